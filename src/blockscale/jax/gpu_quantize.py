"""Quantizing by kernels: which one, and its arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from ..dtypes import FLOAT32, INT32, UINT8
from ..formats import Format
from ..kernels.quantizers.config import AmaxConfig, Config, Request, choose_config
from ..kernels.quantizers.output_shapes import output_shapes
from ..kernels.quantizers.refusals import why_not
from .formulas import Asked, GlobalScale, Steps
from .target import Target

__all__ = ["encoded", "global_scale", "unsupported", "unsupported_global_scale"]


def unsupported(
    scalar: jax.Array | None, asked: tuple[Asked, ...], target: Target, *, grouped: bool
) -> str:
    """Why kernels cannot quantize so; empty where they can."""
    if scalar is not None and scalar.ndim:
        return "global_scale: no kernel takes one for each matrix"
    return why_not(_request(asked, grouped), target.gpu.arch)


def unsupported_global_scale(asked: GlobalScale, target: Target) -> str:
    """Why kernels cannot find a global scale so; empty where they can."""
    return why_not(_amax_request(asked), target.gpu.arch)


def encoded(
    x: jax.Array,
    scalar: jax.Array | None,
    steps: Steps,
    offsets: jax.Array | None,
    asked: tuple[Asked, ...],
    target: Target,
) -> list[tuple[jax.Array, jax.Array]]:
    """Data and scales of ``x`` (..., M, K) along each of the axes that are ``asked`` for, rows
    first, as ``formulas.encoded`` gives them, from one read of ``x``."""
    request, format = _request(asked, offsets is not None), asked[0].format
    groups = None if offsets is None else offsets.shape[0]
    matrix, batched = _as_matrices(x, request)
    config = _choose(matrix, request, target)
    kept = UINT8 if format.scale.nbytes == 1 else FLOAT32
    written: list[jax.ShapeDtypeStruct | None] = [None] * 4  # along rows, then along columns
    shapes = []
    for each in asked:
        layout, first = each.layout, 2 * (each.axis == -2)
        found = output_shapes(
            *(x.shape, format, each.axis, layout.name, groups),
            k_major=each.k_major,
            batched=batched,
        )
        written[first] = jax.ShapeDtypeStruct(found.lines, format.element.numpy_dtype)
        written[first + 1] = jax.ShapeDtypeStruct(found.flat, layout.stored_dtype(kept))
        shapes.append(found.scale)
    numbers, applied = asked[0].seed, _signs(asked[0], steps.signs)
    if numbers is not None:
        applied = steps.elements, numbers.value, *numbers[2:], *applied
    given = scalar, offsets, None, applied or None
    parts = target.launch(config, (matrix,), tuple(written), *given)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [_shaped(x, pair, shape, format) for pair, shape in zip(pairs, shapes, strict=True)]


def global_scale(
    x: jax.Array, step: jax.Array | None, asked: GlobalScale, target: Target
) -> jax.Array:
    """The global scale of all of ``x``; ``step``: of a transform's signs."""
    request = _amax_request(asked)._replace(axes=(), layouts=())
    matrix = x.reshape(-1, x.shape[-1])
    config = _choose(matrix, request, target)
    assert isinstance(config, AmaxConfig)
    config = replace(config, along=asked.axis, room=asked.scaling != "amax")
    words = (config.partials(*matrix.shape),)
    partials, scalar = jax.ShapeDtypeStruct(words, INT32), jax.ShapeDtypeStruct((), FLOAT32)
    signs = _signs(asked, step) or None
    return target.launch(config, (matrix,), partials, scalar, None, signs)[1]


def _signs(asked: Asked | GlobalScale, step: jax.Array | None) -> tuple[Any, ...]:
    """What a kernel takes of a transform: its bits, or a step and the value that draw them."""
    if asked.hadamard is None:
        return ()
    _, *words = asked.hadamard
    return (*words,) if step is None else (step, *words)


def _amax_request(asked: GlobalScale) -> Request:
    return _transforming(Request(asked.format.name, (asked.axis,)), asked.hadamard)


def _transforming(request: Request, hadamard: tuple[int, ...] | None) -> Request:
    """The same request, with a transform before."""
    if hadamard is None:
        return request
    size, *words = hadamard
    return request._replace(hadamard=size, draws_signs=len(words) == 1)


def _request(asked: tuple[Asked, ...], grouped: bool) -> Request:
    first, *_ = asked
    request = Request(
        first.format.name,
        tuple(each.axis for each in asked),
        tuple(each.layout.name for each in asked),
        first.scale_rounding,
        first.nonfinite,
        grouped=grouped,
        k_major=first.k_major,
        stochastic=first.seed is not None,
        fours=first.seed is None or first.seed.fours,
        square=first.square,
        scaling=first.scaling,
    )
    return _transforming(request, first.hadamard)


def _as_matrices(x: jax.Array, request: Request) -> tuple[jax.Array, bool]:
    """A batch of matrices if the kernel takes it so, else one; and which it is."""
    batched = request.is_batch(x.shape)
    return x.reshape(-1, *x.shape[-2:] if batched else x.shape[-1:]), batched


def _choose(matrix: jax.Array, request: Request, target: Target) -> Config:
    *batch, rows, columns = matrix.shape
    row = columns * matrix.dtype.itemsize
    sources, count = [(0, row)], 0
    if batch:
        sources, count = [(0, rows * row), *sources], batch[0]
    given = sources, matrix.dtype, request, target.gpu
    return choose_config((rows, columns), *given, batch=count)


def _shaped(
    x: jax.Array,
    written: tuple[jax.Array, jax.Array],
    scale_shape: tuple[int, ...],
    format: Format,
) -> tuple[jax.Array, jax.Array]:
    data, scale = written
    data = data.reshape(*x.shape[:-2], -1, data.shape[-1])
    scale = scale.reshape(scale_shape)
    return data, scale.view(format.scale.numpy_dtype) if scale.dtype == UINT8 else scale
