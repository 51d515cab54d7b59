"""Which dimensions of an operation's arrays are cut over which axes of a mesh: pure choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

__all__ = ["WHOLE", "Axes", "Cut", "Dims", "Factor", "Plan", "Work", "names_of", "plan"]


class Factor(NamedTuple):
    """A dimension that several arrays of an operation have, each in its own unit.

    Attributes:
        unit: so many items of the array belong together: one item of another array, as a scale has
            32 elements. They are not cut apart.
    """

    name: str
    unit: int = 1


#: The factor of each dimension of an array; None of those that are not cut, as the last ones are
#: which are left out.
Dims = tuple[Factor | None, ...]
#: Names of the axes of a mesh that cut each dimension of an array, the outermost first.
Axes = tuple[tuple[str, ...], ...]


def names_of(dims: Dims) -> tuple[str, ...]:
    """The names of the factors that dimensions have."""
    return tuple(each.name for each in dims if each is not None)


class Cut(NamedTuple):
    """What a shard has of an operation.

    Attributes:
        axes: that cut each factor.
        scattered: that cut factors of results only, whose parts are shared out as they are summed.
        sizes: of the axes.
    """

    axes: Mapping[str, tuple[str, ...]]
    scattered: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    def parts(self, name: str) -> int:
        """Tell how many shards a factor has."""
        return math.prod(self.sizes[axis] for axis in self.axes.get(name, ()))

    def axes_of(self, dims: Dims) -> tuple[str, ...]:
        """The axes that cut an array."""
        return sum((self.axes.get(name, ()) for name in names_of(dims)), ())

    def shape(self, dims: Dims, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of a shard."""
        return tuple(
            size if each is None else size // self.parts(each.name)
            for each, size in zip_longest(dims, whole)
        )


#: What one device has of everything.
WHOLE = Cut({}, {}, {})


class Work(NamedTuple):
    """An operation that can be cut.

    Attributes:
        run: gives the function of a shard's arrays, by what that has; of :data:`WHOLE`, that of
            whole arrays.
        operands: dimensions of its arrays, in the order of their leaves.
        results: those of what it gives.
        sums: factors that are in no result: ``run`` reduces over their axes.
        scatters: factors of results whose parts ``run`` can share out as it sums.
    """

    run: Callable[[Cut], Callable[..., Any]]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sums: tuple[str, ...] = ()
    scatters: tuple[str, ...] = ()


class Plan(NamedTuple):
    """A cut, and the axes of operands and of results in it."""

    cut: Cut
    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]


def plan(
    work: Work,
    shapes: Sequence[Sequence[int]],
    operands: Sequence[Axes],
    results: Sequence[Axes],
    sizes: Mapping[str, int],
) -> Plan:
    """How to cut ``work``, whose operands have ``shapes`` and lie as they do, and whose results are
    wanted so.

    Sums are cut where all operands that have them are, alike. What an operand has and a result
    wants comes first, then what operands have, as it costs nothing. Factors are cut into whole
    units of the same number, else not.
    """
    counts = {
        each.name: size // each.unit
        for dims, shape in zip(work.operands, shapes, strict=True)
        for each, size in zip(dims, shape, strict=False)
        if each is not None
    }
    cut: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()

    def take(name: str, wanted: tuple[str, ...]) -> None:
        fitting = _fitting(wanted, counts[name], taken, sizes)
        if fitting and name not in cut:
            cut[name] = fitting
            taken.update(fitting)

    for name in work.sums:
        take(name, _alike([axes for each, axes in _pairs(work.operands, operands) if each == name]))
    have, want = _pairs(work.operands, operands), _pairs(work.results, results)
    for name, wanted in (*(each for each in have if each in want), *have, *want):
        if name not in work.sums:
            take(name, wanted)
    summed = {axis for name in work.sums for axis in cut.get(name, ())}
    scattered: dict[str, tuple[str, ...]] = {}
    for name, wanted in want:
        if name in work.scatters and name not in cut and wanted and summed.issuperset(wanted):
            fitting = _fitting(wanted, counts[name], set(), sizes)
            if fitting == wanted:
                scattered[name] = wanted
    return Plan(
        Cut(cut, scattered, sizes),
        tuple(_axes(dims, cut) for dims in work.operands),
        tuple(_axes(dims, {**cut, **scattered}) for dims in work.results),
    )


def _pairs(dims: Sequence[Dims], axes: Sequence[Axes]) -> list[tuple[str, tuple[str, ...]]]:
    """The name of each dimension that may be cut, and the axes that cut it."""
    return [
        (each.name, found)
        for pair in zip(dims, axes, strict=True)
        for each, found in zip(*pair, strict=False)
        if each is not None
    ]


def _alike(axes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The first axes, as far as all have them."""
    found = list[str]()
    for step in zip(*axes, strict=False):
        if len(set(step)) > 1:
            break
        found.append(step[0])
    return tuple(found)


def _fitting(
    wanted: Sequence[str], count: int, taken: set[str], sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """The first of the axes, as far as they are free and cut ``count`` into equal parts."""
    found, parts = list[str](), 1
    for axis in wanted:
        parts *= sizes[axis]
        if axis in taken or count % parts:
            break
        found.append(axis)
    return tuple(found)


def _axes(dims: Dims, cut: Mapping[str, tuple[str, ...]]) -> Axes:
    return tuple(() if each is None else cut.get(each.name, ()) for each in dims)
