"""Examples of both frameworks: what they print is right, and MXFP8 learns as bfloat16 does."""

from __future__ import annotations

import pytest

pytest.importorskip("flax", reason="flax is not installed")

import jax
import numpy as np

import blockscale.jax as bsj
from examples.frameworks import mxfp8_jax, mxfp8_torch, train_flax


def test_one_layer():
    """Gradients of both are near those of products that are not quantized."""
    assert mxfp8_torch.main().shape == (128, 256)
    keys = jax.random.split(jax.random.key(0))
    x, w = jax.random.normal(keys[0], (32, 256)), jax.random.normal(keys[1], (256, 128)) / 16
    exact = 2 * x.T @ (x @ w) / (32 * 128)
    assert np.linalg.norm(mxfp8_jax.main() - exact) < 0.08 * np.linalg.norm(exact)


@pytest.mark.slow
def test_flax():
    plain, quantized = (train_flax.train(each) for each in (jax.lax.dot_general, bsj.dot_general))
    assert abs(quantized / plain - 1) < 0.005
    assert plain < 2.5  # it has learned something: ln 256 is 5.5
