"""Products of few rows of bf16 and of matrices that a Hopper kernel widens to it, run in the
emulator, against fp64 products of operands that are dequantized by plain torch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from factors import alpha_of
from kernel_code import built
from mixed_inputs import (
    BF16,
    FP16,
    FP32,
    Operand,
    assert_close,
    assert_exact,
    dequantized,
    emulated,
    every_code,
    ones,
    operand,
    ordered,
)
from sm90_inputs import frame_bytes

from blockscale import emulator as em
from blockscale import quantize
from blockscale.dtypes import BFLOAT16, FLOAT16, FLOAT32, from_torch, to_torch
from blockscale.kernels.common import calls
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.sm90.mixed_config import B_ROWS, Config, choose_config, why_not
from blockscale.kernels.sm90.mixed_gemm import mixed_gemm
from stand_in import chip

pytestmark = pytest.mark.usefixtures("keep_code")

SMALL = Config("mxfp8", BFLOAT16, rows=32)


def operands(config: Config, m: int, n: int, k: int) -> tuple[Tensor, Operand]:
    """A and B."""
    return operand("bf16", m, k, 1)[0], operand(config.b_format, n, k, 2)


def product(config: Config, a: Tensor, b: Operand, **kwargs) -> Tensor:
    return emulated(config, (ordered(a, config.block_k), None, None), b, **kwargs)


def check(config: Config, a: Tensor, b: Operand, got: Tensor) -> None:
    assert_close(got, a.double(), dequantized(config.b_format, *b))


# --- formats and shapes ---------------------------------------------------------------------------

CASES = [  # B, rows of A, blocks that split K, K, type of the output, stored by TMA
    ("eager", "mxfp8", 8, 1, 1152, FP32, False),
    ("random", "mxfp4", 16, 2, 384, FP32, False),
    ("eager", "mxfp8_e5m2", 32, 4, 640, FP32, False),
    ("late", "mxfp8", 32, 5, 1280, BF16, False),
    ("late", "nvfp4", 64, 2, 256, BF16, True),
    ("random", "nvfp4", 64, 3, 512, FP16, True),
    ("random", "mxfp8", 64, 6, 1152, FP32, False),
    ("random", "mxfp4", 64, 1, 128, BF16, True),
    ("late", "mxfp8", 128, 2, 384, BF16, True),
    ("random", "mxfp8", 256, 1, 640, BF16, True),
    ("late", "nvfp4", 192, 2, 512, FP32, False),
    ("eager", "nvfp4", 256, 1, 256, FP16, True),
    ("random", "mxfp8_e5m2", 192, 1, 384, BF16, True),
    ("late", "mxfp4", 256, 1, 384, FP32, False),
]


@pytest.mark.parametrize("case", CASES)
def test_formats(case):
    """Formats; each shape of a wgmma; tails in M and N, and two tiles by one block; stages that are
    used again and again; blocks that have a part of K each, and add up one of a tile's shares, or
    none."""
    completion, b_format, rows, split, k, dtype, tma_store = case
    config = Config(b_format, from_torch(dtype), rows, split, tma_store=tma_store)
    a, b = operands(config, rows - 3, B_ROWS + 8, k)
    check(config, a, b, product(config, a, b, completion=completion, multiprocessors=split))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_last_tiles_reach_back(name):
    """Rows and columns of a tile and a few more; what two CTAs store is the same, or the check of
    global memory would say so. Not where it is added to the output."""
    for rows, accumulate in ((192, False), (256, False), (192, True)):
        config = Config(name, FLOAT32, rows, accumulate=accumulate)
        a, b = operands(config, rows + 11, B_ROWS + 9, 320 if rows == 192 else 256)
        if a.shape[1] % 128:
            config = replace(config, async_scales=False)
        start = torch.zeros(len(a), len(b[0])) if accumulate else None
        check(
            config, a, b, product(config, a, b, start=start, completion="random", multiprocessors=3)
        )


IN_TURN = [  # B, rows of A, blocks that split K, stages, K, type of the output, stored by TMA
    ("random", "mxfp4", 8, 1, 4, 1920, FP32, False),
    ("random", "mxfp8_e5m2", 64, 2, 4, 768, BF16, True),
    ("eager", "nvfp4", 64, 2, 4, 640, FP32, False),
    ("late", "mxfp8", 16, 4, 6, 1152, FP16, False),
    ("random", "mxfp8", 64, 1, 5, 2944, BF16, True),
    ("late", "nvfp4", 32, 2, 3, 3328, FP32, False),
]


@pytest.mark.parametrize("case", IN_TURN)
def test_warpgroups_in_turn(case):
    """Even and odd numbers of a block's K blocks, and of stages; warpgroups whose first stage is
    another one with the next tile."""
    completion, b_format, rows, split, stages, k, dtype, tma_store = case
    config = Config(b_format, from_torch(dtype), rows, split, 2, stages, tma_store=tma_store)
    a, b = operands(config, rows - 3, B_ROWS + 8, k)
    check(config, a, b, product(config, a, b, completion=completion, multiprocessors=split))


@pytest.mark.parametrize(("multiprocessors", "dtype"), [(3, FP32), (12, BF16)])
def test_tiles_down_a(multiprocessors, dtype):
    """More rows of A than a tile has: each block takes all tiles, or one."""
    config = Config("nvfp4", from_torch(dtype), 64, 3, tma_store=dtype == BFLOAT16)
    a, b = operands(config, 64 + 21, B_ROWS + 8, 896)
    check(config, a, b, product(config, a, b, multiprocessors=multiprocessors))


def test_same_bits():
    """Whichever of the blocks that split K is first, or of their warpgroups."""
    config = Config("mxfp8_e5m2", FLOAT32, 32, 2, 2, 4)
    a, b = operands(config, 5, 72, 512)
    first, other = (
        product(config, a, b, completion=each, multiprocessors=2) for each in ("eager", "random")
    )
    assert torch.equal(first, other)


def test_tails_of_k():
    """Stages that are not whole; scales whose rows lie at any address."""
    config = Config("nvfp4", FLOAT32, 16, async_scales=False)
    a, b = operands(config, 11, 24, 160)
    check(config, a, b, product(config, a, b))


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"])
def test_every_element(name):
    """Exact; infinite where fp32 cannot hold it, and in steps of bf16's least number."""
    a, b = dequantized(name, *ones(name)), every_code(name)
    assert_exact(product(Config(name, FLOAT32, 8), a.to(BF16), b), name, a, b)


