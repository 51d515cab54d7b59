"""The torch operations that keep values and scales together; ScaledTensor refuses all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .layouts import TILE_BLOCKS, TILE_ROWS
from .stored import is_per_matrix
from .tensor import RULES, ScaledTensor, transposed
from .tensor_checks import check_value_dtype
from .tensor_refusals import of_flat

__all__ = [
    "check_dim",
    "check_whole",
    "extent_of",
    "has_whole_tiles",
    "reshaped_scales",
    "same_scalar",
    "slice_of",
]

aten = torch.ops.aten


def check_dim(what: str, dim: int, dims: int) -> int:
    """``dim`` counted from the front; IndexError, as torch's, unless there are so many."""
    if not -dims <= dim < dims:
        raise IndexError(f"{what}: got dim={dim}; expected one of {-dims} to {dims - 1}")
    return dim % dims


def check_whole(what: str, q: ScaledTensor) -> None:
    """TypeError of scales that belong to one matrix as it is."""
    if q.offsets is not None:
        raise TypeError(
            f"{what}: {q} has groups, which stay as they were quantized; do this to the "
            "high-precision tensor and quantize that, or call .dequantize()"
        )
    if q.layout_name != "compact":
        raise TypeError(f"{what}: {q} has scales of one matrix; use .to_layout('compact') first")


def has_whole_tiles(q: ScaledTensor, dim: int) -> bool:
    """Whether a matrix has tiles of scales (layout "tcgen05"), the last of which ends where it does
    along ``dim``: beside others they stay as they are."""
    if (
        q.layout_name != "tcgen05"
        or q.offsets is not None
        or q.dim() != 2
        or dim not in range(-2, 2)
    ):
        return False
    tile = TILE_BLOCKS * q.format.block_size if dim % 2 == q.axis % 2 else TILE_ROWS
    return q.shape[dim] % tile == 0


def same_scalar(what: str, a: Tensor | None, b: Tensor | None) -> bool:
    """Compare bytes of global scales on one device; those on meta have none that could differ."""
    if a is None or b is None or a is b or a.is_meta:
        return True  # a format has them or not
    if torch.compiler.is_compiling():
        raise TypeError(
            f"{what}: compiled code cannot see whether global scales are the same; do this outside "
            "of it, or to the high-precision tensor and quantize that"
        )
    return torch.equal(a.reshape(-1).view(torch.int32), b.reshape(-1).view(torch.int32))


