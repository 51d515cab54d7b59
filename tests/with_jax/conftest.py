"""What tests of JAX's side have in common."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(params=["loops", "formulas"])
def way(request, monkeypatch):
    """Compiled loops, which JAX has on a CPU, or the formulas that XLA compiles elsewhere."""
    if request.param == "formulas":
        from blockscale.jax import formulas  # where JAX is installed

        quantize, array = (sys.modules[f"blockscale.jax.{name}"] for name in ("quantize", "array"))
        monkeypatch.setattr(
            quantize,
            "encoded",
            lambda x, scalar, steps, *asked, offsets=None: [
                formulas.encoded(x, scalar, steps, offsets, each) for each in asked
            ],
        )
        monkeypatch.setattr(
            array,
            "decoded",
            lambda *parts: formulas.decoded(*parts[:-1]).astype(parts[-1]),
        )
        monkeypatch.setattr(
            quantize,
            "default_global_scale",
            lambda x, step, asked: formulas.global_scale_of(
                formulas.largest_finite(x, step, asked), asked
            ),
        )
    return request.param
