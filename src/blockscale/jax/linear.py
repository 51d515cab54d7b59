"""The differentiable product: forward, dgrad and wgrad are products of quantized operands."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from .array import ScaledArray
from .checks import Formats, check_out_dtype, formats_of
from .gemm import gemm_as
from .quantize import quantize
from .varying import alike

__all__ = ["linear", "product"]


def linear(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    format: str = "mxfp8",
    gradients: str | None = None,
) -> jax.Array:
    """``x @ w + bias`` with quantized operands, and so its gradients.

    >>> x, w = jnp.ones((64, 512)), jnp.ones((512, 256))
    >>> jax.grad(lambda w: bsj.linear(x, w, format="nvfp4").sum())(w).shape
    (512, 256)

    Args:
        x: (..., K), float32, bfloat16 or float16.
        w: (K, N), as JAX's layers have their kernels.
        bias: (N,) or None.
        format: of activations and weights, a name of :data:`blockscale.formats`, or "fp8_block":
            1x128 blocks of activations and gradients, 128x128 of weights.
        gradients: their format; None for that of activations.

    Each operand is quantized along the contraction of its product, with blocks padded by zeros:
    x and w for the forward, the gradient and w for dgrad, x and the gradient for wgrad. Returns
    (..., N) in the dtype of ``x``. Raises TypeError or ValueError, with the remedy, when it is
    traced, NotImplementedError for second derivatives. Source: the MXFP8 recipe of arXiv
    2506.08027.
    """
    formats = formats_of(format, gradients)
    if bias is not None and bias.shape != w.shape[-1:]:
        raise ValueError(f"bias: has shape {bias.shape}; expected {w.shape[-1:]}")
    if w.ndim != 2 or x.shape[-1:] != w.shape[:1]:
        raise ValueError(f"x, w: have shapes {x.shape} and {w.shape}; expected (..., K) and (K, N)")
    y = product(x.reshape(-1, x.shape[-1]), w, formats, x.dtype)
    y = y.reshape(*x.shape[:-1], w.shape[-1])
    return y if bias is None else y + bias.astype(y.dtype)


def product(x: jax.Array, w: jax.Array, formats: Formats, out_dtype: Any) -> jax.Array:
    """``x @ w`` of matrices, or of batches: (..., M, K) and (..., K, N)."""
    x, w = alike(x, w)
    return _product(x, w, formats, out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: jax.Array, w: jax.Array, formats: Formats, out_dtype: Any) -> jax.Array:
    out = check_out_dtype(out_dtype)
    return gemm_as(_along(x, formats.activations, -1), _along(w, formats.weights, -2), out)


def _forward(x: jax.Array, w: jax.Array, formats: Formats, out_dtype: Any) -> Any:
    columns, rows = _along(x, formats.activations, -2), _along(w, formats.weights, -1)
    return _product(x, w, formats, out_dtype), (columns, rows, x, w)


def _backward(formats: Formats, out_dtype: Any, kept: Any, g: jax.Array) -> Any:
    return _gradients(formats, g, *kept)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(
    formats: Formats, g: jax.Array, columns: Any, rows: Any, x: jax.Array, w: jax.Array
) -> Any:
    """Of ``x`` and ``w``, by what was quantized; they are given so that their gradients, which what
    was quantized does not have, are asked for."""
    grad_x = gemm_as(_along(g, formats.gradients, -1), rows.mT, x.dtype, like=x)
    grad_w = gemm_as(columns.mT, _along(g, formats.gradients, -2), w.dtype, like=w)
    return grad_x, grad_w


def _refuse(*_: Any) -> Any:
    """Else they would be zero."""
    raise NotImplementedError(
        "blockscale.jax.linear has no second derivatives; take them of a product that is not "
        "quantized, jnp.matmul(x, w)"
    )


_gradients.defvjp(lambda formats, *given: (_gradients(formats, *given), None), _refuse)
_product.defvjp(_forward, _backward)


def _along(x: jax.Array, format: str, axis: int) -> ScaledArray:
    return quantize(x, format, axis, pad=True)