def test_scales_without_sign():
    """Of UE4M3 the highest bit means nothing."""
    config = Config("nvfp4", FLOAT32, 8)
    a, (data, scale) = operands(config, 5, 24, 256)
    assert torch.equal(product(config, a, (data, scale | 0x80)), product(config, a, (data, scale)))


# --- epilogues and calls --------------------------------------------------------------------------


EPILOGUES = [
    {"out_dtype": FLOAT32, "accumulate": True, "bias": BFLOAT16, "alpha": (0,)},
    {"out_dtype": FLOAT16, "tma_store": True, "bias": FLOAT32, "rows": 64, "alpha": (0, 0)},
]


@pytest.mark.parametrize("fields", EPILOGUES)
def test_epilogue(fields):
    config = replace(SMALL, b_format="nvfp4", **fields)
    a, b = operands(config, 27, 72, 128)
    bias = torch.randn(72).to(to_torch(config.bias))
    start = torch.randn(27, 72) if config.accumulate else None
    got = product(config, a, b, start=start, bias=bias, alpha=alpha_of(config.alpha, 0.75))
    added = bias.double() + (0 if start is None else start.double())
    assert_close(got, 0.75 * a.double(), dequantized("nvfp4", *b), added)


@pytest.mark.parametrize(("m", "n"), [(33, 136), (65, 16384)])
def test_few_rows_loaded(m, n):
    """The others of a tile are zeros, and not stored."""
    config = choose_config((m, n, 384), "mxfp8", Epilogue(BFLOAT16))
    assert config.loaded_rows == m + 7
    a, b = operands(config, m, 136, 384)
    got = product(config, a, b, completion="random", multiprocessors=config.split_k)
    check(config, a, b, got)
    every = replace(config, loaded_rows=0)
    assert torch.equal(got, product(every, a, b, multiprocessors=config.split_k))


