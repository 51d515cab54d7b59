"""What is done to the sums of the FP8 product before they are rounded, run in the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from factors import alpha_of
from sm90_inputs import (
    BF16,
    FP32,
    SQUARE,
    assert_close,
    assert_no_spills,
    emulated,
    operands,
    product,
)

from blockscale import emulator as em
from blockscale.dtypes import BFLOAT16, FLOAT16, FLOAT32, to_torch
from blockscale.kernels.common.calls import Operand
from blockscale.kernels.sm90 import calls as sm90
from blockscale.kernels.sm90.config import Config
from stand_in import chip

pytestmark = pytest.mark.usefixtures("keep_code")

ALL = {"accumulate": True, "alpha": (0,)}

CASES = {
    "bf16": replace(SQUARE, bias=BFLOAT16, **ALL),
    "bf16, added": replace(SQUARE, accumulate=True),
    "bf16, two scalars": replace(SQUARE, alpha=(0, 0)),
    "fp16, fp32 bias": replace(SQUARE, out_dtype=FLOAT16, bias=FLOAT32, **ALL),
    "fp32, fp16 bias": replace(SQUARE, out_dtype=FLOAT32, bias=FLOAT16, **ALL),
    "one by one, bf16": replace(SQUARE, tma_store=False, bias=BFLOAT16, **ALL),
    "one by one, fp32": replace(
        SQUARE, tma_store=False, out_dtype=FLOAT32, bias=FLOAT32, alpha=(0,)
    ),
    "wide": Config(BFLOAT16, bias=BFLOAT16, **ALL),
    "192 columns": Config(
        BFLOAT16,
        tile=(128, 192),
        stages=4,
        mma_n=96,
        epilogue_stages=3,
        bias=BFLOAT16,
        **ALL,
    ),
    "a warpgroup has every other K block": Config(
        BFLOAT16,
        tile=(64, 128),
        cluster=(1, 2),
        warpgroup_split_k=True,
        stages=5,
        epilogue_stages=2,
        bias=BFLOAT16,
        **ALL,
    ),
}


def normal(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("name", CASES)
def test_one_rounding(name):
    """Everything is added in fp32: the error is that of one rounding. Tails in M and N."""
    config = CASES[name]
    m, n, k = 72, (141 if "one by one" in name else 208), 272
    given = operands(m, n, k, spread=0.1)
    given = (given[0], given[1] * 1e-5, *given[2:])  # sums as large as what is added to them
    bias = None if config.bias is None else normal(n, dtype=to_torch(config.bias))
    alpha = alpha_of(config.alpha, -1.7)
    start = normal(m, n, dtype=to_torch(config.out_dtype)) if config.accumulate else None
    want = product(*given, config.b_block) * (-1.7 if config.alpha else 1)
    size = want.norm()
    for added in (bias, start):
        want = want if added is None else want + added.double()
    assert size > 0.3 * want.norm()
    got = emulated(config, given, start, bias=bias, alpha=alpha, completion="random")
    assert_close(got, want, to_torch(config.out_dtype))
    assert_no_spills(config)


def test_added_before_rounding():
    """256 + 1.0078125 is 258 in bf16; with the product rounded first, to 1, it would stay 256."""
    a, b = (torch.zeros(8, 128) for _ in range(2))
    a[:, :2], b[:, :2] = torch.tensor([1.0, 2.0**-7]), 1.0
    scales = torch.ones(1, 8), torch.ones(1, 1)
    a, b = (x.to(torch.float8_e4m3fn) for x in (a, b))
    given = (a, scales[0], b, scales[1])
    for tma_store in (True, False):
        config = replace(SQUARE, tma_store=tma_store)
        start = torch.full((8, 8), 256.0, dtype=BF16)
        assert bool((emulated(replace(config, accumulate=True), given, start) == 258).all())
        bias = torch.full((8,), 256.0)
        assert bool((emulated(replace(config, bias=FLOAT32), given, bias=bias) == 258).all())


# --- calls ----------------------------------------------------------------------------------------


def call(
    given: tuple[Tensor, ...], b_format: str = "fp8_128x128", arch: str = "sm_90a", **kwargs
) -> Tensor:
    a, b = Operand(*given[:2], "fp8_1x128"), Operand(*given[2:], b_format)
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")):
        return sm90.gemm(a, b, gpu=chip(arch), **kwargs)


def test_bias_alpha_and_sum():
    given = operands(33, 48, 128, spread=0.1)
    want = product(*given, (128, 128))
    size = float(want.abs().mean())
    bias, alpha, c = normal(48, dtype=BF16) * size, torch.tensor(0.5), normal(33, 48, dtype=BF16)
    start = (c * size).to(BF16)
    c = start.clone()
    assert call(given, out=c, accumulate=True, bias=bias, alpha=alpha) is c
    assert_close(c, want / 2 + bias.double() + start.double(), BF16)


def test_rows_that_end_between_16_bytes():
    """TMA would write whole groups of 16 bytes: nothing beside the output may change."""
    given = operands(33, 44, 128)
    wide = torch.full((33, 64), 3.0, dtype=BF16)
    call(given, out=wide[:, :44])
    assert bool((wide[:, 44:] == 3).all())
    assert_close(wide[:, :44], product(*given, (128, 128)), BF16)


@pytest.mark.parametrize("shape", [(0, 16, 128), (16, 0, 128), (16, 16, 0)])
def test_nothing_to_multiply(shape):
    given, bias = operands(*shape), normal(shape[1])
    assert torch.equal(call(given, bias=bias), bias.to(BF16).expand(shape[:2]))
    start = normal(*shape[:2], dtype=BF16)
    got = call(given, out=start.clone(), accumulate=True, bias=bias)
    assert torch.equal(got, (start.float() + bias).to(BF16))


def test_strides_of_scales():
    """Scales of 128 x 128 blocks lie as the quantized tensor or its transpose has them."""
    a, a_scale, b, b_scale = operands(16, 264, 272)
    got = call((a, a_scale, b, b_scale.T.contiguous().T))
    assert torch.equal(got, call((a, a_scale, b, b_scale)))


@pytest.mark.parametrize("accumulate", [False, True])
def test_output_of_more_than_2_31_elements(accumulate):
    """Rows 2^30 elements apart: the last one begins where 32 bits do not reach."""
    given = operands(4, 16, 128, spread=0.1)
    try:
        memory = torch.empty(3 * 2**30 + 16, dtype=BF16)  # almost all of it is never touched
    except RuntimeError:
        pytest.skip("no address space of 6 GiB")
    out = memory.as_strided((4, 16), (2**30, 1))
    out.fill_(1000)
    call(given, out=out, accumulate=accumulate)
    assert_close(out.clone(), product(*given, (128, 128)) + 1000 * accumulate, BF16)
