"""swiglu_quantize, its backward and rmsnorm_quantize: the bytes of two steps, as one operation."""

from __future__ import annotations

import math
import sys
import warnings

import pytest
import torch

import blockscale as bs
import stand_in
from blockscale import ops, reference
from blockscale.formats import formats
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.quantizers import calls as kernels
from blockscale.kernels.quantizers.normalized import RowStatistics
from blockscale.ops import fused, norms

OPS = torch.ops.blockscale
LAYOUTS = {"E8M0": "tcgen05", "UE4M3": "tcgen05", "FP32": "sm90"}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL_AXES = [(-1,), (-2,), (-1, -2)]


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch.compiler.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def matrix(*shape, seed=0, dtype=torch.bfloat16):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def assert_same(got, want):
    """All parts of two ScaledTensors, or of two tuples of them."""
    if isinstance(got, tuple):
        for pair in zip(got, want, strict=True):
            assert_same(*pair)
        return
    assert got._meta() == want._meta()
    assert got.shape == want.shape
    for a, b in zip(got._parts().values(), want._parts().values(), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        a, b = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
        assert torch.equal(a, b)


def in_two_steps(values, name, axes, **kwargs):
    """``values`` quantized along ``axes``, by quantize, with one global scale."""
    if formats[name].has_global_scale:
        kwargs.setdefault("global_scale", reference.global_scale(values, formats[name]))
    return tuple(bs.quantize(values, name, axis, **kwargs) for axis in axes)


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("axes", ALL_AXES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(backend, name, axes, dtype):
    x, grad = matrix(256, 512, dtype=dtype), matrix(256, 256, seed=1, dtype=dtype)
    for layout in ("compact", LAYOUTS[formats[name].scale.name]):
        got = bs.swiglu_quantize(x, name, axes=axes, layout=layout)
        assert_same(got, in_two_steps(reference.swiglu(x), name, axes, layout=layout))
        got = bs.swiglu_backward_quantize(grad, x, name, axes=axes, layout=layout)
        values = reference.swiglu_backward(grad, x)
        assert_same(got, in_two_steps(values, name, axes, layout=layout))


@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_norms(backend, name, dtype, weight_dtype):
    x, weight = matrix(128, 384, dtype=dtype), matrix(384, seed=1, dtype=weight_dtype)
    bias = matrix(384, seed=2, dtype=weight_dtype)
    made, *statistics = reference.rmsnorm(x, weight, 1e-5)
    centered, *others = reference.layernorm(x, weight, bias, 1e-5)
    for axes in ALL_AXES:
        for layout in ("compact", LAYOUTS[formats[name].scale.name]):
            given = {"axes": axes, "eps": 1e-5, "layout": layout}
            *got, rstd = bs.rmsnorm_quantize(x, weight, name, **given)
            assert_same(tuple(got), in_two_steps(made, name, axes, layout=layout))
            assert torch.equal(rstd, *statistics)
            *got, mean, rstd = bs.layernorm_quantize(x, weight, bias, name, **given)
            assert_same(tuple(got), in_two_steps(centered, name, axes, layout=layout))
            assert same((mean, rstd), tuple(others))
    q, rstd = bs.rmsnorm_quantize(x, weight, name, eps=1e-5)
    assert_same((q,), in_two_steps(made, name, (-1,)))
    q, _, _ = bs.layernorm_quantize(x, weight, None, name, eps=1e-5)
    assert_same((q,), in_two_steps(reference.layernorm(x, weight, None, 1e-5)[0], name, (-1,)))


@pytest.mark.parametrize("name", ["mxfp8", "fp8_1x128"])
def test_offsets(backend, name):
    x, grad, ends = matrix(200, 512), matrix(200, 256, seed=1), i32(30, 30, 190)
    where = LAYOUTS[formats[name].scale.name]
    for layout in (("compact", "compact"), (where, "compact")):
        both = bs.swiglu_quantize(x, name, layout=layout, offsets=ends)
        back = bs.swiglu_backward_quantize(grad, x, name, layout=layout, offsets=ends)
        for values, got in (
            (reference.swiglu(x), both),
            (reference.swiglu_backward(grad, x), back),
        ):
            each = zip((-1, -2), layout, strict=True)
            want = (bs.quantize(values, name, a, layout=w, offsets=ends) for a, w in each)
            assert_same(got, tuple(want))
    assert_same(bs.swiglu_quantize(x, name, axes=(-2,), offsets=ends), both[1:])


def test_arguments_reach_the_quantizer(backend):
    x, grad, weight = matrix(100, 130), matrix(100, 65, seed=1), matrix(130, seed=2)
    x[3, 5], x[40, 100] = math.inf, math.nan
    calls = {
        bs.swiglu_quantize: ((x,), reference.swiglu(x)),
        bs.swiglu_backward_quantize: ((grad, x), reference.swiglu_backward(grad, x)),
        bs.rmsnorm_quantize: ((x, weight), reference.rmsnorm(x, weight, 1e-6)[0]),
    }
    kwargs = {"scale_rounding": "even", "nonfinite": "te", "pad": True}
    for function, (args, values) in calls.items():
        got = function(*args, **kwargs)
        got = got if function is not bs.rmsnorm_quantize else got[:1]
        assert_same(got, in_two_steps(values, "mxfp8", (-1, -2)[: len(got)], **kwargs))
        for scalar in (0.01, torch.tensor(0.01), torch.tensor([0.01])):
            got = function(*args, "nvfp4", pad=True, global_scale=scalar)
            got = got if function is not bs.rmsnorm_quantize else got[:1]
            axes = (-1, -2)[: len(got)]
            assert_same(got, in_two_steps(values, "nvfp4", axes, pad=True, global_scale=0.01))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_leading_dimensions_and_strides(backend, name):
    x, grad, weight = matrix(2, 3, 64, 128), matrix(2, 3, 64, 64), matrix(128)
    axes = (-1, -2)
    assert_same(bs.swiglu_quantize(x, name), in_two_steps(reference.swiglu(x), name, axes))
    values = reference.swiglu_backward(grad, x)
    assert_same(bs.swiglu_backward_quantize(grad, x, name), in_two_steps(values, name, axes))
    q, rstd = bs.rmsnorm_quantize(x, weight, name)
    assert_same((q,), in_two_steps(reference.rmsnorm(x, weight, 1e-6)[0], name, (-1,)))
    assert rstd.shape == (2, 3, 64)
    wide, grad = matrix(128, 300), matrix(128, 90)
    strided = wide[::2, 20:148], grad[1::2, 5:69]
    whole = tuple(each.contiguous() for each in strided)
    assert_same(bs.swiglu_quantize(strided[0], name), bs.swiglu_quantize(whole[0], name))
    got = bs.swiglu_backward_quantize(strided[1], strided[0], name)
    assert_same(got, bs.swiglu_backward_quantize(whole[1], whole[0], name))


def test_results_have_no_gradient():
    x, grad = matrix(64, 128).requires_grad_(), matrix(64, 64).requires_grad_()
    weight = matrix(128).requires_grad_()
    q, rstd = bs.rmsnorm_quantize(x, weight)
    for each in (*bs.swiglu_quantize(x), *bs.swiglu_backward_quantize(grad, x), q, rstd):
        assert not each.requires_grad


def test_meta_tensors():
    for name in formats:
        x = torch.empty(256, 512, device="meta", dtype=torch.bfloat16)
        for got, real in zip(
            bs.swiglu_quantize(x, name), bs.swiglu_quantize(matrix(256, 512), name), strict=True
        ):
            assert (got.qdata.shape, got.qdata.stride()) == (real.qdata.shape, real.qdata.stride())
            assert got.scale.shape == real.scale.shape
        *both, mean, rstd = bs.layernorm_quantize(x, x[0], x[0], name, axes=(-1, -2))
        assert [q.shape for q in both] == [(256, 512)] * 2
        assert mean.shape == rstd.shape == (256,)
        q, rstd = bs.rmsnorm_quantize(x, x[0], name)
        assert (q.shape, rstd.shape, rstd.dtype) == ((256, 512), (256,), torch.float32)


# --- the ops --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "fp8_128x128"])
@pytest.mark.parametrize("axes", ALL_AXES)
def test_opcheck_swiglu(backend, name, axes):
    fmt, x = formats[name], matrix(128, 512)
    rounding, where = fmt.default_scale_rounding, LAYOUTS[fmt.scale.name]
    args = name, -1 in axes, -2 in axes, rounding, "propagate", where, "compact"
    for grad in (None, matrix(128, 256, seed=1)):
        for scalar in (None, torch.tensor(0.01)) if fmt.has_global_scale else (None,):
            torch.library.opcheck(OPS.swiglu_quantize.default, (x, grad, *args, scalar))


def test_opcheck_weighted_swiglu(backend):
    args = "mxfp8", True, True, "rceil", "propagate", "compact", "compact", None, i32(40, 90)
    for grad in (None, matrix(96, 64, seed=1)):
        given = (matrix(96, 128), grad, *args, "auto", True, torch.randn(96))
        torch.library.opcheck(OPS.swiglu_quantize.default, given)


def test_opcheck_swiglu_groups(backend):
    args = "mxfp8", True, True, "floor", "te", "tcgen05", "compact", None, i32(40, 90)
    torch.library.opcheck(OPS.swiglu_quantize.default, (matrix(96, 64), None, *args))
    args = (*args, "reference")
    torch.library.opcheck(OPS.swiglu_quantize.default, (matrix(96, 64), matrix(96, 32), *args))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_128x128"])
def test_opcheck_norm_quantize(backend, name):
    fmt = formats[name]
    x, weight, bias = matrix(128, 256), matrix(256, dtype=torch.float32), matrix(256, seed=1)
    how = name, True, True, fmt.default_scale_rounding, "te", LAYOUTS[fmt.scale.name], "compact"
    for scalar in (None, torch.tensor(0.01)) if fmt.has_global_scale else (None,):
        for centered in (False, True):
            args = (x, weight, bias if centered else None, 1e-6, centered, *how, scalar)
            torch.library.opcheck(OPS.norm_quantize.default, args)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_norms(centered, dtype):
    x, weight, grad = (
        matrix(6, 64, dtype=dtype),
        torch.randn(64),
        matrix(6, 64, seed=1, dtype=dtype),
    )
    bias = weight if centered else None
    torch.library.opcheck(OPS.norm.default, (x, weight, bias, 1e-6, centered))
    _, *mean, rstd = ops.norm(x, weight, bias, 1e-6, centered)
    for kind in (None, torch.bfloat16) if centered else (None,):
        given = grad, x, weight, mean[0] if centered else None, rstd, kind
        torch.library.opcheck(OPS.norm_backward.default, given)


def test_opcheck_swiglu_alone(backend):
    torch.library.opcheck(OPS.swiglu.default, (matrix(6, 64),))
    torch.library.opcheck(OPS.swiglu_backward.default, (matrix(6, 32), matrix(6, 64)))


def same(a, b):
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_128x128"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(name, dynamic):
    def step(x, grad, weight):
        return (
            *bs.swiglu_quantize(x, name),
            *bs.swiglu_backward_quantize(grad, x, name, axes=(-2,)),
            *bs.rmsnorm_quantize(x, weight, name),
            *bs.layernorm_quantize(x, weight, weight, name, axes=(-1, -2)),
        )

    run = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for i, (m, k) in enumerate([(640, 512), (384, 768), (256, 1024)]):
        args = matrix(m, k), matrix(m, k // 2, seed=1), matrix(k, seed=2)
        with torch.compiler.set_stance("fail_on_recompile" if dynamic and i else "default"):
            assert same(run(*args), step(*args))


def test_inductor():
    def step(x, w):
        row, column = bs.swiglu_quantize(x * 2, layout="tcgen05")
        return bs.gemm(row, bs.quantize(w).mT) + 1, column

    args = matrix(64, 128), matrix(32, 64, seed=1)
    assert same(torch.compile(step, fullgraph=True, dynamic=False)(*args), step(*args))


# --- which backend --------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A GPU made of the reference, which notes what it is asked for; ``reason``: why it cannot."""

    class Gpu:
        calls, reason = [], ""

        Request = kernels.Request

        def refuse(self):
            if self.reason:
                raise Unsupported(self.reason)

        def global_scale(self, x, fmt, *, producer, others):
            self.refuse()
            self.calls.append(("global_scale", producer))
            return reference.global_scale(self.make(producer, x, others), fmt)

        def quantize(self, x, request, *, global_scale, others, offsets=None):
            self.refuse()
            self.calls.append(("quantize", request.producer, request.axes))
            values = self.make(request.producer, x, others)
            more = request.scale_rounding, request.nonfinite
            return [
                ops.quantize(values, request.format, axis, *more, layout, global_scale, offsets)
                for axis, layout in zip(request.axes, request.layouts, strict=True)
            ]

        def rmsnorm(self, x, weight, request, *, eps, global_scale):
            self.refuse()
            self.calls.append(("rmsnorm",))
            y, rstd = reference.rmsnorm(x, weight, eps)
            more = request.scale_rounding, request.nonfinite, *request.layouts, global_scale
            return *ops.quantize(y, request.format, -1, *more), rstd

        def row_statistics(self, x, weight, bias, request, *, eps, centered):
            self.refuse()
            self.calls.append(("statistics",))
            if not centered:
                self.made, rstd = reference.rmsnorm(x, weight, eps)
                return RowStatistics("rmsnorm", rstd, None, rstd)
            self.made, mean, rstd = reference.layernorm(x, weight, bias, eps)
            biased = "" if bias is None else "biased_"
            return RowStatistics(f"{biased}layernorm", rstd, mean, rstd)

        def make(self, producer, x, others):
            if "norm" in producer:
                return self.made
            made = {"swiglu": reference.swiglu, "swiglu_backward": reference.swiglu_backward}
            return made[producer](*others, x)

    fake = Gpu()
    fake.calls = []
    for module in (fused, norms):
        monkeypatch.setattr(module, "quantizers", fake)
    module = sys.modules["blockscale.ops.quantize"]
    monkeypatch.setattr(module, "gpu_of", lambda device: None)  # which makes what the fake gives
    with stand_in.gpu("sm_90a", quantizes=True):
        yield fake


def check_calls(name, want_calls, gpu, **kwargs):
    x, grad, weight = matrix(128, 512), matrix(128, 256, seed=1), matrix(512, seed=2)
    gpu.calls.clear()
    layout = LAYOUTS[formats[name].scale.name]
    got = bs.swiglu_quantize(x, name, layout=layout, **kwargs)
    assert_same(got, in_two_steps(reference.swiglu(x), name, (-1, -2), layout=layout))
    got = bs.swiglu_backward_quantize(grad, x, name, axes=(-1,), layout=layout, **kwargs)
    values = reference.swiglu_backward(grad, x)
    assert_same(got, in_two_steps(values, name, (-1,), layout=layout))
    y, _ = reference.rmsnorm(x, weight, 1e-6)
    scalar = reference.global_scale(y, formats[name]) if formats[name].has_global_scale else None
    got, _ = bs.rmsnorm_quantize(x, weight, name, layout=layout, global_scale=scalar, **kwargs)
    assert_same((got,), in_two_steps(y, name, (-1,), layout=layout))
    assert gpu.calls == want_calls


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_128x128"])
def test_a_gpu_gets_one_call(gpu, name):
    scaled = formats[name].has_global_scale
    calls = [
        *[("global_scale", "swiglu")] * scaled, ("quantize", "swiglu", (-1, -2)),
        *[("global_scale", "swiglu_backward")] * scaled, ("quantize", "swiglu_backward", (-1,)),
        ("rmsnorm",),
    ]  # fmt: skip
    for backend in ("auto", "kernel"):
        check_calls(name, calls, gpu, backend=backend)
    check_calls(name, [], gpu, backend="reference")


def test_a_gpu_without_the_kernel(gpu):
    gpu.reason = "it is Sunday"
    with pytest.warns(ops.FallbackWarning, match="as plain torch.*it is Sunday") as caught:
        check_calls("mxfp8", [], gpu)
    check_calls("mxfp8", [], gpu)
    said = [str(warning.message).split()[0] for warning in caught]
    with pytest.warns(ops.FallbackWarning, match="layernorm_quantize on .*it is Sunday"):
        bs.layernorm_quantize(matrix(64, 128), matrix(128))
    assert said == ["swiglu_quantize", "swiglu_backward_quantize", "rmsnorm_quantize"]
    exact = bs.Recipe(high_precision=("fprop",))
    for alone in (bs.nn.RMSNorm(64), bs.nn.MLP(64, 128, recipe=exact)):
        with pytest.warns(ops.FallbackWarning, match="kernels with a quantizer behind alone"):
            alone(torch.randn(2, 64))
    for function, args in (
        (bs.swiglu_quantize, (matrix(64, 128),)),
        (bs.swiglu_backward_quantize, (matrix(64, 64), matrix(64, 128))),
        (bs.rmsnorm_quantize, (matrix(64, 128), matrix(128))),
    ):
        with pytest.raises(ValueError, match=r"backend: no kernel can run .*_quantize.*Sunday"):
            function(*args, backend="kernel")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(*args, backend="reference")


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_norms_on_a_gpu(gpu, name):
    """Rows of RMSNorm by one kernel, if all is known; else statistics come first."""
    x, (weight, bias) = matrix(64, 128), matrix(2, 128)
    scaled = [("global_scale", "rmsnorm")] * (name == "nvfp4")
    y, rstd = reference.rmsnorm(x, weight, 1e-6)
    *got, found = bs.rmsnorm_quantize(x, weight, name, axes=(-1, -2), backend="kernel")
    assert_same(tuple(got), in_two_steps(y, name, (-1, -2)))
    assert torch.equal(found, rstd)
    assert gpu.calls == [("statistics",), *scaled, ("quantize", "rmsnorm", (-1, -2))]
    gpu.calls.clear()
    for added, producer in ((None, "layernorm"), (bias, "biased_layernorm")):
        scalar = torch.tensor(0.01) if name == "nvfp4" else None
        given = {"axes": (-2,), "global_scale": scalar, "backend": "kernel"}
        got, *found = bs.layernorm_quantize(x, weight, added, name, **given)
        y, *statistics = reference.layernorm(x, weight, added, 1e-5)
        assert_same((got,), in_two_steps(y, name, (-2,), global_scale=scalar))
        assert same(tuple(found), tuple(statistics))
        assert gpu.calls == [("statistics",), ("quantize", producer, (-2,))]
        gpu.calls.clear()


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [
    bs.swiglu_quantize, lambda x, **kwargs: bs.swiglu_backward_quantize(x, x, **kwargs),
])  # fmt: skip
def test_bad_halves(function):
    for x in (matrix(4, 65), matrix(4, 1), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"x: has shape .*gate and up.*an even number"):
            function(x, pad=True)
    with pytest.raises(TypeError, match=r"x: got Tensor|x: got list"):
        function([1.0])
    with pytest.raises(TypeError, match="x: is a ScaledTensor already"):
        function(bs.quantize(matrix(64, 64)))
    with pytest.raises(ValueError, match=r"x: strides .*call \.contiguous"):
        function(matrix(64, 64).mT)
    for axes in ((), (-2, -1), (0,), -1, None, [-1], (-1, -1)):
        with pytest.raises(ValueError, match=r"axes: got .*choose one of \(-1,\), \(-2,\), \(-1"):
            function(matrix(64, 64), axes=axes)
    for layout in (("compact",), ("compact",) * 3, ()):
        with pytest.raises(ValueError, match=r"layout: got .*one layout, or \(rows, columns\)"):
            function(matrix(64, 64), layout=layout)


def test_bad_swiglu():
    with pytest.raises(ValueError, match=r"dimension -1 is 16, .*block of 32.*x is the product"):
        bs.swiglu_quantize(matrix(64, 32))
    with pytest.raises(TypeError, match=r"x: got torch\.int8"):
        bs.swiglu_quantize(torch.ones(64, 64, dtype=torch.int8))
    with pytest.raises(ValueError, match="nothing to quantize"):
        bs.swiglu_quantize(torch.ones(0, 64))
    with pytest.raises(ValueError, match="global_scale: format 'mxfp8' has none"):
        bs.swiglu_quantize(matrix(64, 64), global_scale=1.0)
    with pytest.raises(ValueError, match=r"global_scale: got 0.0; expected a positive"):
        bs.swiglu_quantize(matrix(64, 64), "nvfp4", global_scale=0.0)
    with pytest.raises(ValueError, match="backend"):
        bs.swiglu_quantize(matrix(64, 64), backend="triton")
    with pytest.raises(ValueError, match="offsets: got"):
        bs.swiglu_quantize(matrix(64, 64), offsets=i32(5, 65))


@pytest.mark.parametrize(("grad", "error", "match"), [
    (None, TypeError, "grad: got NoneType; expected a plain torch.Tensor"),
    (bs.quantize(torch.ones(64, 32)), TypeError, "grad: got ScaledTensor"),
    (torch.ones(64, 32), TypeError, r"grad: got torch.float32, x has torch.bfloat16; cast it to"),
    (matrix(64, 64), ValueError, r"grad: has shape \(64, 64\); x of shape .* needs \(64, 32\)"),
    (matrix(32, 32), ValueError, r"grad: has shape \(32, 32\)"),
    (matrix(64, 32).to("meta"), ValueError, "grad: is on meta, x on cpu"),
    (matrix(32, 64).mT, ValueError, r"grad: is not contiguous .*call \.contiguous"),
])  # fmt: skip
def test_bad_grad(grad, error, match):
    with pytest.raises(error, match=match):
        bs.swiglu_backward_quantize(grad, matrix(64, 64))


@pytest.mark.parametrize(("weight", "error", "match"), [
    ([1.0] * 64, TypeError, "weight: got list"),
    (torch.ones(64, dtype=torch.float64), TypeError, "weight: got torch.float64, .*float32 or"),
    (torch.ones(32), ValueError, r"weight: has shape \(32,\); x of shape .* needs \(64,\)"),
    (torch.ones(1, 64), ValueError, r"weight: has shape \(1, 64\)"),
    (torch.ones(128)[::2], ValueError, "weight: is not contiguous"),
])  # fmt: skip
def test_bad_weight(weight, error, match):
    with pytest.raises(error, match=match):
        bs.rmsnorm_quantize(matrix(64, 64), weight)


@pytest.mark.parametrize("eps", [0, 0.0, -1e-6, math.nan, math.inf, 1e-40, 1e39, "1e-6", None])
def test_bad_eps(eps):
    with pytest.raises(ValueError, match=r"eps: got .*; expected a positive number"):
        bs.rmsnorm_quantize(matrix(64, 64), matrix(64), eps=eps)
