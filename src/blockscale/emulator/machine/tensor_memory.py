"""Tensor Memory of a CTA: 128 lanes of 512 words, allocation and checks. PTX ISA 9.7.16.1."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ..clocks.knowledge import Actor
from ..memory.buffers import MemoryFault
from ..ptx.program import PtxError
from .engine import Work
from .ports import blank
from .shadow import Shadow
from .state import CTA, Fragment
from .undefined import Blanks, Undefined, View

__all__ = ["COLUMNS", "Region", "TensorMemory", "reached", "tensor_memory"]

LANES, COLUMNS = 128, 512
_RUN = 16  # lanes that the checks do not tell apart: no instruction reaches fewer, but .4x256b


class TensorMemory:
    """The words, (128, 512) uint32: NaN until they are written."""

    def __init__(self, cta: CTA) -> None:
        self.cta = cta
        self.words = np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.owner = np.full(COLUMNS, -1)  # first column of the allocation that a column is in
        self.closed_by: int | None = None  # line that gave up the right to allocate
        self.shadow: Shadow | None = None
        cluster = cta.cluster
        if cluster.order is not None:
            name = f"{{}} of the Tensor Memory of {cta}"
            self.shadow = _Shadow(name, LANES // _RUN * COLUMNS, cluster.order, cta.launch.alarms)
        cluster.at_end.append(self._check_end)

    def _check_end(self) -> None:
        left = np.unique(self.owner[self.owner >= 0])
        if len(left):
            raise PtxError(
                f"leak: {self.cta} exits with {int((self.owner >= 0).sum())} columns of "
                f"Tensor Memory allocated, from column {int(left[0])}: tcgen05.dealloc is missing"
            )

    # --- allocation ---

    def place_for(self, columns: int) -> int | None:
        """First column of a free run, None where there is none."""
        for start in range(0, COLUMNS - columns + 1, 32):
            if (self.owner[start : start + columns] < 0).all():
                return start
        return None

    def allocate(self, columns: int, start: int) -> None:
        self.owner[start : start + columns] = start

    def free(self, start: int, columns: int, w: Fragment) -> None:
        """``w``: who does it, after all that is done there."""
        mine = np.nonzero(self.owner == start)[0]
        if len(mine) != columns or (columns and int(mine[0]) != start):
            raise PtxError(
                f"{columns} columns from {start} were not allocated so"
                + (f": {len(mine)} are from there" if len(mine) else ", or were freed before")
            )
        self.owner[mine] = -1
        if self.shadow is not None:  # whoever gets them next must write them first
            cells = (np.arange(LANES // _RUN)[:, None] * COLUMNS + mine).ravel()
            self.shadow.write_by(cells, self.shadow.order.freeing(w.agents()[:1]), w.site())
            self.shadow.written[cells] = 0

    # --- access ---

    def _checked(self, kind: str, work: Work, region: Region) -> None:
        lane, column = region.last
        if lane >= LANES or column >= COLUMNS:
            raise MemoryFault(
                f"lane {lane}, column {column} of Tensor Memory is out of "
                f"bounds: it has {LANES} lanes of {COLUMNS} columns"
            )
        if self.owner[region.columns].min() < 0:
            columns = region.words % COLUMNS
            column = int(columns[self.owner[columns] < 0].flat[0])
            raise MemoryFault(f"column {column} of Tensor Memory is not allocated")
        launch = self.cta.launch
        if self.shadow is not None:
            assert isinstance(work.actor, Actor)
            blanks = self.shadow.blanks
            if kind == "read" and blanks is not None and blanks.has(
                region.cells, lambda: region.words
            ):  # fmt: skip
                blank(work, lambda: blanks.masks(region.words, work.site()))
            check = self.shadow.read_by if kind == "read" else self.shadow.write_by
            check(region.cells, work.actor, work.site())
        if launch.watch is not None:
            launch.watch.transfer(work, "tensor", kind, region.words.reshape(-1) * 4, 4, self.cta)

    def read(self, work: Work, region: Region) -> np.ndarray:
        if work.view is View.MASKS:
            return self._masks(work, region)
        self._checked("read", work, region)
        if region.box is not None:
            return self.words[region.box].copy()
        found: np.ndarray = self.words.take(region.words)
        return found

    def _masks(self, work: Work, region: Region) -> np.ndarray:
        assert self.shadow is not None
        assert self.shadow.blanks is not None
        found = self.shadow.blanks.masks(region.words, work.site())
        if found.bits.any():
            work.origin = found.origin
        return found.bits

    def write(
        self, work: Work, region: Region, values: Any, found: Undefined | None = None
    ) -> None:
        """``found``: what of the values is undefined."""
        self._checked("write", work, region)
        if region.box is not None:
            self.words[region.box] = values
        else:
            self.words.reshape(-1)[region.words] = values
        if self.shadow is not None and self.shadow.blanks is not None:
            self.shadow.blanks.write(lambda: region.words, found)


class Region:
    """Words of Tensor Memory that an instruction reaches, at broadcast lanes and columns."""

    def __init__(self, lanes: np.ndarray, columns: np.ndarray) -> None:
        self.last = int(lanes.max(initial=0)), int(columns.max(initial=0))
        self.words = lanes * COLUMNS + columns
        self.columns = np.unique(columns)
        #: What the checks tell apart of it.
        self.cells = np.unique(lanes // _RUN * COLUMNS + columns)
        self.box = self._box()

    def _box(self) -> tuple[slice, slice] | None:
        """The lanes and columns, if it is a rectangle of them in order."""
        if self.words.ndim != 2 or not self.words.size:
            return None
        height, width = self.words.shape
        lane, column = divmod(int(self.words[0, 0]), COLUMNS)
        box = slice(lane, lane + height), slice(column, column + width)
        words = np.arange(LANES * COLUMNS).reshape(LANES, COLUMNS)
        return box if np.array_equal(words[box], self.words) else None


@lru_cache(maxsize=128)
def reached(
    places: Callable[..., tuple[np.ndarray, ...]], arguments: tuple[Any, ...],
    lane: int, column: int, copies: tuple[int, ...] | None = None,
) -> Region:  # fmt: skip
    """The region of a layout, ``places(*arguments)``, from ``lane`` and ``column`` on.

    ``copies``: how many lanes further each copy of it is; they come first in the region's shape.
    """
    lanes, columns, *_ = places(*arguments)
    if copies is not None:
        lanes = lanes + np.array(copies).reshape(-1, *[1] * lanes.ndim)
    return Region(lane + lanes, column + columns)


class _Shadow(Shadow):
    def _blanks(self, cells: int) -> Blanks:
        """With a mask for each word."""
        return Blanks(self, cells * _RUN, np.uint32)

    def _view_of(self, actor: Actor) -> tuple[np.ndarray, np.ndarray]:
        """tcgen05 instructions alone reach it, and for them it is enough what ran before; whether
        the fences are there is tcgen05_order's to say (9.7.16.6.3)."""
        run = self.order.run_before(actor)
        return run, run

    def cells_of(self, items: np.ndarray) -> np.ndarray:
        return items // COLUMNS // _RUN * COLUMNS + items % COLUMNS

    def cell_name(self, cell: int) -> str:
        lane, column = divmod(cell, COLUMNS)
        return f"lanes {lane * _RUN} to {lane * _RUN + _RUN - 1}, column {column}"


def tensor_memory(cta: CTA) -> TensorMemory:
    if cta.tensor is None:
        cta.tensor = TensorMemory(cta)
    memory: TensorMemory = cta.tensor
    return memory
