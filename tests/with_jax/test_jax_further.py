"""Squares, transforms and scalings of JAX's arrays: the bytes that torch's side has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp
from test_jax_bytes import assert_same, nasty, octets, of_torch

import blockscale as bs
import blockscale.jax as bsj

ENDS = np.array([20, 64], np.int32)
EDEN = {"scaling": "ms_eden", "seed": 3}
HOW = {  # formats, and how they are quantized
    "squares": ("mxfp8", {"square": True}),
    "squares of 16": ("nvfp4", {"square": True, "seed": 5}),
    "transformed": ("nvfp4", {"hadamard": bs.Hadamard(16, 0xACE1)}),
    "transformed by 2": ("mxfp8", {"hadamard": bs.Hadamard(2)}),
    "transformed by 128": ("mxfp4", {"hadamard": bs.Hadamard(128, bs.Seed(3, 5)), "seed": 1}),
    "transformed squares": ("mxfp4", {"square": True, "hadamard": bs.Hadamard(8)}),
    "four_over_six": ("nvfp4", {"scaling": "four_over_six"}),
    "squares of four_over_six": ("nvfp4", {"scaling": "four_over_six", "square": True}),
    "four_over_six, te": ("nvfp4", {"scaling": "four_over_six", "nonfinite": "te"}),
    "search": ("nvfp4", {"scaling": "search", "hadamard": bs.Hadamard(32)}),
    "ms_eden": ("nvfp4", {**EDEN, "hadamard": bs.Hadamard(16, 0xACE1)}),
    "ms_eden by 128": ("nvfp4", {**EDEN, "hadamard": bs.Hadamard(128)}),
}


def tiny(*shape):
    """Of all exponents from those of subnormals up to where squares of errors are normal."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-149, -40, shape, generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator), exponents)


def spikes(*shape):
    """One element of a block loses nothing, and the others so little that squares are subnormal."""
    generator = torch.Generator().manual_seed(2)
    x = torch.ldexp(torch.randn(shape, generator=generator), torch.tensor(-67))
    rows, columns = (torch.arange(n) % 16 for n in shape)
    return torch.where(rows[:, None] == columns, 6.0, x)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", HOW)
