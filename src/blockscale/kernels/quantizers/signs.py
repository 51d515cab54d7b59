# mypy: ignore-errors
"""Signs of a transform, drawn in a kernel: ``blockscale.Hadamard`` with a seed.

Each warp draws those of a whole block, 128 at most, at once: lane l makes the call of Philox that
elements 4l to 4l + 3 share. Of the i-th words of all lanes a vote has the lowest bits: bit l is the
sign of element 4l + i. Votes are then spread, every fourth bit of a word.
"""

from __future__ import annotations

from cutlass import Uint32, cute

from ..common.philox import philox
from .noise import step_words

__all__ = ["drawn_signs"]


def drawn_signs(size: int, step, value) -> list:
    """Words of the signs of ``size`` elements; all lanes of a warp meet in here."""
    counter = [Uint32(cute.arch.lane_idx()), Uint32(0), *step_words(step)]
    drawn = philox(counter, [Uint32(value), Uint32(value >> 32)])
    votes = [cute.arch.vote_ballot_sync((word & 1) == 1) for word in drawn]
    words = []
    for first in range(0, size, 32):
        word = Uint32(0)
        for i, vote in enumerate(votes):
            word = word | _spread((Uint32(vote) >> (first // 4)) & 0xFF) << i
        words.append(word)
    return words


def _spread(bits):
    """Eight bits, the i-th as bit 4i."""
    for distance, mask in ((12, 0x000F000F), (6, 0x03030303), (3, 0x11111111)):
        bits = (bits | bits << distance) & mask
    return bits
