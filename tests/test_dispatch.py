"""Which backend quantizes: GPU kernels, played by stubs that count CPU tensors as GPU ones."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import reference
from blockscale.formats import Format, formats, get_format
from blockscale.kernels.common import runtime
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.quantizers import calls as quantizers
from blockscale.kernels.quantizers.calls import Request
from blockscale.layouts import Grouped, as_bytes, get_layout
from blockscale.ops import backends
from stand_in import chip, gpu

BOTH = (-1, -2)
BF16 = torch.bfloat16


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape or (128, 256), generator=torch.Generator().manual_seed(seed)).to(BF16)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Kernels:
    """Stands for ``kernels.quantizers``: records its calls, returns what the reference gives."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.scalars = 0
        self.reason = ""  # why it can nothing
        self.one_read = True  # whether it can both axes at once

    def refuse(
        self, x: Tensor, format: Format, axes: Any, layouts: Any, *, grouped: bool = False
    ) -> None:
        reason = quantizers.unsupported(
            x, Request(format.name, axes, layouts, grouped=grouped), chip("sm_90a")
        )
        if len(axes) == 2 and not self.one_read:
            reason = "one axis at a time"
        reason = self.reason or reason
        if reason and "not installed" not in reason:
            raise Unsupported(reason)

    def quantize(self, x: Tensor, request: Request, **given: Any) -> list[tuple[Tensor, Tensor]]:
        format, grouped = request.fmt, given["offsets"] is not None
        assert request.grouped == grouped
        given |= request._asdict()
        self.refuse(x, format, given["axes"], given["layouts"], grouped=grouped)
        self.calls.append({"x": x, **given})
        keep = ("scale_rounding", "nonfinite", "global_scale")
        results = []
        for axis, layout in zip(given["axes"], given["layouts"], strict=True):
            offsets = given["offsets"]
            data, scale = reference.quantize(
                x,
                format,
                axis=axis,
                offsets=offsets if axis == -2 else None,
                **{name: given[name] for name in keep},
            )
            scale = as_bytes(scale)
            if layout != "compact":
                where, lines = get_layout(layout), scale if axis == -1 else scale.mT
                scale = (
                    where.swizzle(lines)
                    if offsets is None or not where.spreads
                    else Grouped(where).swizzle(lines, offsets)
                )
            results.append((data, scale))
        return results

    def global_scale(self, x: Tensor, format: Format, **_: Any) -> Tensor:
        self.refuse(x, format, (-1,), ("compact",))
        self.scalars += 1
        return reference.global_scale(x, format)


@pytest.fixture
def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_warned", set())


@pytest.fixture
def on_gpu() -> Iterator[None]:
    """CPU tensors count as those of a GPU."""
    with gpu("sm_100a", quantizes=True):
        yield


