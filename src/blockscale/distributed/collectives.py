"""Collectives of quantized tensors: elements and block scales travel in one message, a byte and
0.03 to 0.13 for each element."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..tensor import ScaledTensor
from .tokens import rank_and_ranks

__all__ = ["all_gather", "all_gather_named", "pack", "unpack"]

#: Its name before torch 2.13, and since.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_HEADER = 256  # bytes that say what a message is
_seen: set[str] = set()  # kinds of messages that have come from all ranks of a group on a GPU


def all_gather(
    shard: ScaledTensor, dim: int = 0, group: dist.ProcessGroup | None = None
) -> ScaledTensor:
    """The shards of all ranks, joined along ``dim`` in the order of ranks: the bytes of the whole
    tensor quantized at once.

    >>> w = torch.randn(256, 128)
    >>> shard = bs.quantize(w, "mxfp8", axis=-2)  # of a rank, its rows: 128 or a multiple
    >>> bs.distributed.all_gather(shard).shape
    torch.Size([256, 128])

    Args:
        shard: this rank's, of the same shape on all, with compact scales; whole blocks along
            ``dim``. Of NVFP4 all ranks quantize with one global scale, that of the largest amax.
        dim: along which the whole tensor was cut.
        group: of torch.distributed; None: the default one, or this process alone where it was not
            initialized. All ranks of it call this.

    Raises TypeError where ``shard`` is no ScaledTensor; ValueError where it cannot be joined, and
    where another rank's is of another shape, format, axis or dtype with as many bytes (which a GPU
    waits for when a ``shard`` is the first of its kind). Where ranks have other global scales, the
    result's is NaN.

    Source: seed 001 of Transformer Engine, "Quantized all-gather".
    """
    if not isinstance(shard, ScaledTensor):
        raise TypeError(
            f"shard: got {type(shard).__name__}; expected a ScaledTensor: call blockscale.quantize"
        )
    if shard.layout_name != "compact" or shard.offsets is not None:
        raise ValueError(
            f"shard: got {shard}; expected compact scales and no groups: call to_layout('compact')"
        )
    if rank_and_ranks(group)[1] == 1:
        return shard
    kind = f"dim={dim}, {tuple(shard.shape)}, {shard._meta()}"
    received, sizes = _exchange(shard, kind, group)
    return unpack(received, sizes, shard, dim, kind)


def all_gather_named(
    shard: ScaledTensor, group: dist.ProcessGroup | None, name: str
) -> ScaledTensor:
    """``all_gather`` along rows of what ranks might ask for in different orders, as compilers move
    ops: an error on a CPU where others sent what has another ``name``, NaN on a GPU."""
    if rank_and_ranks(group)[1] == 1:
        return shard
    kind = f"{name}: {tuple(shard.shape)}, {shard._meta()}"
    received, sizes = _exchange(shard, kind, group)
    whole = unpack(received, sizes, shard, 0, kind)
    if not received.is_cuda:
        return whole
    return _or_nan(whole, (received[:, :_HEADER] == _header(kind, received.device)).all())


def _or_nan(whole: ScaledTensor, known: Tensor) -> ScaledTensor:
    """``whole``, or NaN where ``known`` is false."""
    octets = torch.where(known, whole.qscale.view(torch.uint8), 255)
    return whole._with(scale=octets.view(whole.qscale.dtype))  # all bits: NaN in each type


def _exchange(
    shard: ScaledTensor, kind: str, group: dist.ProcessGroup | None
) -> tuple[Tensor, list[int]]:
    """The messages of all ranks (ranks, bytes), and the sizes of their parts."""
    message, sizes = pack(shard, kind)
    ranks = rank_and_ranks(group)[1]
    received = message.new_empty(ranks * len(message))
    _gather(received, message, group)
    return received.view(ranks, -1), sizes


def pack(shard: ScaledTensor, kind: str) -> tuple[Tensor, list[int]]:
    """A rank's message: bytes of what it is, elements, block scales, and perhaps a global scale;
    and how many there are of each."""
    parts = [_header(kind, shard.device), *(part.contiguous() for part in _parts(shard))]
    octets = [part.view(-1).view(torch.uint8) for part in parts]
    return torch.cat(octets), [len(each) for each in octets]


def unpack(
    received: Tensor, sizes: list[int], shard: ScaledTensor, dim: int, kind: str
) -> ScaledTensor:
    """The messages of all ranks (ranks, bytes) as one tensor, of shards like ``shard``."""
    headers, *found = received.split(sizes, 1)
    _check_headers(headers, kind)
    whole = [
        part.contiguous().view(like.dtype).view(len(received), *like.shape)
        for part, like in zip(found, _parts(shard), strict=True)
    ]
    data, scale, *scalars = whole
    scalar = _alike(scalars[0]) if scalars else None
    each: list[Any] = [
        shard._with(data=data[rank], scale=scale[rank], global_scale=scalar)
        for rank in range(len(received))
    ]
    joined: Any = torch.cat(each, dim)
    return joined


def _parts(shard: ScaledTensor) -> list[Tensor]:
    scalars = [] if shard.global_scale is None else [shard.global_scale]
    return [shard.qdata, shard.qscale, *scalars]


@lru_cache(maxsize=4096)
def _header(kind: str, device: torch.device) -> Tensor:
    octets = kind.encode()[:_HEADER].ljust(_HEADER)
    return torch.frombuffer(bytearray(octets), dtype=torch.uint8).to(device)


def _check_headers(headers: Tensor, kind: str) -> None:
    """ValueError unless all ranks sent the same kind; on a GPU only the first time, as it waits."""
    if headers.is_cuda:
        if kind in _seen or torch.cuda.is_current_stream_capturing():
            return
        _seen.add(kind)
    for rank, octets in enumerate(headers.tolist()):
        given = bytes(octets).decode(errors="replace").strip()
        if given != kind[:_HEADER]:
            raise ValueError(
                f"shard: this rank has {kind}, rank {rank} {given}; quantize alike on all ranks"
            )


def _alike(scalars: Tensor) -> Tensor:
    """The global scale that all ranks have, given theirs (ranks, ...); NaN where they differ."""
    same = (scalars == scalars[0]).all(0)
    return torch.where(same, scalars[0], torch.nan)