def reshaped_scales(q: ScaledTensor, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """What becomes of global scales when dimensions in front of the matrix change."""
    scales = q.global_scale
    return {"global_scale": change(scales)} if is_per_matrix(scales, q.shape) else {}


def _map_rule(func: Any) -> Callable[..., ScaledTensor]:
    return lambda q, **kwargs: q._map(lambda part: func(part, **kwargs))


def _to_copy(q: ScaledTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> ScaledTensor:
    """Moves the parts; a dtype only changes what ``dequantize()`` returns."""
    if dtype is not None:
        check_value_dtype(dtype)
    moved = q._map(lambda part: aten._to_copy.default(part, **kwargs))
    return moved if dtype is None else moved._with(dtype=dtype)


def _empty_like(
    q: ScaledTensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> ScaledTensor:
    """Memory for another of its kind, as Module.to_empty makes it before weights are loaded."""
    made = q._map(lambda part: torch.empty_like(part, device=device))
    return made if dtype is None else made._with(dtype=dtype)


def _transpose(q: ScaledTensor, dim0: int = 0, dim1: int = 1) -> ScaledTensor:
    n = q.dim()
    given = {check_dim("transpose", dim, max(n, 2)) for dim in (dim0, dim1)}
    if n < 2 or given != {n - 2, n - 1}:
        raise TypeError(
            "transpose: only the last two dimensions of a ScaledTensor can be exchanged, by .mT "
            "(its contraction moves with them); quantize the tensor in the order that you need"
        )
    return transposed(q)


def _view(q: ScaledTensor, shape: Sequence[int]) -> ScaledTensor:
    out = q.shape if tuple(shape) == tuple(q.shape) else _infer(shape, q.numel())
    if tuple(out) == tuple(q.shape):
        return q._with()
    if (
        q.axis != -1
        or q.layout_name != "compact"
        or q.format.block[0] != 1
        or q.offsets is not None
    ):
        raise TypeError(
            f"view: {q} keeps its shape; only compact scales in blocks along the last axis can be "
            "reshaped in front of it: reshape before quantizing" + of_flat(out)
        )
    if not out or out[-1] != q.shape[-1]:
        raise TypeError(
            f"view: got {tuple(out)}; blocks run along the last dimension, which must stay "
            f"{q.shape[-1]}: reshape before quantizing" + of_flat(out)
        )
    lead = tuple(out[:-1])
    if is_per_matrix(q.global_scale, q.shape) and lead[-1:] != q.shape[-2:-1]:
        raise TypeError(
            f"view: got {tuple(out)}; matrices of {q} have global scales of their own and stay "
            "whole; quantize the batch with one global scale, or call .dequantize()"
        )
    return q._with(
        data=q.qdata.reshape(*lead, q.qdata.shape[-1]),
        scale=q.qscale.reshape(*lead, q.qscale.shape[-1]),
        shape=tuple(out),
        **reshaped_scales(q, lambda scales: scales.reshape(lead[:-1])),
    )


def _infer(shape: Sequence[int], numel: int) -> list[int]:
    known = 1
    for n in shape:
        known *= n if n != -1 else 1
    return [numel // known if n == -1 else n for n in shape]


def extent_of(q: ScaledTensor, back: int) -> int:
    """Elements of a block along a dimension counted from the end."""
    if back < -2:
        return 1
    return q.format.block_size if back == q.axis else q.format.block[0]


def slice_of(
    q: ScaledTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> ScaledTensor:
    """``q[..., start:end, ...]`` along ``dim``; TypeError where that cuts a block."""
    n, dim = q.dim(), check_dim("slice", dim, q.dim())
    size = q.shape[dim]
    start, end, _ = slice(start, end).indices(size)
    if step == 1 and start == 0 and end == size:
        return q._with()
    check_whole("slice", q)
    if step != 1:
        raise TypeError(
            f"slice: a part of {q} can be taken with step 1, not {step}; slice the high-precision "
            "tensor and quantize that"
        )
    back = dim - n  # -1, -2, ...
    extent = extent_of(q, back)
    end = max(start, end)
    if start % extent or (end % extent and end != size):
        raise TypeError(
            f"slice: {start}:{end} of dimension {dim} cuts through blocks of {extent}; slice at "
            f"multiples of {extent}, or slice the high-precision tensor and quantize that"
        )
    data_start, data_end = start, end
    if back == q.axis:
        padded = -(-end // extent) * extent
        data_start, data_end = q.format.element.stored(start), q.format.element.stored(padded)
    shape, scales = list(q.shape), dict[str, Tensor]()
    shape[dim] = end - start
    if back < -2:
        scales = reshaped_scales(q, lambda given: given.narrow(dim, start, end - start))
    return q._with(
        data=q.qdata.narrow(dim, data_start, data_end - data_start),
        scale=q.qscale.narrow(dim, start // extent, -(-end // extent) - start // extent),
        shape=shape,
        **scales,
    )


def _select(q: ScaledTensor, dim: int, index: int) -> ScaledTensor:
    dim = check_dim("select", dim, q.dim())
    if q.dim() - dim <= 2 or q.layout_name != "compact" or q.offsets is not None:
        raise TypeError(
            "select: one row or column of a block-scaled matrix cannot be taken out; only leading "
            "dimensions can be indexed: use .dequantize()[...]"
        )
    shape = [n for i, n in enumerate(q.shape) if i != dim]
    return q._with(
        data=q.qdata.select(dim, index),
        scale=q.qscale.select(dim, index),
        shape=shape,
        **reshaped_scales(q, lambda scales: scales.select(dim, index)),
    )


def _copy_(q: ScaledTensor, source: Tensor, non_blocking: bool = False) -> ScaledTensor:
    """Whole-tensor copy, as load_state_dict makes it; nothing may be converted on the way."""
    if not isinstance(q, ScaledTensor):
        raise TypeError(
            "copy_: a plain tensor takes values; copy .dequantize() of the ScaledTensor (a model: "
            "call blockscale.quantize_ before load_state_dict, or after it with assign=True)"
        )
    if (
        not isinstance(source, ScaledTensor)
        or source._meta() != q._meta()
        or source.shape != q.shape
        or source._parts().keys() != q._parts().keys()
    ):
        given = repr(source) if isinstance(source, ScaledTensor) else "a plain tensor: quantize it"
        raise TypeError(
            f"copy_: {q} can be overwritten as a whole by a ScaledTensor of the same format, "
            f"shape, axis, layout and dtype; got {given}"
        )
    theirs = source._parts()
    _check_copy(q, source)
    for name, part in q._parts().items():
        other = theirs[name]  # global scales: () or (1,), and one for all or each
        part.copy_(other.reshape(part.shape if other.numel() == part.numel() else ()), non_blocking)
    return q


def _check_copy(q: ScaledTensor, source: ScaledTensor) -> None:
    """Raise for a copy that would stop half way, or change what is not written."""
    if q.offsets is not None and q.offsets.shape != source._parts()["offsets"].shape:
        raise TypeError(
            f"copy_: {q} cannot be overwritten by {source}; quantize with as many groups"
        )
    mine, theirs = q.global_scale, source.global_scale
    if mine is None or theirs is None:
        return
    if is_per_matrix(theirs, source.shape) and not is_per_matrix(mine, q.shape):
        raise TypeError(
            f"copy_: the matrices of the source have global scales of their own, those of {q} one; "
            "make a tensor for it by torch.empty_like(source)"
        )
    if q.is_meta or source.is_meta:
        return
    if any(n > 1 and not step for n, step in zip(mine.shape, mine.stride(), strict=True)):
        raise TypeError(f"copy_: global scales of {q} share memory; copy to a clone of it")
    if q.qdata.untyped_storage().nbytes() == q.qdata.nbytes:
        return
    theirs = theirs.to(mine.device)
    if not same_scalar("copy_", mine, theirs.expand(mine.shape) if mine.dim() else theirs):
        raise ValueError(
            f"copy_: {q} is a part of a tensor and shares its global scale, the source has "
            "another; quantize that with it: blockscale.quantize(..., global_scale=q.global_scale)"
        )


def _equal(q: Tensor, other: Tensor) -> bool:
    """Bytes and meaning equal; never those of a plain tensor, whichever comes first."""
    if not isinstance(q, ScaledTensor) or not isinstance(other, ScaledTensor):
        return False
    if q._meta() != other._meta() or q.shape != other.shape:
        return False
    mine, theirs = q._parts(), other._parts()
    return mine.keys() == theirs.keys() and all(
        torch.equal(_octets(part), _octets(theirs[name])) for name, part in mine.items()
    )


def _octets(part: Tensor) -> Tensor:
    return part.contiguous().flatten().view(torch.uint8)


RULES.update(
    {
        aten.detach.default: _map_rule(aten.detach.default),
        aten.alias.default: _map_rule(aten.alias.default),
        aten.empty_like.default: _empty_like,
        aten.clone.default: _map_rule(lambda part, **_: part.clone()),
        aten._to_copy.default: _to_copy,
        aten.t.default: _transpose,
        aten.transpose.int: _transpose,
        aten.view.default: _view,
        aten._unsafe_view.default: _view,
        aten.reshape.default: _view,
        aten.slice.Tensor: slice_of,
        aten.select.int: _select,
        aten.copy_.default: _copy_,
        aten.equal.default: _equal,
    }
)
