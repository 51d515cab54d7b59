"""Whether ranks do the same, before they wait for each other with different things."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from .tokens import rank_and_ranks

__all__ = ["check_alike", "gather_messages"]

Message = TypeVar("Message")


def gather_messages(message: Message, group: dist.ProcessGroup | None = None) -> list[Message]:
    """Send a message to all ranks; the messages of all of them, in their order."""
    ranks = rank_and_ranks(group)[1]
    if ranks == 1:
        return [message]
    messages: list[Any] = [None] * ranks
    dist.all_gather_object(messages, message, group)
    return messages


def check_alike(what: str, mine: object, group: dist.ProcessGroup) -> None:
    """ValueError on every rank of ``group`` where one has another value of ``what``, by its repr.
    All of them call it."""
    found, here = gather_messages(repr(mine), group), dist.get_rank(group)
    others = [f"rank {i} has {each}" for i, each in enumerate(found) if each != found[here]]
    if others:
        raise ValueError(
            f"{what}: rank {here} has {found[here]}, {', '.join(others)}; give all ranks the same"
        )
