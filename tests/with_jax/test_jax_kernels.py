"""Kernels called by JAX, in the emulator: the bytes of XLA's formulas, the bits of torch's
products."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import torch
from emulated_jax import emulated

import blockscale as bs
import blockscale.jax as bsj
from blockscale.jax import target
from stand_in import emulated as emulated_torch

pytestmark = pytest.mark.kernels

ARCHS = ("sm_90a", "sm_100a")
EDEN = {"scaling": "ms_eden", "seed": 7}


def drawn(size):
    """A transform whose signs a kernel draws."""
    return bs.Hadamard(size, bsj.Seed(-9, jnp.int32(4)))


QUANTIZED = [  # shape, dtype, and how
    ((24, 160), "bfloat16", {"format": "mxfp8"}),
    ((24, 96), "float32", {"format": "mxfp8_e5m2", "scale_rounding": "floor"}),
    ((40, 96), "float16", {"format": "mxfp4", "axis": -2, "pad": True}),
    ((33, 80), "bfloat16", {"format": "nvfp4"}),
    ((32, 48), "float32", {"format": "nvfp4", "axis": -2}),
    ((136, 96), "bfloat16", {"format": "mxfp8", "layout": "tcgen05"}),
    ((8, 256), "bfloat16", {"format": "fp8_1x128", "layout": "sm90"}),
    ((130, 192), "float32", {"format": "fp8_128x128", "pad": True}),
    ((64, 40), "bfloat16", {"format": "mxfp8", "axis": -2, "k_major": True}),
    ((2, 3, 96), "bfloat16", {"format": "mxfp8", "nonfinite": "te"}),
    ((2, 32, 24), "float32", {"format": "mxfp8", "axis": -2}),
    ((2, 32, 32), "float32", {"format": "nvfp4", "axis": -2}),
    ((24, 96), "bfloat16", {"format": "mxfp8", "seed": 7}),
    ((2, 32, 36), "float32", {"format": "mxfp4", "axis": -2, "seed": bsj.Seed(-3, step=-2)}),
    ((16, 64), "bfloat16", {"format": "nvfp4", "seed": bsj.Seed(1, 2, (3, 5), (20, 71))}),
    ((32, 64), "bfloat16", {"format": "nvfp4", "square": True, "seed": 3}),
    ((40, 96), "float32", {"format": "mxfp8", "square": True, "axis": -2, "pad": True}),
    ((16, 96), "bfloat16", {"format": "nvfp4", "hadamard": bs.Hadamard(16, 0xACE1)}),
    ((128, 24), "bfloat16", {"format": "mxfp4", "axis": -2, "hadamard": drawn(128), "seed": 5}),
    ((32, 80), "bfloat16", {"format": "nvfp4", "axis": -2, "hadamard": bs.Hadamard(32)}),
    ((24, 96), "bfloat16", {"format": "nvfp4", "scaling": "four_over_six"}),
    ((16, 96), "float32", {"format": "nvfp4", "scaling": "four_over_six", "square": True}),
    ((8, 128), "bfloat16", {"format": "nvfp4", "hadamard": drawn(16), **EDEN}),
    ((200, 40), "bfloat16", {"format": "mxfp8", "axis": -2, "offsets": (13, 13, 150)}),
    ((200, 40), "float32", {"format": "nvfp4", "axis": -2, "offsets": (0, 130, 200)}),
    ((150, 40), "bfloat16", {
        "format": "mxfp8", "axis": -2, "offsets": (1, 140), "k_major": True, "layout": "tcgen05"}),
    ((150, 36), "bfloat16", {
        "format": "fp8_1x128", "axis": -2, "offsets": (70, 149), "k_major": True,
        "layout": "sm90"}),
    ((150, 96), "bfloat16", {"format": "mxfp4", "offsets": (13, 13, 140), "layout": "tcgen05"}),
]  # fmt: skip
APART = [  # what XLA transforms, and a kernel quantizes
    ({"format": "mxfp8", "axis": -2, "hadamard": bs.Hadamard(16)}, "columns of 8-bit elements"),
    ({"format": "nvfp4", "square": True, "hadamard": bs.Hadamard(16)}, "square: no kernel"),
]


def nasty(shape, dtype, seed=0):
    """Wide magnitudes, zeros, subnormals, infinities and NaN."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-20, 20, size=shape)
    special = [0, -0.0, 1e-40, np.inf, np.nan, 3e38, -6e-8]
    x.flat[:: x.size // len(special) + 1] = special
    with np.errstate(over="ignore"):
        return jnp.asarray(x.astype(np.float32)).astype(dtype)


def quantized(x, offsets=None, **how):
    ends = None if offsets is None else jnp.array(offsets, jnp.int32)
    return bsj.quantize(x, offsets=ends, **how)


def octets(tree):
    return [np.frombuffer(np.asarray(each).tobytes(), np.uint8) for each in jax.tree.leaves(tree)]


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(octets(got), octets(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("shape", "dtype", "how"), QUANTIZED)
def test_quantize(shape, dtype, how, arch):
    x = nasty(shape, dtype)
    expected = quantized(x, **how)
    with emulated(arch) as launched:
        got = jax.jit(lambda x: quantized(x, **how))(x)
        jax.block_until_ready(got)
    assert launched
    assert_same(got, expected)


@pytest.mark.parametrize(("how", "reason"), APART)
def test_transformed_by_xla(how, reason, monkeypatch):
    monkeypatch.setattr(target, "_warned", set())
    x = nasty((32, 64), "bfloat16")
    expected = bsj.quantize(x, **how)
    quantize = jax.jit(lambda x: bsj.quantize(x, **how))
    with emulated("sm_90a") as launched, pytest.warns(bs.FallbackWarning, match=reason):
        got = jax.block_until_ready(quantize(x))
    assert launched
    assert_same(got, expected)


def test_kernels_do_not_search(monkeypatch):
    monkeypatch.setattr(target, "_warned", set())
    quantize = partial(bsj.quantize, format="nvfp4", scaling="search")
    with emulated("sm_90a"), pytest.warns(bs.FallbackWarning, match="no GPU kernel tries so many"):
        jax.eval_shape(quantize, jnp.ones((16, 64)))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("shape", "dtype", "how"), QUANTIZED)
def test_dequantize(shape, dtype, how, arch):
    x = jnp.where(jnp.isfinite(x := nasty(shape, dtype)), x, 1)
    q = quantized(x, **how)
    for each in (q, q.mT):
        expected = bsj.dequantize(each)
        with emulated(arch) as launched:
            got = jax.jit(partial(bsj.dequantize))(each)  # traced anew
            jax.block_until_ready(got)
        assert launched
        assert_same(got, expected)


def operand(shape, format, axis=-1, seed=0, **how):
    """Plain bf16 of no format."""
    x = jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)
    return x if format is None else bsj.quantize(x, format, axis=axis, **how)


