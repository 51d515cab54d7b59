"""Processes of torch.distributed for tests of ranks: by gloo, or by hand on GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["begin", "gather"]


def gather(task: Callable[[int, int, Path], Any], ranks: int, folder: Path) -> list[Any]:
    """What ``task(rank, ranks, folder)`` finds on each of so many ranks, on a CPU."""
    torch.multiprocessing.spawn(_run, (task, ranks, folder), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def _run(rank: int, task: Callable[[int, int, Path], Any], ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    torch.save(task(rank, ranks, folder), folder / f"{rank}.pt")
    dist.destroy_process_group()


def begin(backend: str) -> torch.device:
    """Join the ranks that torchrun has started: the device of this one."""
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    return device
