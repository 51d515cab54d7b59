"""``bs.gemm_quantize`` by kernels, of which the quantizers are one: CPU tensors count as those of a
GPU, which is the emulator."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from sm90_inputs import assert_close
from sm100_inputs import BF16, FP32

import blockscale as bs
from blockscale import reference
from blockscale.layouts import Tcgen05
from blockscale.ops import backends
from stand_in import emulated, matrix

#: Relative errors of sums of products: fp32 on Hopper, where bf16 holds the operands.
SUMS = {"sm_90a": 2**-20, "sm_100a": 2**-18}


@dataclass(frozen=True)
class Machine:
    """``launched``: configurations of kernels."""

    arch: str
    launched: list[Any]

    @property
    def fused(self) -> bool:
        return self.arch == "sm_100a"

    @property
    def kernels(self) -> int:
        """Of a quantized product; on Hopper A is widened, then multiplied, then sums quantized."""
        return 1 if self.fused else 3

    def forget(self) -> int:
        """How many kernels ran until now."""
        count = len(self.launched)
        self.launched.clear()
        return count


@pytest.fixture(params=SUMS)
def machine(request):
    with emulated(request.param, quantizes=True) as launched:
        yield Machine(request.param, launched)


def quantized(x: Tensor, format: str = "mxfp8", layout: str = "compact") -> bs.ScaledTensor:
    """An operand, which no test is about: plain torch is faster than the emulator."""
    return bs.quantize(x, format, layout=layout, backend="reference")


def assert_same(got: bs.ScaledTensor, want: bs.ScaledTensor) -> None:
    """Their bytes, layouts and strides."""
    assert (got.format, got.scale_layout, got.axis, got.shape) == (
        *(want.format, want.scale_layout, want.axis),
        want.shape,
    )
    parts = zip(got._parts().values(), want._parts().values(), strict=True)
    for a, b in parts:
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))


def in_two_steps(a, b, format, *, swiglu=False, bias=None, **how) -> bs.ScaledTensor:
    """The definition: the product's kernel, whose sums are those of this machine; then plain torch
    quantizes them."""
    values = bs.gemm(a, b, FP32, bias=bias, backend="kernel")
    if swiglu:
        values = reference.swiglu(values)
    return bs.quantize(values, format, backend="reference", **how)


@pytest.mark.parametrize(
    ("machine", "format"), [("sm_90a", "mxfp8"), ("sm_100a", "nvfp4")], indirect=["machine"]
)
def test_chain(machine, format):
    """A feed-forward layer: no dimension is one of whole tiles, and half of a weight is not."""
    x, w, down = matrix(34, 96), matrix(192, 96, seed=1) / 8, matrix(40, 96, seed=2)
    layout = "tcgen05" if machine.fused else "compact"
    how: dict[str, Any] = {"swiglu": True, "layout": layout}
    if format == "nvfp4":
        how["global_scale"] = 0.003
    b, c = quantized(w, format, layout).mT, quantized(down, format, layout).mT
    a = bs.quantize(x, format, layout=layout, backend="kernel")
    machine.forget()
    hidden = bs.gemm_quantize(a, b, format, backend="kernel", **how)
    assert machine.forget() == machine.kernels
    y = bs.gemm(hidden, c, FP32, backend="kernel")
    assert_same(hidden, in_two_steps(a, b, format, **how))
    assert hidden.dtype == BF16
    wide = [each.dequantize(FP32).double() for each in (a, b, hidden, c)]
    gate, up = (wide[0] @ wide[1]).chunk(2, -1)
    values = torch.nn.functional.silu(gate) * up
    # an element is off by half a step: a 16th of it in E4M3; a fifth, or little, in E2M1
    assert (wide[2] - values).norm() < values.norm() / (16 if format == "mxfp8" else 4)
    assert_close(y, wide[2] @ wide[3], FP32, SUMS[machine.arch])


def test_all_arguments(machine):
    """They reach the kernels; scales that lie otherwise are rewritten, any bias is taken."""
    x, w, bias = matrix(20, 64), matrix(32, 64, seed=1), matrix(32, seed=2).float()
    x[3, 7], x[5] = torch.nan, 0.0
    a, b = quantized(x), quantized(w, "mxfp4").mT
    how = {"layout": "packed", "scale_rounding": "floor", "nonfinite": "te"}
    want = in_two_steps(a, b, "mxfp8_e5m2", bias=bias, **how)
    machine.forget()
    for each in (bias.double(), torch.stack([bias, bias], 1)[:, 0], bias.clone().requires_grad_()):
        got = bs.gemm_quantize(a, b, "mxfp8_e5m2", bias=each, backend="kernel", **how)
        assert machine.forget() == machine.kernels
        assert_same(got, want)
        assert not got.requires_grad
    bs.gemm_quantize(a, b, "mxfp8_e5m2", backend="reference", **how)
    assert machine.forget() == 0


@pytest.mark.parametrize("machine", ["sm_100a"], indirect=True)
@pytest.mark.parametrize(("n", "result", "scalar", "count"), [
    (32, "nvfp4", None, 3), (48, "nvfp4", 0.01, 2), (128, "fp8_128x128", None, 2),
])  # fmt: skip
def test_what_takes_several_kernels_on_blackwell(machine, n, result, scalar, count):
    """A global scale that nobody knows, columns that are not whole boxes, other formats."""
    a, b = quantized(matrix(20, 32)), quantized(matrix(n, 32, seed=1)).mT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = bs.gemm_quantize(a, b, result, global_scale=scalar, backend="kernel")
    assert machine.forget() == count
    assert_same(got, in_two_steps(a, b, result, global_scale=scalar))


def test_a_sum_of_nothing(machine):
    a, b, bias = quantized(matrix(20, 32)), quantized(matrix(32, 32, seed=1)), matrix(32, seed=2)
    got = bs.gemm_quantize(a[:, :0], b[:, :0].mT, bias=bias, backend="kernel")
    assert machine.forget() == 1
    assert_same(got, quantized(bias.float().expand(20, 32).contiguous()))


@pytest.mark.parametrize("machine", ["sm_90a"], indirect=True)
def test_weight_only(machine):
    x, b = matrix(20, 64), quantized(matrix(64, 64, seed=1)).mT
    got = bs.gemm_quantize(x, b, swiglu=True, backend="kernel")
    assert machine.forget() == machine.kernels
    assert_same(got, in_two_steps(x, b, "mxfp8", swiglu=True))


@pytest.mark.parametrize(("left", "right"), [("mxfp6_e2m3", "mxfp8"), (None, "fp8_1x128")])
def test_no_kernel(machine, left, right):
    """Said once, or raised; the bytes are those of plain torch."""
    x, b = matrix(20, 128), quantized(matrix(128, 128, seed=1), right).mT
    a = x if left is None else quantized(x, left)
    reason = f"no kernel multiplies {left or 'bf16'} by {right} on"
    with pytest.raises(ValueError, match=f"no kernel can run gemm as asked for: {reason}"):
        bs.gemm_quantize(a, b, backend="kernel")
    with pytest.warns(bs.FallbackWarning, match=f"gemm on cpu runs as plain torch.*{reason}"):
        got = bs.gemm_quantize(a, b)
    machine.forget()
    want = bs.gemm_quantize(a, b, backend="reference")
    assert_same(got, want)
    assert machine.forget() == 0
    assert_same(want, quantized(bs.gemm(a, b, FP32, backend="reference")))


def test_tiles_of_whole_halves_are_read_as_they_are(monkeypatch):
    """And what compiled code calls is the same kernel."""
    a = quantized(matrix(20, 32), layout="tcgen05")
    b = quantized(matrix(256, 32, seed=1), layout="tcgen05").mT

    def step(a, b):
        return bs.gemm_quantize(a, b, swiglu=True, layout="tcgen05", backend="kernel")

    def refuse(self: Any, *args: Any) -> None:
        raise AssertionError("rewritten")

    with emulated("sm_100a") as launched:
        want = in_two_steps(a, b, "mxfp8", swiglu=True, layout="tcgen05")
        for name in ("swizzle", "unswizzle"):
            monkeypatch.setattr(Tcgen05, name, refuse)
        assert_same(step(a, b), want)
        assert_same(torch.compile(step, fullgraph=True, backend="aot_eager")(a, b), want)
    assert len(launched) == 3


def test_doctor(machine, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(0))
    name, why = backends.backend("gemm_quantize", "cuda")
    assert name == "CuTe DSL"
    assert ("one kernel" in why) == machine.fused
    assert why.endswith(backends.backend("gemm", "cuda")[1])
    monkeypatch.setattr(backends, "products_on", lambda device: "no reason")
    assert backends.backend("gemm_quantize", "cuda") == ("reference", "no reason")
