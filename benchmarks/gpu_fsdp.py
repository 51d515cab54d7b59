"""DDP and FSDP on GPUs: losses beside one process's, and the peak of memory beside bf16's.

``torchrun --nproc-per-node 2 benchmarks/gpu_fsdp.py OUT.json``
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import blockscale as bs

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "nn"))
import ranks

LAYERS, WIDTH, STEPS = 16, 8192, 4
TOKENS = (2048, 16384)  # of a rank
MODELS = {
    "torch bf16": None,
    "mxfp8": bs.Recipe(),
    "nvfp4": bs.Recipe("nvfp4"),
    "fp8_block": bs.Recipe("fp8_1x128", weights="fp8_128x128"),
}


def peak(recipe: bs.Recipe | None, tokens: int, device: torch.device) -> int:
    """Bytes that a rank has allocated at most, under FSDP2 that reshards after the forward."""
    gc.collect()  # the model before
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(LAYERS)]
    model: nn.Module = nn.Sequential(*layers)
    if recipe is not None:
        model = bs.convert(model, recipe)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in [*model, model]:
        fully_shard(layer, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(tokens, WIDTH, device=device, dtype=torch.bfloat16)
    for step in range(STEPS):
        if step == STEPS - 1:  # kernels are compiled
            torch.cuda.reset_peak_memory_stats()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() - before


def equal_steps(found: dict[str, list]) -> dict[str, int]:
    """Steps of each run whose losses are those of the single process, to the last digit."""
    same = {}
    for kind, recipe, reuse in ranks.RUNS:
        name = f"{kind} {recipe} {reuse}"
        dtype = torch.bfloat16 if kind == "fsdp2_bf16" else torch.float32
        steps = zip(*(one[name] for one in found["ranks"]), strict=True)
        alone = found["alone"][f"{recipe} {dtype}"]
        same[name] = sum(list(a) == b for a, b in zip(steps, alone, strict=True))
    return same


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    found = ranks.gathered(device)
    memory = {
        tokens: {name: peak(recipe, tokens, device) for name, recipe in MODELS.items()}
        for tokens in TOKENS
    }
    if dist.get_rank() == 0:
        report = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "processes": dist.get_world_size(),
            "steps": ranks.STEPS,
            "steps_equal_to_one_process": equal_steps(found),
            "peak_bytes_by_tokens": memory,
            "model": f"{LAYERS} layers of {WIDTH} x {WIDTH}, bf16 policy",
            **found,
        }
        Path(sys.argv[1]).write_text(json.dumps(report) + "\n")
        print(
            json.dumps(
                {k: report[k] for k in ("steps_equal_to_one_process", "peak_bytes_by_tokens")}
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