PRODUCTS = [  # M, N, K; formats of a and of the weight; how they are quantized
    ((40, 72, 256), ("fp8_1x128", "fp8_128x128"), {}),
    ((24, 136, 256), ("fp8_1x128", "fp8_1x128"), {"layout": "sm90"}),
    ((3, 96, 320), (None, "mxfp8"), {}),
    ((16, 80, 192), (None, "nvfp4"), {}),
    ((70, 144, 288), (None, "mxfp4"), {}),
    ((40, 72, 256), ("mxfp8", "mxfp8"), {}),
    ((40, 80, 128), ("nvfp4", "nvfp4"), {}),
    ((130, 48, 160), ("mxfp8", "mxfp4"), {}),
    ((40, 72, 128), ("fp8_1x128", "mxfp4"), {}),
    ((5, 1088, 256), ("mxfp8", "mxfp8_e5m2"), {}),
    ((40, 1152, 2048), ("mxfp8", "mxfp8"), {}),  # stream-K, whose counters a kernel changes
]
BLACKWELL = [
    ((40, 72, 256), ("mxfp8", "mxfp8"), {}),
    ((130, 136, 96), ("mxfp4", "mxfp4"), {}),
    ((40, 80, 80), ("nvfp4", "nvfp4"), {}),
    ((136, 128, 160), ("mxfp8", "mxfp4"), {}),
    ((136, 128, 128), ("mxfp8", "mxfp8_e5m2"), {"layout": "tcgen05"}),
]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("arch", "shape", "formats", "how"),
    [("sm_90a", *each) for each in PRODUCTS] + [("sm_100a", *each) for each in BLACKWELL],
)
def test_gemm(arch, shape, formats, how, bias):
    """The bits of torch's side."""
    m, n, k = shape
    a, w = operand((m, k), formats[0], seed=1, **how), operand((n, k), formats[1], seed=2, **how)
    v = jnp.arange(n, dtype=jnp.float32) if bias else None
    with emulated(arch) as launched:
        got = jax.jit(lambda a, w: bsj.gemm(a, w.mT, jnp.float32, bias=v))(a, w)
        jax.block_until_ready(got)
    assert launched
    left, right, added = (None if x is None else to_torch(x) for x in (a, w, v))
    with emulated_torch(arch) as found:
        expected = bs.gemm(left, right.mT, torch.float32, bias=added)
    assert launched == found
    np.testing.assert_array_equal(np.asarray(got), expected.numpy())


