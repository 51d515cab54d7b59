"""A feed-forward layer on Blackwell, all of it in the emulator: bf16 to a quantizer, its data and
tiles of scales to a product that quantizes SwiGLU of itself, and that to the next product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import assert_same, poisoned
from sm100_inputs import BF16, Operand, product, rounded
from sm100_quantized import expected

from blockscale import emulator as em
from blockscale import quantize, reference
from blockscale.formats import get_format
from blockscale.kernels.common.calls import Operand as Given
from blockscale.kernels.quantizers import calls as quantizers
from blockscale.kernels.sm100 import calls as sm100
from blockscale.kernels.sm100.quantizing_config import Quantizing
from blockscale.layouts import as_bytes, get_layout
from blockscale.ops.gemm_operands import global_scales
from blockscale.rounding import unpack
from stand_in import chip

ARCH = "sm_100a"


@dataclass(frozen=True)
class Layer:
    """x (M, K) bf16; gate and up (H, K); down (N, H)."""

    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def random(cls, m: int, n: int, k: int, h: int) -> Layer:
        generator = torch.Generator().manual_seed(m)

        def one(rows: int, columns: int, size: float) -> Tensor:
            x = size * torch.randn(rows, columns, generator=generator)
            return (x * 2 ** (2 * torch.randn(rows, 1, generator=generator))).to(BF16)

        x, down = one(m, k, 1.0), one(n, h, h**-0.5)
        return cls(x, one(h, k, k**-0.5), one(h, k, k**-0.5), down)


def _by_kernels(layer: Layer, format: str, ctas: int, hidden_scale: Tensor | None) -> list[Tensor]:
    """Data and scales of the hidden layer, and the output. The halves of the first weight have one
    global scale."""
    fmt = get_format(format)
    asked = quantizers.Request(format, layouts=("tcgen05",))

    def scalar(x: Tensor) -> Tensor | None:
        return quantizers.global_scale(x, fmt, gpu=chip(ARCH)) if fmt.has_global_scale else None

    def quantized(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        ((data, tiles),) = quantizers.quantize(x, asked, global_scale=scale, gpu=chip(ARCH))
        return as_bytes(data), tiles

    first = torch.cat((layer.gate, layer.up))
    scalars = [scalar(each) for each in (layer.x, first, layer.down)]
    x, down = quantized(layer.x, scalars[0]), quantized(layer.down, scalars[2])
    halves = [quantized(half, scalars[1]) for half in (layer.gate, layer.up)]
    data, tiles = (torch.cat(each) for each in zip(*halves, strict=True))
    how: dict[str, Any] = {"gpu": chip(ARCH), "ctas": ctas}
    hidden = sm100.gemm_quantize(
        Given(*x, format),
        Given(data, tiles, format),
        Quantizing(format, swiglu=True),
        alpha=global_scales(scalars[0], scalars[1]),
        global_scale=hidden_scale,
        **how,
    )
    alpha = global_scales(hidden_scale, scalars[2])
    y = sm100.gemm(Given(*hidden, format), Given(*down, format), alpha=alpha, **how)
    return [as_bytes(hidden[0]), hidden[1], y]


def _by_reference(layer: Layer, format: str) -> tuple[Tensor | None, list[Tensor]]:
    """The hidden layer's global scale, and all that the kernels should give."""
    fmt = get_format(format)

    def scalar(x: Tensor) -> Tensor | None:
        return reference.global_scale(x, fmt) if fmt.has_global_scale else None

    def quantized(x: Tensor, scale: Tensor | None) -> Operand:
        rounding = fmt.default_scale_rounding
        data, scales = reference.quantize(x, fmt, scale_rounding=rounding, global_scale=scale)
        return Operand(format, _codes(data, format), as_bytes(scales))

    first = torch.cat((layer.gate, layer.up))
    scalars = [scalar(each) for each in (layer.x, first, layer.down)]
    x, w, down = (
        quantized(*pair) for pair in zip((layer.x, first, layer.down), scalars, strict=True)
    )
    sums, alpha = product(x, w), _alpha(scalars[0], scalars[1])
    hidden_scale = scalar(reference.swiglu(rounded(sums, torch.float32, alpha)))
    data, tiles = expected(
        Quantizing(format, swiglu=True), sums, alpha=alpha, global_scale=hidden_scale
    )
    shape = fmt.scale_shape((len(data), len(layer.gate)), -1)
    scales = get_layout("tcgen05").unswizzle(tiles, (shape[0], shape[1]), torch.uint8)
    hidden = Operand(format, _codes(data, format), scales)
    y = rounded(product(hidden, down), BF16, _alpha(hidden_scale, scalars[2]))
    return hidden_scale, [data, tiles, y]


def _codes(data: Tensor, format: str) -> Tensor:
    return unpack(as_bytes(data), get_format(format).element).to(torch.uint8)


def _alpha(*scalars: Tensor | None) -> Tensor | None:
    known = [each for each in scalars if each is not None]
    return torch.stack(known).prod() if known else None


@pytest.mark.parametrize(("ctas", "m", "h"), [(1, 40, 160), (2, 130, 96)])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_chain(format, ctas, m, h):
    """No dimension is one of whole tiles; halves of the first weight have their own."""
    layer = Layer.random(m, n=72, k=160, h=h)
    hidden_scale, want = _by_reference(layer, format)
    completion = "late" if ctas == 1 else "random"
    with em.cutedsl(em.Device(ARCH, completion=completion, check="all,exit_stores")), poisoned():
        got = _by_kernels(layer, format, ctas, hidden_scale)
    for each, right, what in zip(got, want, ("hidden data", "hidden scales", "y"), strict=True):
        assert_same(each, right, what)
    _check_values(layer, format, hidden_scale, got)


def _check_values(
    layer: Layer, format: str, hidden_scale: Tensor | None, got: list[Tensor]
) -> None:
    """What is stored stands for the layer in fp64: each element is off by half a step, which is a
    16th of it in E4M3, and a fifth in E2M1 or little beside the others."""
    fmt = get_format(format)
    first = torch.cat((layer.gate, layer.up))
    x, w, down = (quantize(t, format).dequantize().double() for t in (layer.x, first, layer.down))
    gate, up = (x @ w.T).chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    shape = want.shape
    scales = get_layout("tcgen05").unswizzle(got[1], fmt.scale_shape(shape, -1), torch.uint8)
    hidden = reference.dequantize(
        got[0].view(fmt.element.dtype),
        scales.view(fmt.scale.dtype),
        fmt,
        shape=shape,
        global_scale=hidden_scale,
    ).double()
    assert (hidden - want).norm() < want.norm() / (16 if format == "mxfp8" else 4)
    y = hidden @ down.T
    assert (got[2] - y).norm() < 2**-8 * y.norm()
