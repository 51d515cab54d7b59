# mypy: ignore-errors
"""Which tiles a cluster takes: its own, then those of clusters that have not been launched yet.

There is a cluster for each tile of the raster. One thread asks the hardware for the next one that
waits, which then never starts (cluster launch control), a few tiles ahead of those who work; the
answer goes to all blocks of the cluster at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from ..common.persistent import advance_pipeline
from . import ptx
from .config import ANSWER, TURNS, Config

__all__ = ["Scheduler", "Turns"]


@dataclass(frozen=True)
class Turns:
    """A ring of answers.

    Attributes:
        answers: address of them.
        answered, taken: addresses of barriers of the answers, and of those whose readers have done
            with them, in the cluster's first block.
    """

    config: Config
    answers: Any
    answered: Any
    taken: Any

    def first(self):
        """Of this cluster: its tile, and the place of the first answer."""
        return cute.arch.block_idx()[0] // self.config.blocks, Int32(0), Int32(0)

    def expect(self, turn) -> None:
        """By one thread of each block, for an answer that it will wait for."""
        ptx.expect(self.answered + turn * 8, ANSWER)

    def read(self, turn, phase):
        """The next tile; negative where there is none. The answer stays until all have left it."""
        ptx.wait(self.answered + turn * 8, phase, self.config.blocks)
        return ptx.read_answer(self.answers + turn * ANSWER, self.config.blocks)

    def leave(self, turn) -> None:
        """By one thread, for all that have read with it."""
        ptx.arrive_first(self.taken + turn * 8, self.config.blocks)

    def next(self, turn, phase):
        """The next tile, for a single thread, and the place of the answer after it."""
        index = self.read(turn, phase)
        self.leave(turn)
        return index, *advance_pipeline(turn, phase, TURNS)


class Scheduler:
    """Asks for tiles: one thread's work, of the first block of a cluster."""

    def __init__(self, turns: Turns):
        self.turns = turns

    @cute.jit
    def __call__(self):
        index, turn, phase = self.turns.first()
        while index >= 0:
            ptx.wait(self.turns.taken + turn * 8, phase ^ 1, self.turns.config.blocks)
            address = self.turns.answers + turn * ANSWER
            ptx.ask(address, self.turns.answered + turn * 8, self.turns.config.blocks)
            index = self.turns.read(turn, phase)
            turn, phase = advance_pipeline(turn, phase, TURNS)
