"""gemm_quantize: the bytes of a product in fp32, SwiGLU of it and a quantizer, as one operation."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import blockscale as bs
from blockscale import reference
from blockscale.formats import formats
from blockscale.layouts import as_bytes, get_layout
from blockscale.ops import backends

OPS = torch.ops.blockscale
LAYOUTS = {"E8M0": "tcgen05", "UE4M3": "tcgen05", "FP32": "sm90"}
BF16 = torch.bfloat16
PAIRS = [
    (a, b) for a, b in itertools.product(formats, formats) if formats[a].multiplies(formats[b])
]


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch.compiler.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def matrix(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(a="mxfp8", b=None, m=40, n=256, k=128, **how):
    """(M, K) and (K, N)."""
    x, w = matrix(m, k), matrix(n, k, seed=1)
    return bs.quantize(x, a, **how), bs.quantize(w, b or a, **how).mT


def fp32(q, axis):
    """The values of an operand, by the reference."""
    if not isinstance(q, bs.ScaledTensor):
        return q.float()
    scale = q.compact_scale()
    how = {"shape": q.shape, "axis": axis, "global_scale": q.global_scale}
    return reference.dequantize(q.qdata, scale, q.format, **how)


def in_three_steps(
    a, b, name, *, swiglu=False, bias=None, layout="compact", global_scale=None, **how
):
    """Data, scales and global scale as the reference defines them."""
    fmt = formats[name]
    values = reference.gemm(fp32(a, -1), fp32(b, -2), bias=bias)
    if swiglu:
        values = reference.swiglu(values)
    if global_scale is not None:
        global_scale = torch.tensor(global_scale)
    elif fmt.has_global_scale:
        global_scale = reference.global_scale(values, fmt)
    how.setdefault("scale_rounding", fmt.default_scale_rounding)
    data, scale = reference.quantize(values, fmt, global_scale=global_scale, **how)
    if layout != "compact":
        scale = get_layout(layout).swizzle(as_bytes(scale))
    return data, scale, global_scale


def check(got, want):
    """``got``, a ScaledTensor, has the parts ``want``."""
    for x, y in zip((got.qdata, got.qscale, got.global_scale), want, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert (x.shape, x.stride()) == (y.shape, y.stride())
            assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (x, y)))


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("swiglu", [False, True])
def test_results(backend, name, swiglu):
    a, b = operands()
    for layout in ("compact", LAYOUTS[formats[name].scale.name]):
        for bias in (None, matrix(256, seed=2)):
            how = {"swiglu": swiglu, "bias": bias, "layout": layout}
            got = bs.gemm_quantize(a, b, name, **how)
            check(got, in_three_steps(a, b, name, **how))
            assert got.shape == (40, 128 if swiglu else 256)
            assert (got.format_name, got.layout_name, got.axis) == (name, layout, -1)
            assert got.dtype == BF16


@pytest.mark.sampled(33)
@pytest.mark.parametrize(("left", "right"), [*PAIRS, (None, "mxfp8"), (None, "fp8_128x128")])
def test_operands(backend, left, right):
    b = bs.quantize(matrix(256, 128, seed=1), right).mT
    a = matrix(40, 128) if left is None else bs.quantize(matrix(40, 128), left)
    check(bs.gemm_quantize(a, b, swiglu=True), in_three_steps(a, b, "mxfp8", swiglu=True))


def test_nothing_is_rounded_before_it_is_quantized(backend):
    """449 is more than E4M3 has, so that the scale is 2; in bf16 it would be 448, and the scale 1.
    With the bias rounded into the product first, it would stay 448 too."""
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([448.0, 1.0])
    ones = bs.quantize(torch.ones(32, 32)).mT
    alone = bs.quantize(x * torch.tensor([1.0, *[0.0] * 31]))
    for q in (
        bs.gemm_quantize(bs.quantize(x), ones),
        bs.gemm_quantize(alone, ones, bias=torch.ones(32)),
    ):
        assert torch.equal(q.dequantize(torch.float32), torch.full((1, 32), 448.0))
        assert int(q.qscale) == 128


def test_values_are_those_of_a_layer():
    """Against fp64: an element of E4M3 is off by a 16th of itself at most."""
    a, b = operands(k=256, n=512)
    gate, up = (a.dequantize(torch.float64) @ b.dequantize(torch.float64)).chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    got = bs.gemm_quantize(a, b, swiglu=True).dequantize(torch.float64)
    amax = want.abs().unflatten(-1, (-1, 32)).amax(-1, keepdim=True)
    # or by half of the smallest step, 2^-9 of a scale that is below 2 * amax / 448
    tiny = (amax * 2.0**-17).expand(-1, -1, 32).flatten(1)
    assert bool(((got - want).abs() <= want.abs() / 16 + tiny).all())


def test_arguments_reach_the_quantizer(backend):
    x, w = matrix(40, 128), matrix(128, 128, seed=1)
    x[3, 5], x[7], w[9, 9] = math.inf, 0.0, math.nan
    a, b = bs.quantize(x), bs.quantize(w).mT
    for swiglu in (False, True):
        for nonfinite in ("propagate", "te"):
            how = {"nonfinite": nonfinite, "scale_rounding": "even", "swiglu": swiglu}
            for which in ("auto", "reference"):
                got = bs.gemm_quantize(a, b, backend=which, **how)
                check(got, in_three_steps(a, b, "mxfp8", **how))
        for scalar in (0.01, torch.tensor(0.01), torch.tensor([0.01])):
            got = bs.gemm_quantize(a, b, formats["nvfp4"], swiglu=swiglu, global_scale=scalar)
            check(got, in_three_steps(a, b, "nvfp4", swiglu=swiglu, global_scale=0.01))


@pytest.mark.parametrize(("name", "layout"), [("mxfp8", "tcgen05"), ("fp8_1x128", "sm90")])
def test_layouts_of_operands_do_not_matter(backend, name, layout):
    want = in_three_steps(*operands(name), "mxfp4", swiglu=True)
    check(bs.gemm_quantize(*operands(name, layout=layout), "mxfp4", swiglu=True), want)


def test_sizes(backend):
    """One row; padded contractions; no contraction at all, whose sum is the bias."""
    for m, n, k in ((1, 64, 32), (3, 128, 40), (130, 64, 1)):
        a, b = operands(m=m, n=n, k=k, pad=True)
        for swiglu in (False, True):
            got = bs.gemm_quantize(a, b, swiglu=swiglu)
            check(got, in_three_steps(a, b, "mxfp8", swiglu=swiglu))
    a, b = operands()
    a, b, bias = a[:, :0], b.mT[:, :0].mT, matrix(256, seed=2)
    for each in (None, bias):
        values = torch.zeros(256) if each is None else each.float()
        got = bs.gemm_quantize(a, b, bias=each)
        assert torch.equal(
            got.dequantize(), bs.quantize(values.repeat(40, 1)).dequantize().to(BF16)
        )


def test_a_chain(backend):
    """The result is the next product's ``a``."""
    a, b = operands("nvfp4")
    down = bs.quantize(matrix(48, 128, seed=3), "mxfp8").mT
    hidden = bs.gemm_quantize(a, b, "mxfp8", swiglu=True)
    want = reference.gemm(fp32(hidden, -1), fp32(down, -2), out_dtype=BF16)
    assert torch.equal(bs.gemm(hidden, down), want)


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    """Makes calls go through torch's dispatcher, and its autograd."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_results_have_no_gradient():
    x, (a, b), bias = matrix(40, 128), operands(), matrix(256)
    want = in_three_steps(x, b, "mxfp8", bias=bias)
    bias.requires_grad_()
    for left, name in itertools.product((a, x.requires_grad_()), ("mxfp8", "nvfp4")):
        for mode in (nullcontext(), Watching()):
            with mode:
                q = bs.gemm_quantize(left, b, name, bias=bias if left is a else None)
            assert not any(part.requires_grad for part in (q, *q._parts().values()))
    check(bs.gemm_quantize(x, b, bias=bias), want)


# --- the op ---------------------------------------------------------------------------------------


def arguments(a, b, name, swiglu, layout, scalar, bias):
    sides = (
        (as_bytes(q.qdata), q.compact_bytes(), q.global_scale, q.format_name, "compact", q.shape)
        for q in (a, b)
    )
    left, right = ((*side[:-1], list(side[-1])) for side in sides)
    how = name, swiglu, formats[name].default_scale_rounding, "te", layout, scalar
    return *left, *right, bias, *how


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "fp8_128x128"])
def test_opcheck(backend, name):
    a, b = operands()
    scalars = (None, torch.tensor(0.01)) if formats[name].has_global_scale else (None,)
    for swiglu, scalar in itertools.product((False, True), scalars):
        for layout in ("compact", LAYOUTS[formats[name].scale.name]):
            given = arguments(a, b, name, swiglu, layout, scalar, matrix(256) if swiglu else None)
            torch.library.opcheck(OPS.gemm_quantize.default, given)


@pytest.mark.parametrize("name", formats)
def test_tensors_without_values(name):
    a, b = operands()
    mode = FakeTensorMode()
    empty = [tuple(q.to("meta") for q in (a, b)), tuple(mode.from_tensor(q) for q in (a, b))]
    for swiglu, layout in itertools.product(
        (False, True), ("compact", LAYOUTS[formats[name].scale.name])
    ):
        how = {"swiglu": swiglu, "layout": layout}
        real = bs.gemm_quantize(a, b, name, **how)
        for pair in empty:
            got = bs.gemm_quantize(*pair, name, **how)
            assert got._meta() == real._meta()
            for x, y in zip(got._parts().values(), real._parts().values(), strict=True):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_128x128"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(name, dynamic):
    def step(x, w, bias):
        a, b = bs.quantize(x), bs.quantize(w).mT
        plain = bs.gemm_quantize(a, b, name, bias=bias)
        return plain, bs.gemm_quantize(a, b, name, swiglu=True, layout="compact")

    run = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for i, (m, n, k) in enumerate([(640, 512, 96), (384, 768, 160), (256, 1024, 64)]):
        args = matrix(m, k), matrix(n, k, seed=1), matrix(n, seed=2)
        with torch.compiler.set_stance("fail_on_recompile" if dynamic and i else "default"):
            for got, want in zip(run(*args), step(*args), strict=True):
                assert torch.equal(got, want)
                assert got._meta() == want._meta()


# --- which backend --------------------------------------------------------------------------------


def test_kernels_of_a_cpu():
    """Two: a product, and a quantizer."""
    a, b = operands()
    got, want = (bs.gemm_quantize(a, b, backend=each) for each in ("kernel", "auto"))
    assert torch.equal(got, want)
    assert "gemm_quantize" in backends.OPERATIONS
    assert backends.backend("gemm_quantize", "cpu")[0] in ("reference", "numba + torch")


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "error", "match"), [
    ({"a": [1.0]}, TypeError, "a: got list; expected a ScaledTensor"),
    ({"a": matrix(40, 128).float()}, TypeError, "a: got torch.float32; expected a ScaledTensor"),
    ({"b": matrix(128, 256)}, TypeError, "b: got torch.bfloat16; expected a ScaledTensor"),
    ({"b": bs.quantize(matrix(128, 256))}, ValueError, "b: is blocked along axis -1"),
    ({"b": operands(n=64, k=64)[1]}, ValueError, r"a, b: got \(40, 128\) @ \(64, 64\)"),
    ({"b": operands("nvfp4")[1]}, ValueError, "a, b: formats 'mxfp8' and 'nvfp4' cannot be"),
    ({"b": operands(n=33)[1], "swiglu": True}, ValueError, "b: has 33 columns.*an even number"),
    ({"b": operands(n=48)[1]}, ValueError,
     r"b: has 48 columns, so that 48 are .*block of 32; .*pad=True to quantize, or pad b"),
    ({"b": operands(n=96)[1], "swiglu": True}, ValueError,
     r"b: has 96 columns, so that 48 are .*pad=True to swiglu_quantize"),
    ({"a": operands()[0][:0]}, ValueError, r"a, b: got \(0, 128\) @ .*nothing to quantize"),
    ({"b": operands()[1].mT[:0].mT}, ValueError, r"a, b: got .* @ \(128, 0\); .*nothing to"),
    ({"bias": [1.0]}, TypeError, r"bias: got list; expected a torch\.Tensor"),
    ({"bias": matrix(128), "swiglu": True}, ValueError, r"bias: got \(128,\) .*expected \(256,\)"),
    ({"bias": torch.ones(256, dtype=torch.int32)}, TypeError, "bias: got torch.int32"),
    ({"format": "fp8"}, ValueError, "format: got 'fp8'; choose one of 'mxfp8'"),
    ({"format": None}, ValueError, "format: got None; choose one of"),
    ({"scale_rounding": "up"}, ValueError, "scale_rounding .*got 'up'; choose one of 'rceil'"),
    ({"layout": "sm90"}, ValueError, "layout: layout 'sm90' holds fp32 scales, 'mxfp8' has E8M0"),
    ({"layout": ("compact",)}, ValueError, "layout: got"),
    ({"nonfinite": "ignore"}, ValueError, "nonfinite: got 'ignore'; choose one of 'propagate'"),
    ({"backend": "cuda"}, ValueError, "backend: got 'cuda'; choose one of 'auto'"),
    ({"global_scale": 1.0}, ValueError, "global_scale: format 'mxfp8' has none; leave it out"),
    ({"format": "nvfp4", "global_scale": 0.0}, ValueError, "global_scale: got 0.0; expected a pos"),
    ({"format": "nvfp4", "global_scale": "1"}, TypeError, "global_scale: got '1'; expected"),
    ({"format": "nvfp4", "global_scale": torch.ones(2)}, ValueError, "global_scale: got .2,."),
    ({"format": "nvfp4", "global_scale": torch.ones((), device="meta")}, ValueError,
     "global_scale: is on meta, what it scales on cpu; move it"),
], ids=str)  # fmt: skip
def test_bad_input(change, error, match):
    a, b = operands()
    for _ in range(2):  # nor is it remembered as right
        with pytest.raises(error, match=match):
            bs.gemm_quantize(**{"a": a, "b": b, **change})


# --- groups ---------------------------------------------------------------------------------------

ENDS = (5, 5, 30)  # of 40 rows


def grouped_operands(name="mxfp8", n=256, k=128):
    """(M, K) and (G, K, N)."""
    x, w = matrix(40, k), matrix(3 * n, k, seed=1).view(3, n, k)
    return bs.quantize(x, name), bs.quantize(w, name).mT, torch.tensor(ENDS).int()


@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("out_dtype", [torch.float32, BF16], ids=str)
def test_groups_as_in_steps(backend, name, out_dtype):
    a, b, offsets = grouped_operands()
    grouped = formats[name].block[0] == 1  # blocks of others span rows
    for swiglu in (False, True):
        for layout in ("compact", LAYOUTS[formats[name].scale.name]):
            how = {"layout": layout, "offsets": offsets}
            if not grouped:
                with pytest.raises(ValueError, match="groups cannot cut them"):
                    bs.grouped_gemm_quantize(a, b, offsets, name, swiglu=swiglu)
                continue
            y = bs.grouped_gemm(a, b, offsets, out_dtype)
            want = bs.quantize(y, name, **how)
            if swiglu:
                (want,) = bs.swiglu_quantize(y, name, axes=(-1,), **how)
            more = {"swiglu": swiglu, "out_dtype": out_dtype}
            got = bs.grouped_gemm_quantize(a, b, format=name, **how, **more)
            assert torch.equal(got, want._with(dtype=a.dtype))
            assert got.offsets is offsets


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_opcheck_groups(backend, name):
    a, b, offsets = grouped_operands()
    scalars = (None, torch.tensor(0.01)) if formats[name].has_global_scale else (None,)
    left = a.qdata.view(torch.uint8), a.qscale, None, "mxfp8", "compact", a.shape
    right = b.qdata.view(torch.uint8), b.qscale, None, "mxfp8", "compact", b.shape
    for swiglu, scalar in itertools.product((False, True), scalars):
        for layout in ("compact", LAYOUTS[formats[name].scale.name]):
            how = name, swiglu, not swiglu, formats[name].default_scale_rounding, "te", layout
            given = *left, *right, offsets, *how, scalar
            torch.library.opcheck(OPS.grouped_gemm_quantize.default, given)


def test_groups_compiled():
    a, b, offsets = grouped_operands()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(a, b, offsets):
        q = bs.grouped_gemm_quantize(a, b, offsets, swiglu=True)
        return q, q.dequantize()

    want = bs.grouped_gemm_quantize(a, b, offsets, swiglu=True)
    q, values = run(a, b, offsets)
    assert torch.equal(q, want)
    assert torch.equal(values, want.dequantize())


def test_groups_refused():
    a, b, offsets = grouped_operands()
    with pytest.raises(TypeError, match=r"out_dtype: got torch.float16; choose torch.float32 or"):
        bs.grouped_gemm_quantize(a, b, offsets, out_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"b: got \(128, 256\); expected \(groups, K, N\)"):
        bs.grouped_gemm_quantize(a, b[0], offsets)
    with pytest.raises(ValueError, match="there is nothing to quantize"):
        bs.grouped_gemm_quantize(torch.empty(0, 128).bfloat16(), b, torch.zeros(3).int())
    odd = bs.quantize(matrix(3 * 72, 128).view(3, 72, 128)).mT
    with pytest.raises(ValueError, match="not a multiple of mxfp8's block of 32"):
        bs.grouped_gemm_quantize(a, odd, offsets, swiglu=True)
