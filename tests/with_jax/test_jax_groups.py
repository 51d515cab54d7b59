"""Groups of rows and along K in JAX: torch's bytes, and its products, whatever the groups are."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp
from jax_cases import assert_refused, of_layouts
from test_jax_bytes import assert_same, nasty, of_torch

import blockscale as bs
import blockscale.jax as bsj

KEY = jax.random.key(0)
ROWS = 300
SHORT = (5, 5, 6, 200)  # an empty group, one of a row, and rows of none
#: As many each, so that functions are compiled once.
GROUPINGS = [SHORT, (0, 0, 0, 0), (0, 300, 300, 300), (128, 256, 256, 300), (1, 2, 3, 4)]
#: Formats, and whether columns are K-major, which packed ones are anyway.
FORMATS = [
    (name, k_major)
    for name, format in bs.formats.items()
    for k_major in (False, True)
    if format.block[0] == 1 and (k_major or format.element.bits == 8)
]


def drawn(seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(sorted(rng.choice((0, 1, rng.randrange(ROWS + 1))) for _ in range(4)))


GROUPINGS += map(drawn, range(6))


def ends_of(given: tuple[int, ...]) -> tuple[torch.Tensor, jax.Array]:
    return torch.tensor(given, dtype=torch.int32), jnp.array(given, jnp.int32)


@pytest.mark.parametrize(("name", "k_major"), FORMATS)
@pytest.mark.usefixtures("way")
def test_bytes(name, k_major):
    """Ends are traced: one compiled function for all of them."""
    how = {"format": name, "axis": -2, "k_major": k_major}
    quantize = jax.jit(lambda x, ends: bsj.quantize(x, offsets=ends, **how))
    x = nasty(torch.float32, ROWS, 40)
    for given in GROUPINGS:
        theirs, ours = ends_of(given)
        wanted = bs.quantize(x, offsets=theirs, **how)
        found = quantize(of_torch(x), ours)
        assert_same(found, wanted)
        assert found.k_grouped
        assert found.mT.shape == tuple(wanted.mT.shape)
        values = found.mT.dequantize(jnp.float32)
        assert np.array_equal(values, found.dequantize(jnp.float32).T, equal_nan=True)


@pytest.mark.parametrize("ends", [(299,), tuple(range(7, ROWS, 7))], ids=["one", "many"])
def test_other_counts(ends):
    theirs, ours = ends_of(ends)
    x, how = nasty(torch.float32, ROWS, 40), {"axis": -2, "k_major": True}
    q = bsj.quantize(of_torch(x), offsets=ours, **how)
    assert_same(q, bs.quantize(x, offsets=theirs, **how))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nonfinite", ["propagate", "te"])
@pytest.mark.parametrize("way", ["loops", "formulas"], indirect=True)
@pytest.mark.usefixtures("way")
def test_dtypes(dtype, nonfinite):
    theirs, ours = ends_of(SHORT)
    x, how = nasty(dtype, ROWS, 40), {"axis": -2, "k_major": True, "nonfinite": nonfinite}
    wanted = bs.quantize(x, "nvfp4", offsets=theirs, **how)
    assert_same(bsj.quantize(of_torch(x), "nvfp4", offsets=ours, **how), wanted)


@of_layouts
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.usefixtures("way")
def test_layouts(name, layout, axis):
    """Groups of rows start on tiles of their own in some."""
    x = nasty(torch.float32, ROWS, 256)
    for given in GROUPINGS[:4]:
        theirs, ours = ends_of(given)
        how = {"axis": axis, "layout": layout, "k_major": axis == -2}
        wanted = bs.quantize(x, name, offsets=theirs, **how)
        found = bsj.quantize(of_torch(x), name, offsets=ours, **how)
        assert_same(found, wanted)
        assert found.k_grouped == (axis == -2)
        values = found.mT.dequantize(jnp.float32)
        assert np.array_equal(values, found.dequantize(jnp.float32).T, equal_nan=True)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_both_axes_and_stochastic(name):
    """Random bits are those of elements where they were."""
    theirs, ours = ends_of(SHORT)
    x = nasty(torch.float32, ROWS, 64)
    for how in ({}, {"seed": 7}, {"k_major": True}):
        wanted = bs.quantize_both(x, name, offsets=theirs, **how)
        for got, each in zip(
            bsj.quantize_both(of_torch(x), name, offsets=ours, **how), wanted, strict=True
        ):
            assert_same(got, each)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("k_major", [False, True], ids=["", "k_major"])
@pytest.mark.parametrize(("name", "layout"), [
    ("mxfp8", "compact"), ("nvfp4", "tcgen05"), ("fp8_1x128", "sm90"),
])  # fmt: skip
def test_torch_and_back(name, layout, axis, k_major):
    """In the same memory, ends, too."""
    theirs, _ = ends_of((5, 5, 133, 200))
    q = bs.quantize(
        torch.randn(ROWS, 256), name, axis, offsets=theirs, layout=layout, k_major=k_major
    )
    for each in (q, q.mT):
        found = bsj.from_torch(each)
        assert found.shape == tuple(each.shape)
        assert found.offsets.unsafe_buffer_pointer() == theirs.data_ptr()
        assert np.array_equal(found.dequantize(), each.dequantize())
        back = bsj.to_torch(found)
        assert (back.axis, back.k_grouped) == (each.axis, each.k_grouped)
        assert back.qdata.data_ptr() == each.qdata.data_ptr()
        assert back.offsets.data_ptr() == theirs.data_ptr()
        assert torch.equal(back.dequantize(), each.dequantize())


@pytest.mark.parametrize(("left", "right"), [
    ("mxfp8", "mxfp8"), ("mxfp8_e5m2", "mxfp4"), ("nvfp4", "nvfp4"), ("fp8_1x128", "fp8_1x128"),
    ("fp8_1x128", "nvfp4"), ("mxfp6_e2m3", "mxfp8"),
])  # fmt: skip
@pytest.mark.parametrize("k_major", [False, True], ids=["", "k_major"])
def test_products(left, right, k_major):
    """Exact values, fp32 sums."""
    x, g = torch.randn(ROWS, 72), torch.randn(ROWS, 48)
    how = {"axis": -2, "k_major": k_major}

    @partial(jax.jit, static_argnums=3)
    def product(g, x, ends, dtype):
        a, b = (
            bsj.quantize(each, name, offsets=ends, **how) for each, name in ((g, left), (x, right))
        )
        return bsj.grouped_gemm(a.mT, b, ends, dtype)

    for given in GROUPINGS:
        theirs, ours = ends_of(given)
        a, b = (
            bs.quantize(each, name, offsets=theirs, **how) for each, name in ((g, left), (x, right))
        )
        wanted = bs.grouped_gemm(a.mT, b, theirs, torch.float32).numpy()
        found = product(of_torch(g), of_torch(x), ours, jnp.float32)
        assert found.shape == (len(given), 48, 72)
        assert np.allclose(found, wanted, rtol=1e-5, atol=1e-4)
        rounded = product(of_torch(g), of_torch(x), ours, None)
        assert np.array_equal(rounded, found.astype(jnp.bfloat16))


def test_nan_stays_in_its_group():
    """Nor do rows of no group count."""
    _, ours = ends_of((30, 31, 200))
    x = torch.randn(ROWS, 48)
    x[30], x[200:] = torch.inf, torch.nan
    q = bsj.quantize(of_torch(x), "mxfp8", -2, offsets=ours, k_major=True)
    found = np.asarray(bsj.grouped_gemm(q.mT, q, ours, jnp.float32))
    assert np.isnan(found[1]).all()
    for i, (start, end) in ((0, (0, 30)), (2, (31, 200))):
        alone = bsj.quantize(of_torch(x[start:end]), "mxfp8", -2, pad=True)
        wanted = bsj.gemm(alone.mT, alone, jnp.float32)
        assert np.allclose(found[i], wanted, rtol=1e-5, atol=1e-4)


def test_nan_of_a_matrix_stays_in_its_group():
    """Rows of other groups, and of none, are not multiplied by it."""
    x, w = jnp.ones((64, 32)), jnp.ones((3, 16, 32)).at[1].set(jnp.nan)
    ends = jnp.array([10, 30, 50], jnp.int32)
    y = bsj.grouped_gemm(bsj.quantize(x), bsj.quantize(w).mT, ends, jnp.float32)
    row = np.arange(64)
    assert np.array_equal(np.isnan(y).all(1), (row >= 10) & (row < 30))
    assert np.array_equal(np.isnan(y).any(1), (row >= 10) & (row < 30))
    assert not np.asarray(y)[50:].any()


@pytest.mark.parametrize("ends", [(40, 10, 64), (-5, 20, 99), (70, 50, 20)])
def test_ends_in_disorder(ends):
    """Are taken for the nearest that are in order, as kernels take them."""
    a, b = bsj.quantize(jnp.ones((64, 32))), bsj.quantize(jax.random.normal(KEY, (3, 16, 32))).mT
    found, wanted = (
        bsj.grouped_gemm(a, b, jnp.array(each, jnp.int32), jnp.float32)
        for each in (ends, np.maximum.accumulate(np.clip(ends, 0, 64)))
    )
    assert np.array_equal(found, wanted)


def test_rows_in_tiles_are_multiplied():
    """By any ends, as scales are read where those that were quantized with put them."""
    theirs, ours = ends_of((5, 5, 133, 200))
    a = bs.quantize(torch.randn(ROWS, 128), "mxfp8", offsets=theirs, layout="tcgen05")
    w = bs.quantize(torch.randn(4, 48, 128), "mxfp8")
    wanted = bs.grouped_gemm(a, w.mT, theirs, torch.float32, backend="reference").numpy()
    left, right = bsj.from_torch(a), bsj.from_torch(w)
    found = bsj.grouped_gemm(left, right.mT, ours, jnp.float32)
    assert np.allclose(found, wanted, rtol=1e-5, atol=1e-4)
    one = bsj.gemm(left, jax.tree.map(lambda x: x[2], right).mT, jnp.float32)
    assert np.allclose(one[5:133], wanted[5:133], rtol=1e-5, atol=1e-4)


def test_transformations():
    """vmap, scan and a pytree's round trip give what a loop does."""
    xs = jax.random.normal(jax.random.key(0), (3, ROWS, 64))
    ends = jnp.array([[5, 5, 200], [0, 0, 0], [100, 250, 300]], jnp.int32)

    def step(x, ends):
        q = bsj.quantize(x, "mxfp8", -2, offsets=ends, k_major=True)
        again = jax.tree.unflatten(jax.tree.structure(q), jax.tree.leaves(q))
        return q, bsj.grouped_gemm(again.mT, q, ends, jnp.float32), q.dequantize()

    mapped = jax.vmap(step)(xs, ends)
    assert mapped[0].shape == xs.shape
    assert np.array_equal(mapped[0].dequantize(), mapped[2])
    _, scanned = jax.lax.scan(lambda carry, each: (carry, step(*each)), 0, (xs, ends))
    for i in range(3):
        alone = step(xs[i], ends[i])
        for many in (mapped, scanned):
            for one, other in zip(jax.tree.leaves(many), jax.tree.leaves(alone), strict=True):
                assert np.allclose(
                    np.asarray(one[i], np.float32), np.asarray(other, np.float32), atol=1e-5
                )