def test_bytes(name, axis):
    format, how = HOW[name]
    quantize = jax.jit(lambda x: bsj.quantize(x, format, axis, **how))
    for x in (nasty(torch.float32, 128, 256), tiny(128, 256), spikes(128, 256)):
        wanted = bs.quantize(x, format, axis, backend="reference", **how)
        assert_same(quantize(of_torch(x)), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_batches_of_half(dtype):
    x = nasty(dtype, 2, 48, 64)
    for how in ({"square": True}, {"hadamard": bs.Hadamard(8, 9)}, {"scaling": "four_over_six"}):
        wanted = bs.quantize(x, "nvfp4", **how)
        assert_same(bsj.quantize(of_torch(x), "nvfp4", **how), wanted)


def test_both_axes():
    x = nasty(torch.float32, 96, 64)
    how = {"square": True, "scaling": "four_over_six"}
    pairs = zip(
        bsj.quantize_both(of_torch(x), "nvfp4", **how),
        bs.quantize_both(x, "nvfp4", **how),
        strict=True,
    )
    for found, wanted in pairs:
        assert_same(found, wanted)


def test_a_layout_of_squares():
    x = nasty(torch.bfloat16, 200, 256)
    wanted = bs.quantize(x, "mxfp8", square=True, layout="tcgen05")
    assert_same(bsj.quantize(of_torch(x), "mxfp8", square=True, layout="tcgen05"), wanted)


@pytest.mark.parametrize("axis", [-1, -2])
def test_groups(axis):
    """Random bits, scalings, and along rows transforms."""
    x, ends = nasty(torch.float32, 200, 64), (0, 70, 71, 190)
    for how in (
        {"seed": 3},
        {"scaling": "four_over_six"},
        *([{"hadamard": bs.Hadamard(16, 5)}] if axis == -1 else []),
    ):
        layout = {"layout": "tcgen05"} if axis == -1 else {}
        offsets = torch.tensor(ends, dtype=torch.int32)
        wanted = bs.quantize(x, "nvfp4", axis, offsets=offsets, **layout, **how)
        offsets = jnp.array(ends, jnp.int32)
        found = bsj.quantize(of_torch(x), "nvfp4", axis, offsets=offsets, **layout, **how)
        assert np.array_equal(octets(found.data), octets(wanted.qdata))
        assert np.array_equal(octets(found.scale), octets(wanted.qscale))


def test_signs_of_a_traced_step():
    x = nasty(torch.float32, 32, 64)
    quantize = jax.jit(
        lambda x, step: bsj.quantize(x, "nvfp4", hadamard=bs.Hadamard(16, bsj.Seed(7, step)))
    )
    for step in (0, 1, -5):
        wanted = bs.quantize(x, "nvfp4", hadamard=bs.Hadamard(16, bs.Seed(7, step)))
        assert_same(quantize(of_torch(x), jnp.int32(step)), wanted)
    assert quantize._cache_size() == 1


def test_steps_of_64_bits():
    """Where JAX has 64 bits switched off, too."""
    x, step = torch.randn(32, 64), -(2**40) + 3
    with jax.enable_x64(True):
        ours = jnp.int64(step)
    how = [
        {"seed": seed(7, at), "hadamard": bs.Hadamard(16, seed(8, at))}
        for seed, at in ((bs.Seed, step), (bsj.Seed, ours))
    ]
    wanted = bs.quantize(x, "nvfp4", **how[0])
    assert_same(bsj.quantize(of_torch(x), "nvfp4", **how[1]), wanted)


def test_a_product_of_what_is_transformed():
    """Is what it was, but for rounding."""
    x, w = (jax.random.normal(jax.random.key(i), (64, 256)) for i in range(2))
    signs = bs.Hadamard.random(seed=1)
    a, b = (bsj.quantize(each, "mxfp8", hadamard=signs) for each in (x, w))
    exact = x @ w.T
    error = jnp.linalg.norm(bsj.gemm(a, b.mT, jnp.float32) - exact) / jnp.linalg.norm(exact)
    assert error < 0.05


def test_global_scales():
    x = nasty(torch.float32, 64, 128).nan_to_num(0, 0, 0)
    for how in (
        {"scaling": "four_over_six"},
        {"hadamard": bs.Hadamard(16), "axis": -2},
        {"hadamard": bs.Hadamard(32), "scaling": "four_over_six"},
    ):
        wanted = bs.quantize(x, "nvfp4", **how).global_scale
        assert np.array_equal(octets(bsj.global_scale(of_torch(x), "nvfp4", **how)), octets(wanted))


@pytest.mark.parametrize(("how", "error", "match"), [
    ({"format": "mxfp8", "scaling": "four_over_six"}, ValueError, "leave it out"),
    ({"scaling": "best"}, ValueError, "choose one of 'amax'"),
    ({"scaling": "search", "seed": 1}, ValueError, "rounds to nearest"),
    ({"scaling": "ms_eden", "seed": 1}, ValueError, "corrects blocks that are transformed"),
    ({"scaling": "ms_eden", "hadamard": bs.Hadamard(16)}, ValueError, "seed: got None"),
    ({"hadamard": 16}, TypeError, "expected blockscale.Hadamard"),
    ({"hadamard": bs.Hadamard(128)}, ValueError, "not a multiple of 128"),
    ({"format": "fp8_128x128", "square": True, "pad": True}, ValueError, "are squares"),
    ({"global_scale": -1.0}, ValueError, "expected a positive finite number"),
    ({"global_scale": 1e-50}, ValueError, "expected a positive finite number"),
    ({"global_scale": 1e39}, ValueError, "expected a positive finite number"),
    ({"global_scale": True}, TypeError, "global_scale: got True"),
    ({"square": 1}, TypeError, "square: got 1"),
    ({"square": True, "offsets": ENDS}, ValueError, "groups of offsets would cut squares"),
    ({"axis": -2, "hadamard": bs.Hadamard(16), "offsets": ENDS}, ValueError, "rows that offsets"),
])  # fmt: skip
def test_bad_input(how, error, match):
    x = np.ones((64, 64), np.float32)
    how = {"format": "nvfp4", **how}
    given = {k: jnp.asarray(v) if k == "offsets" else v for k, v in how.items()}
    theirs = {k: torch.from_numpy(v) if k == "offsets" else v for k, v in how.items()}
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda x: bsj.quantize(x, **given), x)
    with pytest.raises((error, TypeError), match=match):
        bs.quantize(torch.from_numpy(x), **theirs)


@pytest.mark.parametrize(("how", "match"), [
    ({"seed": bs.Seed(7, torch.tensor(3))}, "its step is a Tensor of another library"),
    ({"hadamard": bs.Hadamard(16, bs.Seed(7, torch.tensor(3)))}, "its step is a Tensor of another"),
    ({"seed": bs.Seed(7, 0, (jnp.int32(0), 0), (64, 64))}, "expected ints, .* a step of its own"),
])  # fmt: skip
def test_seeds_that_cannot_be(how, match):
    with pytest.raises(TypeError, match=match):
        bsj.quantize(jnp.ones((32, 64)), "nvfp4", **how)


@pytest.mark.parametrize(("x", "error", "match"), [
    (np.ones((32, 64)), TypeError, "expected a jax.Array"),
    (jnp.ones(64), ValueError, "expected a matrix"),
    (jnp.ones((32, 64), int), TypeError, "cast it first"),
])  # fmt: skip
def test_bad_input_of_a_global_scale(x, error, match):
    with pytest.raises(error, match=match):
        bsj.global_scale(x, "nvfp4")
