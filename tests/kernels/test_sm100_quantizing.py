"""Blackwell's products that are quantized for the next one, run in the emulator: byte for byte what
the reference makes of the sums of the tensor cores."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import dataclasses

from gpu_bench import assert_same, poisoned
from kernel_code import built
from sm90_inputs import frame_bytes
from sm100_inputs import FP32, Operand, operand, product
from sm100_quantized import emulated, expected, halved_scale

from blockscale import emulator as em
from blockscale import formats, quantize, swiglu_quantize
from blockscale.dtypes import BFLOAT16, FLOAT32, UINT8, to_torch
from blockscale.kernels.common.calls import Operand as Given
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.sm100 import calls as sm100
from blockscale.kernels.sm100.config import Config, choose_config
from blockscale.kernels.sm100.quantizing_config import Quantizing
from stand_in import chip

pytestmark = pytest.mark.usefixtures("keep_code")

MX8, NV4 = Quantizing("mxfp8"), Quantizing("nvfp4")
GATED8, GATED4 = Quantizing("mxfp8", swiglu=True), Quantizing("nvfp4", swiglu=True)
PAIR = {"ctas": 2, "cluster": (2, 1)}


def _config(format: str, quantizing: Quantizing, **fields: Any) -> Config:
    given = {"mma_n": 256, "epilogue_stages": 1, "stages": 3, "alpha": (0,)} | fields
    b_format = given.pop("b_format", format)
    return Config(format, b_format, UINT8, quantizing=quantizing, **given)


@cache
def _case(a_format: str, b_format: str, shape: tuple[int, int, int]):
    """Operands, their product, and an alpha that makes numbers of it for which exp counts."""
    m, n, k = shape
    a, b = operand(a_format, m, k, 1), operand(b_format, n, k, 2)
    sums = product(a, b)
    return a, b, sums, torch.tensor(4 / np.median(np.abs(sums)), dtype=FP32)


def _check(config: Config, a: Operand, b: Operand, sums: np.ndarray, **given: Any) -> Tensor:
    """Data, as it should be."""
    how = {key: given.pop(key) for key in ("completion", "seed", "resident") if key in given}
    quantizing = config.quantizing
    assert quantizing is not None
    if quantizing.stored.has_global_scale:
        given.setdefault("global_scale", torch.tensor(0.037))
    if config.bias is not None:
        bias = 3 * torch.randn(len(b.codes), generator=torch.Generator().manual_seed(5))
        given["bias"] = bias.to(to_torch(config.bias))
    data, scale = emulated(config, a, b, **given, **how)
    want = expected(quantizing, sums, **given)
    assert_same(data, want[0], "data")
    assert_same(scale, want[1], "scales")
    return data


# Sums in two sets or in overlapping ones, of which a cluster has three; B by boxes of 64 rows and
# more, in panels; M, N, K with tails
CASES: dict[str, tuple[Config, tuple[int, int, int]]] = {
    "swiglu-mxfp8": (_config("mxfp8", GATED8, bias=BFLOAT16), (130, 320, 144)),
    "swiglu-nvfp4, pair": (_config("nvfp4", GATED4, bias=FLOAT32, **PAIR), (130, 576, 288)),
    "swiglu-mxfp8, pairs 2x2": (
        _config("mxfp8", GATED8, ctas=2, cluster=(2, 2)),
        (136, 320, 160),
    ),
    "swiglu-nvfp4 of mxfp8, 4x1": (
        _config("mxfp8", GATED4, b_format="mxfp4", cluster=(4, 1)),
        (136, 192, 128),
    ),
    "swiglu-e5m2, NN": (
        _config("mxfp8_e5m2", Quantizing("mxfp8_e5m2", True), b_format="mxfp8", majors=("k", "mn")),
        (16, 320, 144),
    ),
    "mxfp8": (_config("mxfp8", MX8, mma_n=128), (130, 160, 144)),
    "nvfp4, pair": (
        _config("nvfp4", NV4, epilogue_stages=2, bias=BFLOAT16, **PAIR),
        (130, 288, 288),
    ),
    "mxfp4, floor, te": (
        _config("mxfp4", Quantizing("mxfp4", False, "floor", "te"), stages=4),
        (130, 288, 160),
    ),
}
COMPLETIONS = ("late", "eager", "random")


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    config, shape = CASES[name]
    a, b, sums, alpha = _case(config.a_format, config.b_format, shape)
    completion = COMPLETIONS[list(CASES).index(name) % 3]
    data = _check(config, a, b, sums, alpha=alpha, completion=completion)
    assert len(data.unique()) > 100
    assert set(frame_bytes(built(config).__cubin__)) == {0}


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("name", ["swiglu-mxfp8", "swiglu-nvfp4, pair"])
def test_small(name, completion):
    """Fewer rows than a warp's, fewer columns than a tile of scales."""
    config, _ = CASES[name]
    a, b, sums, alpha = _case(config.a_format, config.b_format, (5, 64, 128))
    _check(config, a, b, sums, alpha=alpha, completion=completion, seed=3, resident=2)