X = jnp.ones((64, 32))
BATCH = jnp.ones((2, 32, 64))
EACH = jnp.array([10, 64], jnp.int32)
Q = bsj.quantize(X, "mxfp8", -2, offsets=EACH)
PLAIN = bsj.quantize(X, "mxfp8", -2)
BAD = [
    (lambda: bsj.quantize(X, axis=-2, offsets=[10, 64]), TypeError, "offsets: got list; expected"),
    (lambda: bsj.quantize(X, axis=-2, offsets=EACH.astype(float)), TypeError,
     r"offsets: got float32 of 1 dimension\(s\); expected an int32 array of one dimension"),
    (lambda: bsj.quantize(X, axis=-2, offsets=EACH[None]), TypeError, r"int32 of 2 dimension\(s\)"),
    (lambda: bsj.quantize(X, axis=-2, offsets=EACH[:0]), ValueError, "offsets: is empty"),
    (lambda: bsj.quantize(X[None], axis=-2, offsets=EACH), ValueError, "cut the rows of a matrix"),
    (lambda: bsj.quantize(jnp.ones((128, 128)), "fp8_128x128", -2, offsets=EACH), ValueError,
     "span 128 rows; groups cannot cut them"),
    (lambda: bsj.quantize_both(X[:, :20], offsets=EACH), ValueError, "pass pad=True"),
    (lambda: bsj.gemm(Q.mT, Q), ValueError, "use grouped_gemm"),
    (lambda: bsj.gemm(Q.mT, PLAIN), ValueError, "use grouped_gemm"),
    (lambda: bsj.grouped_gemm(PLAIN.mT, Q, EACH), ValueError,
     "a: its blocks do not start anew in each group along K; quantize it with axis=-2"),
    (lambda: bsj.grouped_gemm(Q.mT, PLAIN, EACH), ValueError, "b: its blocks do not start anew"),
    (lambda: bsj.grouped_gemm(Q.mT, bsj.quantize(jnp.ones((2, 32, 64))).mT, EACH), ValueError,
     "a: its blocks start anew in each group along K; quantize it without offsets"),
    (lambda: bsj.grouped_gemm(X.T.astype(jnp.bfloat16), Q, EACH), TypeError,
     "a: got bfloat16; expected a ScaledArray with offsets=offsets, as b"),
    (lambda: bsj.grouped_gemm(Q.mT, Q, EACH[:1]), ValueError,
     "offsets: got 1 groups, a was quantized with 2"),
    (lambda: bsj.grouped_gemm(Q, Q, EACH), ValueError, "blocked along axis -2"),
    (lambda: bsj.grouped_gemm(PLAIN.mT, bsj.quantize(jnp.ones((3, 32, 64))).mT, EACH), ValueError,
     "expected one offset for each matrix of b"),
    (lambda: bsj.grouped_gemm(Q.mT, Q, EACH, "int8"), ValueError, "out_dtype: got int8"),
    (lambda: bsj.grouped_gemm(bsj.quantize(BATCH), bsj.quantize(jnp.ones((2, 2, 8, 64))).mT, EACH),
     ValueError, r"a: has shape \(2, 32, 64\); expected a matrix"),
    (lambda: bsj.all_gather(Q, "d"), ValueError, "q: has groups"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "says"), BAD)
def test_bad_input(call, kind, says):
    assert_refused(call, kind, says)
