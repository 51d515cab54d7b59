"""Products of groups of rows, each by its own matrix."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from . import gpu_gemm
from .array import ScaledArray
from .checks import check_out_dtype, check_product
from .dispatch import by_platform, on_target, target_of
from .gemm import exact_values
from .target import Target

__all__ = ["grouped_gemm"]


def grouped_gemm(
    a: ScaledArray | jax.Array, b: ScaledArray, offsets: jax.Array, out_dtype: Any = None
) -> jax.Array:
    """The product of each group of rows (expert) by its matrix; rows past the last group are zero.

    >>> ends = jnp.array([96, 256], jnp.int32)
    >>> x, w = jnp.ones((256, 512)), jnp.ones((2, 128, 512))
    >>> bsj.grouped_gemm(bsj.quantize(x, "mxfp8"), bsj.quantize(w, "mxfp8").mT, ends).shape
    (256, 128)

    Args:
        a: (M, K), blocked along axis -1; or plain bfloat16.
        b: (G, K, N), blocked along axis -2.
        offsets: int32 (G,), ascending: the end of each group. Its values are not looked at.
        out_dtype: bfloat16 (default), float16 or float32.

    Raises TypeError or ValueError, with the remedy, when it is traced.
    """
    check_product(a, b, batched=1)
    if offsets.dtype != jnp.int32 or offsets.shape != b.shape[:1]:
        raise ValueError(
            f"offsets: got {offsets.dtype} {offsets.shape}; expected int32 {b.shape[:1]}, the end "
            "of each group"
        )
    out = check_out_dtype(out_dtype)
    target = target_of("grouped_gemm", partial(gpu_gemm.unsupported, a, b, out, groups=b.shape[0]))

    def by_values(a: ScaledArray | jax.Array, b: ScaledArray, offsets: jax.Array) -> jax.Array:
        sizes, exact = jnp.diff(offsets, prepend=0), jax.lax.Precision.HIGHEST
        values = exact_values(a), exact_values(b)
        return jax.lax.ragged_dot(*values, sizes, precision=exact).astype(out)

    def by_kernels(
        target: Target, a: ScaledArray | jax.Array, b: ScaledArray, offsets: jax.Array
    ) -> jax.Array:
        return gpu_gemm.grouped(a, b, offsets, out, target)

    return by_platform(on_target(target, by_kernels), by_values)(a, b, offsets)
