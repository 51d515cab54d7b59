"""Products of few rows that a Hopper kernel widens to bf16, run in the emulator, against fp64
products of operands that are dequantized by plain torch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from sm90_inputs import frame_bytes
from widened_inputs import (
    BF16,
    FP16,
    FP32,
    Operand,
    assert_close,
    assert_exact,
    dequantized,
    emulated,
    every_code,
    in_range,
    ones,
    operand,
)

from blockscale import emulator as em
from blockscale import quantize
from blockscale.kernels.gpu import compiled
from blockscale.kernels.gpu.plan import Unsupported
from blockscale.kernels.sm90.widened_config import FEW, Config, choose_config, why_not
from blockscale.kernels.sm90.widened_gemm import widened_gemm

pytestmark = pytest.mark.usefixtures("keep_code")

SMALL = Config("mxfp8", "mxfp8", BF16, tile=(32, 128))


def operands(config: Config, m: int, n: int, k: int) -> tuple[Operand, Operand]:
    """A and B."""
    return operand(config.a_format, m, k, 1), operand(config.b_format, n, k, 2)


def check(config: Config, a: Operand, b: Operand, got: Tensor) -> None:
    assert_close(got, dequantized(config.a_format, *a), dequantized(config.b_format, *b))


# --- formats and shapes ---------------------------------------------------------------------------

CASES = [  # A, B, rows of their tiles, blocks that split K, K, type of the output, stored by TMA
    ("eager", "mxfp4", "mxfp8", (8, 128), 1, 1152, FP32, False),
    ("random", "bf16", "mxfp4", (8, 128), 1, 1152, FP32, False),
    ("random", "mxfp8_e5m2", "mxfp4", (16, 128), 2, 384, FP32, False),
    ("eager", "mxfp8", "mxfp8_e5m2", (32, 128), 4, 640, FP32, False),
    ("random", "mxfp8", "mxfp8", (16, 128), 8, 1152, BF16, False),
    ("late", "nvfp4", "nvfp4", (64, 128), 2, 256, BF16, True),
    ("random", "bf16", "nvfp4", (64, 256), 4, 512, FP16, True),
    ("late", "bf16", "mxfp8", (128, 128), 2, 384, BF16, True),
]


@pytest.mark.parametrize("case", CASES)
def test_pairs(case):
    """Pairs of formats; each shape of a wgmma; tails in M and N, and two tiles by one block; stages
    that are used again and again; blocks that have a part of K each, and add up one of a tile's
    shares, or none."""
    completion, a_format, b_format, tile, split, k, dtype, tma_store = case
    config = Config(a_format, b_format, dtype, tile, split, tma_store=tma_store)
    a, b = operands(config, tile[0] - 3, tile[1] + 8, k)
    check(config, a, b, emulated(config, a, b, completion=completion, multiprocessors=split))


def test_same_bits():
    """Whichever of the blocks that split K is first."""
    config = Config("mxfp8", "mxfp8_e5m2", FP32, (32, 128), 4)
    a, b = operands(config, 5, 72, 512)
    first, other = (
        emulated(config, a, b, completion=each, multiprocessors=4) for each in ("eager", "random")
    )
    assert torch.equal(first, other)


def test_tails_of_k():
    """Stages that are not whole; scales whose rows lie at any address."""
    config = Config("bf16", "nvfp4", FP32, (16, 128), async_scales=False)
    a, b = operands(config, 11, 24, 160)
    check(config, a, b, emulated(config, a, b))


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"])
def test_every_element(name):
    """Of A and of B. Exact; infinite where fp32 cannot hold it, and in steps of bf16's least
    number."""
    config = Config(name, name, FP32, (64, 128))
    data, scale = every_code(name)

    def both(a: Operand, b: Operand) -> None:
        assert_exact(emulated(config, a, b), name, in_range(dequantized(name, *a)), b)

    for start in range(0, len(data), 64):
        rows = slice(start, start + 64)
        both((data[rows], scale[rows]), ones(name))
    both(ones(name), (data, scale))


# --- epilogues and calls --------------------------------------------------------------------------


EPILOGUES = [
    {"out_dtype": FP32, "accumulate": True, "bias": BF16},
    {"out_dtype": FP16, "tma_store": True, "bias": FP32, "tile": (64, 128)},
]


@pytest.mark.parametrize("fields", EPILOGUES)
def test_epilogue(fields):
    config = replace(SMALL, a_format="bf16", b_format="nvfp4", alpha=True, **fields)
    a, b = operands(config, 27, 72, 128)
    bias = torch.randn(72).to(config.bias)
    start = torch.randn(27, 72) if config.accumulate else None
    got = emulated(config, a, b, start=start, bias=bias, alpha=torch.tensor(0.75))
    x, y = dequantized("bf16", *a), dequantized("nvfp4", *b)
    added = bias.double() + (0 if start is None else start.double())
    assert_close(got, 0.75 * x, y, added)


@pytest.mark.parametrize("m", [33, 65])
def test_few_rows_loaded(m):
    """The others of a tile are zeros, and not stored."""
    config = choose_config((m, 136, 1024), "bf16", "mxfp8", BF16)
    assert config.loaded_rows == m + 7
    a, b = operands(config, m, 136, 1024)
    got = emulated(config, a, b, completion="random", multiprocessors=8)
    assert_close(got, dequantized("bf16", *a), dequantized("mxfp8", *b))
    every = replace(config, loaded_rows=0)
    assert torch.equal(got, emulated(every, a, b, multiprocessors=8))


def call(a: Operand, a_format: str, b: Operand, b_format: str, **kwargs) -> Tensor:
    with em.cutedsl(em.Device("sm_90a", check="all")):
        return widened_gemm(
            *a, None if a_format == "bf16" else a_format, *b, b_format, arch="sm_90a", **kwargs
        )


def test_quantized():
    """From values to a product; K is no multiple of a stage."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 288, generator=generator) for rows in (24, 40))
    a, b = quantize(x, "nvfp4"), quantize(w, "nvfp4")
    got = call((a.qdata, a.scale), "nvfp4", (b.qdata, b.scale), "nvfp4", out_dtype=FP32,
               alpha=a.global_scale * b.global_scale)  # fmt: skip
    assert_close(got, a.dequantize(torch.float64), b.dequantize(torch.float64))