GROUPED = [
    ("sm_90a", (72, 48, 256), ("fp8_1x128", "fp8_128x128")),
    ("sm_90a", (40, 80, 160), ("mxfp8", "mxfp8")),
    ("sm_90a", (40, 80, 128), (None, "nvfp4")),
    ("sm_90a", (40, 80, 128), ("nvfp4", "nvfp4")),
    ("sm_100a", (72, 80, 160), ("mxfp8", "mxfp8")),
    ("sm_100a", (72, 80, 80), ("nvfp4", "nvfp4")),
]


def grouped(arch, shape, formats, ends):
    """What was launched, the operands and the product, by kernels."""
    m, n, k = shape
    a, w = operand((m, k), formats[0], seed=1), operand((3, n, k), formats[1], seed=2)
    ends = jnp.array(ends, jnp.int32)
    with emulated(arch) as launched:
        got = jax.jit(lambda a, w: bsj.grouped_gemm(a, w.mT, ends, jnp.float32))(a, w)
        jax.block_until_ready(got)
    return launched, (a, w, ends), np.asarray(got)


@pytest.mark.parametrize(("arch", "shape", "formats"), GROUPED)
def test_grouped_gemm(arch, shape, formats):
    """The same, with an empty group, and rows that are no group's."""
    launched, given, got = grouped(arch, shape, formats, [13, 13, 35])
    left, right, offsets = map(to_torch, given)
    with emulated_torch(arch) as found:
        expected = bs.grouped_gemm(left, right.mT, offsets, torch.float32)
    assert launched == found
    np.testing.assert_array_equal(got, expected.numpy())
    assert not got[35:].any()


@pytest.mark.parametrize("ends", [(-4, 90, 20), (30, 7, 1000)])
@pytest.mark.parametrize(("arch", "shape", "formats"), [GROUPED[1], GROUPED[4]])
def test_ends_that_no_groups_have(arch, shape, formats, ends):
    """Nothing is read or written that is not the call's."""
    assert grouped(arch, shape, formats, ends)[0]


COLUMNS = [  # formats of both, and the layout of their scales
    ("sm_90a", ("fp8_1x128", "fp8_1x128"), "sm90"),
    ("sm_90a", ("fp8_1x128", "fp8_1x128"), "compact"),
    ("sm_90a", ("mxfp8", "mxfp4"), "compact"),
    ("sm_90a", ("nvfp4", "nvfp4"), "tcgen05"),
    ("sm_100a", ("mxfp8", "mxfp8_e5m2"), "tcgen05"),
    ("sm_100a", ("mxfp4", "mxfp8"), "compact"),
    ("sm_100a", ("nvfp4", "nvfp4"), "compact"),
]


