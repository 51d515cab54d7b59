# mypy: ignore-errors
"""Stages of shared memory that one warp fills, one after the other, and warpgroups take in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from .persistent import advance_pipeline
from .rounds import rounds

__all__ = ["Pipeline"]


@dataclass(frozen=True)
class Pipeline:
    """Of ``stages``, each warpgroup takes every ``turns``-th.

    A producer has a phase of one bit. A consumer starts with phase 0 and counts what a stage's
    barriers tell apart: its full barriers are as many as ``rounds``.

    Attributes:
        full: mbarriers of all stages, then those of the second round.
        empty: mbarriers, one a stage.
    """

    stages: int
    turns: int
    full: Any
    empty: Any

    @classmethod
    def allocate(cls, memory, stages: int, turns: int) -> Pipeline:
        count = rounds(stages, turns) * stages
        barriers = memory.allocate_array(cutlass.Int64, count + stages)
        return cls(stages, turns, barriers, barriers + count)

    @property
    def rounds(self) -> int:
        return rounds(self.stages, self.turns)

    @property
    def full_barriers(self) -> int:
        return self.rounds * self.stages

    # --- the producer's side ---

    def producer_acquire(self, stage, phase) -> None:
        """Wait until a stage is free."""
        cute.arch.mbarrier_wait(self.empty + stage, phase)

    def producer_barrier(self, stage, phase):
        """The full barrier of a stage that is filled after the ``phase`` of its last use."""
        if self.rounds == 1:
            return self.full + stage
        return self.full + (stage + (phase ^ 1) * self.stages)

    def producer_next(self, stage, phase):
        return advance_pipeline(stage, phase, self.stages)

    # --- a consumer's side ---

    def consumer_wait(self, stage, phase) -> None:
        """Wait until a stage is full."""
        if self.rounds > 1:
            stage, phase = stage + phase % self.rounds * self.stages, phase // self.rounds
        cute.arch.mbarrier_wait(self.full + stage, phase)

    def consumer_next(self, stage, phase):
        """What the same warpgroup takes next."""
        if self.turns == 1:
            return advance_pipeline(stage, phase, self.stages)
        stage = stage + self.turns
        wrapped = Int32(stage >= self.stages)
        return stage - wrapped * self.stages, (phase + wrapped) % (2 * self.rounds)
