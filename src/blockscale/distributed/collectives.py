"""Collectives of quantized tensors: elements and block scales travel in one message, a byte and
0.03 to 0.13 for each element."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..tensor import ScaledTensor
from ..tensor_rules import has_whole_tiles
from .functional_collectives import all_gather_tensor
from .ranks import rank_and_ranks

__all__ = [
    "all_gather",
    "all_gather_named",
    "all_to_all",
    "as_rows",
    "exchange",
    "is_turned",
    "pack",
    "parts_of",
    "unpack",
]

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
        shard: this rank's, of the same shape on all, with compact scales and whole blocks along
            ``dim``, or with whole tiles (layout "tcgen05", a matrix of a multiple of 128 there),
            which stay as they are. Of NVFP4 all ranks quantize with one global scale, that of the
            largest amax.
        dim: along which the whole tensor was cut.
        group: of torch.distributed; None: the default one, or this process alone where it was not
            initialized. All ranks of it call this.

    Raises TypeError where ``shard`` is no ScaledTensor; ValueError where it cannot be joined, and
    where another rank's is of another shape, format, axis, dtype or order in memory (``k_major`` of
    quantize) with as many bytes (which a GPU waits for when a ``shard`` is the first of its kind).
    Where ranks have other global scales, the result's is NaN.

    Source: seed 001 of Transformer Engine, "Quantized all-gather".
    """
    if not isinstance(dim, int):
        raise TypeError(f"dim: got {dim!r}; expected an int, and a group as group=")
    if not (isinstance(shard, ScaledTensor) and has_whole_tiles(shard, dim)):
        _check("shard", shard)
    if rank_and_ranks(group)[1] == 1:
        return shard
    kind = f"dim={dim}, {_kind_of(shard)}"
    received, sizes = _gathered(shard, kind, group)
    return unpack(received, sizes, shard, dim, kind)


def all_gather_named(
    shard: ScaledTensor, group: dist.ProcessGroup | None, name: str
) -> ScaledTensor:
    """``all_gather`` along rows of what ranks might ask for in different orders, as compilers move
    ops: an error on a CPU where others sent what has another ``name``, NaN on a GPU."""
    if rank_and_ranks(group)[1] == 1:
        return shard
    kind = f"{name}: {_kind_of(shard)}"
    received, sizes = _gathered(shard, kind, group)
    whole = unpack(received, sizes, shard, 0, kind)
    if not received.is_cuda:
        return whole
    return _or_nan(whole, (received[:, :_HEADER] == _header(kind, received.device)).all())


def _or_nan(whole: ScaledTensor, known: Tensor) -> ScaledTensor:
    """``whole``, or NaN where ``known`` is false."""
    octets = torch.where(known, whole.qscale.view(torch.uint8), 255)
    return whole._with(scale=octets.view(whole.qscale.dtype))  # all bits: NaN in each type


def _gathered(
    shard: ScaledTensor, kind: str, group: dist.ProcessGroup | None
) -> tuple[Tensor, list[int]]:
    """The messages of all ranks (ranks, bytes), and the sizes of their parts."""
    message, sizes = pack(shard, kind)
    return all_gather_tensor(message, 0, group).view(-1, len(message)), sizes


def exchange(
    parts: list[ScaledTensor], dim: int = 0, group: dist.ProcessGroup | None = None
) -> ScaledTensor:
    """Send each rank one of ``parts``, which are alike; those that came, joined along ``dim``."""
    kind = f"dim={dim}, {_kind_of(parts[0])}"
    messages, sizes = zip(*(pack(part, kind) for part in parts), strict=True)
    sent = torch.cat(messages)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return unpack(received.view(len(parts), -1), sizes[0], parts[0], dim, kind)


def all_to_all(
    rows: ScaledTensor,
    output_split_sizes: list[int],
    input_split_sizes: list[int],
    group: dist.ProcessGroup | None = None,
) -> ScaledTensor:
    """Rows to the ranks that want them: what each rank receives, in the order of ranks, has the
    bytes of the rows sent first and quantized then.

    >>> q = bs.quantize(torch.randn(8, 128), "mxfp8")
    >>> bs.distributed.all_to_all(q, [8], [8]).shape  # alone; of 2 ranks [4, 4] for each to get 4
    torch.Size([8, 128])

    Args:
        rows: (R, K), blocked along -1, each row by itself, with compact scales, of as many columns
            on all ranks. Of NVFP4 all ranks quantize with one global scale, that of the largest
            amax.
        output_split_sizes: how many rows come from each rank, as of
            torch.distributed.all_to_all_single.
        input_split_sizes: and go to it, in the order of ``rows``.
        group: of torch.distributed; None: the default one, or this process alone where it was not
            initialized. All ranks of it call this, those without rows, too.

    Raises TypeError where ``rows`` is no ScaledTensor; ValueError where it cannot be sent, where
    sizes do not fit, and where another rank's is of another format or dtype with as many bytes
    (which a GPU waits for when ``rows`` is the first of its kind). Where ranks have other global
    scales, the result's is NaN.

    Source: DeepEP, whose dispatch sends FP8 rows and their scales.
    """
    _check("rows", rows)
    if rows.dim() != 2 or rows.axis != -1 or rows.format.block[0] > 1:
        raise ValueError(
            f"rows: got {rows}; expected a matrix whose rows have blocks of their own: quantize it "
            "with axis=-1, and with fp8_1x128 for fp8_128x128"
        )
    ranks, count = rank_and_ranks(group)[1], len(rows)
    if not len(output_split_sizes) == len(input_split_sizes) == ranks:
        raise ValueError(
            f"output_split_sizes, input_split_sizes: have {len(output_split_sizes)} and "
            f"{len(input_split_sizes)} numbers, there are {ranks} ranks; give one for each"
        )
    if sum(input_split_sizes) != count:
        raise ValueError(
            f"input_split_sizes: got {input_split_sizes}, {sum(input_split_sizes)} in all; rows "
            f"has {count}"
        )
    if ranks == 1:
        return rows
    kind = f"{rows.shape[1]} columns, {rows._meta()}"
    data, scale, *scalars = (
        part.contiguous().view(part.shape or (1,)).view(torch.uint8) for part in parts_of(rows)
    )
    head = torch.cat([_header(kind, rows.device), *scalars])
    body = torch.cat([data, scale], 1)
    sent, received = (
        [len(head) + size * body.shape[1] for size in sizes]
        for sizes in (input_split_sizes, output_split_sizes)
    )
    pieces = [x for part in body.split(input_split_sizes) for x in (head, part.flatten())]
    found = body.new_empty(sum(received))
    dist.all_to_all_single(found, torch.cat(pieces), received, sent, group=group)
    messages = found.split(received)
    heads = torch.stack([message[: len(head)] for message in messages])
    _check_headers(heads[:, :_HEADER], kind, "rows")
    bodies = torch.cat([message[len(head) :] for message in messages]).view(-1, body.shape[1])
    parts = bodies.split([data.shape[1], scale.shape[1]], 1)
    made: dict[str, Any] = {
        name: part.contiguous().view(like.dtype)
        for name, part, like in zip(("data", "scale"), parts, parts_of(rows), strict=False)
    }
    if scalars:
        made["global_scale"] = _alike(heads[:, _HEADER:].contiguous().view(torch.float32).view(-1))
    return rows._with(**made, shape=(len(bodies), rows.shape[1]))


