"""Tokens to the ranks that have their experts, once to each, and experts' results back.

Rank ``r`` has experts ``r * experts_per_rank`` and those after it. All that is sent is in one
order, so that no numbers travel beside it: by rank, then by token, then by the place of an expert
in the list of a token.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..routing import Routing, route
from .ranks import PeerError, rank_and_ranks

__all__ = ["Dispatched", "dispatch"]


class Dispatched(NamedTuple):
    """What this rank has of the tokens of all ranks, and what it takes to return results.

    Attributes:
        parts: rows of each tensor that was sent, of tokens that name an expert of this rank.
        experts: int32 (rows, top_k), numbers of this rank's experts; negative, or too large, those
            of others.
        pairs: this rank's tokens and their experts, by the rank of the expert.
        tokens: of this rank, in the order in which their rows are sent.
        rows_received: how many rows come from each rank.
        rows_sent: and go to it.
        results_received: how many results come back from each rank.
        results_sent: and go back to it.
    """

    group: dist.ProcessGroup | None
    parts: tuple[Tensor, ...]
    experts: Tensor
    pairs: Routing
    tokens: Tensor
    rows_received: list[int]
    rows_sent: list[int]
    results_received: list[int]
    results_sent: list[int]

    def send(self, part: Tensor) -> Tensor:
        """Rows of one more tensor, which has one for each of this rank's tokens."""
        rows = part.new_empty(sum(self.rows_received), *part.shape[1:])
        _all_to_all(rows, part[self.tokens], self.rows_received, self.rows_sent, self.group)
        return rows

    def return_results(self, results: Tensor) -> Tensor:
        """Results for this rank's tokens, as ``pairs.slots`` names them, zeros for those of no
        expert; given (pairs, H) of this rank's experts, in the order of received rows and their
        experts."""
        out = results.new_zeros(len(self.pairs.pairs), *results.shape[1:])
        received = out[: sum(self.results_received)]
        _all_to_all(received, results, self.results_received, self.results_sent, self.group)
        return out


def dispatch(
    parts: tuple[Tensor, ...],
    experts: Tensor,
    experts_per_rank: int,
    group: dist.ProcessGroup | None = None,
    *,
    error: Exception | None = None,
    kind: str = "",
) -> Dispatched:
    """Send rows of ``parts`` to the ranks that have their ``experts`` (tokens, top_k).

    Every rank of ``group`` calls this. The host waits: how many rows come is known to their senders
    alone. Numbers outside of all experts are of none. ``error``: why this rank cannot take part; it
    is raised here, and :class:`PeerError` on all others, after the first exchange, so that none
    waits for it. ``kind``: what all ranks have to have alike; ValueError on every rank otherwise.
    """
    rank, ranks = rank_and_ranks(group)
    inside = (experts >= 0) & (experts < experts_per_rank * ranks)
    owner = torch.where(inside, experts // experts_per_rank, ranks)
    needed = torch.zeros(len(experts), ranks + 1, dtype=torch.bool, device=experts.device)
    needed = needed.scatter_(1, owner.long(), True)[:, :ranks]
    tokens = needed.mT.nonzero()[:, 1]
    pairs = route(owner, ranks)
    own = zlib.crc32(kind.encode())
    kinds = torch.full((ranks,), own, device=experts.device)
    counts = torch.stack([needed.sum(0), pairs.counts.long(), kinds], 1)
    if error is not None:
        counts.fill_(-1)
    their_counts = torch.empty_like(counts)
    _all_to_all(their_counts, counts, [1] * ranks, [1] * ranks, group)
    rows_sent, results_received, _ = counts.mT.tolist()
    rows_received, results_sent, their_kinds = their_counts.mT.tolist()
    if error is not None:
        raise error
    if min(rows_received) < 0:
        who = ", ".join(str(r) for r, count in enumerate(rows_received) if count < 0)
        raise PeerError(f"rank {who} cannot go on and says why; rank {rank} stopped with it")
    if others := ", ".join(str(r) for r, one in enumerate(their_kinds) if one != own):
        raise ValueError(
            f"rank {others} does something else than rank {rank}, which has {kind}; call it alike "
            "on all ranks"
        )
    splits = rows_received, rows_sent, results_received, results_sent
    sender = Dispatched(group, (), experts, pairs, tokens, *splits)
    numbers = sender.send(torch.where(inside, experts, -1).int()) - rank * experts_per_rank
    return sender._replace(parts=tuple(map(sender.send, parts)), experts=numbers)


def _all_to_all(
    out: Tensor,
    given: Tensor,
    received: list[int],
    sent: list[int],
    group: dist.ProcessGroup | None,
) -> None:
    """Exchange rows of any type and shape: so many are ``received`` from each rank, and ``sent``
    to it."""
    if rank_and_ranks(group)[1] == 1:
        out.copy_(given)
        return
    width = math.prod(out.shape[1:])
    to, of = (x.view(len(x), width).view(torch.uint8) for x in (out, given.contiguous()))
    dist.all_to_all_single(to, of, received, sent, group=group)
