"""Programs whose ranks are processes, one for each GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

__all__ = ["RANKS", "run_ranks", "run_task"]

RANKS = torch.cuda.device_count()


def run_ranks(
    program: Path,
    task: str,
    folder: Path,
    more: Sequence[str] = (),
    *,
    killed: Collection[int] = (),
) -> None:
    """``program task RANK RANKS STORE ...`` for each rank; all end well but those ``killed``."""
    processes = [
        subprocess.Popen(
            [sys.executable, program, task, str(rank), str(RANKS), folder / "store", *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        for rank, process in enumerate(processes):
            text, _ = process.communicate(timeout=300)
            assert (process.returncode != 0) == (rank in killed), f"rank {rank}: {text[-3000:]}"
    finally:
        for process in processes:
            process.kill()


def run_task(tasks: Mapping[str, Callable[[], None]]) -> NoReturn:
    """What such a program does: the task that it was started for, as a rank of the group."""
    task, number, ranks, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.cuda.set_device(number)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=number,
        world_size=ranks,
        device_id=torch.device("cuda", number),
    )
    with torch.no_grad():
        tasks[task]()
    torch.cuda.synchronize()
    os._exit(0)  # a group whose rank has died cannot be taken down
