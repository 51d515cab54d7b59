"""Kernels called by JAX: in the emulator with the bytes of XLA's formulas, and lowered for GPUs
that are not here."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import jax
import jax.numpy as jnp
import numpy as np
from emulated_jax import emulated

import blockscale.jax as bsj

ARCHS = ("sm_90a", "sm_100a")
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
]


def nasty(shape, dtype, seed=0):
    """Wide magnitudes, zeros, subnormals, infinities and NaN."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-20, 20, size=shape)
    special = [0, -0.0, 1e-40, np.inf, np.nan, 3e38, -6e-8]
    x.flat[:: x.size // len(special) + 1] = special
    with np.errstate(over="ignore"):
        return jnp.asarray(x.astype(np.float32)).astype(dtype)


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
    expected = bsj.quantize(x, **how)
    with emulated(arch) as launched:
        got = jax.jit(lambda x: bsj.quantize(x, **how))(x)
        jax.block_until_ready(got)
    assert launched
    assert_same(got, expected)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("shape", "dtype", "how"), QUANTIZED)
def test_dequantize(shape, dtype, how, arch):
    x = jnp.where(jnp.isfinite(x := nasty(shape, dtype)), x, 1)
    q = bsj.quantize(x, **how)
    for each in (q, q.mT):
        expected = bsj.dequantize(each)
        with emulated(arch) as launched:
            got = jax.jit(partial(bsj.dequantize))(each)  # traced anew
            jax.block_until_ready(got)
        assert launched
        assert_same(got, expected)
