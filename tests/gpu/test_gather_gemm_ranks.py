"""Products of rows that several GPUs gather meanwhile, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from started import RANKS, run_ranks

PROGRAM = Path(__file__).with_name("gather_gemm_ranks.py")
HOPPER = RANKS > 0 and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.skipif(RANKS < 2 or not HOPPER, reason="needs two GPUs of sm_90")
@pytest.mark.parametrize("task", ["sizes", "launches", "late", "dying"])
def test_ranks(task, tmp_path):
    run_ranks(PROGRAM, task, tmp_path, killed={RANKS - 1} if task == "dying" else set())
