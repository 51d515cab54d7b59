"""Over which axes of a mesh arrays vary, which ``jax.shard_map`` checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")

__all__ = ["alike", "varies_as_given"]


def alike(*arrays: jax.Array) -> list[jax.Array]:
    """The same, each of which varies where one of them does: gradients of those that did not are
    summed over the mesh."""
    axes = _axes(arrays)
    return [_cast(x, axes) for x in arrays]


def varies_as_given(function: Callable[..., T]) -> Callable[..., T]:
    """What foreign code returns varies wherever its arguments do; JAX takes it for the same on all
    devices."""

    def run(*given: Any) -> T:
        axes = _axes(given)
        return jax.tree.map(lambda x: _cast(x, axes), function(*given))

    return run


def _axes(tree: Any) -> frozenset[str]:
    types = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(tree)]
    return frozenset[str]().union(*(each.varying for each in types))


def _cast(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = axes - _axes(x)
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x
