"""By kernels on a GPU, by the compiled loops on a CPU, else by formulas: the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

from ..formats import Format
from ..kernels.cpu import xla as loops
from ..layouts import get_layout
from ..layouts.base import as_bytes
from ..layouts.scales import unswizzle_scale
from . import factors, formulas, gpu_dequantize, gpu_quantize
from .cut import Cut, Work, names_of
from .formulas import Asked, GlobalScale, Steps, Stored
from .groups import as_stored, moved_apart
from .partition import partitioned
from .seeds import of_shard
from .target import Target, current_target, fall_back
from .varying import varies_as_given

T = TypeVar("T")

__all__ = [
    "by_platform",
    "decoded",
    "encoded",
    "global_scale",
    "multiplied",
    "on_target",
    "target_of",
]


def encoded(
    x: jax.Array,
    scalar: jax.Array | None,
    steps: Steps,
    *asked: Asked,
    offsets: jax.Array | None = None,
) -> list[tuple[jax.Array, jax.Array]]:
    """As ``formulas.encoded``, for each of the axes that are ``asked`` for."""
    if all(each.axis == -1 and not each.layout.spreads for each in asked):
        offsets = None  # groups of rows move no scale
    target, (first, *_) = current_target(), asked
    unsupported = partial(gpu_quantize.unsupported, scalar, grouped=offsets is not None)
    reason = "" if target is None or first.hadamard is None else unsupported(asked, target)
    if reason and first.scaling != "ms_eden":  # a kernel may quantize what XLA transforms
        fall_back("quantize", reason)
        x = formulas.transformed(x, steps.signs, first)
        asked = (first._replace(hadamard=None),)
    target = target_of("quantize", partial(unsupported, asked))
    return _encoded(x, scalar, steps, offsets, asked, target)


@partial(jax.jit, static_argnums=(4, 5))
def _encoded(
    x: jax.Array,
    scalar: jax.Array | None,
    steps: Steps,
    offsets: jax.Array | None,
    asked: tuple[Asked, ...],
    target: Target | None,
) -> list[tuple[jax.Array, jax.Array]]:
    grouped, seed = offsets is not None, asked[0].seed
    dims, of_scalar, results = factors.of_quantize(x.shape, scalar, asked, grouped)

    def run(cut: Cut) -> Callable[..., list[tuple[jax.Array, jax.Array]]]:
        if seed is None or not cut.axes_of(dims):
            return _encode(asked, target)
        if target is not None:
            fall_back("quantize", "seed: no kernel takes where a shard of a sharded array begins")

        def by_formulas(
            x: jax.Array, scalar: jax.Array | None, steps: Steps, offsets: None
        ) -> list[tuple[jax.Array, jax.Array]]:
            own = of_shard(steps, seed, x.shape, cut, dims)
            return [formulas.encoded(x, scalar, own, offsets, each) for each in asked]

        return by_formulas

    whole = factors.whole((steps, offsets))
    work = Work(run, (dims, *of_scalar, *whole), tuple(results))
    return partitioned(work)(x, scalar, steps, offsets)


def _encode(
    asked: tuple[Asked, ...], target: Target | None
) -> Callable[..., list[tuple[jax.Array, jax.Array]]]:
    def by_formulas(*given: Any) -> list[tuple[jax.Array, jax.Array]]:
        return [formulas.encoded(*given, each) for each in asked]

    def by_loops(
        x: jax.Array, scalar: jax.Array | None, steps: Steps, offsets: jax.Array | None
    ) -> list[tuple[jax.Array, jax.Array]]:
        x = formulas.transformed(x, steps.signs, asked[0])
        return [_by_loops(x, scalar, offsets, each) for each in asked]

    def by_kernels(
        target: Target,
        x: jax.Array,
        scalar: jax.Array | None,
        steps: Steps,
        offsets: jax.Array | None,
    ) -> list[tuple[jax.Array, jax.Array]]:
        return gpu_quantize.encoded(x, scalar, steps, offsets, asked, target)

    def run(
        x: jax.Array, scalar: jax.Array | None, *rest: Any
    ) -> list[tuple[jax.Array, jax.Array]]:
        looped = asked[0].seed is None and asked[0].scaling == "amax"
        ways = {"cpu": by_loops} if looped and _takes(asked[0].blocked, scalar) else {}
        ways |= on_target(target, by_kernels)
        return by_platform(ways, by_formulas)(x, scalar, *rest)

    return run


def _by_loops(
    x: jax.Array, scalar: jax.Array | None, offsets: jax.Array | None, asked: Asked
) -> tuple[jax.Array, jax.Array]:
    format, axis, shape = asked.format, asked.axis, x.shape
    if offsets is not None and axis == -2:
        x = moved_apart(x, offsets)
    how = {"scale_rounding": asked.scale_rounding, "nonfinite": asked.nonfinite}
    data, scale = loops.quantize(x, asked.blocked, axis=axis, global_scale=scalar, **how)
    if format.turned(axis, asked.k_major) and not format.turned(axis, False):
        data = jnp.swapaxes(data, -1, -2)
    scale = scale.view(format.scale.numpy_dtype)
    return as_stored(data.view(format.element.numpy_dtype), scale, asked, offsets, shape)


def decoded(
    data: jax.Array, scale: jax.Array, scalar: jax.Array | None, stored: Stored, dtype: np.dtype
) -> jax.Array:
    """As ``formulas.decoded``, rounded once to ``dtype``; what lies turned is turned by who reads
    it."""
    target = target_of("dequantize", lambda target: gpu_dequantize.unsupported(scalar, stored))
    return _decoded(data, scale, scalar, stored, dtype, target)


@partial(jax.jit, static_argnums=(3, 4, 5))
def _decoded(
    data: jax.Array,
    scale: jax.Array,
    scalar: jax.Array | None,
    stored: Stored,
    dtype: np.dtype,
    target: Target | None,
) -> jax.Array:
    values, operands = factors.of_dequantize(stored, scalar)

    def run(cut: Cut) -> Callable[..., jax.Array]:
        shard = stored._replace(shape=cut.shape(values, stored.shape))
        return _decode(shard, dtype, target)

    return partitioned(Work(run, tuple(operands), (values,)))(data, scale, scalar)


def _decode(stored: Stored, dtype: np.dtype, target: Target | None) -> Callable[..., jax.Array]:
    def by_formulas(data: jax.Array, scale: jax.Array, scalar: jax.Array | None) -> jax.Array:
        return formulas.decoded(data, scale, scalar, stored).astype(dtype)

    def by_loops(data: jax.Array, scale: jax.Array, scalar: jax.Array | None) -> jax.Array:
        format, axis, shape = stored.format, stored.axis, stored.shape
        compact, found = format.scale_shape(shape, axis), format.scale.numpy_dtype
        scale = unswizzle_scale(scale, axis, get_layout(stored.layout), compact, found, None)
        turned, (shape, axis) = stored.turned[0], stored.lying
        if turned != stored.turned[1]:
            scale = jnp.swapaxes(scale, -1, -2)
        values = loops.dequantize(
            as_bytes(data), as_bytes(scale), format, shape=shape, axis=axis, global_scale=scalar
        )
        return (jnp.swapaxes(values, -1, -2) if turned else values).astype(dtype)

    def by_kernels(
        target: Target, data: jax.Array, scale: jax.Array, scalar: jax.Array | None
    ) -> jax.Array:
        return gpu_dequantize.decoded(data, scale, scalar, stored, dtype, target)

    def run(data: jax.Array, scale: jax.Array, scalar: jax.Array | None) -> jax.Array:
        ways = {"cpu": by_loops} if _takes(stored.format, scalar) else {}
        ways |= on_target(target, by_kernels)
        return by_platform(ways, by_formulas)(data, scale, scalar)

    return run


def global_scale(x: jax.Array, step: jax.Array | None, asked: GlobalScale) -> jax.Array:
    """The global scale of all of ``x``; ``step``: of a transform's signs."""
    target = target_of("global_scale", partial(gpu_quantize.unsupported_global_scale, asked))
    return _global_scale(x, step, asked, target)