@pytest.fixture
def kernels(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    stub = Kernels()
    for name in ("quantize", "global_scale"):
        monkeypatch.setattr(quantizers, name, getattr(stub, name))
    return stub


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def same(a: bs.ScaledTensor, b: bs.ScaledTensor) -> bool:
    parts = ((a.qdata, b.qdata), (a.qscale, b.qscale))
    alike = all((p.dtype, p.stride()) == (q.dtype, q.stride()) for p, q in parts)
    return alike and torch.equal(a, b)


# --- what reaches the kernel ----------------------------------------------------------------------


@pytest.mark.parametrize("axis", BOTH)
@pytest.mark.parametrize("name", [n for n, f in formats.items() if f.element.bits != 6])
@pytest.mark.usefixtures("no_warning")
def test_quantize_runs_the_kernel(kernels, name, axis):
    x = matrix()
    rounding = formats[name].scale.roundings[-1]
    got = bs.quantize(x, name, axis, scale_rounding=rounding, nonfinite="te")
    (call,) = kernels.calls
    assert call["axes"] == (axis,)
    assert (call["scale_rounding"], call["nonfinite"]) == (rounding, "te")
    assert call["layouts"] == ("compact",)
    assert kernels.scalars == formats[name].has_global_scale
    given = {"scale_rounding": rounding, "nonfinite": "te", "backend": "reference"}
    assert same(got, bs.quantize(x, name, axis, **given))
    assert len(kernels.calls) == 1


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128"])
@pytest.mark.usefixtures("no_warning")
def test_quantize_both_is_one_call(kernels, name):
    x = matrix()
    layout = "sm90" if name == "fp8_1x128" else "tcgen05"
    got = bs.quantize_both(x, name, layout=(layout, "compact"))
    (call,) = kernels.calls
    assert call["axes"] == BOTH
    assert call["layouts"] == (layout, "compact")
    assert kernels.scalars == formats[name].has_global_scale
    wanted = (bs.quantize(x, name, backend="reference", layout=layout),
              bs.quantize(x, name, -2, backend="reference"))  # fmt: skip
    assert all(map(same, got, wanted))


@pytest.mark.usefixtures("no_warning")
def test_both_by_two_kernels_where_none_does_both(kernels):
    kernels.one_read = False
    row, column = bs.quantize_both(matrix(), layout="tcgen05", backend="kernel")
    assert [call["axes"] for call in kernels.calls] == [(-1,), (-2,)]
    assert same(row, bs.quantize(matrix(), layout="tcgen05", backend="reference"))
    assert same(column, bs.quantize(matrix(), axis=-2, layout="tcgen05", backend="reference"))


@pytest.mark.usefixtures("no_warning")
def test_groups(kernels):
    x, ends = matrix(), i32(10, 10, 100)
    row = bs.quantize(x, layout="tcgen05", offsets=ends)
    column = bs.quantize(x, axis=-2, offsets=ends)
    both = bs.quantize_both(x, layout=("tcgen05", "compact"), offsets=ends)
    assert all(call["offsets"] is ends for call in kernels.calls)
    assert column.k_grouped and not row.k_grouped  # noqa: PT018
    given = {"offsets": ends, "backend": "reference"}
    wanted = bs.quantize(x, layout="tcgen05", **given), bs.quantize(x, axis=-2, **given)
    assert same(row, wanted[0])
    assert same(column, wanted[1])
    assert all(map(same, both, wanted))
    assert len(kernels.calls) == 3


@pytest.mark.usefixtures("no_warning")
def test_groups_change_no_compact_scale_along_rows(kernels):
    bs.quantize(matrix(), offsets=i32(10, 100))
    assert kernels.calls[0]["offsets"] is None


@pytest.mark.usefixtures("no_warning")
def test_scales_of_square_blocks_are_placed_after_the_kernel(kernels):
    x = matrix(256, 384)
    both = bs.quantize_both(x, "fp8_128x128", layout="sm90")
    assert kernels.calls[0]["layouts"] == ("compact", "compact")
    for axis, got in zip(BOTH, both, strict=True):
        one = bs.quantize(x, "fp8_128x128", axis, layout="sm90")
        assert kernels.calls[-1]["layouts"] == ("compact",)
        want = bs.quantize(x, "fp8_128x128", axis, layout="sm90", backend="reference")
        assert same(got, want)
        assert same(one, want)


def test_the_input_is_detached(kernels):
    x = matrix().requires_grad_()
    bs.quantize(x)
    bs.quantize_both(x)
    assert [call["x"].requires_grad for call in kernels.calls] == [False, False]


@pytest.mark.usefixtures("no_warning")
def test_reference_is_never_the_kernel(kernels):
    bs.quantize(matrix(), "nvfp4", backend="reference")
    bs.quantize_both(matrix(), "nvfp4", backend="reference")
    bs.quantize(matrix(), seed=1, backend="reference")
    assert not kernels.calls
    assert not kernels.scalars


@pytest.mark.usefixtures("no_warning")
def test_dequantize_says_nothing(kernels):
    q = bs.quantize(matrix())
    assert torch.equal(q.dequantize(), bs.quantize(matrix(), backend="reference").dequantize())


# --- where there is no kernel ---------------------------------------------------------------------


def fallback(function, *args, **kwargs) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args, **kwargs)
    assert all(w.category is bs.FallbackWarning for w in caught)
    return result, [str(w.message) for w in caught]


