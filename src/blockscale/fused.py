"""Quantizers with SwiGLU, its backward, RMSNorm or LayerNorm in front: no tensor between.

Each gives the bytes of the two steps one after the other, see "Fused producers" in the numerics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .formats import Format
from .layouts import Layout
from .quantize import wrap
from .quantize_checks import (
    DTYPES,
    Arguments,
    Call,
    check,
    check_tensor,
    given_global_scale,
)
from .tensor import ScaledTensor
from .watching import is_dtensor

__all__ = [
    "check_norm",
    "layernorm_quantize",
    "rmsnorm_quantize",
    "swiglu_backward_quantize",
    "swiglu_quantize",
]

_AXES = ((-1,), (-2,), (-1, -2))
_SMALLEST_EPS, _LARGEST_EPS = 2.0**-126, torch.finfo(torch.float32).max


def swiglu_quantize(
    x: Tensor,
    format: str | Format = "mxfp8",
    *,
    axes: tuple[int, ...] = (-1, -2),
    scale_rounding: str | None = None,
    layout: str | Layout | tuple[str | Layout, ...] = "compact",
    nonfinite: str = "propagate",
    global_scale: Tensor | float | None = None,
    pad: bool = False,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    k_major: bool = False,
    backend: str = "auto",
) -> tuple[ScaledTensor, ...]:
    """Quantize ``silu(gate) * up`` (M, H) of ``x`` (M, 2H), whose first H columns are the gate.

    >>> rows, columns = bs.swiglu_quantize(torch.randn(256, 512), "mxfp8")  # (256, 256) each

    Args:
        x: float32, bfloat16 or float16, last dimension contiguous and even, not empty.
        axes: of the contractions to come: (-1,), (-2,), or (-1, -2) for both from one read.
        layout: of all scales, or one for each of ``axes``.
        global_scale: as in :func:`blockscale.quantize`; its default, from the product, costs a
            second read of ``x``.
        weights: (M,) fp32, what each row of the product, rounded, is multiplied by; then it is
            rounded again. Experts' rows have those of the router.
        backend: as in :func:`blockscale.quantize`.

    The other arguments are those of :func:`blockscale.quantize`, for the product (M, H). Dimensions
    in front of M are taken too, by plain torch.

    Returns:
        One :class:`ScaledTensor` (M, H), of the dtype of ``x``, for each of ``axes``. They have no
        gradient: :func:`swiglu_backward_quantize` is it.

    Raises TypeError or ValueError as :func:`blockscale.quantize`, and for an odd last dimension.

    Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202.
    """
    half = _check_halves(x)
    values = x.narrow(-1, 0, half)  # not those: a tensor of their shape and dtype
    layouts = _each(layout, axes)
    asked = Arguments(axes, format, scale_rounding, layouts, nonfinite, pad, k_major, backend)
    try:
        call = check(values, asked, offsets)
    except (TypeError, ValueError) as error:
        more = "; axes=(-1,) asks for rows alone" if axes == (-1, -2) else ""
        raise type(error)(f"{error} (here x is the product, half as wide{more})") from None
    if weights is not None:
        _check_weights(weights, x)
    return _swiglu((x, None, weights), values, call, asked, global_scale, offsets)[0]


def swiglu_backward_quantize(
    grad: Tensor,
    x: Tensor,
    format: str | Format = "mxfp8",
    *,
    axes: tuple[int, ...] = (-1, -2),
    scale_rounding: str | None = None,
    layout: str | Layout | tuple[str | Layout, ...] = "compact",
    nonfinite: str = "propagate",
    global_scale: Tensor | float | None = None,
    pad: bool = False,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    k_major: bool = False,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """Quantize the gradient (M, 2H) of ``x`` (M, 2H), given ``grad`` (M, H) of its SwiGLU.

    >>> x, grad = torch.randn(256, 512), torch.randn(256, 256)
    >>> rows, columns = bs.swiglu_backward_quantize(grad, x, "mxfp8")  # (256, 512) each

    Args:
        grad: of the dtype and on the device of ``x``, last dimension contiguous.
        x, weights: what :func:`swiglu_quantize` took.

    The other arguments are those of :func:`swiglu_quantize`.

    Returns:
        One :class:`ScaledTensor` of the shape and dtype of ``x`` for each of ``axes``: gradients of
        the gate in the first H columns, of ``up`` in the others. With ``weights`` their gradient,
        (M,) in fp32, comes last, of a single pass.

    Raises TypeError or ValueError as :func:`swiglu_quantize`, and where ``grad`` does not fit.
    """
    half = _check_halves(x)
    layouts = _each(layout, axes)
    asked = Arguments(axes, format, scale_rounding, layouts, nonfinite, pad, k_major, backend)
    call = check(x, asked, offsets)
    _check_other("grad", grad, (*x.shape[:-1], half), x, (x.dtype,))
    if weights is None:
        return _swiglu((x, grad, None), x, call, asked, global_scale, offsets)[0]
    _check_weights(weights, x)
    tensors, of_weights = _swiglu((x, grad, weights), x, call, asked, global_scale, offsets)
    return *tensors, of_weights


def rmsnorm_quantize(
    x: Tensor,
    weight: Tensor,
    format: str | Format = "mxfp8",
    *,
    axes: tuple[int, ...] = (-1,),
    eps: float = 1e-6,
    scale_rounding: str | None = None,
    layout: str | Layout | tuple[str | Layout, ...] = "compact",
    nonfinite: str = "propagate",
    global_scale: Tensor | float | None = None,
    pad: bool = False,
    k_major: bool = False,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """Quantize ``x * rstd * weight``, where ``rstd = 1 / sqrt(mean(x**2) + eps)`` of each row.

    >>> x, weight = torch.randn(256, 512), torch.ones(512)
    >>> q, rstd = bs.rmsnorm_quantize(x, weight, "mxfp8")
    >>> rows, columns, rstd = bs.rmsnorm_quantize(x, weight, "mxfp8", axes=(-1, -2))

    Args:
        x: (..., M, K), float32, bfloat16 or float16, last dimension contiguous, not empty.
        weight: (K,), of any of these dtypes, contiguous, on the device of ``x``.
        axes: of the contractions to come: (-1,), (-2,), or (-1, -2) for both.
        eps: what is added to the mean of squares; positive, a normal number of fp32.
        layout: of all scales, or one for each of ``axes``.
        global_scale: as in :func:`blockscale.quantize`; its default, from the result, costs more
            reads of ``x``. On a GPU rows alone take one read, any others two.

    The other arguments are those of :func:`blockscale.quantize`.

    Returns:
        A :class:`ScaledTensor` of the shape and dtype of ``x`` for each of ``axes``, and ``rstd``
        (..., M) in fp32, which a backward needs. They have no gradient.

    Raises TypeError or ValueError as :func:`blockscale.quantize`, and where ``weight`` or ``eps``
    does not fit.

    Source: Zhang and Sennrich, "Root mean square layer normalization", arXiv 1910.07467.
    """
    layouts = _each(layout, axes)
    asked = Arguments(axes, format, scale_rounding, layouts, nonfinite, pad, k_major, backend)
    return _norm((x, weight, None), False, eps, asked, global_scale)


def layernorm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    format: str | Format = "mxfp8",
    *,
    axes: tuple[int, ...] = (-1,),
    eps: float = 1e-5,
    scale_rounding: str | None = None,
    layout: str | Layout | tuple[str | Layout, ...] = "compact",
    nonfinite: str = "propagate",
    global_scale: Tensor | float | None = None,
    pad: bool = False,
    k_major: bool = False,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """Quantize ``(x - mean) * rstd * weight + bias``, with ``mean`` and ``rstd`` of each row.

    >>> x, weight, bias = torch.randn(256, 512), torch.ones(512), torch.zeros(512)
    >>> rows, columns, mean, rstd = bs.layernorm_quantize(x, weight, bias, axes=(-1, -2))

    Args:
        bias: (K,), as ``weight``, or None.
        eps: what is added to the variance.

    The other arguments are those of :func:`rmsnorm_quantize`.

    Returns:
        A :class:`ScaledTensor` of the shape and dtype of ``x`` for each of ``axes``, then ``mean``
        and ``rstd`` (..., M) in fp32, which a backward needs. They have no gradient.

    Raises TypeError or ValueError as :func:`rmsnorm_quantize`.

    Source: Ba, Kiros and Hinton, "Layer normalization", arXiv 1607.06450.
    """
    layouts = _each(layout, axes)
    asked = Arguments(axes, format, scale_rounding, layouts, nonfinite, pad, k_major, backend)
    return _norm((x, weight, bias), True, eps, asked, global_scale)


def check_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    """Raise unless the rows of ``x`` can be normalized so."""
    _check_other("weight", weight, (x.shape[-1],), x, DTYPES)
    if bias is not None:
        _check_other("bias", bias, (x.shape[-1],), x, DTYPES)
    number = isinstance(eps, (int, float)) and not isinstance(eps, bool)
    if not number or not _SMALLEST_EPS <= eps <= _LARGEST_EPS:
        raise ValueError(
            f"eps: got {eps!r}; expected a positive number, normal in fp32 (from 2**-126), as 1e-6"
        )


def _norm(
    inputs: tuple[Tensor, Tensor, Tensor | None],
    centered: bool,
    eps: float,
    asked: Arguments,
    global_scale: Tensor | float | None,
) -> tuple[Any, ...]:
    """``inputs``: x, weight and bias. Tensors, then what a backward needs of the rows."""
    call = check(inputs[0], asked)
    check_norm(*inputs, eps)
    x, weight, bias = (y.detach() if y is not None and y.requires_grad else y for y in inputs)
    assert x is not None
    assert weight is not None
    scalar = given_global_scale(global_scale, x, call, asked.backend)
    results = ops.norm_quantize(
        x,
        weight,
        bias,
        float(eps),
        centered,
        call.format.name,
        -1 in call.axes,
        -2 in call.axes,
        call.scale_rounding,
        asked.nonfinite,
        call.layouts[0].name,
        call.layouts[-1].name,
        scalar,
        asked.backend,
        asked.k_major,
    )
    count = 2 * len(call.axes)
    statistics = results[count : count + 1 + centered]
    return *_wrapped(inputs[0], call, results, scalar, None), *statistics


def _swiglu(
    inputs: tuple[Tensor, Tensor | None, Tensor | None],
    values: Tensor,
    call: Call,
    asked: Arguments,
    global_scale: Tensor | float | None,
    offsets: Tensor | None,
) -> tuple[tuple[ScaledTensor, ...], Tensor | None]:
    """``inputs``: x, the gradient of its SwiGLU where its backward is quantized, and weights of
    rows, whose gradient the backward has, too."""
    x, grad, weights = inputs
    scalar = given_global_scale(global_scale, x, call, asked.backend)
    results = ops.swiglu_quantize(
        x.detach() if x.requires_grad else x,
        grad.detach() if grad is not None and grad.requires_grad else grad,
        call.format.name,
        -1 in call.axes,
        -2 in call.axes,
        call.scale_rounding,
        asked.nonfinite,
        call.layouts[0].name,
        call.layouts[-1].name,
        scalar,
        offsets,
        asked.backend,
        asked.k_major,
        None if weights is None else weights.detach(),
    )
    count = 2 * len(call.axes)
    of_weights = results[count] if grad is not None and weights is not None else None
    return _wrapped(values, call, results, scalar, offsets), of_weights


def _wrapped(
    like: Tensor,
    call: Call,
    results: list[Tensor],
    scalar: Tensor | None,
    offsets: Tensor | None,
) -> tuple[ScaledTensor, ...]:
    """The tensors that an op's ``results`` begin with; a global scale that it found comes last."""
    if call.format.has_global_scale and scalar is None:
        scalar = results[-1]
    return tuple(
        wrap(like, call, i, results[2 * i], results[2 * i + 1], scalar, offsets)
        for i in range(len(call.axes))
    )


