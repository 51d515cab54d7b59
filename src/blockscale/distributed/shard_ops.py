"""The gather of quantized shards as one op: what is sent is packed, and what comes is checked,
where compilers do not look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..formats import get_format
from ..memory import joined
from ..ops.operand_layout import operand_layout
from ..ops.operation import operation
from ..tensor import ScaledTensor
from .collectives import all_gather, as_rows, is_turned, parts_of
from .functional_collectives import group_of

__all__ = ["as_operand", "gather_operand", "join_received", "received_shards"]


def gather_operand(shard: ScaledTensor, rows: int, ranks: int, group: str) -> ScaledTensor:
    """The matrix of which ranks have shards, as products read it. A shard has pieces of so many
    ``rows``, and under each the matrix has those of the other ranks."""
    given = shard.format_name, list(shard.shape), shard.axis, shard.layout_name, shard.dtype
    scalar = shard.global_scale
    data, scale, *found = gather_scaled(
        shard.qdata, shard.qscale, scalar, *given, rows, ranks, group
    )
    layout, _ = operand_layout(shard.format_name, shard.device)
    size = ranks * shard.shape[0], shard.shape[1]
    scalar = found[0] if found else None
    return shard._with(data=data, scale=scale, global_scale=scalar, shape=size, layout=layout)


def _fake_gather_scaled(
    data: Tensor, scale: Tensor, global_scale: Tensor | None, format: str, shape: list[int],
    axis: int, layout: str, dtype: torch.dtype, ranks: int,
) -> list[Tensor]:  # fmt: skip
    shard = _scaled((data, scale, global_scale), format, shape, axis, layout, dtype)
    whole: Any = torch.cat([shard] * ranks)
    return [torch.empty_like(part) for part in parts_of(as_operand(whole))]


@operation(_fake_gather_scaled)
def gather_scaled(
    data: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    format: str,
    shape: list[int],
    axis: int,
    layout: str,
    dtype: torch.dtype,
    rows: int,
    ranks: int,
    group: str,
) -> list[Tensor]:
    """Elements, scales, and perhaps the global scale, of the whole matrix."""
    shard = _scaled((data, scale, global_scale), format, shape, axis, layout, dtype)
    whole = all_gather(shard, 0, group_of(group))
    pieces = shape[0] // rows
    if pieces > 1:  # the ranks' shards of each lie one after another
        steps = [
            whole[start : start + rows]
            for piece in range(pieces)
            for start in range(piece * rows, whole.shape[0], pieces * rows)
        ]
        whole = torch.cat(steps)  # type: ignore[assignment]
    found = parts_of(as_operand(whole))
    return [part.clone() for part in found] if ranks == 1 else found  # not what was given


def _scaled(
    parts: tuple[Tensor, Tensor, Tensor | None],
    format: str,
    shape: list[int],
    axis: int,
    layout: str,
    dtype: torch.dtype,
) -> ScaledTensor:
    data, scale = parts[0], parts[1].contiguous()
    how: Any = {"format": get_format(format), "shape": shape, "axis": axis, "dtype": dtype}
    return ScaledTensor(data, scale, global_scale=parts[2], layout=layout, **how)


def received_shards(sent: ScaledTensor, data: Tensor, scale: Tensor) -> Iterator[ScaledTensor]:
    """What each rank has sent, shards as ``sent``: views of their bytes and of their scales, which
    lie one after the other."""
    turned = is_turned(sent.qdata)
    each = data.view(-1, *as_rows(sent.qdata).shape), scale.view(-1, *sent.qscale.shape)
    for d, s in zip(*each, strict=True):
        yield sent._with(data=(d.mT if turned else d).view(sent.qdata.dtype), scale=s)


def join_received(
    like: ScaledTensor, data: Tensor, scale: Tensor, shape: torch.Size
) -> ScaledTensor:
    """The matrix of which ranks have sent shards as ``like``, of its rows: their bytes and their
    scales lie one after the other."""
    if like.axis == -2 and like.layout_name != "compact":  # tiles of scales lie beside each other
        parts: Any = list(received_shards(like, data, scale))
        whole: ScaledTensor = torch.cat(parts)  # type: ignore[assignment]
        return whole
    if is_turned(like.qdata):
        data = joined(torch.cat, data.view(-1, *like.qdata.mT.shape).mT.unbind(), -2)
    return like._with(data=data.view(like.qdata.dtype), scale=scale, shape=tuple(shape))


def as_operand(whole: ScaledTensor) -> ScaledTensor:
    """In memory as products want it."""
    layout, k_major = operand_layout(whole.format_name, whole.device)
    if whole.axis == -1 and not whole.qdata.is_contiguous():
        whole = whole._with(data=whole.qdata.contiguous())  # square blocks, gathered as columns
    elif whole.axis == -2 and k_major and not whole.qdata.mT.is_contiguous():
        whole = whole._with(data=whole.qdata.mT.contiguous().mT)
    return whole.to_layout(layout)
