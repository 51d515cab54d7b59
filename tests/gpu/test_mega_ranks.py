"""A mega MoE on several GPUs of a machine, each in a process of its own: the bits of one that has
all experts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("mega_ranks.py")
RANKS = torch.cuda.device_count()


@pytest.mark.skipif(RANKS < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("task", ["sizes", "launches", "late", "dying"])
def test_ranks(task, tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), task, *map(str, (rank, RANKS, tmp_path / "store"))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        for rank, process in enumerate(processes):
            text, _ = process.communicate(timeout=300)
            killed = task == "dying" and rank == RANKS - 1
            assert (process.returncode != 0) == killed, f"rank {rank}: {text[-3000:]}"
    finally:
        for process in processes:
            process.kill()