def test_a_fallback_is_said_once_for_each_reason(kernels):
    kernels.reason = "the moon is full"
    q, said = fallback(bs.quantize, matrix())
    assert len(said) == 1
    assert "the moon is full" in said[0]
    assert "backend='reference'" in said[0]
    assert same(q, bs.quantize(matrix(), backend="reference"))
    for function in (bs.quantize, bs.quantize_both, partial(bs.quantize, axis=-2)):
        assert fallback(function, matrix(64, 128))[1] == []
    kernels.reason = "it rains"
    assert "it rains" in fallback(bs.quantize_both, matrix(), "nvfp4")[1][0]
    assert fallback(bs.quantize, matrix(), "nvfp4")[1] == []
    assert not kernels.calls


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"format": "mxfp6_e2m3"}, "6-bit"),
        ({"format": "mxfp6_e3m2"}, "6-bit"),
    ],
)
@pytest.mark.parametrize("function", [bs.quantize, bs.quantize_both])
def test_what_only_the_reference_can(kernels, function, given, reason):
    got, said = fallback(function, matrix(), **given)
    assert len(said) == 1
    assert reason in said[0]
    want = function(matrix(), backend="reference", **given)
    pairs = [(got, want)] if function is bs.quantize else zip(got, want, strict=True)
    assert all(same(*pair) for pair in pairs)
    with pytest.raises(ValueError, match=f"backend: no kernel can .*{reason}.*backend='auto'"):
        function(matrix(), backend="kernel", **given)
    assert not kernels.calls


def test_one_axis_by_the_kernel_and_one_by_the_reference(kernels, monkeypatch):
    def refuse(x: Tensor, format: Format, axes: Any, *_: Any, **__: Any) -> None:
        if -2 in axes:
            raise Unsupported("columns")

    monkeypatch.setattr(kernels, "refuse", refuse)
    (row, column), said = fallback(bs.quantize_both, matrix())
    assert [call["axes"] for call in kernels.calls] == [(-1,)]
    assert len(said) == 1
    assert same(row, bs.quantize(matrix(), backend="reference"))
    assert same(column, bs.quantize(matrix(), axis=-2, backend="reference"))


@pytest.mark.parametrize(
    ("patched", "arch", "reason"),
    [
        ({"find_spec": lambda name: None}, "sm_90a", r"pip install 'blockscale\[cuda\]'"),
        ({"find_spec": lambda name: name != "tvm_ffi" or None}, "sm_90a", "pip install"),
        ({"find_spec": lambda name: True}, "sm_80", "sm_80: .*sm_90a, sm_100a and sm_103a"),
        ({"find_spec": lambda name: True}, "sm_120", "sm_120: .*sm_90a, sm_100a and sm_103a"),
    ],
)
@pytest.mark.parametrize("function", [bs.quantize, bs.quantize_both])
def test_machines_without_kernels(monkeypatch, function, patched, arch, reason):
    for name, value in patched.items():
        monkeypatch.setattr(runtime, name, value)
    with gpu(arch, quantizes=True):
        for name in ("mxfp8", "nvfp4"):
            with pytest.raises(ValueError, match=f"backend: no kernel .*{reason}"):
                function(matrix(), name, backend="kernel")
        with pytest.warns(bs.FallbackWarning, match=reason):
            function(matrix(), "nvfp4")


def test_kernel_on_a_cpu_is_the_compiled_one(backend, forget_warnings):
    assert fallback(bs.quantize, matrix(), seed=1)[1] == []  # nothing is slower than usual
    if backend == "numba":
        assert same(bs.quantize(matrix(), backend="kernel"), bs.quantize(matrix()))
        ends = i32(5, 100)
        groups = {"axis": -2, "offsets": ends}
        assert same(
            bs.quantize(matrix(), backend="kernel", **groups), bs.quantize(matrix(), **groups)
        )
        with pytest.raises(ValueError, match="axis=-2: no CPU kernel rounds stochastically"):
            bs.quantize(matrix(), backend="kernel", seed=1, **groups)
        return
    for function in (bs.quantize, bs.quantize_both):
        assert fallback(function, matrix(), "nvfp4")[1] == []
        with pytest.raises(ValueError, match=r"backend: .*numba is not installed: pip install"):
            function(matrix(), backend="kernel")