def columns(arch, formats, layout, ends, traced=None):
    """The same as of ``grouped``, of groups along K; ``traced``: ends that the product is given."""
    how = {"axis": -2, "offsets": jnp.array(ends, jnp.int32), "k_major": True, "layout": layout}
    given = zip((72, 136), formats, (1, 2), strict=True)
    a, b = (operand((200, n), format, seed=seed, **how) for n, format, seed in given)
    ends = how["offsets"] if traced is None else jnp.array(traced, jnp.int32)
    with emulated(arch) as launched:
        got = jax.jit(lambda a, b, ends: bsj.grouped_gemm(a.mT, b, ends, jnp.float32))(a, b, ends)
        jax.block_until_ready(got)
    return launched, (a, b, ends), np.asarray(got)


@pytest.mark.parametrize(("arch", "formats", "layout"), COLUMNS)
def test_groups_along_k(arch, formats, layout):
    """The bits of torch's side, whose kernel it is; an empty group has zeros."""
    launched, given, got = columns(arch, formats, layout, [40, 40, 173])
    left, right, offsets = map(to_torch, given)
    with emulated_torch(arch) as found:
        expected = bs.grouped_gemm(left.mT, right, offsets, torch.float32, backend="kernel")
    assert launched[-1] == found[-1]
    assert launched[-1].grouping == "k"
    assert len(launched) == len(found)
    np.testing.assert_array_equal(got, expected.numpy())
    assert not got[1].any()


@pytest.mark.parametrize("ends", [(-4, 250, 20), (30, 7, 1000)])
@pytest.mark.parametrize(("arch", "formats", "layout"), [COLUMNS[1], COLUMNS[2], COLUMNS[4]])
def test_ends_along_k_that_no_groups_have(arch, formats, layout, ends):
    """Neither those that are quantized with, nor those of the product."""
    assert columns(arch, formats, layout, ends)[0]
    assert columns(arch, formats, layout, (40, 40, 173), ends)[0]


@pytest.mark.parametrize(("arch", "formats", "how", "says"), [
    ("sm_90a", ("mxfp8", "mxfp8"), {"k_major": False}, "quantize columns .* with k_major=True"),
    ("sm_90a", ("mxfp8", "mxfp8"), {"seed": 1}, "seed: no kernel takes it with offsets"),
    ("sm_90a", ("fp8_1x128", "mxfp4"), {}, "groups along K of fp8_1x128 by mxfp4"),
    ("sm_100a", ("fp8_1x128", "fp8_1x128"), {}, "no instruction multiplies these"),
])  # fmt: skip
def test_groups_without_kernels(arch, formats, how, says, monkeypatch):
    """XLA computes with them, and says so."""
    monkeypatch.setattr(target, "_warned", set())
    ends = jnp.array([40, 40, 173], jnp.int32)
    how = {"axis": -2, "offsets": ends, "k_major": True, **how}
    given = [operand((200, n), None, seed=n) for n in (72, 136)]

    def compute(*given):
        a, b = (bsj.quantize(x, name, **how) for x, name in zip(given, formats, strict=True))
        return a.dequantize(), bsj.grouped_gemm(a.mT, b, ends, jnp.float32)

    expected = compute(*given)
    with emulated(arch), pytest.warns(bs.FallbackWarning, match=f"{says}.*; XLA computes it"):
        got = jax.block_until_ready(jax.jit(compute)(*given))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (one, other)), rtol=1e-5, atol=1e-4
        )


def to_torch(x):
    return bsj.to_torch(x) if isinstance(x, bsj.ScaledArray) else torch.from_dlpack(x)