@partial(jax.jit, static_argnums=(2, 3))
def _global_scale(
    x: jax.Array, step: jax.Array | None, asked: GlobalScale, target: Target | None
) -> jax.Array:
    def by_formulas(x: jax.Array, step: jax.Array | None) -> jax.Array:
        return formulas.global_scale_of(formulas.largest_finite(x, step, asked), asked)

    def by_kernels(target: Target, x: jax.Array, step: jax.Array | None) -> jax.Array:
        return gpu_quantize.global_scale(x, step, asked, target)

    def by_loops(x: jax.Array, step: jax.Array | None) -> jax.Array:
        return loops.global_scale(formulas.transformed(x, step, asked), asked.format)

    # loops leave no room above the largest scale
    ways: dict[str, Callable[..., jax.Array]] = {"cpu": by_loops} if asked.scaling == "amax" else {}
    ways |= on_target(target, by_kernels)
    dims = factors.of_values(x.shape, asked)

    def run(cut: Cut) -> Callable[..., jax.Array]:
        axes = cut.axes_of(dims)
        if not axes:
            return by_platform(ways, by_formulas)
        return lambda x, step: formulas.global_scale_of(
            jax.lax.pmax(formulas.largest_finite(x, step, asked), axes), asked
        )

    work = Work(run, (dims, *factors.whole(step)), ((),), sums=names_of(dims))
    return partitioned(work)(x, step)


