"""Programs whose ranks are processes, one for each GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

__all__ = ["RANKS", "run_ranks"]

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