# --- values ---------------------------------------------------------------------------------------


def _nasty(format: str, rows: int, k: int, seed: int) -> Operand:
    """Rows of zeros, some with a NaN, scales of all sizes and NaN: sums overflow, too."""
    x = operand(format, rows, k, seed)
    generator = torch.Generator().manual_seed(seed)
    if format != "nvfp4":
        x.scales[:] = 127 + 60 * torch.randn(x.scales.shape[0], 1, generator=generator)
        x.scales.clamp_(0, 254)
    if format == "mxfp8":
        x.codes[3::40, 7] = 0x7F  # NaN
    x.codes[2::8] = 0
    x.scales[7::50, 1] = 0x7F if format == "nvfp4" else 0xFF  # NaN
    return x


@pytest.mark.parametrize("name", ["swiglu-mxfp8", "swiglu-nvfp4, pair", "mxfp4, floor, te"])
def test_nasty(name):
    """Zeros, NaN and infinities, sums of all sizes."""
    config, _ = CASES[name]
    a, b = _nasty(config.a_format, 128, 128, 3), _nasty(config.b_format, 256, 128, 4)
    sums = product(a, b)
    kinds = [np.isnan(sums).any(), np.isinf(sums).any(), np.isfinite(sums).any(), (sums == 0).any()]
    assert kinds == [True, config.a_format != "nvfp4", True, True]
    for alpha, scale in ((1.0, 1e-38), (3e-6, 2.0**127)):
        given: dict[str, Any] = {"alpha": torch.tensor(alpha)}
        if config.quantizing.stored.has_global_scale:
            given["global_scale"] = torch.tensor(scale)
        _check(config, a, b, sums, **given)


# --- calls ----------------------------------------------------------------------------------------