def multiplied(
    x: jax.Array, data: jax.Array, scale: jax.Array, scalar: jax.Array | None, format: Format
) -> jax.Array:
    """``x @ w.mT`` in fp32, of a few rows by a weight (N, K) that is stored along K, with compact
    scales."""

    def by_values(
        x: jax.Array, data: jax.Array, scale: jax.Array, scalar: jax.Array | None
    ) -> jax.Array:
        how = Stored(format, -1, "compact", (data.shape[0], x.shape[-1]), (False, False))
        w = formulas.decoded(data, scale, scalar, how)
        return jnp.matmul(x, w.mT, precision=jax.lax.Precision.HIGHEST)

    def by_loops(
        x: jax.Array, data: jax.Array, scale: jax.Array, scalar: jax.Array | None
    ) -> jax.Array:
        return loops.multiply(x, as_bytes(data), as_bytes(scale), format, global_scale=scalar)

    return by_platform({"cpu": by_loops}, by_values)(x, data, scale, scalar)


def target_of(operation: str, why_not: Callable[[Target], str]) -> Target | None:
    """The target whose kernels can do an operation, or None; a warning says once why not."""
    target = current_target()
    reason = "" if target is None else why_not(target)
    if reason:
        fall_back(operation, reason)
        return None
    return target


def on_target(target: Target | None, by_kernels: Callable[..., T]) -> dict[str, Callable[..., T]]:
    """The way of kernels, by the platform of their target; none without one. ``vmap`` runs them one
    after the other."""
    if target is None:
        return {}
    return {target.platform: sequential_vmap(_without_derivative(partial(by_kernels, target)))}


def by_platform(ways: dict[str, Callable[..., T]], default: Callable[..., T]) -> Callable[..., T]:
    """A function that takes the way of the platform that it is compiled for."""
    ways = {name: varies_as_given(way) for name, way in ways.items()}
    return lambda *given: jax.lax.platform_dependent(*given, default=default, **ways)


def _without_derivative(function: Callable[..., T]) -> Callable[..., T]:
    """The same function, whose derivative is an error that names what has one."""
    run = jax.custom_jvp(function)

    @run.defjvp
    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            "kernels have no derivative: differentiate blockscale.jax.linear or dot_general, whose "
            "gradients are products of quantized operands"
        )

    return run


def _takes(format: Format, scalar: jax.Array | None) -> bool:
    """Whether the loops do; of global scales they take one."""
    return loops.supported(format) and (scalar is None or scalar.ndim == 0)