@pytest.mark.parametrize(
    ("arch", "format"), [("sm_90a", "mxfp8"), ("sm_90a", "fp8_block"), ("sm_100a", "nvfp4")]
)
def test_linear(arch, format):
    """Gradients, and a batch of calls, are those without kernels, but for the order of sums."""
    x, w = operand((2, 32, 128), None, seed=1), operand((128, 64), None, seed=2)

    def loss(w, x):
        return (bsj.linear(x, w, format=format).astype(jnp.float32) ** 2).mean()

    of_each = jax.vmap(jax.value_and_grad(loss, (0, 1)), (None, 0))
    expected = of_each(w, x)
    with emulated(arch) as launched:
        got = jax.jit(of_each)(w, x)
        jax.block_until_ready(got)
    assert len(launched) >= 2 * 3
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        one, other = (np.asarray(each).astype(np.float64) for each in (one, other))
        # a sum that is rounded otherwise may move an element of what is quantized next by a step
        assert np.linalg.norm(one - other) <= 2.0**-7 * np.linalg.norm(other)


def test_products_alike():
    """Two products of the same operands by stream-K do not share the counters that both change."""
    a, w = operand((40, 2048), "mxfp8", seed=1), operand((1152, 2048), "mxfp8", seed=2)
    with emulated("sm_90a") as launched:
        product = jax.jit(lambda a, w: [bsj.gemm(a, w.mT), bsj.gemm(a, w.mT, jnp.float32)])
        first, other = product(a, w)
        jax.block_until_ready(other)
    assert any(getattr(each, "stream_k", False) for each in launched)
    np.testing.assert_array_equal(first, other.astype(first.dtype))
    np.testing.assert_allclose(other, bsj.gemm(a, w.mT, jnp.float32), rtol=1e-5, atol=1e-3)


def test_no_derivative():
    w = operand((48, 128), "mxfp8")
    with emulated("sm_90a"), pytest.raises(NotImplementedError, match=r"jax\.linear"):
        jax.grad(lambda a: bsj.gemm(a, w.mT).sum())(jnp.ones((32, 128), jnp.bfloat16))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("lead", [(2,), (2, 1)])
def test_batch_of_products(lead, bias):
    a, w = operand((*lead, 24, 128), "nvfp4", seed=1), operand((*lead, 48, 128), "nvfp4", seed=2)
    v = jnp.arange(48, dtype=jnp.float32) if bias else None
    expected = bsj.gemm(a, w.mT, jnp.float32, bias=v)
    with emulated("sm_90a") as launched:
        got = jax.jit(lambda a, w, v: bsj.gemm(a, w.mT, jnp.float32, bias=v))(a, w, v)
        jax.block_until_ready(got)
    assert len(launched) == 4  # A is widened before each
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [3, 40, 300])  # decoded, widened, and widened before
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("alone", [False, True], ids=["", "weights"])
def test_tiles_of_scales_on_hopper(alone, format, rows):
    """What Blackwell reads as it lies has the bits of compact scales."""

    def product(layout):
        a, w = (
            operand(shape, kind, **({"layout": layout} if kind else {}))
            for shape, kind in (((rows, 160), None if alone else format), ((72, 160), format))
        )
        return jax.block_until_ready(jax.jit(lambda a, w: bsj.gemm(a, w.mT))(a, w))

    with emulated("sm_90a") as launched:
        expected, got = map(product, ("compact", "tcgen05"))
    assert launched
    assert_same(got, expected)


@pytest.mark.parametrize("format", ["fp8_1x128", "fp8_128x128"])
def test_products_of_bf16_by_blocks_of_128(format, monkeypatch):
    """XLA multiplies, and says so."""
    monkeypatch.setattr(target, "_warned", set())
    a, w = operand((24, 256), None, seed=1), operand((48, 256), format, seed=2)
    expected = bsj.gemm(a, w.mT, jnp.float32)
    with emulated("sm_90a"):
        multiply = jax.jit(lambda a, w: bsj.gemm(a, w.mT, jnp.float32))
        with pytest.warns(bs.FallbackWarning, match=f"no kernel multiplies bf16 by {format}"):
            got = multiply(a, w)
        jax.block_until_ready(got)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
