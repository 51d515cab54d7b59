"""Products of quantized arrays: of their exact values, summed in fp32, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ..dtypes import FLOAT32
from ..kernels.cpu.spec import MAX_SKINNY_M, supported
from . import gpu_gemm
from .array import ScaledArray
from .checks import check_out_dtype, check_plain, check_product
from .cut import Cut
from .dispatch import by_platform, multiplied, on_target, target_of
from .partition import lying, partitioned
from .product_factors import SUMMED, product_work, summed
from .quantize import dequantize
from .target import Target, current_target

__all__ = ["exact_values", "gemm", "gemm_as"]

T = TypeVar("T")


def gemm(
    a: ScaledArray | jax.Array, b: ScaledArray, out_dtype: Any = None, *, bias: Any = None
) -> jax.Array:
    """``a @ b + bias``, matrices of a batch one by one.

    >>> x, w = jnp.ones((64, 512)), jnp.ones((256, 512))
    >>> bsj.gemm(bsj.quantize(x, "mxfp8"), bsj.quantize(w, "mxfp8").mT).shape
    (64, 256)

    Args:
        a: (..., M, K), blocked along axis -1; or a plain bfloat16 array (weight-only).
        b: (..., K, N), blocked along axis -2: ``w.mT`` for a weight (N, K) quantized along -1.
        out_dtype: bfloat16 (default), float16 or float32.
        bias: (N,), added in fp32.

    Raises TypeError or ValueError, with the remedy, when it is traced.
    """
    check_product(a, b)
    check_plain(a, b)
    out = check_out_dtype(out_dtype)
    if bias is not None and jnp.shape(bias) != b.shape[-1:]:
        raise ValueError(f"bias: has shape {jnp.shape(bias)}; expected {b.shape[-1:]}")
    a, b = a.ungrouped() if isinstance(a, ScaledArray) else a, b.ungrouped()
    return gemm_as(a, b, out, None if bias is None else jnp.asarray(bias))


def gemm_as(
    a: ScaledArray | jax.Array,
    b: ScaledArray,
    out: np.dtype,
    bias: jax.Array | None = None,
    like: jax.Array | None = None,
) -> jax.Array:
    """The product; in a mesh with explicit axes it lies as the array that it is ``like``."""
    target = target_of("gemm", partial(gpu_gemm.unsupported, a, b, out))
    how = _How(out, target, current_target(), None if like is None else lying(like))
    return _gemm(a, b, bias, how)


class _How(NamedTuple):
    """What a product is traced for.

    Attributes:
        target: whose kernels multiply, if there are such.
        present: the target that is here, whose kernels may dequantize.
    """

    out: np.dtype
    target: Target | None
    present: Target | None
    lies: NamedSharding | None


@partial(jax.jit, static_argnums=3)
def _gemm(
    a: ScaledArray | jax.Array,
    b: ScaledArray,
    bias: jax.Array | None,
    how: _How,
) -> jax.Array:
    out, target, _, lies = how
    lead = a.ndim - 2
    if target is not None:
        a, b = _each(a), _each(b)

    def run(cut: Cut) -> Callable[..., jax.Array]:
        if SUMMED not in cut.axes:
            return _product_of(lead, out, target)

        def of_shards(
            a: ScaledArray | jax.Array, b: ScaledArray, bias: jax.Array | None
        ) -> jax.Array:
            acc = summed(_product_of(lead, FLOAT32, target)(a, b, None), cut)
            return (acc if bias is None else acc + bias.astype(FLOAT32)).astype(out)

        return of_shards

    return partitioned(product_work(run, a, b, bias), lies)(a, b, bias)


def _product_of(lead: int, out: np.dtype, target: Target | None) -> Callable[..., jax.Array]:
    """The product of operands with so many leading dimensions."""

    def by_kernels(
        target: Target, a: ScaledArray | jax.Array, b: ScaledArray, bias: jax.Array | None
    ) -> jax.Array:
        return gpu_gemm.multiplied(a, b, bias, out, target)

    product = by_platform(on_target(target, by_kernels), partial(_by_values, out=out))
    for _ in range(lead if target is not None else 0):
        product = jax.vmap(product, (0, 0, None))  # kernels close over no array
    return product


def _by_values(
    a: ScaledArray | jax.Array, b: ScaledArray, bias: jax.Array | None, out: np.dtype
) -> jax.Array:
    acc = _product(a, b)
    if bias is not None:
        acc = acc + bias.astype(jnp.float32)
    return acc.astype(out)


def _each(x: T) -> T:
    """With a global scale for each matrix."""
    if not isinstance(x, ScaledArray) or x.global_scale is None:
        return x
    return replace(x, global_scale=jnp.broadcast_to(x.global_scale, x.shape[:-2]))


def _product(a: ScaledArray | jax.Array, b: ScaledArray) -> jax.Array:
    """The product of dequantized values, in fp32."""
    if a.ndim == 2 and 0 < a.shape[0] <= MAX_SKINNY_M and b.turned == (True, True) and _is_whole(b):
        return multiplied(exact_values(a), b.data, b.scale, b.global_scale, b.kind)
    return jnp.matmul(exact_values(a), exact_values(b), precision=jax.lax.Precision.HIGHEST)


def _is_whole(b: ScaledArray) -> bool:
    """Whether the loops multiply by it as it lies."""
    return b.layout == "compact" and b.length is None and supported(b.kind)


def exact_values(x: ScaledArray | jax.Array) -> jax.Array:
    """What an operand stands for, in fp32."""
    return dequantize(x, jnp.float32) if isinstance(x, ScaledArray) else x.astype(jnp.float32)
