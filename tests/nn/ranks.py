"""What each rank does in the tests of DDP and FSDP: train a small model, and tell the losses.

By hand on GPUs: ``torchrun --nproc-per-node 2 tests/nn/ranks.py nccl`` prints all losses as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.parallel import DistributedDataParallel as DDP

import blockscale as bs

STEPS = 60
RECIPES = {"mxfp8": bs.Recipe(), "nvfp4": bs.Recipe("nvfp4")}
BF16 = torch.bfloat16


def make_model(recipe: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64)
    return bs.convert(nn.Sequential(*layers), RECIPES[recipe]).to(device)


def batches(device: torch.device) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Of each step: four micro-batches, the first two of them rank 0's."""
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(64, 64, generator=generator) / 8
    for _ in range(STEPS):
        x = torch.randn(4, 32, 64, generator=generator)
        yield [(one.to(device), (one @ teacher).to(device)) for one in x]


def squared_error(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (model(x).float() - y).square().mean()


def maybe_reuse(reuse: bool) -> contextlib.AbstractContextManager[None]:
    return bs.reuse_weights() if reuse else contextlib.nullcontext()


def optimizer_of(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


# --- the single process ---------------------------------------------------------------------------


def alone(recipe: str, dtype: torch.dtype, device: torch.device, ranks: int) -> list[list[float]]:
    """Losses of each step and rank. Gradients are added up in the order of ``ranks`` ranks."""
    model = make_model(recipe, device)
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in batches(device):
        sums: list[list[Tensor]] = []
        losses.append([0.0] * ranks)
        for rank in range(ranks):
            seen = {k: p.detach().to(dtype).requires_grad_() for k, p in model.named_parameters()}

            def forward(x: Tensor, seen=seen) -> Tensor:
                return torch.func.functional_call(model, seen, (x.to(dtype),))

            grads = [torch.zeros_like(p) for p in model.parameters()]
            for x, y in step[2 * rank : 2 * rank + 2]:
                loss = squared_error(forward, x, y)
                found = torch.autograd.grad(loss, list(seen.values()))
                grads = [sum_ + one.float() for sum_, one in zip(grads, found, strict=True)]
                losses[-1][rank] += loss.item()
            sums.append(grads)
        for p, *grads in zip(model.parameters(), *sums, strict=True):
            p.grad = sum(grads) / ranks
        optimizer.step()
    return losses


# --- the ranks ------------------------------------------------------------------------------------


def wrap(kind: str, model: nn.Module, device: torch.device) -> nn.Module:
    index = [device.index] if device.type == "cuda" else None
    if kind == "ddp":
        return DDP(model, device_ids=index)
    if kind == "fsdp1":
        return FSDP1(model, use_orig_params=True, device_id=device)
    policy = MixedPrecisionPolicy(BF16, torch.float32) if kind == "fsdp2_bf16" else None
    for layer in [*model, model]:
        if not isinstance(layer, nn.GELU):
            fully_shard(
                layer,
                reshard_after_forward=kind != "fsdp2_kept",
                mp_policy=policy or MixedPrecisionPolicy(),
            )
    return model


KINDS = ("ddp", "fsdp1", "fsdp2", "fsdp2_kept", "fsdp2_bf16")
#: Kind, recipe, and where weights are reused: "never", in each "step", or "always" (in one block).
RUNS = (
    *((kind, "mxfp8", reuse) for kind in KINDS for reuse in ("never", "always")),
    *((kind, "mxfp8", "step") for kind in ("fsdp2", "fsdp2_kept")),
    *(("fsdp2", "nvfp4", reuse) for reuse in ("never", "always")),
)


def train(kind: str, recipe: str, reuse: str, device: torch.device) -> list[float]:
    """This rank's losses."""
    model = wrap(kind, make_model(recipe, device), device)
    optimizer = optimizer_of(model.parameters())
    first, losses = 2 * dist.get_rank(), []
    with maybe_reuse(reuse == "always"):
        for step in batches(device):
            mine, total = step[first : first + 2], 0.0
            with maybe_reuse(reuse == "step"):
                for i, (x, y) in enumerate(mine):
                    last = i == len(mine) - 1
                    if isinstance(model, FSDPModule):
                        model.set_requires_gradient_sync(last)
                    no_sync = getattr(model, "no_sync", contextlib.nullcontext)
                    with contextlib.nullcontext() if last else no_sync():
                        loss = squared_error(model, x, y)
                        loss.backward()
                    total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    return losses


def reload(how: str, reuse: bool, folder: Path, device: torch.device) -> dict[str, float]:
    """Losses before training, after it, and with the first weights loaded again."""
    model = wrap("fsdp2", make_model("mxfp8", device), device)
    optimizer = optimizer_of(model.parameters())
    data = list(batches(device))
    x, y = data[0][dist.get_rank()]
    found = {}
    with maybe_reuse(reuse), torch.no_grad():
        found["before"] = squared_error(model, x, y).item()
    kept = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    dcp.save({"model": model}, checkpoint_id=folder)
    with maybe_reuse(reuse):
        for step in data[:5]:
            squared_error(model, *step[dist.get_rank()]).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            found["after"] = squared_error(model, x, y).item()
        if how == "dcp.load":
            dcp.load({"model": model}, checkpoint_id=folder)
        else:
            set_model_state_dict(model, kept)
        with torch.no_grad():
            found["again"] = squared_error(model, x, y).item()
    return found


RELOADS = tuple(
    (how, reuse) for how in ("dcp.load", "set_model_state_dict") for reuse in (False, True)
)


def everything(device: torch.device) -> dict[str, object]:
    """All losses, by a name; those of each rank side by side where they are gathered."""
    results: dict[str, object] = {" ".join(one): train(*one, device) for one in RUNS}
    for how, reuse in RELOADS:
        shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(shared)
        results[f"{how} {reuse}"] = reload(how, reuse, Path(str(shared[0])), device)
    return results


def gathered(device: torch.device) -> dict[str, object]:
    """On rank 0 the results of all ranks and of the single process."""
    ranks: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, everything(device))
    single = {
        f"{recipe} {dtype}": alone(recipe, dtype, device, dist.get_world_size())
        for recipe in RECIPES
        for dtype in (torch.float32, BF16)
    }
    return {"ranks": ranks, "alone": single}


def run(rank: int, ranks: int, folder: str, gather: Callable[[], object]) -> None:
    """A rank of the tests, on a CPU; what it gathers on rank 0 is written to ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    found = gather()
    if rank == 0:
        Path(folder, "losses.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def spawn(gather: Callable[[], object], folder: Path) -> Any:
    """What two processes gather."""
    torch.multiprocessing.spawn(run, (2, str(folder), gather), nprocs=2)
    return json.loads((folder / "losses.json").read_text())


if __name__ == "__main__":
    backend = sys.argv[1]
    where = torch.device("cpu")
    if backend == "nccl":
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    dist.init_process_group(backend)
    report = gathered(where)
    if dist.get_rank() == 0:
        print(json.dumps(report))
    dist.destroy_process_group()
