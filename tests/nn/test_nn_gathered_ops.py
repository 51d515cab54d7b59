"""Layers in compiled code whose weight others have quantized."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import blockscale as bs
from blockscale.nn.forms import quantize_forms
from blockscale.nn.gathered_ops import gathered_backward, gathered_fprop, number

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
W = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
RECIPE = bs.Recipe("mxfp8").text


class Weight:
    def __init__(self, values):
        self.values = values

    def quantized_forms(self, operand, *, rows, columns):
        if self.values is None:
            return None
        return quantize_forms(self.values, operand, rows=rows, columns=columns)


def fprop(handle):
    q = bs.quantize(X, "mxfp8")
    given = q.data, q.scale, None, "compact", [8, 64], X.dtype
    return torch.ops.blockscale.gathered_fprop(
        *given, handle, [96, 64], None, RECIPE, torch.float32
    )


def test_what_the_weight_has_when_an_op_runs_is_read():
    weight = Weight(W)
    handle = number(weight)
    for values in (W, 2 * W):
        weight.values = values
        assert torch.equal(fprop(handle), bs.gemm(bs.quantize(X), bs.quantize(values).mT, X.dtype))


def test_numbers_are_no_others():
    kept = [Weight(W) for _ in range(3)]
    assert len({int(number(each)) for each in kept}) == 3


def test_a_weight_that_is_gone():
    handle = number(Weight(W))
    with pytest.raises(RuntimeError, match="is gone; keep the module"):
        fprop(handle)


def test_a_weight_that_has_values_again():
    weight = Weight(None)
    with pytest.raises(RuntimeError, match="has values now; compile it anew"):
        fprop(number(weight))


@pytest.mark.parametrize("wgrad", [False, True])
def test_fakes(wgrad):
    weight = Weight(W)
    handle, q = number(weight), bs.quantize(X, "mxfp8")
    opcheck = partial(torch.library.opcheck, test_utils="test_faketensor")
    rows = q.data, q.scale, None, "compact", [8, 64], X.dtype
    more = handle, [96, 64], None, RECIPE, torch.float32
    opcheck(torch.ops.blockscale.gathered_fprop.default, (*rows, *more))
    columns = bs.quantize(X, "mxfp8", -2, pad=True)
    x = (columns.data, columns.scale) if wgrad else (None, None)
    given = torch.ones(8, 96), *x, None, "compact", [8, 64], X.dtype
    more = handle, W.dtype, RECIPE, wgrad
    opcheck(torch.ops.blockscale.gathered_backward.default, (*given, *more))


def test_called_at_once():
    """As compiled code never does, and tests of kernels do."""
    weight = Weight(W)
    q = bs.quantize(X, "mxfp8")
    x = q.data, q.scale, None, "compact", [8, 64], X.dtype
    handle = number(weight)
    got = gathered_fprop(*x, handle, [96, 64], None, RECIPE, torch.float32)
    assert torch.equal(got, fprop(handle))
    grad = torch.ones(8, 96)
    (grad_x,) = gathered_backward(
        grad, None, None, None, "compact", [8, 64], X.dtype, handle, W.dtype, RECIPE, False
    )
    assert torch.equal(grad_x, bs.gemm(bs.quantize(grad), bs.quantize(W, axis=-2), X.dtype))


def test_gradients_that_ranks_have_quantized():
    weight = Weight(W)
    handle, q = number(weight), bs.quantize(torch.ones(8, 96), "mxfp8")
    given = q.data, q.scale, None, "compact", [8, 96], handle, [96, 64], RECIPE, torch.float32
    op = torch.ops.blockscale.gathered_dgrad
    torch.library.opcheck(op.default, given, test_utils="test_faketensor")
    assert torch.equal(op(*given), bs.gemm(q, bs.quantize(W, axis=-2), torch.float32))
