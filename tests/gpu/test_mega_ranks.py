"""A mega MoE on several GPUs of a machine, each in a process of its own: the bits of one that has
all experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from started import RANKS, run_ranks

PROGRAM = Path(__file__).with_name("mega_ranks.py")
HOPPER = RANKS > 0 and torch.cuda.get_device_capability()[0] == 9
FORMATS = ["fp8_128x128", "fp8_1x128"] if HOPPER else ["mxfp4", "mxfp8"]
NVFP4 = ["nvfp4", "fp8_1x128" if HOPPER else "nvfp4"]


@pytest.mark.skipif(RANKS < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize(
    ("task", "formats"),
    [*((task, FORMATS) for task in ("sizes", "launches", "late", "dying")), ("sizes", NVFP4)],
)
def test_ranks(task, formats, tmp_path):
    killed = {RANKS - 1} if task == "dying" else set()
    run_ranks(PROGRAM, task, tmp_path, formats, killed=killed)