@pytest.mark.parametrize("shape", [(0, 16, 128), (16, 0, 128), (16, 24, 0)])
def test_empty(shape):
    m, n, k = shape
    a, b = operands(SMALL, m, n, k)
    bias = torch.ones(n)
    assert bool((call(a, "mxfp8", b, "mxfp8", bias=bias) == 1).all())
    start = torch.ones(m, n)
    kept = call(a, "mxfp8", b, "mxfp8", c=start, out_dtype=FP32, accumulate=True)
    assert kept is start
    assert bool((kept == 1).all())


def test_bad_input():
    a, b = operands(SMALL, 16, 24, 128)
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
    with pytest.raises(ValueError, match="accumulate: needs c"):
        call(a, "mxfp8", b, "mxfp8", accumulate=True)
    with pytest.raises(Unsupported, match="16 bytes"):
        call((a[0][:, 8:104], a[1][:, :3]), "mxfp8", (b[0][:, :96], b[1][:, :3]), "mxfp8")
    with pytest.raises(Unsupported, match="format mxfp6_e2m3"):
        call(a, "mxfp6_e2m3", b, "mxfp8")
    with pytest.raises(Unsupported, match="cannot be multiplied"):
        call(a, "mxfp8", b, "nvfp4")
    assert "sm_100a" in why_not("mxfp8", "mxfp8", BF16, "sm_100a")
    assert "float64" in why_not("mxfp8", "mxfp8", torch.float64, "sm_90a")
    with pytest.raises(Unsupported, match=r"129 rows.*call dequantized_gemm"):
        call(operand("mxfp8", FEW + 1, 128, 1), "mxfp8", b, "mxfp8")


@pytest.mark.parametrize("wrong", [
    {"loaded_rows": 128},
    {"tile": (96, 128)}, {"tile": (64, 64)}, {"tile": (128, 256)}, {"split": 3}, {"stages": 1},
    {"stages": 40}, {"tma_store": True}, {"tile": (64, 128), "tma_store": True, "out_dtype": FP32},
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
        config = choose_config((m, n, 8192), "bf16", format, BF16)
        assert min(0.84 * 132, n / 32) <= n // config.tile[1] * config.split <= 132
        assert config.stages >= 3


def test_chosen_take_all_rows():
    """In one tile; and each block of threads has a part of K."""
    for m in range(1, FEW + 1):
        for blocks in range(1, 40):
            config = choose_config((m, 64 * 133, 128 * blocks), "mxfp4", "mxfp4", FP32)
            assert m <= config.tile[0] < max(2 * m, 9)
            assert config.split <= blocks


@pytest.mark.parametrize("formats", [
    ("bf16", "nvfp4"), ("nvfp4", "nvfp4"), ("bf16", "mxfp8"), ("mxfp8_e5m2", "mxfp8"),
    ("mxfp8", "mxfp4"), ("mxfp4", "mxfp4"),
])  # fmt: skip
def test_chosen_fit(formats):
    """Every product of few rows has a kernel, for which there is shared memory."""
    columns = 1, 128, 576, 2112, 4096, 7168, 24576
    sizes = itertools.product((1, 16, 33, 65, 128), columns, (32, 640, 7168))
    for shape, dtype in itertools.product(sizes, (BF16, FP32)):
        for added, aligned, whole in itertools.product((False, True), repeat=3):
            how = {"accumulate": added, "aligned": aligned, "async_scales": whole}
            assert choose_config(shape, *formats, dtype, **how).shared_bytes <= 227 * 1024


def test_chosen_share_large_rows():
    """Tiles of B that are half as large as A's are twice as high, if there is room for all."""
    for n, tile in ((7168, (64, 256)), (8192, (64, 128))):
        assert choose_config((64, n, 16384), "bf16", "nvfp4", BF16).tile == tile
        assert choose_config((64, n, 16384), "bf16", "mxfp8", BF16).tile == (64, 128)


@pytest.mark.parametrize("case", [
    ((16, 7168, 16384), "bf16", "mxfp8"), ((128, 8192, 8192), "mxfp4", "mxfp4"),
    ((64, 7168, 16384), "nvfp4", "nvfp4"),
])  # fmt: skip
def test_no_spills(case):
    with em.cutedsl(em.Device("sm_90a")):
        frames = frame_bytes(compiled.build(choose_config(*case, BF16)).__cubin__)
    assert frames == [0]
