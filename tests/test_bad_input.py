"""Bad input: ValueError or TypeError that names the argument, and the remedy if any."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import blockscale as bs
from blockscale.formats import formats
from stand_in import gpu


def x(*shape, dtype=torch.float32):
    return torch.ones(shape or (64, 128), dtype=dtype)


def q(*shape, **kwargs):
    return bs.quantize(x(*shape), **kwargs)


def i32(*values, **kwargs):
    return torch.tensor(values, dtype=torch.int32, **kwargs)


NOT_DENSE = {
    "sparse_coo": lambda: x().to_sparse(),
    "sparse_csr": lambda: x().to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(x(), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([x(), x()]),
}


# --- quantize -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float64, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e8m0fnu,
], ids=str)  # fmt: skip
@pytest.mark.parametrize("function", [bs.quantize, bs.quantize_both])
def test_dtype(function, dtype):
    for name in ("mxfp8", "nvfp4"):
        with pytest.raises(TypeError, match=r"x: got torch\..*expected one of .*: cast it first"):
            function(x().to(dtype), name)


@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.filterwarnings("ignore")  # torch says that these are beta or deprecated
def test_not_dense(kind):
    with pytest.raises(
        TypeError, match=rf"x: got a .*{kind}.*expected a dense one: call \.to_dense"
    ):
        bs.quantize(NOT_DENSE[kind]())


@pytest.mark.parametrize("thing", [None, 1.0, [1.0, 2.0], x().numpy(), "x"], ids=repr)
def test_no_tensor(thing):
    with pytest.raises(TypeError, match=r"x: got .*; expected a torch\.Tensor"):
        bs.quantize(thing)


def test_quantized_already():
    with pytest.raises(TypeError, match=r"x: is a ScaledTensor already; .*high-precision"):
        bs.quantize(q())
    with pytest.raises(TypeError, match="x: is a ScaledTensor already"):
        bs.quantize_both(q(), "nvfp4")


@pytest.mark.parametrize("make", [
    lambda: x(128, 64).mT, lambda: x(64, 256)[:, ::2], lambda: x(1, 1).expand(4, 32),
    lambda: x(2, 64, 32).permute(0, 2, 1),
], ids=["transposed", "step", "expanded", "permuted"])  # fmt: skip
def test_not_contiguous(make):
    for axis in (-1, -2):
        with pytest.raises(ValueError, match=r"x: strides .*call \.contiguous\(\)"):
            bs.quantize(make(), axis=axis)


@pytest.mark.parametrize("shape", [(0,), (0, 32), (4, 0), (2, 0, 32)], ids=str)
def test_zero_size(shape):
    with pytest.raises(ValueError, match=r"x: has shape .*nothing to quantize; leave empty"):
        bs.quantize(torch.ones(shape))


def test_dimensions():
    with pytest.raises(ValueError, match=r"x: has 0 dimension\(s\); axis=-1 needs at least 1"):
        bs.quantize(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"x: has 1 dimension\(s\); axis=-2 needs at least 2"):
        bs.quantize(x(32), axis=-2)


@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("axis", [-1, -2])
def test_contraction_that_is_no_multiple_of_the_block(name, axis):
    block = formats[name].block_size
    for k in (1, block - 1, block + 1):
        y = x(64, k) if axis == -1 else x(k, 64)
        with pytest.raises(
            ValueError, match=rf"dimension {axis} is {k}, .*block of {block}; pass pad="
        ):
            bs.quantize(y, name, axis)
        assert bs.quantize(y, name, axis, pad=True).shape == y.shape


@pytest.mark.parametrize("axis", [0, 1, -3, None, "rows", "-1", 1.5, True])
def test_axis(axis):
    with pytest.raises(ValueError, match=r"axis .*choose one of '?-1'?, '?-2'?"):
        bs.quantize(x(), axis=axis)


@pytest.mark.parametrize("wrong", ["fp8", "MXFP8", "", None, 8, ["mxfp8"], torch.float8_e4m3fn])
def test_unknown_format_lists_the_known(wrong):
    with pytest.raises(ValueError, match=r"format: got .*choose one of") as error:
        bs.quantize(x(), wrong)
    assert all(repr(name) in str(error.value) for name in formats)


@pytest.mark.parametrize(("wrong", "meant"), [
    ("mxpf8", "mxfp8"), ("MXFP8", "mxfp8"), ("nvpf4", "nvfp4"), ("fp8_128", "fp8_1x128"),
])  # fmt: skip
def test_a_near_miss_is_answered_with_what_was_meant(wrong, meant):
    with pytest.raises(ValueError, match=rf"got '{wrong}'; .* \(did you mean '{meant}'\?\)$"):
        bs.quantize(x(), wrong)
    with pytest.raises(ValueError, match=r"choose one of [^?]*$"):
        bs.quantize(x(), "int")


def test_the_name_of_a_recipe_is_no_format():
    q = bs.quantize(x(128, 128), "fp8_1x128")
    for call in (
        lambda: bs.quantize(x(), "fp8_block"),
        lambda: bs.quantize_both(x(), "fp8_block"),
        lambda: bs.ScaledTensor(q.data, q.scale, format="fp8_block", shape=q.shape),
    ):
        with pytest.raises(
            ValueError, match=r"format: 'fp8_block' is a recipe .*'fp8_1x128', or 'fp8_128x128' for"
        ):
            call()


@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("wrong", ["ru", "round", 3, ""])
def test_unknown_scale_rounding_lists_the_known(name, wrong):
    with pytest.raises(ValueError, match=r"scale_rounding .*choose one of") as error:
        bs.quantize(x(128, 128), name, scale_rounding=wrong)
    assert all(repr(mode) in str(error.value) for mode in formats[name].scale.roundings)


def test_rounding_of_another_scale():
    with pytest.raises(ValueError, match=r"scale_rounding .*'nvfp4'.*choose one of 'nearest'"):
        bs.quantize(x(), "nvfp4", scale_rounding="rceil")
    with pytest.raises(ValueError, match="choose one of 'rceil', 'floor', 'ceil', 'even'"):
        bs.quantize(x(), "mxfp8", scale_rounding="nearest")


@pytest.mark.parametrize("wrong", ["ignore", None, "", 0])
def test_unknown_nonfinite(wrong):
    with pytest.raises(ValueError, match=r"nonfinite: got .*choose one of 'propagate', 'te'"):
        bs.quantize(x(), nonfinite=wrong)


def test_layout_that_cannot_hold_the_scales():
    with pytest.raises(ValueError, match="layout 'sm90' holds fp32 scales"):
        bs.quantize(x(), layout="sm90")
    with pytest.raises(ValueError, match="layout 'tcgen05' holds one-byte scales"):
        bs.quantize(x(), "fp8_1x128", layout="tcgen05")
    for shape in ((64,), (2, 64, 128)):
        with pytest.raises(ValueError, match="layout: 'tcgen05' stores the scales of one matrix"):
            bs.quantize(x(*shape), layout="tcgen05")


@pytest.mark.parametrize("wrong", [
    0.0, -1.0, float("nan"), float("inf"), 1e-50, 1e39, 10**400, torch.tensor([1.0, 2.0]),
    torch.tensor(1.0, dtype=torch.float64), torch.tensor(1), torch.tensor(-1.0),
    torch.tensor(1.0, device="meta"), "large",
], ids=str)  # fmt: skip
def test_global_scale(wrong):
    for function in (bs.quantize, bs.quantize_both):
        with pytest.raises((ValueError, TypeError), match="global_scale: "):
            function(x(), "nvfp4", global_scale=wrong)


def test_global_scale_of_a_format_without():
    for name in formats:
        if name != "nvfp4":
            with pytest.raises(
                ValueError, match=f"global_scale: format '{name}' has none; leave it"
            ):
                bs.quantize(x(128, 128), name, global_scale=1.0)


@pytest.mark.parametrize("seed", ["a", 1.5, 2**64, -(2**64), torch.tensor(3.0)], ids=str)
def test_seed(seed):
    with pytest.raises((ValueError, TypeError), match="seed"):
        bs.quantize(x(), seed=seed)


@pytest.mark.parametrize("offsets", [
    [64], (64,), i32(64).long(), i32(64).float(), torch.tensor(64, dtype=torch.int32),
    i32(32, 64).reshape(1, 2), i32(), i32(-1, 64), i32(40, 30), i32(65), i32(64, device="meta"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize(("axis", "layout"), [(-1, "compact"), (-1, "tcgen05"), (-2, "compact")])
def test_offsets(offsets, axis, layout):
    with pytest.raises((ValueError, TypeError), match="offsets: "):
        bs.quantize(x(), axis=axis, offsets=offsets, layout=layout)


@pytest.mark.parametrize(("offsets", "given"), [
    ([64], "list"), (i32(64).long(), "torch.int64 of 1 dim"), (i32(64)[None], "torch.int32 of 2"),
])  # fmt: skip
def test_offsets_say_what_was_given(offsets, given):
    for call in (bs.quantize, lambda x, offsets: bs.grouped_gemm(q(64, 128), experts(), offsets)):
        with pytest.raises(TypeError, match=f"offsets: got {given}.*; expected a torch.int32 tens"):
            call(x(), offsets=offsets)


def test_offsets_where_groups_cannot_be():
    with pytest.raises(ValueError, match=r"offsets: x has shape .*groups cut the rows of a matrix"):
        bs.quantize(x(2, 64, 128), offsets=i32(64))
    with pytest.raises(ValueError, match=r"offsets: .* span 128 rows"):
        bs.quantize(x(128, 128), "fp8_128x128", offsets=i32(64))


# --- gemm -----------------------------------------------------------------------------------------


@pytest.fixture(params=[None, "sm_90a", "sm_100a"])
def layout(request, monkeypatch):
    """Of MXFP8 scales, as a GPU reads them where there is one. No kernel of it is ever run."""
    if request.param is None:
        yield "compact"
        return
    with gpu(request.param, lambda config: pytest.fail("a kernel is found")):
        yield "tcgen05" if request.param == "sm_100a" else "compact"


on_all = pytest.mark.usefixtures("layout")


@on_all
def test_operands_that_are_not_quantized():
    for a, b in ((x(), q(32, 128).mT), (q(), x(128, 32)), (None, q(32, 128).mT)):
        with pytest.raises(
            TypeError, match=r"[ab]: got .*; expected a ScaledTensor: call blockscale"
        ):
            bs.gemm(a, b)


@on_all
def test_operands_blocked_along_the_other_axis():
    """The transpose for the other contraction needs the high-precision values, and says so."""
    weight = q(64, 128)
    with pytest.raises(ValueError, match=r"b: is blocked along axis -1, .*pass b\.mT"):
        bs.gemm(q(32, 64), weight)  # dgrad with the bytes of fprop
    with pytest.raises(
        ValueError, match=r"a: is blocked along axis -2, .*quantize the high-precis"
    ):
        bs.gemm(q(128, 64, axis=-2), weight.mT)
    with pytest.raises(ValueError, match="a: is blocked along axis -2"):
        bs.gemm(weight.mT, q(64, 32, axis=-2))  # wgrad with the bytes of fprop


@on_all
@pytest.mark.parametrize(("a", "b"), [
    ("mxfp8", "nvfp4"), ("nvfp4", "mxfp4"), ("mxfp8", "fp8_1x128"), ("fp8_128x128", "mxfp8"),
])  # fmt: skip
def test_formats_that_cannot_be_mixed(a, b):
    with pytest.raises(ValueError, match=f"a, b: formats '{a}' and '{b}' cannot be multiplied: bl"):
        bs.gemm(q(128, 128, format=a), q(128, 128, format=b).mT)


@on_all
@pytest.mark.parametrize(("a", "b"), [
    ((64, 128), (32, 96)), ((64, 128), (2, 32, 128)), ((2, 64, 128), (32, 128)),
    ((128,), (32, 128)),
], ids=str)  # fmt: skip
def test_shapes(a, b):
    with pytest.raises(ValueError, match=r"a, b: got .*; expected \(M, K\) @ \(K, N\)"):
        bs.gemm(q(*a), q(*b).mT)


@on_all
def test_padded_contractions_must_agree():
    a, b = (bs.quantize(x(8, k), pad=True) for k in (40, 64))
    with pytest.raises(ValueError, match="a, b: got"):
        bs.gemm(a, b.mT)


@pytest.mark.parametrize(("kwargs", "error", "message"), [
    ({"out_dtype": torch.int32}, TypeError, "out_dtype: got .*; choose torch.bfloat16"),
    ({"out_dtype": torch.float64}, TypeError, "out_dtype: got .*; choose torch.bfloat16"),
    ({"out_dtype": torch.float8_e4m3fn}, TypeError, "out_dtype: got .*; choose"),
    ({"out": torch.ones(64, 31)}, ValueError, r"out: has shape \(64, 31\); .* \(64, 32\)"),
    ({"out": torch.ones(64, 32, dtype=torch.int32)}, TypeError, "out: got torch.int32; choose"),
    ({"out": torch.ones(64, 32), "out_dtype": torch.bfloat16}, TypeError, "out: is .*out_dtype"),
    ({"out": torch.ones(64, 32, device="meta")}, ValueError, "out: is on meta, a on cpu; move it"),
    ({"accumulate": True}, ValueError, "accumulate: needs out"),
    ({"bias": torch.ones(31)}, ValueError, r"bias: got \(31,\) .*expected \(32,\)"),
    ({"bias": torch.ones(1, 32)}, ValueError, "bias: got"),
    ({"bias": torch.ones(32, device="meta")}, ValueError, "bias: got .* on meta"),
    ({"bias": torch.ones(32, dtype=torch.complex64)}, TypeError, "bias: "),
    ({"bias": 1.0}, TypeError, "bias: "),
    ({"out": [1.0]}, TypeError, "out: "),
])  # fmt: skip
def test_arguments_of_gemm(layout, kwargs, error, message):
    with pytest.raises(error, match=message):
        bs.gemm(q(64, 128, layout=layout), q(32, 128, layout=layout).mT, **kwargs)


def test_out_is_untouched_by_a_refusal(layout):
    out, a, b = torch.full((64, 32), 7.0), q(64, 128, layout=layout), q(32, 128, layout=layout).mT
    with pytest.raises(ValueError, match="bias"):
        bs.gemm(a, b, out=out, bias=torch.ones(3))
    assert (out == 7).all()


@on_all
def test_devices():
    with pytest.raises(ValueError, match=r"a, b: are on cpu and meta; move one of them"):
        bs.gemm(q(64, 128), q(32, 128).mT.to("meta"))


@on_all
@pytest.mark.filterwarnings("ignore::blockscale.FallbackWarning")
def test_blocks_of_groups_in_a_plain_gemm():
    a, b = q(64, 32, axis=-2, offsets=i32(64)).mT, q(64, 32, axis=-2, offsets=i32(64))
    with pytest.raises(
        ValueError, match="a, b: blocks start anew in groups along K; use grouped_gemm"
    ):
        bs.gemm(a, b)


# --- grouped_gemm ---------------------------------------------------------------------------------


def experts(groups=2, n=32, k=128):
    return q(groups, n, k).mT


@pytest.mark.parametrize("offsets", [
    [32, 64], i32(32, 64).long(), i32(), i32(64, 32), i32(32, 65), i32(-1, 64),
    i32(32, 64, device="meta"), i32(32), i32(10, 20, 30),
], ids=str)  # fmt: skip
def test_offsets_of_grouped_gemm(offsets):
    with pytest.raises((ValueError, TypeError), match="offsets: "):
        bs.grouped_gemm(q(64, 128), experts(), offsets)


@pytest.mark.parametrize("counts", [
    [16, 1], i32(16, 1).long(), i32(), i32(17, 1), i32(-1, 1), i32(16, 1, device="meta"), i32(16),
    i32(1, 2, 3),
], ids=str)  # fmt: skip
def test_counts_of_grouped_gemm(counts):
    with pytest.raises((ValueError, TypeError), match="counts: "):
        bs.grouped_gemm(q(2, 16, 128), experts(), counts=counts)


def test_masked_grouped_gemm():
    a, counts = q(2, 16, 128), i32(16, 1)
    for given in ({}, {"offsets": i32(16, 32), "counts": counts}):
        with pytest.raises(TypeError, match=r"offsets, counts: got (neither|both)"):
            bs.grouped_gemm(a, experts(), **given)
    for rows in (q(3, 16, 128), q(33, 128), q(2, 16, 64), q(1, 2, 16, 128)):
        with pytest.raises(ValueError, match=r"a, b: got .* with counts; expected"):
            bs.grouped_gemm(rows, experts(), counts=counts)
    with pytest.raises(ValueError, match=r"a, b: got .* with counts; expected"):
        bs.grouped_gemm(a, q(32, 128).mT, counts=counts)


def test_batches_with_offsets_and_matrices_without_groups():
    with pytest.raises(ValueError, match=r"a, b: got .*a batch \(G, capacity, K\) wants counts="):
        bs.grouped_gemm(q(2, 16, 128), experts(), i32(16, 32))
    with pytest.raises(ValueError, match=r"where rows are grouped, b is \(G, K, N\)"):
        bs.grouped_gemm(q(64, 128), q(32, 128).mT, i32(32, 64))


@pytest.mark.parametrize("layout", ["tcgen05", "packed"])
def test_scales_that_lie_as_other_groups_have_them(layout):
    """Once read as if they lay as these have them."""
    a = bs.quantize(torch.randn(64, 128), layout=layout, offsets=i32(10, 20))
    with pytest.raises(ValueError, match="offsets: differ from those that a was quantized with"):
        bs.grouped_gemm(a, experts(), i32(10, 64))
    with pytest.raises(ValueError, match="a: was quantized with offsets"):
        bs.grouped_gemm(a, experts(), counts=i32(10, 10))


def test_tangents_of_products():
    """Once dropped in silence."""
    x = torch.randn(8, 128).bfloat16()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            bs.gemm(dual, q(32, 128).mT)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            bs.grouped_gemm(dual, experts(), i32(3, 8))


def test_out_over_offsets():
    memory = torch.zeros(64 * 32)
    offsets = memory[:2].view(torch.int32)
    offsets.copy_(i32(32, 64))
    with pytest.raises(ValueError, match="out: shares memory with offsets or counts"):
        bs.grouped_gemm(q(64, 128), experts(), offsets, out=memory.view(64, 32))


def test_operands_of_grouped_gemm():
    a, offsets = q(64, 128), i32(32, 64)
    with pytest.raises(TypeError, match=r"a: got torch\.float32; expected a ScaledTensor"):
        bs.grouped_gemm(x(), experts(), offsets)
    with pytest.raises(TypeError, match="a: got list; expected a ScaledTensor"):
        bs.grouped_gemm([1.0], experts(), offsets)
    with pytest.raises(TypeError, match=r"b: got torch\.float32; expected a ScaledTensor"):
        bs.grouped_gemm(a, torch.ones(2, 128, 32), offsets)
    with pytest.raises(
        TypeError, match=r"a: got torch\.bfloat16; expected .* with offsets=offsets"
    ):
        bs.grouped_gemm(x().bfloat16(), q(128, 32, axis=-2, offsets=offsets), offsets)
    with pytest.raises(ValueError, match=r"b: is blocked along axis -1, .*pass b\.mT"):
        bs.grouped_gemm(a, q(2, 128, 32), offsets)
    with pytest.raises(ValueError, match="a, b: formats 'mxfp8' and 'nvfp4' cannot be multiplied"):
        bs.grouped_gemm(a, q(2, 32, 128, format="nvfp4").mT, offsets)
    with pytest.raises(ValueError, match=r"a, b: got .*expected \(M, K\) and \(G, K, N\)"):
        bs.grouped_gemm(a, experts(k=64), offsets)
    with pytest.raises(ValueError, match=r"a, b: got .*expected \(M, K\) and \(G, K, N\)"):
        bs.grouped_gemm(q(64, 1, 128), experts(), offsets)
    with pytest.raises(TypeError, match="out_dtype: got"):
        bs.grouped_gemm(a, experts(), offsets, out_dtype=torch.float64)


def test_wgrad_without_groups_along_the_contraction():
    offsets = i32(32, 64)
    a, b = q(64, 32, axis=-2).mT, q(64, 96, axis=-2)
    with pytest.raises(ValueError, match=r"a: its blocks do not start anew .*offsets=offsets"):
        bs.grouped_gemm(a, b, offsets)
    grouped = q(64, 32, axis=-2, offsets=offsets).mT
    with pytest.raises(ValueError, match="b: its blocks do not start anew"):
        bs.grouped_gemm(grouped, b, offsets)
    with pytest.raises(ValueError, match="offsets: differ from those that a was quantized with"):
        bs.grouped_gemm(grouped, q(64, 96, axis=-2, offsets=i32(30, 64)), i32(30, 64))


# --- flags, seeds and sharded tensors -------------------------------------------------------------

X = torch.randn(64, 64)
FLAGS = {
    "pad": lambda value: bs.quantize(X, pad=value),
    "k_major": lambda value: bs.quantize_both(X, k_major=value),
    "accumulate": lambda value: bs.gemm(
        bs.quantize(X), bs.quantize(X).mT, out=torch.zeros(64, 64), accumulate=value
    ),
    "swiglu": lambda value: bs.gemm_quantize(bs.quantize(X), bs.quantize(X).mT, swiglu=value),
}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["yes", "no", 1, 0, None])
def test_flags_are_true_or_false(name, value):
    """Also where an equal value was given before: True == 1."""
    FLAGS[name](True)
    FLAGS[name](False)
    with pytest.raises(TypeError, match=f"{name}: got {value!r}; expected True or False"):
        FLAGS[name](value)


def test_flags_of_producers():
    with pytest.raises(TypeError, match="pad: got 'yes'; expected True or False"):
        bs.swiglu_quantize(torch.randn(8, 128), pad="yes")


@pytest.mark.parametrize("wrong", [True, False])
def test_flags_are_no_numbers(wrong):
    bs.quantize(X, "nvfp4", global_scale=1)
    bs.rmsnorm_quantize(X, torch.ones(64), eps=1)
    with pytest.raises(TypeError, match=f"global_scale: got {wrong}; expected an fp32 scalar"):
        bs.quantize(X, "nvfp4", global_scale=wrong)
    with pytest.raises(ValueError, match=f"eps: got {wrong}; expected a positive number"):
        bs.rmsnorm_quantize(X, torch.ones(64), eps=wrong)


@pytest.mark.parametrize("seed", [True, False, "1", 1.0, 2**63])
def test_seeds_are_integers(seed):
    with pytest.raises(ValueError, match=r"seed: got .* expected a 64-bit int"):
        bs.quantize(X, seed=seed)


def test_a_sharded_tensor_says_what_to_do():
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        x = distribute_tensor(X, init_device_mesh("cpu", (1,)), [Shard(0)])
        for call in (bs.quantize, bs.quantize_both, bs.swiglu_quantize):
            with pytest.raises(TypeError, match=r"x: is a DTensor.*full_tensor\(\)"):
                call(x)
        layer = bs.nn.Linear(64, 64)
        with pytest.raises(TypeError, match=r"x: is a DTensor.*full_tensor\(\)"):
            layer(x)
        with pytest.raises(TypeError, match=r"weight: is a DTensor.*full_tensor\(\)"):
            bs.nn.linear(X, x, recipe=bs.Recipe())
        assert torch.equal(bs.quantize(x.to_local()), bs.quantize(X))
        others = {
            "grad": lambda: bs.swiglu_backward_quantize(x[:, :32], X),
            "weight": lambda: bs.rmsnorm_quantize(X, x[0]),
            "global_scale": lambda: bs.quantize(X, "nvfp4", global_scale=x.amax()),
        }
        for name, call in others.items():
            with pytest.raises(TypeError, match=rf"{name}: is a DTensor.*full_tensor\(\)"):
                call()
    finally:
        dist.destroy_process_group()


def test_out_of_groups():
    a, b, ends = q(64, 128), bs.quantize(x(2, 32, 128)).mT, i32(30, 64)
    with pytest.raises(ValueError, match="accumulate: groups of rows are not added to"):
        bs.grouped_gemm(a, b, ends, out=torch.zeros(64, 32), accumulate=True)
    with pytest.raises(ValueError, match=r"out: has shape \(64, 31\); the product is \(64, 32\)"):
        bs.grouped_gemm(a, b, ends, out=torch.zeros(64, 31))
    with pytest.raises(TypeError, match=r"out: got list; expected a torch\.Tensor"):
        bs.grouped_gemm(a, b, ends, out=[])
    with pytest.raises(TypeError, match=r"out: is torch\.float32, out_dtype asks for"):
        bs.grouped_gemm(a, b, ends, torch.bfloat16, out=torch.zeros(64, 32))
    a, b = (q(64, n, axis=-2, offsets=ends) for n in (32, 64))
    with pytest.raises(ValueError, match=r"out: has shape .* the product is \(2, 32, 64\)"):
        bs.grouped_gemm(a.mT, b, ends, out=torch.zeros(32, 64))
    with pytest.raises(ValueError, match="accumulate: needs out"):
        bs.grouped_gemm(a.mT, b, ends, accumulate=True)
    with pytest.raises(TypeError, match="accumulate: "):
        bs.grouped_gemm(a.mT, b, ends, out=torch.zeros(2, 32, 64), accumulate=1)