@pytest.mark.parametrize("wrong", ["gpu", "", None, 1, ["auto"]])
def test_unknown_backend(wrong):
    for function in (bs.quantize, bs.quantize_both):
        with pytest.raises(ValueError, match=r"backend: got .*choose one of 'auto'"):
            function(matrix(), backend=wrong)


# --- checks in front of the kernel ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"layout": "sm90"}, ValueError, "'sm90' holds fp32 scales.*'compact', 'tcgen05'"),
        ({"format": "fp8_1x128", "layout": "packed"}, ValueError, "'packed' holds one-byte"),
        ({"format": "nvfp4", "global_scale": torch.ones((), device="meta")}, ValueError, "move it"),
        ({"offsets": torch.ones(1, dtype=torch.int32, device="meta")}, ValueError, "move it"),
        ({"offsets": torch.ones(1)}, TypeError, "offsets: got torch.float32 of 1 dim"),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [bs.quantize, bs.quantize_both])
def test_wrong_arguments_never_reach_a_kernel(kernels, function, given, error, message):
    for _ in range(2):  # a refusal is not remembered as anything else
        with pytest.raises(error, match=message):
            function(matrix(), **given)
    assert not kernels.calls


@pytest.mark.parametrize("function", [bs.quantize, bs.quantize_both])
def test_a_call_that_was_right_once_is_checked_again(kernels, function):
    x = matrix(64, 128)
    function(x)
    with pytest.raises(TypeError, match=r"x: got torch\.float64"):
        function(x.double())
    with pytest.raises(ValueError, match="dimension -1 is 100"):
        function(x[:, :100])
    with pytest.raises(ValueError, match="not contiguous"):
        function(matrix(128, 64).mT)
    with pytest.raises(ValueError, match="offsets: got"):
        function(x, offsets=i32(65))
    assert len(kernels.calls) == 1


def test_layouts_of_both():
    x, ends = matrix(), i32(10, 100)
    with pytest.raises(
        ValueError, match=r"layout: got .*expected one layout, or \(rows, columns\)"
    ):
        bs.quantize_both(x, layout=("tcgen05", "compact", "packed"))
    with pytest.raises(ValueError, match=r"layout: got .*choose one of 'compact'"):
        bs.quantize_both(x, layout=("tcgen05", "nosuch"))
    row, column = bs.quantize_both(x, layout=("packed", get_layout("tcgen05")))
    assert (row.layout_name, column.layout_name) == ("packed", "tcgen05")
    for layouts in (("tcgen05", "compact"), ("packed", "tcgen05")):
        row, column = bs.quantize_both(x, layout=layouts, offsets=ends)
        assert same(row, bs.quantize(x, layout=layouts[0], offsets=ends))
        assert same(column, bs.quantize(x, axis=-2, layout=layouts[1], offsets=ends))


# --- compilers, modes and transforms --------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.usefixtures("no_warning")
def test_compiled_code_calls_the_kernel(kernels, name):
    torch.compiler.reset()

    def step(x: Tensor) -> tuple[bs.ScaledTensor, ...]:
        return bs.quantize(x, name, layout="tcgen05"), *bs.quantize_both(x, name)

    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(same, run(matrix()), step(matrix())))
    assert [call["axes"] for call in kernels.calls] == [(-1,), BOTH, (-1,), BOTH]
    assert kernels.scalars == 4 * formats[name].has_global_scale


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["compact", "tcgen05"])
def test_opcheck(kernels, layout):
    ops, x, ends = torch.ops.blockscale, matrix(128, 96), i32(10, 100)
    for axis, groups in ((-1, None), (-2, None), (-1, ends)):
        args = (x, "mxfp8", axis, "rceil", "propagate", layout, None, groups, None, "kernel")
        torch.library.opcheck(ops.quantize.default, args)
    for groups in (None, ends):
        args = (x, "mxfp8", "rceil", "te", layout, "compact", None, groups, None, "kernel")
        torch.library.opcheck(ops.quantize_both.default, args)
    torch.library.opcheck(ops.global_scale.default, (x, "nvfp4", "kernel"))
    assert kernels.calls
    assert kernels.scalars


