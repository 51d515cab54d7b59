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
HOPPER = RANKS > 0 and torch.cuda.get_device_capability()[0] == 9
FORMATS = ["fp8_128x128", "fp8_1x128"] if HOPPER else ["mxfp4", "mxfp8"]
NVFP4 = ["nvfp4", "fp8_1x128" if HOPPER else "nvfp4"]


@pytest.mark.skipif(RANKS < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize(
    ("task", "formats"),
    [*((task, FORMATS) for task in ("sizes", "launches", "late", "dying")), ("sizes", NVFP4)],
)
def test_ranks(task, formats, tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, task, str(rank), str(RANKS), tmp_path / "store", *formats],
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
