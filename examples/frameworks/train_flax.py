"""A small Flax model that learns to continue Python sources, in bfloat16 and in MXFP8.

python -m examples.frameworks.train_flax
"""

from __future__ import annotations

import argparse as source  # any module with much text will do
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import blockscale.jax as bsj

CONTEXT, BATCH, WIDTH = 16, 256, 256


class Model(nnx.Module):
    """The next byte from those before: an embedding, two layers, and logits in bfloat16."""

    def __init__(self, dot_general: Callable[..., Any], rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(256, 32, rngs=rngs)
        how: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.first = nnx.Linear(32 * CONTEXT, WIDTH, dot_general=dot_general, **how)
        self.second = nnx.Linear(WIDTH, WIDTH, dot_general=dot_general, **how)
        self.head = nnx.Linear(WIDTH, 256, **how)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.embedding(x).reshape(len(x), -1)
        h = nnx.gelu(self.first(h))
        return self.head(h + nnx.gelu(self.second(h))).astype(jnp.float32)


def train(dot_general: Callable[..., Any], steps: int = 300) -> float:
    """The mean loss of the last fifty steps."""
    text = np.frombuffer(Path(source.__file__).read_bytes(), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
    model = Model(dot_general, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
        def loss(model: Model) -> jax.Array:
            logits, last = model(batch[:, :-1]), batch[:, -1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, last).mean()

        value, grad = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grad)
        return value

    draw, losses = np.random.default_rng(0), []
    for _ in range(steps):
        batch = windows[draw.integers(0, len(windows), BATCH)].astype(np.int32)
        losses.append(float(step(model, optimizer, jnp.asarray(batch))))
    return float(np.mean(losses[-50:]))


def main() -> None:
    plain, quantized = train(jax.lax.dot_general), train(bsj.dot_general)
    print(f"bfloat16 {plain:.4f}, MXFP8 {quantized:.4f} ({quantized / plain - 1:+.2%})")


if __name__ == "__main__":
    main()
