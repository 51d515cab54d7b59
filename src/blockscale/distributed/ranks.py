"""Which rank this process is, and what ranks tell each other before they wait for each other with
different things."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["PeerError", "check_alike", "gather_messages", "make_on_all", "rank_and_ranks"]

Message = TypeVar("Message")
Made = TypeVar("Made")


class PeerError(RuntimeError):
    """Another rank cannot go on, for a reason that it raises itself."""


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


def gather_messages(message: Message, group: dist.ProcessGroup | None = None) -> list[Message]:
    """Send a message to all ranks; the messages of all of them, in their order."""
    ranks = rank_and_ranks(group)[1]
    if ranks == 1:
        return [message]
    messages: list[Any] = [None] * ranks
    dist.all_gather_object(messages, message, group)
    return messages


def make_on_all(
    make: Callable[[], Made], group: dist.ProcessGroup | None = None
) -> tuple[Made | None, str]:
    """What ``make`` returns; or None, and why, where it raises RuntimeError on any rank. All of
    them call it."""
    made, wrong = None, ""
    try:
        made = make()
    except RuntimeError as error:
        wrong = str(error) or repr(error)
    wrong = next((said for said in gather_messages(wrong, group) if said), "")
    return (None if wrong else made), wrong


def check_alike(what: str, mine: object, group: dist.ProcessGroup) -> None:
    """ValueError on every rank of ``group`` where one has another value of ``what``, by its repr.
    All of them call it."""
    found, here = gather_messages(repr(mine), group), dist.get_rank(group)
    others = [f"rank {i} has {each}" for i, each in enumerate(found) if each != found[here]]
    if others:
        raise ValueError(
            f"{what}: rank {here} has {found[here]}, {', '.join(others)}; give all ranks the same"
        )
