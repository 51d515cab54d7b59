"""Who read each cell of global memory, or wrote it by strong writes, since its last weak write.

A cell names an access, or a *node* where nothing orders several: a node is one more access and
what the cell named before. An access may be forgotten once another stands for it, which comes after
it and races with all that it does: a weak one, or a strong one of no wider scope.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..clocks.scopes import SCOPE, alike
from .accesses import Accesses

__all__ = ["Past"]

_NODE = np.uint32(1 << 31)
_LONG = 64  # accesses to a cell, before those are dropped that a later one stands for

#: Which of some accesses, of any shape, the accessor whose turn it is has not seen.
Unseen = Callable[[np.ndarray], np.ndarray]


def _stands_for(code: Any, earlier: np.ndarray) -> np.ndarray:
    """Whether accesses do with such codes for earlier ones, if they come after them."""
    no_wider = code & SCOPE <= earlier & SCOPE
    return np.asarray((code & SCOPE == 0) | (alike(code, earlier) & no_wider))


class Past:
    """The earlier accesses of some kind to ``cells`` cells."""

    def __init__(self, cells: int, accesses: Accesses) -> None:
        self._accesses = accesses
        self._named = np.zeros(cells, np.uint32)
        # Of each node: what was named before, the access, how many there are, and how many may be.
        self._nodes = np.zeros((4, 1 << 8), np.uint32)
        self._count = 0
        self._some = False

    def clear(self, cells: np.ndarray) -> None:
        self._named[cells] = 0

    def before(self, cells: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Accesses to cells (n, k) of n threads: cells and accesses of one shape, 0 is none."""
        if not self._some:
            return
        named = self._named.take(cells)
        if len(cells) == 1 and np.count_nonzero(named):  # a flag may have many
            found = [self._all(name) for name in named[0].tolist()]
            yield (
                np.repeat(cells[0], list(map(len, found)))[None],
                np.array([list(itertools.chain.from_iterable(found))], np.uint32),
            )
            return
        while np.count_nonzero(named):
            nodes = named >= _NODE
            at = np.where(nodes, named - _NODE, 0)
            yield cells, np.where(nodes, self._nodes[1].take(at), named)
            named = np.where(nodes, self._nodes[0].take(at), 0).astype(np.uint32)

    def _all(self, named: int) -> list[int]:
        """The accesses that a cell names, the last one first."""
        found: list[int] = []
        node, befores, accesses = int(_NODE), self._nodes[0], self._nodes[1]
        while named:
            if named < node:
                return [*found, named]
            found.append(int(accesses[named - node]))
            named = int(befores[named - node])
        return found

    def add(self, cells: np.ndarray, access: np.ndarray, unseen: Unseen, code: int) -> None:
        """Accesses to cells, of one shape. Earlier ones may go that somebody has seen who accesses
        the cells now with that code."""
        self._some = True
        named = self._named.take(cells)
        self._named[cells] = access
        lost = self._named.take(cells) != access
        several = np.count_nonzero(lost)
        if not several and not np.count_nonzero(named):
            return
        single = named < _NODE
        who, codes = self._accesses.who, self._accesses.code
        last = np.where(single, named, self._nodes[1].take(np.where(single, 0, named - _NODE)))
        again = (last > 0) & (who.take(last) == who.take(access))
        again &= _stands_for(codes.take(access), codes.take(last))
        over = single & (again | (named == 0))
        seen = ~unseen(np.where(single, named, 0))
        over |= single & seen & _stands_for(np.uint8(code), codes.take(last))
        if several:
            mark = np.isin(cells, cells[lost])
            over &= ~mark
        chosen = ~over
        if not np.count_nonzero(chosen):
            return
        flat, new, old = cells[chosen], access[chosen], named[chosen]
        again = again[chosen] & ~single[chosen]
        old = np.where(again, self._nodes[0].take(np.where(again, old - _NODE, 0)), old)
        if several:  # a cell may be accessed by several threads at once
            order = np.argsort(flat, kind="stable")
            flat, new, old = flat[order], new[order], old[order]
        self._named[flat] = self._add(flat, old.astype(np.uint32), new, bool(several))

    def _add(
        self, cells: np.ndarray, named: np.ndarray, access: np.ndarray, several: bool
    ) -> np.ndarray:
        """What cells, which named something, do so after one more access. With several accesses to
        a cell these stand together, and the last one's is what the cell names."""
        which: np.ndarray | None = None
        before = named
        if not several:  # equal ones share a node
            pairs, which = np.unique(
                named.astype(np.uint64) << np.uint64(32) | access, return_inverse=True
            )
            before, access = (pairs >> np.uint64(32)).astype(np.uint32), pairs.astype(np.uint32)
        rank = np.zeros(len(access), np.int64)
        if several:
            starts = np.nonzero(np.r_[True, cells[1:] != cells[:-1]])[0]
            rank = np.arange(len(cells)) - np.repeat(starts, np.diff(np.r_[starts, len(cells)]))
        nodes = before >= _NODE
        at = np.where(nodes, before - _NODE, 0)
        count = np.where(nodes, self._nodes[2].take(at), before > 0).astype(np.uint32) + 1 + rank
        limit = np.where(nodes, self._nodes[3].take(at), _LONG)
        made = self._count + np.arange(len(access), dtype=np.uint32) + _NODE
        made = np.where((before == 0) & (rank == 0), access, made).astype(np.uint32)
        before = np.where(rank > 0, np.r_[np.uint32(0), made[:-1]], before)
        self._new(before, access, count, limit)
        last = np.r_[rank[1:] == 0, True]
        for i in np.nonzero(last & (count > limit))[0].tolist():
            made[i] = self._shortened(int(made[i]))
        return made if which is None else made[which.reshape(-1)]

    def _new(self, *values: np.ndarray) -> np.ndarray:
        first, last = self._count, self._count + len(values[0])
        while last > self._nodes.shape[1]:
            self._nodes = np.concatenate([self._nodes, np.zeros_like(self._nodes)], axis=1)
        self._nodes[:, first:last] = values
        self._count = last
        return np.arange(first, last, dtype=np.uint32) + _NODE

    def _shortened(self, named: int) -> int:
        """The same accesses, each accessor's last one of a code only."""
        kept: dict[tuple[int, int], int] = {}
        for access in self._all(named):
            key = int(self._accesses.who[access]), int(self._accesses.code[access])
            kept.setdefault(key, access)
        left = list(kept.values())[::-1]
        made, limit = left[0], max(_LONG, 2 * len(left))
        for count, access in enumerate(left[1:], 2):
            values = (np.array([value], np.uint32) for value in (made, access, count, limit))
            made = int(self._new(*values)[0])
        return made
