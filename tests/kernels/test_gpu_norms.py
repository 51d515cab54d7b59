"""Norms in front of the quantizer: statistics of rows, then both axes, in the emulator. The bytes
are the reference's."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import ARCHITECTURES, assert_same, expected, nasty, poisoned

import blockscale as bs
from blockscale import emulator as em
from blockscale import reference
from blockscale.dtypes import BFLOAT16, FLOAT32
from blockscale.formats import formats
from blockscale.kernels.common.builders import build_kernel
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.quantizers import calls as quantizers
from blockscale.kernels.quantizers import normalized
from blockscale.kernels.quantizers.config import Request
from blockscale.kernels.quantizers.statistics_config import (
    StatisticsConfig,
    choose_statistics,
    most_columns_of_statistics,
)
from stand_in import chip, emulated

COMPLETIONS = ("late", "eager", "random")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS, COLUMNS, BOTH = (-1,), (-2,), (-1, -2)
RMS, LAYER, BIASED = "rmsnorm", "layernorm", "biased_layernorm"


def rows(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of all sizes and means, some of equal numbers; every fourth with NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    x = x * torch.exp2(torch.randint(-12, 12, (m, 1), generator=generator).float())
    x += torch.randn(m, 1, generator=generator) * 4
    x = x.to(dtype)
    x[1::4] = nasty(m, k, dtype, seed)[1::4]
    x[2::7] = 0.0
    x[3::7] = 1.5
    return x


def factors(producer: str, k: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor | None]:
    """Weights, and biases, some of which are zeros and infinite."""
    generator = torch.Generator().manual_seed(seed + 1)
    weight, bias = 1 + torch.randn(2, k, generator=generator)
    weight[::37], bias[::19] = 0.0, -0.0
    weight[5::301] = float("inf")
    return [weight.to(dtype), bias.to(FP32) if producer == BIASED else None]


def check(
    producer: str,
    x: Tensor,
    by: list[Tensor | None],
    format: str,
    arch: str,
    axes: tuple[int, ...] = BOTH,
    *,
    layout: Any = "compact",
    completion: str = "late",
    **given: Any,
) -> None:
    """Assert that the kernels' bytes are the reference's, with a global scale that they find."""
    layouts = (layout,) * len(axes) if isinstance(layout, str) else layout
    fmt, gpu, found = formats[format], chip(arch, 1), None  # as if there were many rows
    names = {key: given[key] for key in ("nonfinite", "k_major") if key in given}
    request = Request(format, axes, layouts, **names)
    weight, bias = by
    assert weight is not None
    device = em.Device(arch, completion=completion, check="all,exit_stores,global")
    with em.cutedsl(device), poisoned():
        how = {"eps": 1e-5, "centered": producer != RMS, "gpu": gpu}
        made = normalized.row_statistics(x, weight, bias, request, **how)
        assert made.producer == producer
        others = {"producer": made.producer, "others": (made.vector,)}
        if fmt.has_global_scale:
            found = quantizers.global_scale(x, fmt, gpu=gpu, **others)
        asked = request._replace(producer=made.producer)
        given = {"others": (made.vector,), "global_scale": found, "gpu": gpu}
        results = quantizers.quantize(x, asked, **given)
    if producer == RMS:
        y, rstd = reference.rmsnorm(x, weight, 1e-5)
        assert made.mean is None
    else:
        y, mean, rstd = reference.layernorm(x, weight, bias, 1e-5)
        assert made.mean is not None
        assert_same(made.mean, mean, "mean")
    assert_same(made.rstd, rstd, "rstd")
    if fmt.has_global_scale:
        scale = reference.global_scale(y, fmt)
        assert found is not None
        assert_same(found.view(1), scale.view(1), "global scale")
        names["global_scale"] = scale
    names.pop("k_major", None)
    for axis, where, (data, scale) in zip(axes, layouts, results, strict=True):
        want_data, want_scale = expected(y, format, axis, where, **names)
        assert_same(data, want_data, f"data along {axis}")
        assert_same(scale, want_scale, f"scales along {axis}")


# producer, format, axes, layouts, dtype of x and of the weight, and what differs from the defaults
CASES: list[tuple[str, str, tuple[int, ...], Any, torch.dtype, torch.dtype, dict[str, Any]]] = [
    (RMS, "mxfp8", BOTH, "tcgen05", BF16, BF16, {}),
    (LAYER, "mxfp8", BOTH, "compact", FP32, BF16, {"nonfinite": "te"}),
    (BIASED, "mxfp8", COLUMNS, "packed", FP16, FP32, {"k_major": True}),
    (RMS, "fp8_1x128", BOTH, "sm90", BF16, FP32, {"k_major": True}),
    (BIASED, "fp8_1x128", BOTH, ("sm90", "compact"), BF16, BF16, {"nonfinite": "te"}),
    (RMS, "nvfp4", BOTH, "tcgen05", BF16, FP16, {}),
    (BIASED, "nvfp4", ROWS, "compact", FP32, FP32, {}),
    (LAYER, "mxfp4", BOTH, "tcgen05", BF16, BF16, {"nonfinite": "te"}),
    (BIASED, "mxfp8", ROWS, "tcgen05", BF16, BF16, {}),
    (RMS, "fp8_128x128", BOTH, "compact", BF16, BF16, {}),
]


@pytest.mark.parametrize("i", range(len(CASES)), ids=["-".join(map(str, c[:6])) for c in CASES])
def test_formats(i):
    producer, format, axes, layout, dtype, weight_dtype, given = CASES[i]
    x, by = rows(40, 176, dtype, seed=i), factors(producer, 176, weight_dtype, seed=i)
    given = given | {"layout": layout, "completion": COMPLETIONS[i % 3]}
    for arch in ARCHITECTURES if i < 2 else ARCHITECTURES[i % 2 :][:1]:
        check(producer, x, by, format, arch, axes, **given)


@pytest.mark.parametrize(
    ("producer", "arch", "shape", "dtype"),
    [
        (RMS, "sm_90a", (1, 16), BF16),
        (BIASED, "sm_100a", (130, 257), BF16),
        (BIASED, "sm_90a", (3, 1), FP32),
        (LAYER, "sm_90a", (5, 33), FP16),
        (RMS, "sm_100a", (9, 1104), FP32),
        (BIASED, "sm_90a", (2, 7168), BF16),
    ],
)
def test_shapes(producer, arch, shape, dtype):
    """Tails and padding; rows of several segments; memory is filled with other bytes before."""
    x, by = rows(*shape, dtype, seed=sum(shape)), factors(producer, shape[1], BF16)
    check(producer, x, by, "mxfp8", arch, layout="tcgen05", completion="random")


def test_strided_and_misaligned():
    whole = rows(8, 700, BF16)
    for x in (whole[::2, 8:264], whole[:, 1:257], whole[:, :300]):
        check(BIASED, x, factors(BIASED, x.shape[1], BF16), "mxfp8", "sm_90a")
    check(BIASED, whole[:1, 8:264], factors(BIASED, 256, BF16), "mxfp8", "sm_90a")
    alone = torch.as_strided(whole, (1, 256), (3, 1))
    check(RMS, alone, factors(RMS, 256, BF16), "mxfp8", "sm_90a")
    by = factors(BIASED, 257, BF16)
    by = [each[1:] for each in by]  # of an odd address
    check(BIASED, whole[:, :256], by, "mxfp8", "sm_90a")


def test_few_warps_for_many_segments(monkeypatch):
    """A warp takes several segments of a row, and not all warps equally many; two rows a block."""
    config = StatisticsConfig("sm_90a", BFLOAT16, BFLOAT16, FLOAT32, True, 3600, 2, 3, 1, bulk=True)
    monkeypatch.setattr(normalized, "choose_statistics", lambda *_: config)
    normalized._plan.cache_clear()
    check(BIASED, rows(3, 3600, BF16), factors(BIASED, 3600, BF16), "mxfp8", "sm_90a")
    normalized._plan.cache_clear()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sums_are_not_fused(arch):
    """ptxas may fuse a multiplication and an addition unless both say how they are rounded."""
    config = choose_statistics((64, 64), (0, 128), BFLOAT16, (BFLOAT16, BFLOAT16), True, chip(arch))
    with em.cutedsl(em.Device(arch, check="all,exit_stores")):
        ptx = build_kernel(config).__ptx__
    assert "add.rn.f32" in ptx
    assert "add.f32" not in ptx
    assert "sub.f32" not in ptx


X, W = torch.zeros(2, 64), torch.zeros(64)


@pytest.mark.parametrize(
    ("x", "format", "layout", "arch", "message"),
    [
        (X, "mxfp8", "compact", "sm_80", "sm_90a, sm_100a and sm_103a"),
        (X, "mxfp8", "compact", None, "x is on cpu"),
        (X, "mxfp6_e2m3", "compact", "sm_90a", "6-bit"),
        (X[:0], "mxfp8", "compact", "sm_90a", "nothing to normalize"),
        (X.view(2, 1, 64), "mxfp8", "compact", "sm_90a", "take matrices"),
    ],
)
def test_refusals(x, format, layout, arch, message):
    request = Request(format, BOTH, (layout,) * 2)
    with pytest.raises(Unsupported, match=message):
        normalized.row_statistics(
            x, W, None, request, eps=1e-6, centered=False, gpu=arch and chip(arch)
        )


def test_largest_rows():
    """Shared memory holds what the chooser says, and one segment more is refused."""
    most = most_columns_of_statistics(FLOAT32)
    x = torch.zeros(1, most + 1)
    request = Request("mxfp8", BOTH, ("compact",) * 2)
    with pytest.raises(Unsupported, match=f"{most + 1} columns: shared memory .* most {most}"):
        normalized.row_statistics(
            x, x[0], None, request, eps=1e-6, centered=False, gpu=chip("sm_90a")
        )
    check(BIASED, rows(1, most, FP32), factors(BIASED, most, BF16), "mxfp8", "sm_90a", ROWS)


@pytest.mark.parametrize("name", ["RMSNormLinear", "LayerNormLinear", "MLP"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_layers(name, recipe):
    """Both passes by kernels alone: sums have another order than on a CPU."""
    layer = getattr(bs.nn, name)(128, 128, dtype=BF16, recipe=bs.Recipe(recipe))
    found = []
    for where in (nullcontext(()), emulated("sm_90a", quantizes=True)):
        x = rows(64, 128, BF16).nan_to_num(0.0, 1.0, -1.0).clamp(-8, 8).requires_grad_()
        with where as launched, warnings.catch_warnings():
            warnings.simplefilter("error", bs.FallbackWarning)
            y = layer(x)
            grad = rows(64, y.shape[1], BF16, seed=1).nan_to_num(0.0, 1.0, -1.0).clamp(-8, 8)
            found.append([y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad)])
    producers = {c.producer for c in launched if hasattr(c, "producer")}
    expected_producers = {
        "RMSNormLinear": {"rmsnorm"},
        "LayerNormLinear": {"biased_layernorm"},
        "MLP": {"swiglu", "swiglu_backward"},
    }
    assert producers == {"load"} | expected_producers[name]
    for got, want in zip(*found, strict=True):
        assert (got - want).float().norm() < 0.01 * want.float().norm()
