"""Steps of a Llama over ranks by FSDP2, or on one GPU beside torchao: tokens/s, and peak memory.

    torchrun --nproc-per-node 2 benchmarks/gpu_train_ranks.py OUT.json 1b:16 8b:16
    torchrun --nproc-per-node 1 benchmarks/gpu_train_ranks.py OUT.json 8b:8

``8b:16``: 16 of its layers. All blocks are compiled. bf16 is measured first and last.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import blockscale as bs

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.ranks.model import SIZES, Llama, LlamaConfig
from examples.ranks.shard import shard

WARM, STEPS, BATCH, LENGTH = 3, 10, 2, 4096
NAMES = "dp", "ep", "tp"  # of the mesh
#: Of a step; None is bf16, a string what torchao calls it.
MODELS: dict[str, Any] = {
    "bf16": None,
    "fp8_block": bs.Recipe("fp8_block"),
    "mxfp8": bs.Recipe("mxfp8"),
    "torchao tensorwise": "tensorwise",
    "bf16 again": None,
}


def make_model(config: LlamaConfig, recipe: Any, mesh: Any, backend: str) -> Any:
    torch.manual_seed(0)
    device = torch.device(mesh.device_type)
    with device:
        model = Llama(config)
    if isinstance(recipe, str):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config_ = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(model.model.layers, config=config_)
        recipe = None
    if recipe is not None:
        bs.convert(model, recipe)
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return shard(model, recipe, mesh)


def measure(model: Any, device: torch.device) -> dict[str, float]:
    """Of a rank: seconds of a step, bytes at most, and the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    vocabulary, cuda = model.config.vocab_size, device.type == "cuda"
    generator = torch.Generator().manual_seed(dist.get_rank())
    start = 0.0
    # there before they are needed, as loaders have them: a copy would wait for the step before
    shape = WARM + STEPS, BATCH, LENGTH + 1
    batches = torch.randint(vocabulary, shape, generator=generator).to(device)
    for step, tokens in enumerate(batches):
        if step == WARM:
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            dist.barrier()
            start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    last = loss.item()
    seconds = (time.perf_counter() - start) / STEPS
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return {"step_s": seconds, "peak_bytes": peak, "loss": last}


def compare(config: LlamaConfig, device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1, 1), mesh_dim_names=NAMES)
    for name, recipe in MODELS.items():
        gc.collect()
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            model = make_model(config, recipe, mesh, backend)
            found: dict[str, Any] = measure(model, device)
            tokens = BATCH * LENGTH * dist.get_world_size()
            found["tokens_per_s"] = tokens / found["step_s"]
            del model
        except (ImportError, torch.cuda.OutOfMemoryError) as error:
            found = {"missing": f"{type(error).__name__}: {error}"[:300]}
        yield name, found


def main(out: str, *sizes: str) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "ranks": dist.get_world_size(),
        "batch": BATCH,
        "length": LENGTH,
        "models": {},
    }
    for each in sizes:
        size, _, layers = each.partition(":")
        config = replace(SIZES[size], num_hidden_layers=int(layers))
        report["models"][each] = found = {}
        for name, found[name] in compare(config, device):
            if dist.get_rank() == 0:
                print(each, name, found[name], flush=True)
                Path(out).write_text(json.dumps(report) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
