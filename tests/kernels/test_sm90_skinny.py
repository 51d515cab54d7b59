"""Products of at most 16 bf16 rows by quantized weights on Hopper, run in the emulator, against
fp64 products of operands that are dequantized by plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from factors import alpha_of
from mixed_inputs import (
    BF16,
    COLUMNS,
    FP32,
    Operand,
    assert_close,
    assert_exact,
    dequantized,
    emulated,
    every_code,
    operand,
    spaced,
)

from blockscale import emulator as em
from blockscale.dtypes import BFLOAT16, FLOAT16, FLOAT32, to_torch
from blockscale.kernels.common.calls import Operand as Given
from blockscale.kernels.common.calls import describe_call
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.sm90 import mixed_config
from blockscale.kernels.sm90.mixed_gemm import mixed_gemm
from blockscale.kernels.sm90.mixed_plan import plan_mixed
from blockscale.kernels.sm90.skinny_config import Config, choose_config
from stand_in import chip

pytestmark = pytest.mark.usefixtures("keep_code")

FORMATS = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")


def weight(name: str, rows: int, k: int, tma_scales: bool = True) -> Operand:
    given = operand(name, rows, k, 2)
    return spaced(*given) if tma_scales else adrift(*given)


def adrift(data: Tensor, scale: Tensor) -> Operand:
    """The same operand, whose scales are at odd addresses, rows three bytes apart, and at the end
    of what is allocated."""
    rows, blocks = scale.shape
    apart = blocks + 3 + blocks % 2
    whole = torch.full((1 + rows * apart - (apart - blocks),), 0xFF, dtype=torch.uint8)
    placed = whole.as_strided((rows, blocks), (apart, 1), 1)
    placed.copy_(scale)
    return data, placed


CASES = [  # completion; kernel; M, N, K
    ("eager", Config("mxfp8", FLOAT32, rows=8, warps=2), (5, 40, 1024)),
    ("random", Config("mxfp8", BFLOAT16, rows=16, warps=4), (16, 64, 512)),
    (
        "late",
        Config("mxfp8_e5m2", FLOAT32, rows=16, warps=2, stages=3, resident=1),
        (11, 33, 1440),
    ),
    ("random", Config("mxfp4", FLOAT32, rows=16, warps=2), (9, 72, 1152)),
    ("late", Config("nvfp4", FLOAT32, rows=8, loaded_rows=1, warps=4), (1, 96, 1056)),
    ("random", Config("mxfp8", BFLOAT16, rows=8, loaded_rows=4, warps=2), (3, 40, 1440)),
    ("eager", Config("nvfp4", FLOAT16, rows=16, warps=8), (13, 8, 256)),
    ("late", Config("mxfp4", BFLOAT16, rows=8, warps=4, stages=1), (8, 32, 1024)),
    ("random", Config("nvfp4", BFLOAT16, rows=16, b_rows=64, warps=2), (14, 144, 1056)),
    (
        "late",
        Config("mxfp8", FLOAT32, rows=8, b_rows=64, warps=2, resident=1),
        (7, 72, 1024),
    ),
    ("random", Config("mxfp8", BFLOAT16, rows=16, warps=6), (12, 40, 1664)),
    ("random", Config("mxfp8", BFLOAT16, rows=8, loaded_rows=1, warps=16), (1, 40, 4480)),
]


@pytest.mark.parametrize("tma_scales", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_products(case, tma_scales):
    """Tails in M, N and K; stages that are used again and again; fewer K blocks than warps, and no
    multiple of them; scales that TMA cannot load."""
    completion, config, (m, n, k) = case
    config = replace(config, tma_scales=tma_scales)
    a, b = operand("bf16", m, k, 1), weight(config.b_format, n, k, tma_scales)
    got = emulated(config, a, b, completion=completion)
    assert_close(got, a[0].double(), dequantized(config.b_format, *b))


def test_same_bits():
    """Whichever of the warps is first."""
    config = Config("nvfp4", FLOAT32, warps=4)
    a, b = operand("bf16", 3, 1536, 1), weight("nvfp4", 32, 1536)
    first, other = (emulated(config, a, b, completion=each) for each in ("eager", "random"))
    assert torch.equal(first, other)


@pytest.mark.parametrize("tma_scales", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_every_element(name, tma_scales):
    """Exact; infinite where fp32 cannot hold it, and in steps of bf16's least number; NaN spoils
    its column of the output and no other."""
    given, a = every_code(name), torch.zeros(len(COLUMNS), 128)
    b = spaced(*given) if tma_scales else adrift(*given)
    for i, column in enumerate(COLUMNS):
        a[i, column] = 1
    config = Config(name, FLOAT32, warps=2, tma_scales=tma_scales)
    got = emulated(config, (a.to(BF16), None), b)
    assert_exact(got, name, a.double(), b)


@pytest.mark.parametrize(("name", "nan"), [("mxfp8", 0xFF), ("nvfp4", 0x7F)])
def test_nan_at_the_edge(name, nan):
    """A NaN in the last scale of a row, which is read for what is behind it, too, and of the last
    row, which is read for those after it."""
    config = Config(name, FLOAT32, warps=2, tma_scales=False)
    data, scale = operand(name, 33, 1056, 2)
    scale[5, -1] = scale[-1, 0] = nan
    a, b = operand("bf16", 3, 1056, 1), adrift(data, scale)
    got = emulated(config, a, b)
    spoilt = torch.tensor([5, 32])
    assert bool(got[:, spoilt].isnan().all())
    others = torch.ones(33, dtype=torch.bool).index_fill(0, spoilt, False)
    assert_close(got[:, others], a[0].double(), dequantized(name, *b)[others])


EPILOGUES = [
    {"out_dtype": FLOAT32, "accumulate": True, "bias": BFLOAT16, "alpha": (0,)},
    {"out_dtype": BFLOAT16, "accumulate": True},
    {"out_dtype": FLOAT16, "bias": FLOAT32, "rows": 16, "alpha": (0, 0)},
]


@pytest.mark.parametrize("fields", EPILOGUES)
def test_epilogue(fields):
    config = replace(Config("nvfp4", FLOAT32, warps=2), **fields)
    m = config.rows - 2
    a, b = operand("bf16", m, 256, 1), weight("nvfp4", 40, 256)
    bias = torch.randn(40).to(to_torch(config.bias)) if config.bias else None
    start = torch.randn(m, 40).to(to_torch(config.out_dtype)) if config.accumulate else None
    alpha = alpha_of(config.alpha, 0.75)
    got = emulated(config, a, b, start=start, bias=bias, alpha=alpha)
    added = sum(each.double() for each in (bias, start) if each is not None)
    factor = 0.75 if config.alpha else 1.0
    assert_close(got, factor * a[0].double(), dequantized("nvfp4", *b), added)


@pytest.mark.parametrize("k", [512, 544])
@pytest.mark.parametrize("format", FORMATS)
def test_through_the_host_function(format, k):
    """A product that this kernel is chosen for, whether TMA can load its scales or not."""
    a, b = operand("bf16", 2, k, 1), operand(format, 24, k, 2)
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")) as reports:
        got = mixed_gemm(Given(*a), Given(*b, format), out_dtype=FP32, gpu=chip("sm_90a"))
    assert_close(got, a[0].double(), dequantized(format, *b))
    assert any(each.startswith("mma.sync") for each in reports[0].instructions)


_UNBUILT = replace(chip("sm_90a"), load=lambda config: None)


def chosen(m: int, n: int, k: int, a_format: str | None = None, pad: int = 0):
    """The kernel of a product whose scales lie ``pad`` bytes further apart than they are long."""
    blocks = k // 32
    scale = torch.empty(n, blocks + pad, dtype=torch.uint8)[:, :blocks]
    a = torch.empty(m, k, dtype=BF16 if a_format is None else torch.uint8)
    a_scale = None if a_format is None else torch.empty(m, blocks, dtype=torch.uint8)
    b = torch.empty(n, k, dtype=torch.uint8)
    operands = Given(a, a_scale, a_format), Given(b, scale, "mxfp8")
    return plan_mixed(describe_call(*operands, out_dtype=BF16, gpu=_UNBUILT)).config


def test_choice():
    """For up to 16 rows; for quantized ones, which are widened first, unless so few blocks would
    have all of K. Threads read the scales where TMA cannot load them."""
    for m, rows in ((1, 8), (8, 8), (9, 16), (16, 16)):
        config = chosen(m, 8192, 1024)
        assert config == choose_config(m, 8192, 1024, "mxfp8", Epilogue(BFLOAT16))
        assert config.rows == rows
        assert config.loaded_rows == (m if m < 8 else 0)
        assert chosen(m, 4096, 1024, a_format="mxfp8") == choose_config(
            m, 4096, 1024, "mxfp8", Epilogue(BFLOAT16)
        )
    assert [chosen(1, 2048, k).warps for k in (4096, 8192)] == [8, 16]
    aligned = chosen(1, 8192, 1024)
    for config in (chosen(1, 8192, 1024, pad=4), chosen(1, 8192, 1024 + 32)):
        assert config == replace(aligned, tma_scales=False)
    for config in (chosen(17, 8192, 1024), chosen(1, 2112, 1024, a_format="mxfp8")):
        assert isinstance(config, mixed_config.Config)


def test_rows_of_b():
    """64 where NVFP4 meets 9 to 16 rows, and multiprocessors have one tile each."""
    for m, format, n, rows in (
        (16, "nvfp4", 8192, 64),
        (9, "nvfp4", 5120, 64),
        (8, "nvfp4", 8192, 32),
        (16, "mxfp4", 8192, 32),
        (16, "mxfp8", 8192, 32),
        (16, "nvfp4", 4096, 32),
        (16, "nvfp4", 8512, 32),
    ):
        assert choose_config(m, n, 4096, format, Epilogue(BFLOAT16)).b_rows == rows


@pytest.mark.parametrize(
    ("shape", "format", "warps"),
    [
        ((1, 4224, 4224), "nvfp4", 16),  # one tile for each multiprocessor, 33 K blocks
        ((1, 4224, 4096), "nvfp4", 8),  # 32
        ((8, 4224, 4097), "mxfp4", 16),  # a part of the 33rd
        ((9, 4224, 14336), "mxfp4", 8),
        ((1, 3168, 14336), "mxfp8", 16),  # for three of four
        ((1, 3200, 14336), "mxfp8", 8),
        ((16, 2048, 14336), "mxfp8_e5m2", 8),
        ((16, 8448, 14336), "nvfp4", 8),  # of 64 rows
        ((1, 4256, 14336), "nvfp4", 8),  # two
        ((16, 8448, 4096), "mxfp4", 8),
        ((1, 8448, 4096), "mxfp8", 6),
        ((16, 4256, 4096), "mxfp8", 6),
        ((1, 8480, 14336), "nvfp4", 4),  # three
        ((1, 25344, 4096), "mxfp4", 4),  # six
        ((1, 25376, 4096), "mxfp4", 8),  # seven
        ((16, 57344, 4096), "nvfp4", 4),
        ((1, 57344, 4096), "mxfp8", 4),
    ],
)
def test_warps(shape, format, warps):
    """On 132 multiprocessors, by tiles of 32 rows for each of them."""
    assert choose_config(*shape, format, Epilogue(BFLOAT16)).warps == warps


def test_four_warps_at_once():
    """Up to six tiles of four bits have four warps: as many fit a multiprocessor's shared memory,
    and no seventh."""
    config = choose_config(1, 25344, 4096, "nvfp4", Epilogue(BFLOAT16))
    assert 6 * config.shared_bytes <= 228 * 1024 < 7 * config.shared_bytes


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("k", [1024, 4096, 4097, 28672])
@pytest.mark.parametrize("n", [256, 2304, 4096, 8192, 12288, 57344])
@pytest.mark.parametrize("m", [1, 16])
def test_chosen_fit(m, n, k, format):
    """Tiles that a multiprocessor takes at once fit its shared memory, two at least where there are
    more than one for each; and where they are few, no others do."""
    config = choose_config(m, n, k, format, Epilogue(BFLOAT16))
    each = -(-n // (config.b_rows * 132))
    assert config.shared_bytes * min(2, each) <= 227 * 1024
    assert each > 3 or (each + 1) * config.shared_bytes >= 228 * 1024


@pytest.mark.parametrize(
    "wrong",
    [{"rows": 12}, {"loaded_rows": 8}, {"b_rows": 48}, {"warps": 0}, {"stages": 0}, {"stages": 40}],
)
def test_no_such_kernel(wrong):
    with pytest.raises(ValueError, match=r": got .*; no kernel is made so"):
        replace(Config("mxfp8", BFLOAT16), **wrong)
