"""The torch.library ops: opcheck on each, and torch.compile(fullgraph=True) of what users call."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import fresh_cache

import blockscale as bs
import blockscale.distributed
import blockscale.nn.gathered_ops
from blockscale.formats import formats
from blockscale.layouts import as_bytes
from blockscale.seed import numbers_of

OPS = torch.ops.blockscale
NAMES = ["mxfp8", "nvfp4", "fp8_128x128"]
LAYOUTS = {"E8M0": "tcgen05", "UE4M3": "tcgen05", "FP32": "sm90"}


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    """Of this process, and what others left on disk: it calls the ops as they were then."""
    torch.compiler.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def matrix(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def same(a, b):
    if isinstance(a, tuple):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b)


# --- opcheck --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("axis", [-1, -2])
def test_opcheck_quantize(backend, name, axis):
    fmt = formats[name]
    scalar = torch.tensor(0.01) if fmt.has_global_scale else None
    x = matrix(256, 128) if axis == -1 else matrix(128, 256)
    for layout in ("compact", LAYOUTS[fmt.scale.name]):
        for mode in fmt.scale.roundings[:2]:
            args = (x, name, axis, mode, "propagate", layout, scalar)
            torch.library.opcheck(OPS.quantize.default, args)


def test_opcheck_quantize_other_arguments(backend):
    x = matrix(96, 64)
    args = (x, "mxfp8", -1, "rceil", "te", "tcgen05", None, i32(40, 90))
    torch.library.opcheck(OPS.quantize.default, args)
    args = (x, "mxfp8", -2, "floor", "te", "compact", None, i32(40, 90))
    torch.library.opcheck(OPS.quantize.default, args)
    seed = [*numbers_of(7, (3, 5, 40))]
    args = (matrix(3, 5, 40), "mxfp4", -1, "rceil", "te", "compact", None, None, seed)
    torch.library.opcheck(OPS.quantize.default, args)
    args = (matrix(40, 64), "mxfp8", -2, "rceil", "te", "tcgen05")
    torch.library.opcheck(OPS.quantize.default, args, {"square": True})
    further = {"seed": [*numbers_of(7, (40, 64))], "step": torch.tensor(3)}
    args = (matrix(64, 64), "mxfp8", -2, "rceil", "te", "tcgen05")
    torch.library.opcheck(OPS.quantize.default, args, further | {"hadamard": [16, 5, 0]})
    drawn = {"hadamard": [16, 5], "signs_step": torch.tensor(3)}
    torch.library.opcheck(OPS.quantize.default, args, further | drawn)
    args = (matrix(40), "mxfp8", -1, "rceil", "te", "compact")
    torch.library.opcheck(OPS.quantize.default, args)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_quantize_both(backend, name):
    fmt = formats[name]
    scalar = torch.tensor(0.01) if fmt.has_global_scale else None
    for layout in ("compact", LAYOUTS[fmt.scale.name]):
        args = (matrix(256, 128), name, fmt.scale.roundings[0], "te", layout, "compact", scalar)
        torch.library.opcheck(OPS.quantize_both.default, args)
    if fmt.block[0] == 1 and fmt.element.bits == 8:
        seed, ends = [*numbers_of(7, (96, 128))], i32(40, 90)
        args = (matrix(96, 128), name, "rceil", "te", layout, "compact", None, ends, seed)
        torch.library.opcheck(OPS.quantize_both.default, args)
    if fmt.block[0] == 1:
        args = (matrix(256, 128), name, fmt.scale.roundings[0], "te", "compact", "compact", scalar)
        further = {"seed": [*numbers_of(7, (256, 128))], "step": torch.tensor(3)}
        torch.library.opcheck(
            OPS.quantize_both.default, args, further | {"hadamard": [128, -1, 2**62]}
        )
        drawn = {"hadamard": [128, -5], "signs_step": torch.tensor(3)}
        torch.library.opcheck(OPS.quantize_both.default, args, further | drawn)


def test_opcheck_global_scale(backend):
    for shape in ((64, 32), (3, 4, 16), (7,)):
        torch.library.opcheck(OPS.global_scale.default, (matrix(*shape), "nvfp4"))
    args = (matrix(32, 48), "nvfp4", "auto", -2, [32, 5, 0])
    torch.library.opcheck(OPS.global_scale.default, args)
    args = (matrix(32, 48), "nvfp4", "auto", -2, [32, 5], "ms_eden", torch.tensor(3))
    torch.library.opcheck(OPS.global_scale.default, args)


def dequantize_args(q, dtype):
    parts = as_bytes(q.qdata), as_bytes(q.compact_scale())
    cut = q.offsets if q.k_grouped else None
    return (*parts, q.format_name, list(q.shape), q.axis, q.global_scale, cut, dtype)


@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("axis", [-1, -2])
def test_opcheck_dequantize(backend, name, axis):
    q = bs.quantize(matrix(128, 256), name, axis)
    for dtype in (torch.bfloat16, torch.float32):
        torch.library.opcheck(OPS.dequantize.default, dequantize_args(q, dtype))


def test_opcheck_dequantize_groups(backend):
    q = bs.quantize(matrix(96, 64), axis=-2, offsets=i32(40, 90))
    torch.library.opcheck(OPS.dequantize.default, dequantize_args(q, torch.float16))


def side(q, *, layout=()):
    """An operand as the ops take it; scales of grouped products are always compact."""
    if type(q) is torch.Tensor:
        return q, None, None, None, "compact", list(q.shape)
    scale = q.qscale if layout == ("sm90",) else q.compact_bytes()
    return as_bytes(q.qdata), scale, q.global_scale, q.format_name, *layout, list(q.shape)


zeros = torch.zeros
COMPACT = {"layout": ("compact",)}


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_128x128"])
def test_opcheck_gemm(backend, name):
    a, b = bs.quantize(matrix(64, 128), name), bs.quantize(matrix(32, 128, seed=1), name).mT
    for bias, c in ((None, None), (torch.ones(32), torch.ones(64, 32))):
        args = (*side(a, **COMPACT), *side(b, **COMPACT), bias, c, torch.float32)
        torch.library.opcheck(OPS.gemm.default, args)
        args = (*side(a, **COMPACT), *side(b, **COMPACT), bias, torch.ones(64, 32), c is not None)
        torch.library.opcheck(OPS.gemm_out.default, args)


def test_opcheck_gemm_other_operands():
    a = bs.quantize(matrix(64, 128), "fp8_1x128", layout="sm90")
    b = bs.quantize(matrix(32, 128, seed=1), "fp8_1x128", layout="sm90").mT
    args = (*side(a, layout=("sm90",)), *side(b, layout=("sm90",)), None, None, torch.bfloat16)
    torch.library.opcheck(OPS.gemm.default, args)
    args = (*side(matrix(64, 128)), *side(b, layout=("sm90",)), None, None, torch.bfloat16)
    torch.library.opcheck(OPS.gemm.default, args)


def test_opcheck_gemm_gradients(backend):
    a, b = bs.quantize(matrix(64, 128)), bs.quantize(matrix(32, 128, seed=1)).mT
    bias, c = torch.ones(32, requires_grad=True), torch.ones(64, 32, requires_grad=True)
    for left in (a, matrix(64, 128).requires_grad_()):
        args = (*side(left, **COMPACT), *side(b, **COMPACT), bias, c, torch.float32)
        torch.library.opcheck(OPS.gemm.default, args)


def test_opcheck_grouped(backend):
    ends = i32(10, 10, 60)
    a, b = bs.quantize(matrix(64, 128)), bs.quantize(matrix(3, 32, 128, seed=1)).mT
    sides = *side(a, **COMPACT), *side(b, **COMPACT)
    torch.library.opcheck(OPS.grouped_gemm.default, (*sides, ends, "m", None, torch.bfloat16))
    torch.library.opcheck(OPS.grouped_gemm_out.default, (*sides, ends, "m", zeros(64, 32), False))
    plain = matrix(64, 128).bfloat16().requires_grad_()
    args = (*side(plain), *side(b, **COMPACT), ends, "m", None, torch.bfloat16)
    torch.library.opcheck(OPS.grouped_gemm.default, args)
    plain = matrix(60, 128).bfloat16().requires_grad_()
    args = (*side(plain), *side(b, **COMPACT), i32(20, 0, 7), "masked", None, torch.bfloat16)
    torch.library.opcheck(OPS.grouped_gemm.default, args)
    for q in (b, bs.quantize(matrix(3, 32, 128, seed=1))):
        stored = as_bytes(q.qdata), q.qscale, None, "mxfp8", list(q.shape), q.axis
        args = (matrix(64, q.shape[1]), *stored, ends, torch.float32)
        torch.library.opcheck(OPS.grouped_values.default, args)
    for k_major in (False, True):
        given = {"axis": -2, "offsets": ends, "k_major": k_major}
        a, b = (bs.quantize(matrix(64, 32, seed=s), **given) for s in (0, 1))
        sides = *side(a.mT, **COMPACT), *side(b, **COMPACT)
        for c in (None, zeros(3, 32, 32).requires_grad_()):
            args = (*sides, ends, "k", c, torch.float32)
            torch.library.opcheck(OPS.grouped_gemm.default, args)
        args = (*sides, ends, "k", zeros(3, 32, 32), True)
        torch.library.opcheck(OPS.grouped_gemm_out.default, args)


@pytest.mark.parametrize("axis", [-1, -2])
def test_opcheck_gathered_rows(backend, axis):
    rows = i32(0, 5, 5, *range(40))
    args = (matrix(64, 96), "mxfp8", axis, "rceil", "propagate", "tcgen05", None, i32(9, 9, 40))
    torch.library.opcheck(OPS.quantize.default, (*args, None, "auto", True, rows))
    args = (matrix(64, 96), "mxfp8", "rceil", "te", "compact", "compact", None, i32(9, 43))
    torch.library.opcheck(OPS.quantize_both.default, (*args, None, "auto", True, rows))


def test_opcheck_combine(backend):
    y, slots = matrix(12, 40), torch.randperm(12).view(4, 3)
    for weights in (None, torch.randn(4, 3)):
        for dtype in (torch.bfloat16, torch.float32):
            torch.library.opcheck(OPS.combine.default, (y, slots, weights, dtype))


def test_opcheck_route(backend):
    for experts in (torch.randint(-1, 6, (7, 3)), torch.zeros(0, 2, dtype=torch.int32)):
        torch.library.opcheck(OPS.route.default, (experts, 5))


def test_every_op_is_checked_here():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name[:12] == "blockscale::"]
    here = ["combine", "dequantize", "gemm", "gemm_out", "global_scale", "grouped_gemm", "quantize"]
    here += ["grouped_gemm_out", "grouped_values", "quantize_both", "route"]
    in_test_fused = ["norm", "norm_backward", "norm_quantize"]
    in_test_fused += ["swiglu", "swiglu_backward", "swiglu_quantize"]
    in_test_nn_layer_ops = ["linear", "linear_fprop", "linear_backward"]
    in_test_nn_gathered_ops = ["gathered_fprop", "gathered_backward", "gathered_dgrad"]
    in_test_compiled_parallel = ["gather_shards", "scatter_sum", "take_shard", "gather_scaled"]
    in_test_compiled_parallel += ["reduce_over_ranks", "parallel_gather", "parallel_input"]
    in_test_compiled_parallel += ["parallel_multiply", "parallel_reduce"]
    elsewhere = [*in_test_fused, *in_test_nn_layer_ops, *in_test_nn_gathered_ops]
    elsewhere += in_test_compiled_parallel
    elsewhere += ["gemm_quantize", "grouped_gemm_quantize"]
    in_test_vllm_served = ["blockscale::served_linear"]  # which that imports first
    names = [name for name in names if name not in in_test_vllm_served]
    assert sorted(names) == sorted(f"blockscale::{name}" for name in here + elsewhere)


# --- torch.compile --------------------------------------------------------------------------------


def compiled(function, *, dynamic, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


def check(function, inputs, dynamic, backend="aot_eager"):
    """Compiled equals eager for all inputs; with dynamic shapes without compiling again."""
    run = compiled(function, dynamic=dynamic, backend=backend)
    for i, given in enumerate(inputs):
        with torch.compiler.set_stance("fail_on_recompile" if dynamic and i else "default"):
            assert same(run(*given), function(*given))


#: The first has no two equal sizes in its parts, and none has a size of 1: torch specializes there.
SIZES = [(640, 512), (384, 768), (256, 1024)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_compile_quantize(name, dynamic):
    inputs = [(matrix(*size),) for size in SIZES]
    check(lambda x: bs.quantize(x, name), inputs, dynamic)
    layout = LAYOUTS[formats[name].scale.name]
    check(lambda x: bs.quantize(x, name, -2, layout=layout), inputs, dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_compile_quantize_both(name, dynamic):
    check(lambda x: bs.quantize_both(x, name), [(matrix(*size),) for size in SIZES], dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_other_arguments(dynamic):
    inputs = [(matrix(*size),) for size in SIZES]
    check(lambda x: bs.quantize(x, seed=5, nonfinite="te", scale_rounding="even"), inputs, dynamic)
    check(lambda x: bs.quantize(x, "nvfp4", global_scale=0.01), inputs, dynamic)
    ragged = [(matrix(m, k),) for m, k in ((5, 40), (6, 50), (9, 70))]
    check(lambda x: bs.quantize(x, pad=True), ragged, dynamic)
    batched = [(matrix(b, 5, 64),) for b in (2, 3, 4)]
    check(lambda x: bs.quantize(x, axis=-1), batched, dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_compile_dequantize(name, dynamic):
    inputs = [(bs.quantize(matrix(*size), name),) for size in SIZES]
    check(lambda q: q.dequantize(), inputs, dynamic)
    check(lambda q: q.mT.dequantize(torch.float32) + 1, inputs, dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_compile_gemm(name, dynamic):
    def linear(x, w):
        return bs.gemm(bs.quantize(x, name), bs.quantize(w, name).mT)

    check(linear, [(matrix(m, k), matrix(64, k, seed=1)) for m, k in SIZES], dynamic)
    inputs = [
        (bs.quantize(matrix(m, k), name), bs.quantize(matrix(64, k, seed=1), name).mT)
        for m, k in SIZES
    ]
    check(lambda a, b: bs.gemm(a, b, torch.float32), inputs, dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_gemm_arguments(dynamic):
    def accumulate(x, w, bias, c):
        return bs.gemm(bs.quantize(x), bs.quantize(w).mT, out=c, accumulate=True, bias=bias).clone()

    run = compiled(accumulate, dynamic=dynamic)
    for m, k in SIZES:
        x, w, bias, c = (
            matrix(m, k),
            matrix(64, k, seed=1),
            matrix(64, seed=2),
            matrix(m, 64, seed=3),
        )
        assert same(run(x, w, bias, c.clone()), accumulate(x, w, bias, c.clone()))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128"])
def test_compile_grouped_gemm(name, dynamic):
    def experts(x, w, offsets):
        return bs.grouped_gemm(bs.quantize(x, name), bs.quantize(w, name).mT, offsets)

    ends = [i32(33, 100), i32(0, 128), i32(17, 17)]
    inputs = [
        (matrix(m, k), matrix(2, 64, k, seed=1), e) for (m, k), e in zip(SIZES, ends, strict=True)
    ]
    check(experts, inputs, dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_wgrad(dynamic):
    def wgrad(g, x, offsets):
        g = bs.quantize(g, axis=-2, offsets=offsets)
        x = bs.quantize(x, axis=-2, offsets=offsets)
        return bs.grouped_gemm(g.mT, x, offsets)

    ends = [i32(33, 100), i32(0, 128), i32(17, 256)]
    inputs = [
        (matrix(m, k), matrix(m, 64, seed=1), e) for (m, k), e in zip(SIZES, ends, strict=True)
    ]
    check(wgrad, inputs, dynamic)

    def added(g, x, offsets):
        given = {"axis": -2, "offsets": offsets, "layout": "sm90", "k_major": True}
        g, x = (bs.quantize(each, "fp8_1x128", **given) for each in (g, x))
        out = torch.ones(offsets.shape[0], g.shape[1], x.shape[1])
        bs.grouped_gemm(g.mT, x, offsets, out=out, accumulate=True)
        return out * 2

    check(added, inputs, dynamic)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128"])
@pytest.mark.parametrize("layout", ["compact", "other"])
def test_inductor_takes_and_returns_scaled_tensors(name, layout):
    """Each way in and out that eager mode has, through the default compiler."""
    other = LAYOUTS[formats[name].scale.name]
    layout = layout if layout == "compact" else other
    q = bs.quantize(matrix(256, 256), name, layout=layout)
    w = bs.quantize(matrix(128, 256, seed=1), name, layout=layout).mT

    def step(q):
        return (
            q, q.detach(), q.clone(), q.to(torch.float32), q.mT, q.mT.mT, q.dequantize() * 2,
            bs.gemm(q, w), q.to_layout("compact"), q.to_layout(other),
        )  # fmt: skip

    assert same(compiled(step, dynamic=False, backend="inductor")(q), step(q))


def test_cached_graphs_are_of_like_tensors():
    """Of other shapes and strides torch runs no graph that it has on disk."""
    each = [
        bs.quantize(matrix(n, 128), axis=-2, k_major=k)
        for n, k in ((64, False), (128, False), (64, True))
    ]

    def step(q):
        return q.dequantize() * 2

    with torch._inductor.config.patch(force_disable_caches=False), fresh_cache():
        for q in each:
            torch.compiler.reset()
            assert same(compiled(step, dynamic=False, backend="inductor")(q), step(q))
    frozen, trained = (torch.nn.Parameter(each[0], requires_grad=on) for on in (False, True))
    assert frozen._stable_hash_for_caching() != trained._stable_hash_for_caching()


def test_inductor_end_to_end():
    def step(x, w, bias):
        a = bs.quantize(x.relu() * 2, layout="tcgen05")
        return bs.gemm(a, bs.quantize(w).mT, bias=bias).float() - 1

    args = matrix(64, 128), matrix(32, 128, seed=1), matrix(32, seed=2)
    assert same(compiled(step, dynamic=False, backend="inductor")(*args), step(*args))


def test_meta_tensors():
    """Shapes without memory, for planning."""
    for name, fmt in formats.items():
        q = bs.quantize(torch.empty(256, 384, device="meta"), name, -2)
        real = bs.quantize(matrix(256, 384), name, -2)
        assert q.qdata.shape == real.qdata.shape
        assert q.qdata.stride() == real.qdata.stride()
        assert q.scale.shape == real.scale.shape
        assert q.dequantize().shape == (256, 384)
        assert q.global_scale is None or fmt.has_global_scale
