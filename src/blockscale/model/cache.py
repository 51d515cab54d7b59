"""The L2 cache under a launch: which rows of A and of B are still there when they are read again.

Clusters that run at once go through K in step, and the cache forgets what was used longest ago.
What is stored does not push A and B out: the bytes that ncu counts of memory fit that better.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import islice

from .counts import Launch
from .machine import Machine

__all__ = ["Traffic", "walk"]

_CHUNKS = 8  # of K: what is kept or forgotten at once


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a launch.

    Attributes:
        read: of A and B, asked of the L2 cache: once by a cluster, or by CTAs of a TPC.
        missed: of these, read from memory.
        output: written, and read before that if it is added to.
        hit_rate: as ncu seems to count it (``L2 Hit Rate``): a line has its place in one part of
            the cache. Where multiprocessors of the other part read it, too, it is missing there
            once more and looked up in its place; what is written is missing unless its place is in
            the writer's part.
    """

    read: float
    missed: float
    output: float
    hit_rate: float

    @property
    def memory(self) -> float:
        """To and from memory."""
        return self.missed + self.output

    @property
    def l2(self) -> float:
        return self.read + self.output


class _Recent:
    """A cache of ``size`` bytes that forgets what was used longest ago."""

    def __init__(self, size: float):
        self.free, self.kept = size, OrderedDict[tuple[int, int, int], float]()

    def use(self, key: tuple[int, int, int], nbytes: float) -> float:
        """The bytes that were not there."""
        if key in self.kept:
            self.kept.move_to_end(key)
            return 0.0
        self.kept[key] = nbytes
        self.free -= nbytes
        while self.free < 0 and len(self.kept) > 1:
            self.free += self.kept.popitem(last=False)[1]
        return nbytes


def walk(launch: Launch, machine: Machine) -> Traffic:
    """The traffic of all clusters, in their order."""
    extents, operands = launch.extents, [launch.shape[2] * x for x in launch.operand_bytes]
    sharers = machine.load_sharers if launch.blocks == 1 else 1
    chunks = min(_CHUNKS, launch.k_blocks)
    recent, read, missed, far = _Recent(machine.l2_bytes), 0.0, 0.0, 0.0

    def nbytes(side: int, place: int) -> float:
        """Of A's rows of tiles or B's columns, at their place."""
        return extents[side][place] * operands[side]

    raster, at_once = launch.raster(), machine.multiprocessors // launch.blocks
    while wave := list(islice(raster, at_once)):
        for first in range(0, len(wave), sharers):
            neighbours = wave[first : first + sharers]
            loads = {load for places in neighbours for load in enumerate(places)}
            read += sum(nbytes(*load) for load in loads)
        readers = [Counter(each) for each in zip(*wave, strict=True)]
        for chunk in range(chunks):
            for side in (0, 1):
                for place, several in readers[side].items():
                    lost = recent.use((side, place, chunk), nbytes(side, place) / chunks)
                    missed += lost
                    far += lost * (1 - machine.l2_parts**-several)
    output = float(launch.output_bytes)
    elsewhere = output * (1 - 1 / machine.l2_parts)
    rate = 1 - (missed + far + elsewhere) / (read + far + output)
    return Traffic(read, missed, output * (1 + launch.accumulate), rate)
