"""Products on Hopper: which kernels, and their arguments. ``ends``: the output, bias and alpha."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..dtypes import BFLOAT16, INT32
from ..formats import get_format
from ..kernels.common.epilogue import Epilogue
from ..kernels.common.groupings import square
from ..kernels.sm90 import bf16_config, grouped_config, mixed_config
from ..kernels.sm90 import config as fp8_config
from ..kernels.sm90.mixed_choice import MixedKernels, choose_kernels, widens
from ..kernels.sm90.mixed_config import BLOCK_K
from .gpu_operand import Operand
from .launch import InPlace
from .target import Target

__all__ = ["columns", "grouped", "multiplied"]


def multiplied(
    a: Operand, b: Operand, epilogue: Epilogue, ends: tuple[Any, ...], target: Target
) -> jax.Array:
    """``alpha * A @ B.mT + bias``."""
    by = _fp8 if b.name in fp8_config.FORMATS else _widened
    return by(a, b, epilogue, ends, target)


def grouped(
    a: Operand,
    b: Operand,
    offsets: jax.Array,
    epilogue: Epilogue,
    ends: tuple[Any, ...],
    target: Target,
) -> jax.Array:
    """The product of each group of rows of A by its matrix of B."""
    gpu, m, (groups, n, _) = target.gpu, a.data.shape[0], b.data.shape
    below, scale = b.data.reshape(groups * n, -1), b.compact()
    if b.name in fp8_config.FORMATS:
        config = grouped_config.choose_grouped((m, n, b.k), groups, epilogue, gpu=gpu)
        band = grouped_config.supergroup(config.tile, b.k, gpu.multiprocessors)
        given = a.data, a.by_rows(), below, scale, *ends
        return target.launch(config, *given, offsets, band, gpu.multiprocessors)[0]
    scale = scale.reshape(groups * n, -1)
    chosen = choose_kernels(
        (m, n, b.k), (a.name, b.name or ""), epilogue,
        scales_apart=scale.shape[-1], groups=groups, gpu=gpu,
    )  # fmt: skip
    rest = offsets, *chosen.rest(gpu.multiprocessors)
    return _by_widened(
        chosen, a, b._replace(data=below, scale=scale, turned=False), (*ends, *rest), target
    )


def columns(
    a: Operand,
    b: Operand,
    offsets: jax.Array,
    epilogue: Epilogue,
    ends: tuple[Any, ...],
    target: Target,
) -> jax.Array:
    """The product of each group of columns of A and B, one below the other."""
    gpu, shape = target.gpu, (a.data.shape[0], b.data.shape[0], b.k)
    of_groups = shape, offsets.shape[0], epilogue
    config: Any
    given: tuple[jax.Array, ...]
    if b.name in fp8_config.FORMATS:
        config = grouped_config.k_grouped_candidates(*of_groups, gpu)[0]
        given = a.data, a.by_rows(), b.data, b.by_rows()
    else:
        config = bf16_config.k_grouped_candidates(*of_groups, gpu=gpu)[0]
        given = a.values(target), b.values(target)
    band = square(config.tile, gpu.multiprocessors)
    return target.launch(config, *given, *ends, offsets, band, gpu.multiprocessors)[0]


def _fp8(
    a: Operand, b: Operand, epilogue: Epilogue, ends: tuple[Any, ...], target: Target
) -> jax.Array:
    gpu, block = target.gpu, get_format(b.name or "").block
    shape = a.data.shape[0], b.data.shape[0], b.k
    config = fp8_config.choose_config(shape, epilogue, b_block=block, gpu=gpu)
    scale = b.by_rows() if block[0] == 1 else b.compact()
    given = a.data, a.by_rows(), b.data, scale, *ends
    return target.launch(config, *given, None, None, gpu.multiprocessors)[0]


def _widened(
    a: Operand, b: Operand, epilogue: Epilogue, ends: tuple[Any, ...], target: Target
) -> jax.Array:
    gpu, (m, n) = target.gpu, (a.data.shape[0], b.data.shape[0])
    shape = m, n, b.k
    if not (a.format and mixed_config.promotes(a.format.name)) and not widens(m, n):
        values = [_padded(x.values(target), b.k) for x in (a, b)]
        config = bf16_config.choose_config(shape, epilogue, gpu=gpu)
        return target.launch(config, *values, *ends, None, None, gpu.multiprocessors)[0]
    scale = b.compact()
    chosen = choose_kernels(
        shape, (a.name, b.name or ""), epilogue, scales_apart=scale.shape[-1], gpu=gpu
    )
    rest = chosen.rest(gpu.multiprocessors)
    return _by_widened(chosen, a, b._replace(scale=scale, turned=False), (*ends, *rest), target)


def _by_widened(
    chosen: MixedKernels, a: Operand, b: Operand, rest: tuple[Any, ...], target: Target
) -> jax.Array:
    """By the kernel that puts A in order, if there is one, and the product. ``b`` has compact
    scales."""
    scale = None if a.format is None else a.by_rows() if chosen.promotes else a.compact()
    values, partials = a.data, None
    if chosen.widen is not None:
        columns = -(-b.k // BLOCK_K) * BLOCK_K
        shape = jax.ShapeDtypeStruct((a.data.shape[0], columns), BFLOAT16)
        words = jax.ShapeDtypeStruct((chosen.partials,), INT32) if chosen.partials else None
        applied = scale if chosen.widen.applies_scales else None
        values, *made = target.launch(chosen.widen, a.data, applied, shape, words)
        partials = InPlace(made[0]) if made else None
    later = scale if chosen.promotes else None
    if chosen.decodes:
        return target.launch(chosen.multiply, values, None, b.data, b.scale, *rest)[0]
    return target.launch(chosen.multiply, values, later, partials, b.data, b.scale, *rest)[-1]


def _padded(x: jax.Array, k: int) -> jax.Array:
    return x if x.shape[-1] == k else jnp.pad(x, ((0, 0), (0, k - x.shape[-1])))
