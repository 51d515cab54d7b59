"""Uses of a stage of shared memory, one after the other, and the barriers that tell them apart."""

from __future__ import annotations

__all__ = ["rounds"]


def rounds(stages: int, parts: int) -> int:
    """How many rounds of a stage have a barrier of their own, where each of ``parts`` warpgroups
    takes stages in its turn. Two where the next round of a stage is another one's: who saw only
    every other one could not tell a round from the one after the next, for a barrier tells no more
    than odd from even."""
    return 2 if stages % parts else 1
