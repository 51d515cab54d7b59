"""Tokens to the ranks that have their experts, once to each, and experts' results back.

Rank ``r`` has experts ``r * own`` to ``(r + 1) * own - 1``. All that is sent is in one order, so
that no numbers travel beside it: by rank, then by token, then by the place of an expert in the list
of a token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..routing import Routing, route

__all__ = ["Exchange", "Received", "Stopped", "exchange_tokens", "rank_and_ranks"]


class Stopped(RuntimeError):
    """Another rank cannot go on, for a reason that it raises itself."""


class Received(NamedTuple):
    """What a rank has of the tokens of all ranks.

    Attributes:
        parts: rows of each tensor that was sent, of tokens that name an expert of this rank.
        experts: int32 (rows, top_k), numbers of this rank's experts; negative, or too large, those
            of others.
    """

    parts: tuple[Tensor, ...]
    experts: Tensor


class Exchange(NamedTuple):
    """A way there that was gone, and the way back.

    Attributes:
        received: by this rank.
        pairs: tokens and their experts, by the rank of the expert.
        returned: how many results come back from each rank.
        due: and go back to it.
    """

    group: dist.ProcessGroup | None
    received: Received
    pairs: Routing
    returned: list[int]
    due: list[int]

    def back(self, results: Tensor) -> Tensor:
        """Results for this rank's tokens, as ``pairs.slots`` names them, zeros for those of no
        expert; given those (pairs, H) that are due, in the order of received rows and their
        experts."""
        count, *size = len(self.pairs.pairs), *results.shape[1:]
        out = results.new_zeros(count, *size)
        mine = out[: sum(self.returned)]
        _all_to_all(mine, results, self.returned, self.due, self.group)
        return out


def rank_and_ranks(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process and how many there are; one where torch.distributed was not initialized.
    ValueError where it is not in ``group``."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"group: rank {dist.get_rank()} is not in it; call this on the ranks of the group alone"
        )
    return rank, dist.get_world_size(group)


def exchange_tokens(
    parts: tuple[Tensor, ...],
    experts: Tensor,
    own: int,
    group: dist.ProcessGroup | None = None,
    *,
    problem: Exception | None = None,
) -> Exchange:
    """Send rows of ``parts`` to the ranks that have their ``experts`` (tokens, top_k).

    Every rank of ``group`` calls this. The host waits: how many rows come is known to their senders
    alone. ``own``: experts of each rank; numbers outside of all are of none. ``problem``: why this
    rank cannot take part; it is raised here, and :class:`Stopped` on all others, after the first
    exchange, so that none waits for it.
    """
    rank, ranks = rank_and_ranks(group)
    top_k, device = experts.shape[1], experts.device
    inside = (experts >= 0) & (experts < own * ranks)
    owner = torch.where(inside, experts // own, ranks)
    needed = torch.zeros(len(experts), ranks + 1, dtype=torch.bool, device=device)
    needed.scatter_(1, owner.long(), True)
    token = needed[:, :ranks].mT.nonzero()[:, 1]
    pairs = route(owner, ranks)
    counts = torch.stack([needed[:, :ranks].sum(0), pairs.counts.long()], 1)
    if problem is not None:
        counts.fill_(-1)
    told = torch.empty_like(counts)
    _all_to_all(told, counts, [1] * ranks, [1] * ranks, group)
    sent, returned = counts.mT.tolist()
    coming, due = told.mT.tolist()
    if problem is not None:
        raise problem
    if min(coming) < 0:
        who = ", ".join(str(r) for r, n in enumerate(coming) if n < 0)
        raise Stopped(f"rank {who} cannot go on and says why; rank {rank} stopped with it")
    arrived = []
    for part in (*parts, torch.where(inside, experts, -1).int()):
        rows = part.new_empty(sum(coming), *part.shape[1:])
        _all_to_all(rows, part[token], coming, sent, group)
        arrived.append(rows)
    *others, numbers = arrived
    received = Received(tuple(others), numbers.view(-1, top_k) - rank * own)
    return Exchange(group, received, pairs, returned, due)


def _all_to_all(
    out: Tensor, given: Tensor, coming: list[int], sent: list[int], group: dist.ProcessGroup | None
) -> None:
    """Of rows of any type and shape."""
    if rank_and_ranks(group)[1] == 1:
        out.copy_(given)
        return
    width = math.prod(out.shape[1:])
    to, of = (x.view(len(x), width).view(torch.uint8) for x in (out, given.contiguous()))
    dist.all_to_all_single(to, of, coming, sent, group=group)
