"""What can be quantized and multiplied: looked at when a function is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import check_axis, check_flag, choose
from ..formats import FP8_BLOCK, NONFINITE, Format, get_format
from ..hadamard import Hadamard, check_transform
from ..layouts import get_layout
from ..quantization import (
    check_eden,
    check_groups,
    check_rounding,
    check_scaling,
    check_square,
)
from ..seed import Seed, numbers_of
from .array import ScaledArray
from .formulas import FLOATS, Asked
from .seeds import as_seed

__all__ = [
    "Formats",
    "Request",
    "check_global_scale",
    "check_grouped",
    "check_out_dtype",
    "check_plain",
    "check_product",
    "check_quantize",
    "check_scaled",
    "check_values",
    "formats_of",
    "transform_of",
]


class Request(NamedTuple):
    """The arguments of ``quantize`` that say how, as a caller gave them."""

    format: str | Format
    axis: int
    scale_rounding: str | None
    layout: str
    nonfinite: str
    pad: bool
    k_major: bool
    seed: int | Seed | None
    square: bool
    scaling: str
    hadamard: Hadamard | None = None


def check_quantize(x: Any, request: Request, offsets: Any = None) -> Asked:
    """Raise TypeError or ValueError unless ``x`` can be quantized so, in groups if there are
    ``offsets``."""
    format, axis, scale_rounding, layout, nonfinite, pad, k_major, seed, *_ = request
    kind, axis, stored = get_format(format), check_axis(axis), get_layout(layout)
    check_flag("pad", pad)
    check_flag("k_major", k_major)
    check_flag("square", request.square)
    choose("nonfinite", nonfinite, dict.fromkeys(NONFINITE))
    if isinstance(seed, bool) or not isinstance(seed, int | Seed | None):
        raise TypeError(f"seed: got {seed!r}; expected an int, a Seed, or None for nearest even")
    rounding = kind.default_scale_rounding if scale_rounding is None else scale_rounding
    known = dict.fromkeys(kind.scale.roundings)
    choose(f"scale_rounding (of format {kind.name!r})", rounding, known)
    check_values(x)
    if offsets is not None:
        check_groups(x.shape, kind)
        check_offsets(offsets)
    anew = offsets is not None and axis == -2  # blocks start so in each group
    if x.shape[axis] % kind.block_size and not (pad or anew):
        raise ValueError(
            f"x: dimension {axis} is {x.shape[axis]}, no multiple of {kind.block_size}, the block "
            f"of {kind.name!r}; pass pad=True to pad it with zeros"
        )
    if kind.scale.nbytes not in stored.itemsize or (x.ndim > 2 and stored.name != "compact"):
        raise ValueError(
            f"layout: {stored.name!r} does not hold scales of {kind.name!r} with shape {x.shape}; "
            "choose 'compact', or flatten leading dimensions into the rows"
        )
    _check_further(x, kind, request, offsets is not None)
    transform = transform_of(request.hadamard, x.shape, axis, ["offsets"] * (offsets is not None))
    check_eden(request.scaling, request.hadamard, seed is not None)
    numbers = None if seed is None else numbers_of(as_seed(seed), x.shape)._replace(step=0)
    named = kind, axis, rounding, stored, nonfinite, k_major
    return Asked(*named, numbers, request.square, request.scaling, transform)


def check_values(x: Any) -> None:
    """Raise unless ``x`` is an array that can be quantized, of no format yet."""
    if isinstance(x, ScaledArray):
        raise TypeError(
            "x: is a ScaledArray already; quantizing it again rounds twice: quantize the "
            "high-precision array"
        )
    if not isinstance(x, jax.Array):
        raise TypeError(f"x: got {type(x).__name__}; expected a jax.Array: pass jnp.asarray(x)")
    if x.dtype.name not in FLOATS:
        raise TypeError(f"x: got {x.dtype}; expected one of {', '.join(FLOATS)}: cast it first")
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(
            f"x: has shape {x.shape}; expected a matrix, or a batch, that is not empty"
        )


def check_global_scale(given: Any) -> None:
    """Raise unless it is an array, whose values are not looked at, or a positive number of fp32."""
    if isinstance(given, jax.Array | np.ndarray):
        return
    if isinstance(given, bool) or not isinstance(given, int | float | np.number):
        raise TypeError(f"global_scale: got {given!r}; expected a number, or a float32 array")
    with np.errstate(over="ignore"):
        rounded = np.float32(given)
    if not 0 < rounded < np.inf:
        raise ValueError(f"global_scale: got {given}; expected a positive finite number of fp32")


def _check_further(x: jax.Array, kind: Format, request: Request, grouped: bool) -> None:
    """Raise unless ``x`` can have such squares and scales."""
    check_rounding(request.scaling, request.square, request.seed is not None)
    check_scaling(request.scaling, kind)
    if request.square:
        check_square(x.shape, kind, grouped)


def transform_of(
    hadamard: Hadamard | None, shape: Sequence[int], axis: int, orders: Sequence[str] = ()
) -> tuple[int, ...] | None:
    """The numbers of a transform (``Hadamard.for_op``), or None; raise as ``check_transform``."""
    if hadamard is None:
        return None
    check_transform(hadamard, shape, axis, orders)
    return tuple(hadamard.for_op()[0])


def check_offsets(offsets: Any) -> None:
    """Raise unless these are ends of groups, whose values are not looked at."""
    dtype, shape = getattr(offsets, "dtype", None), getattr(offsets, "shape", ())
    if dtype != jnp.int32 or len(shape) != 1:
        found = type(offsets).__name__ if dtype is None else f"{dtype} of {len(shape)} dimension(s)"
        raise TypeError(
            f"offsets: got {found}; expected an int32 array of one dimension, the end of each group"
        )
    if shape == (0,):
        raise ValueError("offsets: is empty; expected the end of each group, of one at least")


def check_scaled(name: str, q: Any) -> None:
    """TypeError unless it is a :class:`ScaledArray`."""
    if not isinstance(q, ScaledArray):
        raise TypeError(
            f"{name}: got {type(q).__name__}; expected a ScaledArray, as blockscale.jax.quantize "
            "gives"
        )


def check_product(a: Any, b: Any, batched: bool = False) -> None:
    """Raise unless ``a @ b`` is a product; ``batched``: ``b`` has a dimension more."""
    check_scaled("b", b)
    if b.axis != -2:
        raise ValueError("b: is blocked along axis -1; pass b.mT of a weight (N, K)")
    if isinstance(a, ScaledArray):
        if a.axis != -1:
            raise ValueError("a: is blocked along axis -2; quantize it along axis=-1")
        if not a.kind.multiplies(b.kind):
            raise ValueError(
                f"a, b: {a.format!r} and {b.format!r} are not multiplied; quantize both in formats "
                "of the same block and scale"
            )
    elif not isinstance(a, jax.Array) or a.dtype != jnp.bfloat16:
        found = getattr(a, "dtype", type(a).__name__)
        raise TypeError(f"a: got {found}; expected a ScaledArray, or a bfloat16 array")
    lead = b.shape[batched:-2]
    if a.shape[:-2] != lead or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"a, b: have shapes {a.shape} and {b.shape}; expected (..., M, K) and (..., K, N)"
        )


def check_plain(a: Any, b: Any) -> None:
    """ValueError where one has groups along K."""
    if any(isinstance(x, ScaledArray) and x.k_grouped for x in (a, b)):
        raise ValueError("a, b: blocks start anew in groups along K; use grouped_gemm")


def check_grouped(a: Any, b: Any, offsets: Any) -> bool:
    """Raise unless ``a`` and ``b`` are multiplied in groups; whether these are along K."""
    check_scaled("b", b)
    along_k = b.ndim == 2
    if along_k and not isinstance(a, ScaledArray):
        found = getattr(a, "dtype", type(a).__name__)
        raise TypeError(f"a: got {found}; expected a ScaledArray with offsets=offsets, as b")
    check_product(a, b, batched=not along_k)
    if a.ndim != 2:
        raise ValueError(f"a: has shape {a.shape}; expected a matrix, whose rows are in groups")
    check_offsets(offsets)
    count = offsets.shape[0]
    if not along_k and b.shape[0] != count:
        raise ValueError(
            f"offsets: got {count} groups for b {b.shape}; expected one offset for each matrix of b"
        )
    for name, q in (("a", a), ("b", b)):
        if not isinstance(q, ScaledArray):
            continue
        if q.k_grouped != along_k:
            raise ValueError(
                f"{name}: its blocks {'do not ' * along_k}start anew in each group along K; "
                + (
                    "quantize it with axis=-2 and offsets=offsets; or, where rows are grouped, b "
                    "is (G, K, N), a matrix for each group"
                    if along_k
                    else "quantize it without offsets along the contraction"
                )
            )
        if along_k and q.offsets is not None and q.offsets.shape[0] != count:
            raise ValueError(
                f"offsets: got {count} groups, {name} was quantized with {q.offsets.shape[0]}; "
                "pass the same"
            )
    return along_k


def check_out_dtype(dtype: Any) -> Any:
    """bfloat16 of None. ValueError unless it is a float that products are rounded to."""
    found = jnp.dtype(jnp.bfloat16 if dtype is None else dtype)
    if found.name not in FLOATS:
        raise ValueError(f"out_dtype: got {found}; expected one of {', '.join(FLOATS)}")
    return found


class Formats(NamedTuple):
    """Names of formats of a layer: of activations, weights and gradients."""

    activations: str
    weights: str
    gradients: str


def formats_of(format: str, gradients: str | None) -> Formats:
    """Those of a recipe's name. Raises ValueError for an unknown one."""
    if format == FP8_BLOCK:
        first, weights = "fp8_1x128", "fp8_128x128"
    else:
        first = weights = get_format(format, "format", (FP8_BLOCK,)).name
    last = first if gradients is None else get_format(gradients, "gradients").name
    for other in (first, weights):
        if not get_format(last).multiplies(get_format(other)):
            raise ValueError(
                f"gradients: {last!r} and {other!r} are not multiplied; choose one of the same "
                "block and scale"
            )
    return Formats(first, weights, last)
