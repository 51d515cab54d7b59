"""GPUs that are not there, for layers that launch what a plan found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from blockscale import ops
from blockscale.formats import get_format
from blockscale.kernels.common.calls import CompiledGemm, Operand
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.common.template import template
from blockscale.kernels.quantizers import calls as quantizers
from blockscale.kernels.quantizers.outputs import choose_output
from blockscale.nn import plan_cache
from blockscale.ops import gemm_cpu, gemm_kernels
from blockscale.ops.gemm_operands import Products, Side
from stand_in import gpu

__all__ = ["Counts", "torch_gpu"]


class Counts:
    """What the kernels of :func:`torch_gpu` were launched for."""

    def __init__(self) -> None:
        self.quantized: list[torch.Size] = []
        self.products = 0


class _Quantizer:
    """What quantizes on a GPU that computes by torch, with the attributes of a QuantizePlan."""

    def __init__(
        self, counts: Counts, x: Any, format: str, *how: Any, of: tuple[Any, str] = ((-1,), "amax")
    ) -> None:
        self._along, self._scaling = of  # of a global scale
        self._counts, self._shape, self._format, self._how = counts, x[0], format, how
        if how:
            axes, layouts, *_, k_major = how
            self.outputs = [
                choose_output(
                    *(tuple(x[0]), get_format(format), axis, layout, torch.device("cpu"), None),
                    k_major,
                )
                for axis, layout in zip(axes, layouts, strict=True)
            ]

    def quantize(
        self, inputs: Any, global_scale: Any, offsets: Any = None, further: Any = quantizers.PLAIN
    ) -> list[Any]:
        (x,), (axes, layouts, scale_rounding, square, scaling, k_major) = inputs, self._how
        assert x.shape == self._shape
        assert not x.requires_grad
        self._counts.quantized.append(x.shape)
        written: list[Any] = [None] * 4
        for axis, layout, output in zip(axes, layouts, self.outputs, strict=True):
            data, scale = ops.quantize(
                *(x, self._format, axis, scale_rounding, "propagate", layout, global_scale),
                *(None, _numbers(further), "reference", k_major, None, square),
                *(_step(further), *_transform(further, scaling)),
            )
            written[output.first] = (data.mT if output.turned else data).contiguous()
            written[output.first + 1] = scale.contiguous()
        return written

    def global_scale(
        self, inputs: Any, weights: Any = None, further: Any = quantizers.PLAIN
    ) -> torch.Tensor:
        transform = _transform(further, self._scaling)
        return ops.global_scale(inputs[0], self._format, "reference", *self._along, *transform)


def _numbers(further: Any) -> Any:
    numbers = further.numbers
    return None if numbers is None else list(numbers._replace(step=0))


def _step(further: Any) -> Any:
    return None if further.numbers is None else further.numbers.step


def _transform(further: Any, scaling: str) -> tuple[Any, str, Any]:
    """The last arguments of ops."""
    words, step = (None, None) if further.hadamard is None else further.hadamard.for_op()
    return words, scaling, step


@contextmanager
def torch_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """A GPU whose tensors are on the CPU and whose kernels are those of a CPU, and the
    reference's quantizers: the numbers of layers on a CPU."""
    counts, shapes = Counts(), []

    def lay(a: Side, b: Side) -> Any:
        shapes[:] = a.shape, b.shape
        return Operand(a.data, a.scale, a.format), Operand(b.data, b.scale, b.format)

    def plan(call: Any) -> CompiledGemm:
        a_shape, b_shape = shapes

        def run(
            a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, bias: Any, alpha: Any
        ) -> None:
            counts.products += 1
            scalars = alpha if isinstance(alpha, tuple) else (None, None)
            left = Side(a, a_scale, scalars[0], call.a.format, "compact", a_shape)
            right = Side(b, b_scale, scalars[1], call.b.format, "compact", b_shape)
            gemm_cpu.multiply(left, right, bias, out, call.accumulate, call.out_dtype)

        like = template((a_shape[0], b_shape[1]), call.out_dtype, call.device)
        return CompiledGemm(None, run, like, lambda *operands: operands)

    pairs = {(x, y) for x in _FORMATS for y in _FORMATS}
    products = Products("a GPU", "all", pairs, lay, plan, {}, k_major=False)
    monkeypatch.setattr(gemm_kernels, "products_on", lambda device: products)

    def plan_quantize(
        inputs: Any, device: Any, gpu: Any, asked: quantizers.Request, *_: Any
    ) -> _Quantizer:
        if inputs[0][1][-1] != 1:
            raise Unsupported("x: not contiguous in the last dimension")
        how = asked.axes, asked.layouts, asked.scale_rounding, asked.square, asked.scaling
        return _Quantizer(counts, inputs[0], asked.format, *how, asked.k_major)

    def plan_amax(inputs: Any, device: Any, gpu: Any, asked: quantizers.Request) -> _Quantizer:
        of = asked.axes[:1] or (-1,), asked.scaling
        return _Quantizer(counts, inputs[0], asked.format, of=of)

    monkeypatch.setattr(quantizers, "plan_quantize", plan_quantize)
    monkeypatch.setattr(quantizers, "plan_amax", plan_amax)
    monkeypatch.setattr(plan_cache, "_plans", {})
    with gpu("of torch"):
        yield counts


_FORMATS = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp8_1x128", "fp8_128x128")
