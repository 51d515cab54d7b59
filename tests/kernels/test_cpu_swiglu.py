"""SwiGLU and its backward by the compiled CPU loops: the reference's bits."""

from __future__ import annotations

import pytest
import torch
from test_cpu import three_threads
from torch import Tensor

import blockscale as bs
from blockscale import reference
from blockscale.kernels.cpu import calls as cpu

numba = pytest.importorskip("numba")

__all__ = ["three_threads"]  # a fixture

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def same(a: Tensor, b: Tensor) -> bool:
    """Which NaN a NaN is stays open."""
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    number = ~(a.isnan() & b.isnan())
    return a.shape == b.shape and torch.equal(a[number].view(bits), b[number].view(bits))


def patterns(dtype: torch.dtype) -> Tensor:
    """All of 16 bits; of 32 some of each exponent."""
    if dtype == torch.float32:
        return torch.arange(-(2**31), 2**31, 65519).to(torch.int32).view(dtype)
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_gate(dtype):
    gate = patterns(dtype)
    gate = gate[: len(gate) // 256 * 256].view(-1, 256)
    generator = torch.Generator().manual_seed(0)
    other = gate.flatten()[torch.randint(gate.numel(), gate.shape, generator=generator)]
    for up in (torch.ones_like(gate), other):
        x = torch.cat((gate, up), -1)
        assert same(cpu.swiglu(x), reference.swiglu(x))
        for grad in (torch.ones_like(gate), other.flip(0)):
            assert same(cpu.swiglu_backward(grad, x), reference.swiglu_backward(grad, x))


def test_shapes_and_strides(three_threads):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(7, 300, 260, generator=generator) * 5
    for x in (whole, whole[1], whole[:, ::3, 4:100], whole[0, :1, :2], whole.mT[:, :, :100]):
        assert same(cpu.swiglu(x), reference.swiglu(x))
        grad = whole[..., 50:].narrow(-1, 0, x.shape[-1] // 2).flatten()[: x.numel() // 2]
        grad = grad.view(*x.shape[:-1], -1)
        assert same(cpu.swiglu_backward(grad, x), reference.swiglu_backward(grad, x))


@pytest.mark.parametrize("weighted", [False, True])
def test_operations_run_it(monkeypatch, weighted):
    x, grad, weights = torch.randn(40, 256), torch.randn(40, 128), torch.randn(40)
    given = {"weights": weights} if weighted else {}

    def run(backend: str) -> list[Tensor]:
        made = bs.swiglu_quantize(x, backend=backend, pad=True, **given)
        made += bs.swiglu_backward_quantize(grad, x, backend=backend, pad=True, **given)
        return [t.dequantize() if isinstance(t, bs.ScaledTensor) else t for t in made]

    calls = []
    for name in ("swiglu", "swiglu_backward"):
        original = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *a, f=original: calls.append(f) or f(*a))
    got = run("auto")
    assert len(calls) == (3 if weighted else 2)
    for a, b in zip(got, run("reference"), strict=True):
        assert torch.equal(a, b)
    assert len(calls) == (3 if weighted else 2)
