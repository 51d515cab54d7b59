"""A watch on ranks that share a model by FSDP2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from processes import gather
from torch import nn
from torch.distributed.fsdp import fully_shard

import blockscale as bs


def run(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    found = {}
    for quantized in (False, True):
        losses = []
        for watched in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(2)))
            bs.convert(model, bs.Recipe("mxfp8"))
            amax = model[1].weight.abs().max().item()
            if quantized:
                bs.distributed.gather_quantized(model)
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            x = torch.randn(64, 128, generator=torch.Generator().manual_seed(rank))
            out = folder / f"{quantized}"

            def step(model=model, x=x) -> float:
                loss = model(x).square().mean()
                loss.backward()
                return loss.item()

            if not watched:
                losses.append([step(), step()])
                continue
            with bs.debug.watch(model, every=2, out=out) as files:
                losses.append([step(), step()])
        lines = [json.loads(line) for line in files.jsonl.read_text().splitlines()]
        found[f"{quantized}"] = losses, files.jsonl.name, lines, amax, x.abs().max().item()
    return found


def test_ranks(tmp_path):
    """Each writes what it has seen: its part of the batch, and weights whole."""
    for rank, found in enumerate(gather(run, 2, tmp_path)):
        for quantized in ("False", "True"):
            losses, name, lines, amax, largest = found[quantized]
            assert losses[0] == losses[1]
            assert name == f"watch-rank{rank}.jsonl"
            by_use = {(line["module"], line["tensor"], line["product"]): line for line in lines}
            assert {(line["step"], line["rank"]) for line in lines} == {(0, rank)}
            assert len(by_use) == len(lines) == 10
            assert by_use["0", "activations", "fprop"]["amax"] == largest
            for product in ("fprop", "dgrad"):
                weight = by_use["1", "weights", product]
                assert weight["shape"] == [128, 128]
                assert weight["scale_log2"] is not None
                values = quantized == "False"  # else nobody has them whole
                assert (weight["sqnr_db"] is not None) == values
                assert weight["amax"] == (amax if values else None)
