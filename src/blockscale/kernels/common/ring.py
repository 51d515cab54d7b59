# mypy: ignore-errors
"""Stages that one warp fills, one after the other, and warpgroups take in turn."""

from __future__ import annotations

from cutlass import Int32, cute

from .persistent import advance
from .rounds import rounds

__all__ = ["Ring"]


class Ring:
    """Of ``stages``, each warpgroup has every ``parts``-th.

    Who fills them has a phase of one bit (``persistent.advance``). Who takes them starts with phase
    0 and counts what a stage's barriers tell apart, which are ``waits`` in all.
    """

    def __init__(self, stages: int, parts: int):
        self.stages, self.parts = stages, parts
        self.rounds = rounds(stages, parts)

    @property
    def waits(self) -> int:
        return self.rounds * self.stages

    def filled(self, full, stage, phase):
        """The barrier of a stage that is filled when the ``phase`` of its last use is over."""
        return full + stage if self.rounds == 1 else full + (stage + (phase ^ 1) * self.stages)

    def wait(self, full, stage, phase) -> None:
        """Until a stage is full."""
        if self.rounds > 1:
            stage, phase = stage + phase % self.rounds * self.stages, phase // self.rounds
        cute.arch.mbarrier_wait(full + stage, phase)

    def next(self, stage, phase):
        """What the same warpgroup takes next."""
        if self.parts == 1:
            return advance(stage, phase, self.stages)
        stage = stage + self.parts
        wrapped = Int32(stage >= self.stages)
        return stage - wrapped * self.stages, (phase + wrapped) % (2 * self.rounds)
