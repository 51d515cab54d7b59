"""Joining and cutting ScaledTensors: exact where whole blocks stay whole, else refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .layouts import TILE_ROWS
from .memory import joined
from .stored import is_per_matrix
from .tensor import RULES, ScaledTensor
from .tensor_rules import (
    check_dim,
    check_whole,
    extent_of,
    has_whole_tiles,
    reshaped_scales,
    same_scalar,
    slice_of,
)

__all__: list[str] = []

aten = torch.ops.aten


def _alike(what: str, tensors: Sequence[Any], dim: int | None = None) -> list[ScaledTensor]:
    """The tensors, if their parts can be put side by side, along ``dim`` if it is given."""
    first, *others = tensors
    tiled = dim is not None and all(
        isinstance(q, ScaledTensor) and has_whole_tiles(q, dim) for q in tensors
    )
    for i, q in enumerate(tensors):
        if not isinstance(q, ScaledTensor):
            raise TypeError(
                f"{what}: tensors[{i}] is plain and another one a ScaledTensor; quantize it, or "
                "call .dequantize() of the others"
            )
        if not tiled:
            check_whole(what, q)
    for i, q in enumerate(others, 1):
        if q._meta() != first._meta():
            raise TypeError(
                f"{what}: tensors[0] is {first}, tensors[{i}] {q}; quantize all in one format, "
                "along one axis, from one dtype"
            )
        if q.device != first.device:
            raise ValueError(
                f"{what}: tensors[0] is on {first.device}, tensors[{i}] on {q.device}; move it"
            )
    return list(tensors)


def _check_scales(what: str, tensors: Sequence[ScaledTensor]) -> None:
    """ValueError unless all have the same global scales."""
    first = tensors[0].global_scale
    for i, q in enumerate(tensors[1:], 1):
        if not same_scalar(what, q.global_scale, first):
            raise ValueError(
                f"{what}: tensors[0] and tensors[{i}] have different global scales; quantize them "
                "with one: blockscale.quantize(..., global_scale=the largest of all)"
            )


def _joined_scales(tensors: Sequence[ScaledTensor], join: Callable[..., Tensor]) -> dict[str, Any]:
    """The global scales of matrices side by side: one for each, unless all share a single one. The
    shape is not to depend on values. New memory, as all that is joined."""
    scales = [q.global_scale for q in tensors if q.global_scale is not None]
    if not scales:
        return {}
    if scales[0].numel() == 1 and all(_is_same_memory(x, scales[0]) for x in scales):
        return {"global_scale": scales[0].reshape(()).clone()}
    each = [
        (x if is_per_matrix(x, q.shape) else x.reshape(())).expand(q.shape[:-2])
        for x, q in zip(scales, tensors, strict=True)
    ]
    return {"global_scale": join(each)}


def _is_same_memory(x: Tensor, y: Tensor) -> bool:
    if x is y or torch.compiler.is_compiling():
        return x is y
    places = [(each.untyped_storage()._cdata, each.storage_offset()) for each in (x, y)]
    return places[0] == places[1]


def _side_by_side(tensors: Sequence[ScaledTensor], back: int) -> Tensor:
    """Block scales; whole tiles of them, of which those along the contraction are next to each
    other."""
    if tensors[0].layout_name == "compact":
        return torch.cat([q.qscale for q in tensors], back)
    if back != tensors[0].axis:
        return torch.cat([q.qscale for q in tensors])
    outer = -(-tensors[0].shape[-3 - back] // TILE_ROWS)
    return torch.cat([q.qscale.view(outer, -1) for q in tensors], 1).flatten()


def _cat(tensors: Sequence[Any], dim: int = 0) -> ScaledTensor:
    first, *_ = all_ = _alike("cat", tensors, dim)
    n = first.dim()
    back = check_dim("cat", dim, n) - n
    for i, q in enumerate(all_):
        if q.dim() != n or any(
            a != b
            for d, (a, b) in enumerate(zip(q.shape, first.shape, strict=True))
            if d - n != back
        ):
            raise ValueError(
                f"cat: got shapes {tuple(first.shape)} and {tuple(q.shape)}; expected the same but "
                f"for dimension {dim}"
            )
        extent = extent_of(q, back)
        if q.shape[back] % extent and i < len(all_) - 1:
            raise ValueError(
                f"cat: dimension {dim} of tensors[{i}] is {q.shape[back]}, which ends inside a "
                f"block of {extent}; join the high-precision tensors and quantize that"
            )
    scales: dict[str, Any] = {}
    if back < -2:
        scales = _joined_scales(all_, partial(torch.cat, dim=back + 2))
    else:
        _check_scales("cat", all_)
        if first.global_scale is not None:
            scales = {"global_scale": first.global_scale.clone()}
    shape = list(first.shape)
    shape[back] = sum(q.shape[back] for q in all_)
    return first._with(
        data=joined(torch.cat, [q.qdata for q in all_], back),
        scale=_side_by_side(all_, back),
        shape=shape,
        **scales,
    )


def _stack(tensors: Sequence[Any], dim: int = 0) -> ScaledTensor:
    first, *_ = all_ = _alike("stack", tensors)
    shapes = {tuple(q.shape) for q in all_}
    if len(shapes) > 1:
        raise ValueError(f"stack: got shapes {sorted(shapes)}; expected one")
    at = _leading("stack", dim, first.dim() + 1)
    back = at - first.dim() - 1
    return first._with(
        data=joined(torch.stack, [q.qdata for q in all_], back),
        scale=torch.stack([q.qscale for q in all_], back),
        shape=(*first.shape[:at], len(all_), *first.shape[at:]),
        **_joined_scales(all_, partial(torch.stack, dim=at)),
    )


def _leading(what: str, dim: int, dims: int) -> int:
    """A dimension in front of the matrix, from the front; TypeError of others."""
    at = check_dim(what, dim, dims)
    if at > dims - 3:
        there = f"0 to {dims - 3}" if dims > 2 else "there is none here"
        raise TypeError(
            f"{what}: got dim={dim}; blocks lie in the last two dimensions, and only dimensions in "
            f"front of them can come and go: {there}"
        )
    return at


def _unsqueeze(q: ScaledTensor, dim: int) -> ScaledTensor:
    check_whole("unsqueeze", q)
    at = _leading("unsqueeze", dim, q.dim() + 1)
    return q._with(
        data=q.qdata.unsqueeze(at),
        scale=q.qscale.unsqueeze(at),
        shape=(*q.shape[:at], 1, *q.shape[at:]),
        **reshaped_scales(q, lambda scales: scales.unsqueeze(at)),
    )


def _squeeze(q: ScaledTensor, dim: int) -> ScaledTensor:
    if q.shape[check_dim("squeeze", dim, q.dim())] != 1:
        return q._with()
    check_whole("squeeze", q)
    at = _leading("squeeze", dim, q.dim())
    return q._with(
        data=q.qdata.squeeze(at),
        scale=q.qscale.squeeze(at),
        shape=(*q.shape[:at], *q.shape[at + 1 :]),
        **reshaped_scales(q, lambda scales: scales.squeeze(at)),
    )


def _squeeze_all(q: ScaledTensor, dims: Sequence[int] | None = None) -> ScaledTensor:
    which = range(q.dim()) if dims is None else {check_dim("squeeze", dim, q.dim()) for dim in dims}
    for dim in sorted(which, reverse=True):
        q = _squeeze(q, dim)
    return q


def _split_with_sizes(q: ScaledTensor, sizes: Sequence[int], dim: int = 0) -> list[ScaledTensor]:
    whole = q.shape[check_dim("split", dim, q.dim())]
    if sum(sizes) != whole or min(sizes, default=0) < 0:
        raise ValueError(
            f"split: got sizes {list(sizes)} for {whole} of dimension {dim}; expected sizes of at "
            f"least 0 that add up to {whole}"
        )
    parts, start = [], 0
    for size in sizes:
        parts.append(slice_of(q, dim, start, start + size))
        start += size
    return parts


def _split(q: ScaledTensor, size: int, dim: int = 0) -> list[ScaledTensor]:
    whole = q.shape[check_dim("split", dim, q.dim())]
    if size < 0 or (whole and not size):
        raise ValueError(f"split: got size {size}; expected a positive number")
    sizes = [min(size, whole - start) for start in range(0, whole, size or 1)]
    return _split_with_sizes(q, sizes or [0], dim)


def _unbind(q: ScaledTensor, dim: int = 0) -> list[ScaledTensor]:
    dim = check_dim("unbind", dim, q.dim())
    return [RULES[aten.select.int](q, dim, i) for i in range(q.shape[dim])]


def _permute(q: ScaledTensor, dims: Sequence[int]) -> ScaledTensor:
    n = q.dim()
    order = [check_dim("permute", dim, n) for dim in dims]
    if order == list(range(n)):
        return q._with()
    if n > 1 and order == [*range(n - 2), n - 1, n - 2]:
        return RULES[aten.transpose.int](q, -2, -1)
    raise TypeError(
        f"permute: got {tuple(dims)}; only the last two dimensions of a ScaledTensor can be "
        "exchanged: use .mT (.T of a matrix)"
    )


RULES.update(
    {
        aten.cat.default: _cat,
        aten.stack.default: _stack,
        aten.unsqueeze.default: _unsqueeze,
        aten.squeeze.default: _squeeze_all,
        aten.squeeze.dim: _squeeze,
        aten.squeeze.dims: _squeeze_all,
        aten.split.Tensor: _split,
        aten.split_with_sizes.default: _split_with_sizes,
        aten.unbind.int: _unbind,
        aten.permute.default: _permute,
    }
)