def test_call_is_the_two_steps():
    """The bytes of the fp32 product, quantized afterwards. Halves of whole tiles have the scales of
    the whole weight."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 64, generator=generator) for rows in (24, 256))
    a, b = (quantize(t, "nvfp4", layout="tcgen05") for t in (x, w))
    assert a.global_scale is not None
    assert b.global_scale is not None
    alpha, scale = (a.global_scale, b.global_scale), torch.tensor(2e-3)
    operands = Given(a.data, a.scale, "nvfp4"), Given(b.data, b.scale, "nvfp4")
    given: dict[str, Any] = {"alpha": alpha, "gpu": chip("sm_100a")}
    with em.cutedsl(em.Device("sm_100a", check="all,exit_stores")), poisoned():
        data, scales = sm100.gemm_quantize(
            *operands, Quantizing("nvfp4", swiglu=True), global_scale=scale, **given
        )
        h = sm100.gemm(*operands, out_dtype=FP32, **given)
    fmt = {"axes": (-1,), "layout": "tcgen05", "global_scale": scale}
    (q,) = swiglu_quantize(h, "nvfp4", **fmt)
    assert_same(data, q.qdata, "data")
    assert_same(scales, q.qscale.view(torch.uint8), "scales")


def test_nothing():
    a, b = operand("mxfp8", 0, 128, 1), operand("mxfp8", 64, 128, 1)
    operands = Given(a.data, a.scale, "mxfp8"), Given(b.data, b.scale, "mxfp8")
    given: dict[str, Any] = {"global_scale": torch.tensor(1.0), "gpu": chip("sm_100a")}
    data, scale = sm100.gemm_quantize(*operands, Quantizing("nvfp4"), **given)
    assert (data.shape, scale.shape) == ((0, 32), (0,))
    data = torch.zeros(32, 0, dtype=torch.uint8)
    none = Given(data, data[0], "mxfp8")
    with pytest.raises(Unsupported, match="K is 0"):
        sm100.gemm_quantize(none, none, Quantizing("mxfp8"), gpu=chip("sm_100a"))


_FIELDS = [field.name for field in dataclasses.fields(Quantizing)]


@pytest.mark.parametrize(
    ("kind", "match", "rows", "given"),
    [
        (Unsupported, r"sm_100:.*sm_100a and sm_103a", 64, {"gpu": chip("sm_100")}),
        (Unsupported, "80 rows, so 80 columns .* multiple of 32: pad", 80, {}),
        (Unsupported, "40 columns .* each half", 80, {"swiglu": True}),
        (ValueError, "has 65 rows; expected as many for gate", 65, {"swiglu": True}),
        (ValueError, r"b_scale: has shape \(512,\).*\(1024,\).*halves", 64, {"swiglu": True}),
        (ValueError, "format: got 'fp8_1x128'", 64, {"format": "fp8_1x128"}),
        (ValueError, "scale_rounding .*got 'nearest'", 64, {"scale_rounding": "nearest"}),
        (ValueError, "nonfinite: got 'no'", 64, {"nonfinite": "no"}),
        (ValueError, "global_scale: nvfp4 needs one", 64, {"format": "nvfp4"}),
        (ValueError, "'mxfp8' has none", 64, {"global_scale": torch.tensor(1.0)}),
        (
            TypeError,
            "global_scale: got torch.float64",
            64,
            {"format": "nvfp4", "global_scale": torch.tensor(1.0).double()},
        ),
        (ValueError, "bias: has shape", 64, {"bias": torch.zeros(32), "swiglu": True}),
        (ValueError, "ctas: got 3", 64, {"ctas": 3}),
    ],
)
def test_refused(kind, match, rows, given):
    a, b = operand("mxfp8", 8, 128, 1), operand("mxfp8", rows, 128, 2)
    halves = "bias" in given or rows == 80
    scale = halved_scale(b) if halves and given.get("swiglu") else b.scale
    operands = Given(a.data, a.scale, "mxfp8"), Given(b.data, scale, "mxfp8")
    fields = {"format": "mxfp8"} | {k: v for k, v in given.items() if k in _FIELDS}
    given = {k: v for k, v in given.items() if k not in _FIELDS}
    with pytest.raises(kind, match=match):
        sm100.gemm_quantize(*operands, Quantizing(**fields), **({"gpu": chip("sm_100a")} | given))


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("swiglu", [True, False])
def test_chosen(format, swiglu):
    """Every size has a configuration, whose sums and scales Tensor Memory has room for."""
    quantizing = Quantizing(format, swiglu)
    for shape in ((1, 64, 128), (256, 256, 256), (8192, 8192, 8192)):
        config = choose_config(shape, (format, format), Epilogue(UINT8), quantizing=quantizing)
        last = config.scale_columns[1] + 4 * config.scale_rows[1] * config.kind.scale_tiles
        assert last <= 512
        early = config.early_release * config.subtile_n
        assert config.acc_stride >= config.mma_n - early
        assert formats[format].block_size <= config.subtile_n