class Names(torch.utils._python_dispatch.TorchDispatchMode):
    """The operations that pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_dispatcher_is_used_where_something_looks_on(kernels):
    with Names() as mode:
        bs.quantize(matrix(), "nvfp4")
        bs.quantize_both(matrix())
    for name in ("global_scale", "quantize", "quantize_both"):
        assert f"blockscale.{name}.default" in mode.names
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    fake = mode.from_tensor(matrix())
    kernels.calls.clear()
    for q in (bs.quantize(fake), *bs.quantize_both(fake)):  # outside of the mode
        assert type(q.qdata) is type(fake)
    for q in (bs.quantize(matrix().to("meta")), *bs.quantize_both(matrix().to("meta"))):
        assert q.device.type == "meta"
    assert not kernels.calls


@pytest.mark.usefixtures("kernels")
def test_no_dispatcher_where_nothing_does(monkeypatch):
    """It costs more than the launch of a kernel."""

    def refuse(*args, **kwargs):
        raise AssertionError("dispatched")

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", refuse)
    parameter = torch.nn.Parameter(matrix())
    bs.quantize(parameter, "nvfp4")
    bs.quantize_both(matrix(), "nvfp4", offsets=None)
    with pytest.raises(AssertionError, match="dispatched"), Names():
        bs.quantize(parameter)


# --- the real kernel, and imports -----------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_the_kernel_in_the_emulator(on_gpu, no_warning, format):
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    from blockscale import emulator as em

    x = matrix(40, 160)
    x[3, 5], x[7, 9], x[8] = torch.nan, -torch.inf, -0.0
    layout = ("tcgen05", "compact")
    scalar = torch.tensor(0.01) if get_format(format).has_global_scale else None
    given = {"layout": layout, "global_scale": scalar, "pad": True}
    with em.cutedsl(em.Device("sm_100a", completion="late", check="all")) as reports:
        got = bs.quantize_both(x, format, backend="kernel", **given)
    assert len(reports) == 1
    assert all(map(same, got, bs.quantize_both(x, format, backend="reference", **given)))


@pytest.mark.slow
def test_cpu_tensors_import_no_gpu_language():
    script = """
import sys, torch, blockscale as bs
bs.quantize(torch.ones(32, 32))
bs.quantize_both(torch.ones(32, 32), "nvfp4")
assert not {"cutlass", "tvm_ffi", "torch._dynamo"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_each_operation_says_that_it_runs_as_plain_torch(on_gpu):
    """Though another one gave the same reason before."""
    x = torch.empty(0)
    for operation in ("gemm", "dequantize"):
        with pytest.warns(bs.FallbackWarning, match=f"^{operation} on .* no kernel for it"):
            backends.fall_back(operation, x, "auto", "no kernel for it")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            backends.fall_back(operation, x, "auto", "no kernel for it")


def test_grouped_gemm_says_that_it_runs_as_plain_torch(on_gpu):
    shapes = (64, 64), (2, 32, 64)
    a, b = (bs.quantize(torch.randn(n), "mxfp6_e2m3", backend="reference") for n in shapes)
    b = b.mT
    offsets = torch.tensor([30, 64], dtype=torch.int32)
    with pytest.warns(bs.FallbackWarning, match="^grouped_gemm on .* sums in fp32 but many times"):
        bs.grouped_gemm(a, b, offsets)
    with warnings.catch_warnings():
        warnings.simplefilter("error", bs.FallbackWarning)
        bs.grouped_gemm(a, b, offsets, backend="reference")
    with pytest.raises(ValueError, match="no kernel can run grouped_gemm as asked for"):
        bs.grouped_gemm(a, b, offsets, backend="kernel")
