"""Tokens a second of a Llama of 8 billion parameters, decoding under CUDA graphs, on one GPU.

    python benchmarks/gpu_decode.py OUT.json [--minutes 8]

transformers' Llama with random weights and a static cache of 512 tokens, of which 100 are there:
one step is one token for each sequence, its logits and the next token, recorded in a graph and
replayed. Weights in bf16, MXFP8, NVFP4 and MXFP4, activations in bf16, in one run; with batches of
1, 16 and 64; as it is, and compiled by torch, which fuses what is between the products; with q, k
and v, and gate and up, as one product (``bs.nn.fuse_projections``; bf16 as Phi-3, whose model has
them so) and as several; with the output head in bf16, as by default, and quantized. For batch 1
the time of each kernel.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import typer
from torch.autograd import DeviceType

import blockscale as bs

SHAPE: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
FORMATS, BATCHES, LENGTH, FILLED = (None, "mxfp8", "nvfp4", "mxfp4"), (1, 16, 64), 512, 100


def main(out: Path, minutes: float = 8, device: str = "cuda") -> None:
    ends, rows = time.monotonic() + 60 * minutes, list[dict[str, Any]]()
    about = {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": SHAPE,
        "rows": rows,
    }
    for case in cases():
        if time.monotonic() > ends:
            return
        row = {**case._asdict(), "weights": case.weights or "bf16", **measure(case, device)}
        rows.append(row)
        print({k: v for k, v in row.items() if k != "kernels"}, flush=True)
        out.write_text(json.dumps(about, indent=1) + "\n")


class Case(NamedTuple):
    weights: str | None
    batch: int
    compiled: bool = True
    fused: bool = True
    quantized_head: bool = False


def cases() -> Iterator[Case]:
    """Those that tell most first."""
    for batch in BATCHES:
        yield from (Case(format, batch) for format in FORMATS)
    yield from (Case(format, 1, fused=False) for format in FORMATS)
    yield from (Case(format, 1, quantized_head=True) for format in FORMATS[1:])
    yield from (Case(format, 1, compiled=False) for format in FORMATS)
    yield from (Case(format, 1, compiled=False, fused=False) for format in FORMATS)
    for batch in BATCHES[1:]:
        yield from (Case(format, batch, fused=False) for format in FORMATS)


@lru_cache(maxsize=1)
def build(format: str | None, fused: bool, head: bool, device: str) -> Any:
    shape = SHAPE if device == "cuda" else TINY
    architecture = "Phi3" if fused and format is None else "Llama"
    config = getattr(transformers, f"{architecture}Config")(
        **shape, attn_implementation="sdpa", tie_word_embeddings=False, pad_token_id=0
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(torch.bfloat16)
    model.to_empty(device=device).eval().requires_grad_(False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # has buffers
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02).view(-1)[0] = 0.125  # the largest: one global scale for all
    if format is not None:
        recipe = bs.Recipe(format, activations="bfloat16")
        overrides = {"lm_head": recipe} if head else {}
        bs.quantize_(model, bs.Recipe(format, activations="bfloat16", overrides=overrides))
        if fused:
            bs.nn.fuse_projections(model)
    return model


def measure(case: Case, device: str) -> dict[str, Any]:
    """Milliseconds of a replayed step, the median of five runs of twenty."""
    model = build(case.weights, case.fused, case.quantized_head, device)
    batch = case.batch
    torch._dynamo.reset()  # or the ninth model is not compiled
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH)
    tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
    place = torch.full((1,), FILLED, dtype=torch.long, device=device)
    forward = torch.compile(model.forward, dynamic=False) if case.compiled else model.forward
    given = {
        "cache_position": place,
        "position_ids": place[None].expand(batch, 1),
        "attention_mask": torch.zeros(batch, 1, 1, LENGTH, dtype=torch.bfloat16, device=device),
    }

    def step() -> None:
        with torch.no_grad():
            logits = forward(tokens, past_key_values=cache, use_cache=True, **given).logits
            tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

    for _ in range(3):
        step()
    if device == "cpu":
        return {}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = sorted(_replays(graph, 20) for _ in range(5))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            kernels.setdefault(event.name[:100], []).append(event.time_range.elapsed_us())
    return {
        "milliseconds": round(times[2], 4),
        "tokens_per_second": round(1e3 * batch / times[2], 1),
        "kernels": {n: [len(t), round(sum(t), 1)] for n, t in kernels.items()}
        if batch == 1
        else {},
    }


def _replays(graph: torch.cuda.CUDAGraph, n: int) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(n):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / n


if __name__ == "__main__":
    typer.run(main)