def _each(
    layout: str | Layout | tuple[str | Layout, ...], axes: tuple[int, ...]
) -> tuple[str | Layout, ...]:
    """A layout for each of ``axes``, which are checked."""
    if axes not in _AXES:
        raise ValueError(f"axes: got {axes!r}; choose one of {', '.join(map(str, _AXES))}")
    return layout if isinstance(layout, tuple) else (layout,) * len(axes)


def _check_halves(x: Tensor) -> int:
    """Columns of gate and of up."""
    check_tensor(x)
    if not x.dim() or x.shape[-1] % 2:
        raise ValueError(
            f"x: has shape {tuple(x.shape)}; its last dimension holds gate and up side by side, "
            "as many columns of each: expected an even number"
        )
    return x.shape[-1] // 2


def _check_weights(weights: Tensor, x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"weights: x has shape {tuple(x.shape)}; only rows of a matrix have some")
    if isinstance(weights, Tensor) and weights.dtype != torch.float32:
        raise TypeError(f"weights: got {weights.dtype}; expected torch.float32: call .float()")
    _check_other("weights", weights, x.shape[:1], x, (torch.float32,))


def _check_other(
    name: str,
    given: Tensor,
    shape: tuple[int, ...],
    x: Tensor,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raise unless a second input fits ``x``."""
    if not isinstance(given, Tensor) or isinstance(given, ScaledTensor):
        raise TypeError(f"{name}: got {type(given).__name__}; expected a plain torch.Tensor")
    if is_dtensor(given):
        raise TypeError(
            f"{name}: is a DTensor, and x is not; pass {name}.to_local() where it is the part that "
            f"belongs to x, else {name}.full_tensor()"
        )
    if given.dtype not in dtypes:
        allowed = " or ".join(map(str, dtypes))
        raise TypeError(f"{name}: got {given.dtype}, x has {x.dtype}; cast it to {allowed}")
    if given.shape != shape:
        raise ValueError(
            f"{name}: has shape {tuple(given.shape)}; x of shape {tuple(x.shape)} needs {shape}"
        )
    if given.device != x.device:
        raise ValueError(f"{name}: is on {given.device}, x on {x.device}; move it there")
    if torch.compiler.is_compiling():  # traced tensors are dense; their strides, torch's choice
        return
    if given.layout != torch.strided or (given.stride(-1) != 1 and shape[-1] != 1):
        raise ValueError(f"{name}: is not contiguous in its last dimension; call .contiguous()")
