"""Batches of matrices, as experts' weights are, by the GPU quantizers in the emulator: blocks of
each matrix by itself, from one launch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import ARCHITECTURES, check, nasty

from blockscale.kernels.quantizers import calls as quantizers
from stand_in import chip

COMPLETIONS = ("late", "eager", "random")
BF16, FP32 = torch.bfloat16, torch.float32
ROWS, COLUMNS, BOTH = (-1,), (-2,), (-1, -2)
KMAJOR = {"k_major": True}


def batch(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    *lead, columns = shape
    return nasty(torch.Size(lead).numel(), columns, dtype, seed).view(shape)


CASES = [
    ("mxfp8", COLUMNS, (3, 160, 144), BF16, KMAJOR),
    ("mxfp8", BOTH, (3, 32, 144), BF16, KMAJOR),
    ("mxfp8", BOTH, (2, 130, 80), BF16, {"nonfinite": "te"}),
    ("nvfp4", BOTH, (3, 130, 80), BF16, {"global_scale": torch.tensor(0.37)}),
    ("mxfp4", COLUMNS, (2, 96, 144), BF16, {}),
    ("fp8_128x128", BOTH, (2, 130, 144), BF16, KMAJOR),
    ("fp8_128x128", ROWS, (3, 130, 80), BF16, {}),
    ("fp8_1x128", COLUMNS, (2, 130, 48), FP32, KMAJOR),
]


@pytest.mark.parametrize("i", range(len(CASES)), ids=["-".join(map(str, c[:3])) for c in CASES])
def test_bytes(i):
    """Also of matrices that end within a tile, or a block."""
    name, axes, shape, dtype, given = CASES[i]
    x = batch(*shape, dtype=dtype, seed=i)
    check(x, name, ARCHITECTURES[i % 2], axes, completion=COMPLETIONS[i % 3], **given)


def test_strides():
    check(batch(6, 40, 144)[::2, 3:35, 8:136], "mxfp8", "sm_90a", BOTH, **KMAJOR)
    check(batch(2, 40, 77), "mxfp8", "sm_90a", BOTH, **KMAJOR)  # rows that TMA does not take
    check(batch(1, 40, 64)[:, :1], "mxfp8", "sm_90a", COLUMNS)
    check(batch(2, 3, 40, 64), "mxfp8", "sm_90a", BOTH, **KMAJOR)
    apart = batch(4, 3, 40, 64)[::2, :2]  # not at equal distances
    asked = quantizers.Request("mxfp8", COLUMNS)
    assert "matrices do not lie" in quantizers.unsupported(apart, asked, chip("sm_90a"))
