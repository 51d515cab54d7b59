"""The compiled loop that looks at quantized matrices: its numbers are those of torch operations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.debug.form_kernels import FormKernels
from blockscale.debug.form_numbers import evaluate
from blockscale.debug.form_samples import take_sample
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.common.matrix import Matrix
from blockscale.kernels.common.watch_vector import (
    CODES_AT,
    ELEMENT,
    FIRST_BLOCK,
    SUMS,
    SUMS_AT,
    VALUE,
    nan_code,
)
from blockscale.kernels.cpu.watch_plan import plan_watch

FORMATS = ["mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp8_1x128", "fp8_128x128"]
_SIGNAL = SUMS_AT + SUMS.index("signal")


def values(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(-6, 3, shape[1])
    x[: shape[0] // 2, : shape[1] // 3] = 0
    return x.to(dtype)


def both(x: Tensor | None, q: bs.ScaledTensor) -> tuple[np.ndarray, np.ndarray]:
    """The vectors of the loop, and of torch operations."""
    kernels = FormKernels()
    assert kernels.add(0, x, q)
    limits = None if x is None else tuple(torch.aminmax(x))
    wanted = evaluate([take_sample(x, q, limits)])[0].vector.numpy()
    return kernels.evaluate()[0].vector, wanted


def check(x: Tensor | None, q: bs.ScaledTensor) -> np.ndarray:
    found, wanted = both(x, q)
    # sums of squares are added up in another order
    sums = slice(_SIGNAL, _SIGNAL + 2)
    np.testing.assert_allclose(found[sums], wanted[sums], rtol=1e-12)
    found[sums] = wanted[sums]
    if not wanted[CODES_AT + nan_code(q.format)]:  # then these mean nothing
        fields = [FIRST_BLOCK, ELEMENT, VALUE]
        found[fields] = wanted[fields]
    np.testing.assert_array_equal(found, wanted)
    return found


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers(format, axis, dtype):
    for shape in ((192, 256), (33, 70), (1, 5)):
        x = values(shape, dtype)
        check(x, bs.quantize(x, format, axis, pad=True))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite(format, axis, value):
    x = values((160, 288), torch.float32)
    x[150, 280] = math.nan
    x[70, 201] = value
    found = check(x, bs.quantize(x, format, axis, pad=True))
    assert found[VALUE] == value or math.isnan(value)


def test_subnormals():
    """Octaves are those of the quotient, however small its terms."""
    x = values((64, 64), torch.float32) * 2.0**-130
    check(x, bs.quantize(x, "fp8_1x128", pad=True))


def test_without_values():
    x = values((64, 96), torch.bfloat16)
    check(None, bs.quantize(x, "mxfp8", pad=True))


def test_transposed_source():
    x = values((64, 96), torch.bfloat16).mT
    check(x, bs.quantize(x.contiguous(), "mxfp8", pad=True))


def test_refusals():
    """What the loop does not read is left to torch operations."""
    x, places = values((64, 96), torch.bfloat16), np.zeros(1, np.int32)

    def refused(x: Tensor, q: bs.ScaledTensor, why: str) -> None:
        matrix = Matrix(
            q.format, tuple(q.shape), q.axis, q.layout_name, q.qdata, q.qscale, q.global_scale
        )
        with pytest.raises(Unsupported, match=why):
            plan_watch(x, matrix, places)
        assert not FormKernels().add(0, x, q)

    refused(x, bs.quantize(x, "mxfp6_e2m3"), "format mxfp6_e2m3")
    refused(x, bs.quantize(x, layout="tcgen05"), "layout tcgen05")
    refused(x.double(), bs.quantize(x), "torch.float64")
    refused(values((64, 192), torch.bfloat16)[:, ::2], bs.quantize(x), "strides")