def call(a: Operand, a_format: str, b: Operand, b_format: str, **kwargs) -> Tensor:
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")):
        left = calls.Operand(*a, None if a_format == "bf16" else a_format)
        return mixed_gemm(left, calls.Operand(*b, b_format), gpu=chip("sm_90a"), **kwargs)


def test_quantized():
    """From values to a product; K is no multiple of a stage."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 288, generator=generator) for rows in (24, 40))
    a, b = quantize(x, "nvfp4"), quantize(w, "nvfp4")
    got = call((a.qdata, a.scale), "nvfp4", (b.qdata, b.scale), "nvfp4", out_dtype=FP32,
               alpha=(a.global_scale, b.global_scale))  # fmt: skip
    assert_close(got, a.dequantize(torch.float64), b.dequantize(torch.float64))


@pytest.mark.parametrize("shape", [(0, 16, 128), (16, 0, 128), (16, 24, 0)])
def test_empty(shape):
    m, n, k = shape
    a, b = operand("mxfp8", m, k, 1), operand("mxfp8", n, k, 2)
    bias = torch.ones(n)
    assert bool((call(a, "mxfp8", b, "mxfp8", bias=bias) == 1).all())
    start = torch.ones(m, n)
    kept = call(a, "mxfp8", b, "mxfp8", out=start, out_dtype=FP32, accumulate=True)
    assert kept is start
    assert bool((kept == 1).all())


def test_bad_input():
    a, b = operand("mxfp8", 16, 128, 1), operand("mxfp8", 24, 128, 2)
    wrong = {
        "expected \\(M, K\\)": (a, (b[0][:, :64], b[1][:, :2])),
        "a_scale: has shape": ((a[0], a[1][:, :2]), b),
        "a_scale: belongs": ((a[0], None), b),
        "b_data: has strides.*k_major=True": (a, (b[0].T.contiguous().T, b[1])),
        "b_scale: has strides": (a, (b[0], b[1].T.contiguous().T)),
    }
    for message, (left, right) in wrong.items():
        with pytest.raises(ValueError, match=message):
            call(left, "mxfp8", right, "mxfp8")
    with pytest.raises(TypeError, match="a_data: got"):
        call((a[0].float(), a[1]), "mxfp8", b, "mxfp8")
    with pytest.raises(TypeError, match="b_scale: got"):
        call(a, "mxfp8", (b[0], b[1].float()), "mxfp8")
    with pytest.raises(ValueError, match="accumulate: needs out"):
        call(a, "mxfp8", b, "mxfp8", accumulate=True)
    with pytest.raises(Unsupported, match="16 bytes"):
        call((a[0][:, 8:104], a[1][:, :3]), "mxfp8", (b[0][:, :96], b[1][:, :3]), "mxfp8")
    with pytest.raises(Unsupported, match="format mxfp6_e2m3"):
        call(a, "mxfp6_e2m3", b, "mxfp8")
    with pytest.raises(Unsupported, match="cannot be multiplied"):
        call(a, "mxfp8", b, "nvfp4")
    assert "sm_100a" in why_not("mxfp8", "mxfp8", BFLOAT16, "sm_100a")
    assert "float64" in why_not("mxfp8", "mxfp8", torch.float64, "sm_90a")


@pytest.mark.parametrize("wrong", [
    {"rows": 96}, {"loaded_rows": 128}, {"split_k": 7}, {"stages": 1}, {"stages": 40},
    {"warpgroup_split_k": 3},
    {"warpgroup_split_k": 2, "stages": 4, "rows": 128, "split_k": 2},
    {"tma_store": True}, {"rows": 64, "tma_store": True, "out_dtype": FP32},
])  # fmt: skip
def test_no_such_kernel(wrong):
    with pytest.raises(ValueError, match=r": got .*; no kernel is made so"):
        replace(SMALL, **wrong)


# --- choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("n", [2048, 7168, 8192, 16384])
def test_chosen_fill_the_machine(format, n):
    """One turn, by nearly as many blocks of threads as there are multiprocessors, where there are
    as many tiles or they can be split."""
    for m in (1, 16, 64):
        config = choose_config((m, n, 8192), format, Epilogue(BFLOAT16))
        assert min(0.84 * 132, n / 32) <= n // B_ROWS * config.split_k <= 132
        assert config.stages >= 3


def test_chosen_take_all_rows():
    """A few in one tile; and each CTA has a part of K, and each of its warpgroups."""
    for m in (*range(1, 129), 130, 192, 200, 300, 5000):
        for n, blocks in itertools.product((64, 1000, 64 * 133), range(1, 40)):
            config = choose_config((m, n, 128 * blocks), "mxfp4", Epilogue(FLOAT32))
            assert config.rows < max(2 * m, 9)
            assert config.rows >= m or m > (96 if n > 1000 else 64)
            assert config.split_k * config.warpgroup_split_k <= blocks


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_fewer_k_blocks_than_ctas_of_a_cluster(blocks):
    """With seven, eight CTAs were chosen, and one waited for ever for its first K block."""
    config = choose_config((5, 128, 128 * blocks), "mxfp8", Epilogue(BFLOAT16))
    a, b = operands(config, 5, 128, 128 * blocks)
    check(config, a, b, product(config, a, b, multiprocessors=config.split_k))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
def test_chosen_fit(format):
    """Every product of few rows has a kernel, for which there is shared memory."""
    columns = 1, 128, 576, 2112, 4096, 7168, 24576
    sizes = itertools.product((1, 16, 33, 65, 128, 190, 256, 1000), columns, (32, 640, 7168))
    for shape, dtype in itertools.product(sizes, (BF16, FP32)):
        for added, aligned, whole in itertools.product((False, True), repeat=3):
            how = Epilogue(from_torch(dtype), accumulate=added, tma_store=aligned)
            config = choose_config(shape, format, how, async_scales=whole)
            assert config.shared_bytes <= 227 * 1024


def test_chosen_take_turns():
    """Twice as many warpgroups, where enough is in flight and K long enough."""
    for (m, n, k), format, parts in (
        ((64, 7168, 16384), "nvfp4", 2),
        ((64, 8192, 8192), "mxfp8", 2),
        ((64, 3072, 16384), "mxfp8", 1),
        ((32, 8192, 2048), "mxfp8", 2),
        ((32, 8192, 1920), "mxfp8", 1),
        ((128, 8192, 8192), "nvfp4", 1),
    ):
        assert choose_config((m, n, k), format, Epilogue(BFLOAT16)).warpgroup_split_k == parts


def test_chosen_split_k():
    """Among as many blocks as run at once, in clusters; rows of A in two tiles where columns are
    few."""
    for (m, n), rows, split in (
        ((16, 576), 16, 8),
        ((32, 2112), 32, 6),
        ((64, 2112), 64, 6),
        ((64, 4096), 64, 3),
        ((64, 5120), 64, 2),
        ((64, 16384), 64, 1),
        ((96, 2112), 64, 3),
        ((97, 2112), 64, 3),
        ((128, 4096), 128, 3),
        ((256, 4096), 128, 2),
        ((1024, 8192), 256, 1),
    ):
        config = choose_config((m, n, 7168), "mxfp8", Epilogue(BFLOAT16))
        assert (config.rows, config.split_k, config.stream_k) == (rows, split, False)


@pytest.mark.parametrize("case", [
    ((16, 7168, 16384), "mxfp8", BF16), ((24, 16384, 7168), "mxfp8_e5m2", FP32),
    ((64, 8192, 8192), "mxfp8", BF16), ((64, 16384, 8192), "mxfp8_e5m2", FP32),
    ((64, 7168, 16384), "nvfp4", BF16), ((64, 8192, 8192), "nvfp4", FP32),
    ((128, 8192, 8192), "mxfp8", BF16), ((128, 8192, 8192), "mxfp4", BF16),
])  # fmt: skip
@pytest.mark.parametrize("more", [{}, {"bias": FLOAT32, "alpha": (0, 0)}])
def test_no_spills(case, more):
    shape, format, dtype = case
    config = choose_config(
        shape, format, Epilogue(from_torch(dtype), **more), async_scales=not more
    )
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")):
        frames = frame_bytes(built(config).__cubin__)
    assert frames == [0]
