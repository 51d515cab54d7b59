"""Whether ranks do the same, before they wait for each other with different things."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["check_alike"]


def check_alike(what: str, mine: object, group: dist.ProcessGroup) -> None:
    """ValueError on every rank of ``group`` where one has another value of ``what``, by its repr.
    All of them call it."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, repr(mine), group=group)
    here = dist.get_rank(group)
    others = [f"rank {i} has {each}" for i, each in enumerate(found) if each != found[here]]
    if others:
        raise ValueError(
            f"{what}: rank {here} has {found[here]}, {', '.join(others)}; give all ranks the same"
        )
