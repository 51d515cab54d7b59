"""Products on Hopper whose CTAs have equal shares of all K blocks, and add up accumulators of the
tiles that they share: in the emulator, against fp64 products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from factors import alpha_of
from mixed_inputs import (
    BF16,
    FP16,
    FP32,
    Operand,
    assert_close,
    dequantized,
    emulated,
    operand,
    ordered,
)

import blockscale as bs
from blockscale import emulator as em
from blockscale.dtypes import FLOAT32, from_torch, to_torch
from blockscale.kernels.common import calls
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import GPUS, Gpu
from blockscale.kernels.sm90.mixed_config import COUNTERS, Config, choose_config
from blockscale.kernels.sm90.mixed_gemm import mixed_gemm

pytestmark = pytest.mark.usefixtures("keep_code")


def stream(b_format: str, dtype: Any, rows: int, **fields: Any) -> Config:
    stages = 3 if rows <= 128 else 4
    return Config(b_format, from_torch(dtype), rows, stages=stages, stream_k=True, **fields)


def partials(config: Config, ctas: int, counted: int = 0) -> Tensor:
    """NaN, but for the counters."""
    words = torch.full((config.partials(ctas),), -1, dtype=torch.int32)
    words[:COUNTERS] = counted
    return words


def product(
    config: Config, a: Tensor, b: Operand, ctas: int, counted: int = 0, **more: Any
) -> Tensor:
    left = ordered(a, config.block_k), None, partials(config, ctas, counted)
    return emulated(config, left, b, multiprocessors=ctas, **more)


CASES = [  # B, rows of a tile, (M, N, K), CTAs, type of the output, stored by TMA
    # tiles of a CTA's: parts of two, and whole ones
    ("eager", "mxfp8", 64, (130, 300, 1152), 7, FP32, False),
    # ... a part of one: several add up
    ("late", "mxfp8", 64, (64, 128, 1024), 8, BF16, True),
    ("random", "mxfp4", 128, (128, 128, 1280), 6, FP32, False),
    # ... first those in part, then others
    ("random", "nvfp4", 64, (190, 640, 256), 4, FP16, True),
    # ... whole ones alone
    ("late", "mxfp8", 192, (400, 400, 256), 2, FP16, True),
    ("late", "mxfp8_e5m2", 256, (300, 136, 640), 4, BF16, True),
    ("random", "nvfp4", 256, (200, 264, 384), 5, BF16, True),
    # as many K blocks as CTAs
    ("eager", "mxfp8", 32, (20, 256, 384), 6, FP32, False),
]


@pytest.mark.parametrize("case", CASES)
def test_shapes(case):
    completion, b_format, rows, (m, n, k), ctas, dtype, tma_store = case
    config = stream(b_format, dtype, rows, tma_store=tma_store)
    a, b = operand("bf16", m, k, 1)[0], operand(b_format, n, k, 2)
    got = product(config, a, b, ctas, completion=completion)
    assert_close(got, a.double(), dequantized(b_format, *b))


def test_same_bits():
    """Whichever CTA is first."""
    config = stream("mxfp8", FP32, 64)
    a, b = operand("bf16", 100, 640, 1)[0], operand("mxfp8", 200, 640, 2)
    first, other = (product(config, a, b, 6, completion=each) for each in ("eager", "random"))
    assert torch.equal(first, other)


def test_epilogue():
    """Of sums, once."""
    config = stream("nvfp4", FP32, 64, accumulate=True, bias=from_torch(BF16), alpha=(0, 0))
    a, b = operand("bf16", 75, 512, 1)[0], operand("nvfp4", 136, 512, 2)
    bias, start = torch.randn(136).to(to_torch(config.bias)), torch.randn(75, 136)
    got = product(config, a, b, 5, start=start, bias=bias, alpha=alpha_of((0, 0), 0.75))
    added = bias.double() + start.double()
    assert_close(got, 0.75 * a.double(), dequantized("nvfp4", *b), added)


def test_nobody_waits_is_caught():
    """Counters that are not zero: accumulators are read before they are there."""
    config = stream("mxfp8", FP32, 64)
    a, b = operand("bf16", 64, 512, 1)[0], operand("mxfp8", 128, 512, 2)
    with pytest.raises(em.DataRace):
        product(config, a, b, 4, counted=1)


def test_call():
    """From values to a product: the kernel that puts A in order sets the counters to zero."""
    gpu = Gpu("sm_90a", 3, GPUS["sm_90a"].dram_rate)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 8192, generator=generator) for rows in (24, 200))
    a, b = bs.quantize(x, "mxfp8"), bs.quantize(w, "mxfp8")
    assert choose_config((24, 200, 8192), "mxfp8", Epilogue(FLOAT32), gpu=gpu).stream_k
    left, right = (calls.Operand(q.qdata, q.scale, "mxfp8") for q in (a, b))
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores", completion="random")):
        got = mixed_gemm(left, right, out_dtype=FP32, gpu=gpu)
    assert_close(got, a.dequantize(torch.float64), b.dequantize(torch.float64))


def test_chosen():
    """Where tiles are no multiple of CTAs, and A stays in the L2 cache."""
    chosen = {
        shape: choose_config(shape, "mxfp8", Epilogue())
        for shape in ((1024, 4544, 7552), (128, 2672, 12032), (2048, 1152, 14592), (64, 2112, 7168))
    }
    assert [config.stream_k for config in chosen.values()] == [True, True, False, False]
    for shape in ((1024, 4544, 7552), (128, 2672, 12032)):
        many = Gpu("sm_90a", COUNTERS, 4814)
        assert not choose_config(shape, "mxfp8", Epilogue(), gpu=many).stream_k
    with pytest.raises(ValueError, match="stream_k: got True"):
        Config("mxfp8", FLOAT32, 64, split_k=2, stream_k=True)