def _check(name: str, given: ScaledTensor) -> None:
    if not isinstance(given, ScaledTensor):
        raise TypeError(
            f"{name}: got {type(given).__name__}; expected a ScaledTensor: call blockscale.quantize"
        )
    if given.layout_name != "compact" or given.offsets is not None:
        raise ValueError(
            f"{name}: got {given}; expected compact scales and no groups: call to_layout('compact')"
        )


def _kind_of(shard: ScaledTensor) -> str:
    """Describe how a message's bytes are to be read: by shape, order in memory, and format."""
    order = "column after column" if is_turned(shard.qdata) else "row after row"
    return f"{tuple(shard.shape)}, {order}, {shard._meta()}"


def pack(shard: ScaledTensor, kind: str) -> tuple[Tensor, list[int]]:
    """A rank's message: bytes of what it is, elements, block scales, and perhaps a global scale;
    and how many there are of each."""
    data, *others = parts_of(shard)
    parts = [_header(kind, shard.device), as_rows(data), *(part.contiguous() for part in others)]
    octets = [part.view(-1).view(torch.uint8) for part in parts]
    return torch.cat(octets), [len(each) for each in octets]


def unpack(
    received: Tensor, sizes: list[int], shard: ScaledTensor, dim: int, kind: str
) -> ScaledTensor:
    """The messages of all ranks (ranks, bytes) as one tensor, of shards like ``shard``."""
    headers, *found = received.split(sizes, 1)
    _check_headers(headers, kind, "shard")
    like = [as_rows(shard.qdata), *parts_of(shard)[1:]]
    data, scale, *scalars = (
        part.contiguous().view(each.dtype).view(len(received), *each.shape)
        for part, each in zip(found, like, strict=True)
    )
    if is_turned(shard.qdata):
        data = data.mT
    scalar = _alike(scalars[0]) if scalars else None
    each: list[Any] = [
        shard._with(data=data[rank], scale=scale[rank], global_scale=scalar)
        for rank in range(len(received))
    ]
    joined: Any = torch.cat(each, dim)
    return joined


def is_turned(data: Tensor) -> bool:
    """Whether a matrix lies in memory column after column."""
    return not data.is_contiguous() and data.mT.is_contiguous()


def as_rows(data: Tensor) -> Tensor:
    """A matrix, or its transpose, which of them lies row after row."""
    return data.mT if is_turned(data) else data.contiguous()


def parts_of(shard: ScaledTensor) -> list[Tensor]:
    """Elements, block scales, and perhaps a global scale."""
    scalars = [] if shard.global_scale is None else [shard.global_scale]
    return [shard.qdata, shard.qscale, *scalars]


@lru_cache(maxsize=4096)
def _header(kind: str, device: torch.device) -> Tensor:
    octets = kind.encode()[:_HEADER].ljust(_HEADER)
    return torch.frombuffer(bytearray(octets), dtype=torch.uint8).to(device)


def _check_headers(headers: Tensor, kind: str, name: str) -> None:
    """ValueError unless all ranks sent the same kind; on a GPU only the first time, as it waits."""
    if headers.is_cuda:
        if kind in _seen or torch.cuda.is_current_stream_capturing():
            return
        _seen.add(kind)
    for rank, octets in enumerate(headers.tolist()):
        given = bytes(octets).decode(errors="replace").strip()
        if given != kind[:_HEADER]:
            raise ValueError(
                f"{name}: this rank has {kind}, rank {rank} {given}; quantize alike on all ranks"
            )


def _alike(scalars: Tensor) -> Tensor:
    """The global scale that all ranks have, given theirs (ranks, ...); NaN where they differ."""
    same = (scalars == scalars[0]).all(0)
    return torch.where(same, scalars[0], torch.nan)
