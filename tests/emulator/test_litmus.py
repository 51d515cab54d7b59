"""Random programs: what the emulator says of their races is what the memory model says.

``litmus`` has the programs, ``memory_model`` the relations, and benchmarks/emulator_litmus.py runs
some thousands of them.
"""

from __future__ import annotations

import re

import pytest
from litmus import Program, verdict
from litmus_vectors import Vectors
from memory_model import Event, races


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_alarms_are_the_races_of_the_model(first: int) -> None:
    racy = 0
    for seed in range(first, first + 50):
        found = verdict(Program(seed))
        racy += found.racy
        assert not found.false, seed
        assert not found.missed, seed
        assert not found.mistaken, seed
    assert 25 <= racy < 50


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_each_scalar_of_a_vector_is_an_operation(first: int) -> None:
    """Missed is what only the order of an acquire and the other scalars decides, which the ISA
    leaves open."""
    for seed in range(first, first + 50):
        program = Vectors(seed)
        found, lines = verdict(program), program.source.splitlines()
        assert not found.false, seed
        assert not found.mistaken, seed
        for _, later in found.missed:
            assert re.match(r"(ld|atom)\.acq.*(\.v[24]|x2)", lines[later - 1].strip()), seed


# --- the model itself, on the examples of the ISA -------------------------------------------------

X, Y = ("global", range(4)), ("global", range(4, 8))


def execution(*threads: list[tuple[object, ...]]) -> list[Event]:
    """Of threads in CTAs of one cluster: opcodes, with the place and the number of the source of
    a read among all events in turn."""
    events: list[Event] = []
    for cta, operations in enumerate(threads):
        for line, (opcode, *rest) in enumerate(operations):
            where = rest[0] if rest else None
            event = Event((0, 0, cta, 0), line, str(opcode), where, at=len(events))  # type: ignore[arg-type]
            event.reads = bool(where) and str(opcode).startswith(("ld", "atom", "red"))
            event.writes = bool(where) and not str(opcode).startswith("ld")
            event.sources = [events[int(rest[1])]] if len(rest) > 1 else []  # type: ignore[call-overload]
            events.append(event)
    return events


@pytest.mark.parametrize(
    ("writer", "reader", "ordered"),
    [
        (["fence.acq_rel.sys", "st.relaxed.sys"], ["ld.relaxed.sys", "fence.acq_rel.sys"], True),
        (["fence.acq_rel.sys", "st.relaxed.sys"], ["ld.relaxed.sys", "fence.acq_rel.cta"], False),
        (["fence.acq_rel.cta", "st.relaxed.sys"], ["ld.relaxed.sys", "fence.acq_rel.sys"], False),
        (["fence.acq_rel.sys", "st.relaxed.sys"], ["red.sys", "fence.acq_rel.sys"], False),
        (["st.relaxed.sys"], ["ld.acquire.sys"], False),
        (["st.release.gpu"], ["ld.acquire.gpu"], True),
        (["st.release.cta"], ["ld.acquire.gpu"], False),
    ],
)
def test_message_passing(writer: list[str], reader: list[str], ordered: bool) -> None:
    """8.10.6 and 8.11.1."""
    first = [("st", X), *((op, Y) if op[0] != "f" else (op,) for op in writer)]
    source = len(first) - 1
    second = [(op, Y, source) if op[0] != "f" else (op,) for op in reader]
    events = execution(first, [*second, ("ld", X, 0)])
    assert ((0, len(events) - 1) not in races(events).pairs) == ordered


@pytest.mark.parametrize(("width", "race"), [(range(4), False), (range(8), True)])
def test_strong_accesses_that_overlap_in_part_race(width: range, race: bool) -> None:
    """8.7 and 8.7.2."""
    events = execution([("st.relaxed.gpu", X)], [("st.relaxed.gpu", ("global", width))])
    assert bool(races(events).pairs) == race


def test_who_observed_a_write_comes_after_it() -> None:
    """8.9.5: a relaxed read, and then any access to the place; but not to another one."""
    first = [("st", X), ("st.relaxed.gpu", Y)]
    events = execution(first, [("ld.relaxed.gpu", Y, 1), ("st", Y), ("ld", X, 0)])
    assert set(races(events).pairs) == {(0, 4)}
