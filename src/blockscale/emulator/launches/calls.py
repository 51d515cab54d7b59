"""Launches: each taken apart, and all that are there run together."""

from __future__ import annotations

import gc
import math
import multiprocessing
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..alarms.alarm import Alarms
from ..global_races.races import Races
from ..memory.buffers import SYSTEM_SHARED, GlobalMemory
from ..observe.collect import collect, finish
from ..observe.report import Report
from ..ptx.parse import parse_once
from ..ptx.program import Address, Function, Module, PtxError, Symbol
from ..ptx.targets import has
from .arguments import add_memory, lay_out, place_variables, place_workspace
from .clock import Clock
from .code import Program
from .grid import run_grids
from .launch import Launch
from .workers import Peers, run_forked

if TYPE_CHECKING:
    from .device import Device

__all__ = ["Call", "launch_together"]

_MOST_SHARED = 227 * 1024
_MOST_CTAS = ((1 << 31) - 1, 65535, 65535)  # of a grid
_MOST_THREADS = (1024, 1024, 64)  # of a block
_NARROW = {"b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16"}

Dim = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Call:
    """A launch that :func:`launch_together` makes: a device, and what ``Device.launch`` takes."""

    device: Device
    ptx: str
    name: str
    grid: int | Sequence[int]
    block: int | Sequence[int]
    args: Sequence[Any]
    _: KW_ONLY
    cluster: int | Sequence[int] | None = None
    shared: int = 0
    buffers: Mapping[str, Any] | Sequence[tuple[str, Any]] = ()
    variables: Mapping[str, Any] | None = None
    profile: bool = False
    trace: bool = False
    programmatic: bool = False


def launch_together(calls: Sequence[Call]) -> list[Report]:
    """Run launches at once, which take turns and see each other's memory.

    Args:
        calls: one a rank. Those of one :class:`Device` run on one device, others on their own.

    Returns a report for each rank; everything that is said of a CTA names its rank.

    Raises ValueError where there are no calls, or several and one of their devices has workers;
    else what ``Device.launch`` raises.
    """
    if not calls:
        raise ValueError("calls: got none; at least 1")
    for rank, call in enumerate(calls):
        if not isinstance(call.ptx, str):
            of = f"calls[{rank}].ptx" if len(calls) > 1 else "ptx"
            what = type(call.ptx).__name__
            raise TypeError(f"{of}: got {what}; expected the text of a module, a str")
        if len(calls) > 1 and call.device.workers > 1:
            raise ValueError(
                f"calls[{rank}]: its device has workers={call.device.workers}; launches that run "
                "together share one process: give it workers=1"
            )
    memory, clock = GlobalMemory(), Clock()
    devices = list(dict.fromkeys(call.device for call in calls))
    programs = []
    with _uncollected():
        for rank, call in enumerate(calls):
            module = parse_once(call.ptx, call.name)
            _check_target(module, call.device.target)
            of = rank if len(calls) > 1 else None
            launch = _prepare(call, module, memory, clock, of, devices.index(call.device))
            programs.append(Program(module, launch))
        looked_at = {"global" in call.device.checks for call in calls}
        if len(looked_at) > 1:
            raise ValueError(
                "check: of launches that run together some look for races in global memory and "
                "others do not; give global to all of their devices or to none"
            )
        if True in looked_at:
            races = Races(memory, _cell([program.module for program in programs], "global"))
            for program in programs:
                program.launch.races = races
        codes = [program.code(call.name) for program, call in zip(programs, calls, strict=True)]
    workers = min(calls[0].device.workers, programs[0].launch.clusters)

    def run(number: int) -> list[Report]:
        for code, call in zip(codes, calls, strict=True):
            if call.profile or call.trace:
                code.launch.watch = collect(code.launch, trace=call.trace)
        run_grids(codes, number, workers)
        return [finish(p.launch.watch, p.codes(), p.launch.alarms) for p in programs]

    with np.errstate(all="ignore"):  # wrap-around, infinities and NaN are the hardware's too
        if workers == 1:
            return run(0)
        launch = programs[0].launch
        launch.lock, launch.peers = multiprocessing.get_context("fork").Lock(), Peers(workers)
        found = run_forked(memory, workers, run)
        return [Report.merge([report for (report,) in found])]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector: thousands of steps are made, none is garbage, and each full
    collection among them walks over all that the process has."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _check_target(module: Module, target: str) -> None:
    """sm_90 runs on all that came later, sm_90a and sm_90f only where their letter is met."""
    if any(has(target, name) for name in module.target):
        return
    raise PtxError(
        f"target: the PTX is for {', '.join(module.target) or 'none'}, the device is {target}"
    )


def _three(value: int | Sequence[int], what: str) -> tuple[int, int, int]:
    given = tuple(value) if isinstance(value, Sequence) else (value,)
    if not 1 <= len(given) <= 3 or any(operator.index(n) < 1 for n in given):
        raise ValueError(f"{what}: got {value!r}; expected one to three positive numbers")
    x, y, z = (*map(operator.index, given), 1, 1)[:3]
    return x, y, z


def _dimensions(
    function: Function,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    cluster: int | Sequence[int] | None,
) -> tuple[Dim, Dim, Dim]:
    """Grid, block and cluster, checked against the limits and what the kernel demands."""
    required = {
        key: (*function.directives[key], 1, 1)[:3]
        for key in ("reqntid", "maxntid", "reqnctapercluster")
        if function.directives.get(key)
    }
    if cluster is None:
        cluster = required.get("reqnctapercluster", 1)
    dims = _three(grid, "grid"), _three(block, "block"), _three(cluster, "cluster")
    for key, name, got in (
        ("reqntid", "block", dims[1]),
        ("reqnctapercluster", "cluster", dims[2]),
    ):
        if required.get(key, got) != got:
            raise ValueError(f"{name}: got {got}; the kernel requires {required[key]}")
    if any(g % c for g, c in zip(dims[0], dims[2], strict=True)):
        raise ValueError(f"cluster: {dims[2]} does not divide the grid {dims[0]}")
    if math.prod(dims[2]) > 16:
        raise ValueError(f"cluster: {math.prod(dims[2])} CTAs; at most 16")
    threads, limit = math.prod(dims[1]), min(1024, math.prod(required.get("maxntid", (1024,))))
    if threads > limit:
        raise ValueError(f"block: {threads} threads; at most {limit}")
    for name, got, most in (("grid", dims[0], _MOST_CTAS), ("block", dims[1], _MOST_THREADS)):
        if any(n > limit for n, limit in zip(got, most, strict=True)):
            raise ValueError(f"{name}: got {got}; at most {most}")
    return dims


def _named(buffers: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    pairs = list(buffers.items() if isinstance(buffers, Mapping) else buffers)
    for i, pair in enumerate(pairs):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(
                f"buffers[{i}]: got {type(pair).__name__}; expected a name and an array, as in "
                'buffers={"weights": array}'
            )
    return pairs


def _prepare(
    call: Call, module: Module, memory: GlobalMemory, clock: Clock, rank: int | None, device: int
) -> Launch:
    function = module.functions[call.name]
    dims = _dimensions(function, call.grid, call.block, call.cluster)
    whose = "" if rank is None else f" of rank {rank}"
    for label, array in _named(call.buffers):
        add_memory(array, f"buffers: {label}{whose}", memory)
    parameters, offsets = lay_out(function, call.args, memory, whose)
    variables = place_variables(module, memory, call.variables or {})
    static, size = _shared(module, function)
    shared = call.shared
    dynamic = -(-size // 1024) * 1024 if shared else size
    if shared < 0 or dynamic + shared > _MOST_SHARED:
        raise ValueError(
            f"shared: {size} bytes static and {shared} dynamic; at most {_MOST_SHARED} in all"
        )
    for variable in module.variables.values():
        if variable.space == "shared" and variable.extern:
            static[variable.name] = SYSTEM_SHARED + dynamic
    owner = call.device
    return Launch(
        *dims,
        shared_bytes=dynamic + shared,
        dynamic_shared=shared,
        static_shared=static,
        memory=memory,
        parameters=parameters,
        parameter_offsets=offsets,
        module_variables=variables,
        workspace=place_workspace(call.ptx, memory),
        settings=owner.settings,
        cell=_cell([module], "shared"),
        programmatic=call.programmatic and "pdl" in owner.checks,
        clock=clock,
        rank=rank,
        device=device,
        alarms=Alarms(
            owner.checks,
            owner.collecting,
            [entry for entry in owner.suppressions if entry.is_for(call.name)],
        ),
        constants=(parameters, *(b for b in variables.values() if not b.writable)),
    )


def _cell(modules: Iterable[Module], space: str) -> int:
    """Bytes of shared or global memory that the checks tell apart: a word, if no instruction
    reaches less."""
    spaces = {"global", "shared", "param", "local", "const"} - {space}
    for function in (each for module in modules for each in module.functions.values()):
        for ins in function.instructions:
            parts = {part.partition("::")[0] for part in ins.parts}
            narrow = not _NARROW.isdisjoint(parts) and spaces.isdisjoint(parts)
            if narrow and ins.parts[0] in ("ld", "st", "atom", "red"):
                return 1
    return 4


def _shared(module: Module, function: Function) -> tuple[dict[str, int], int]:
    """Offsets in shared memory of the static variables that the kernel uses, and their size."""
    used, functions = _reach(module, function)
    everywhere = [v for f in functions for v in f.variables.values()]
    everywhere += [v for v in module.variables.values() if v.name in used]
    places: dict[str, int] = {}
    size = 0
    for variable in everywhere:
        if variable.space == "shared" and not variable.extern:
            size = -(-size // variable.align) * variable.align
            places[variable.name] = SYSTEM_SHARED + size
            size += variable.nbytes
    return places, size


def _reach(module: Module, function: Function) -> tuple[set[str], list[Function]]:
    """Symbols that a kernel and the functions it calls name, and these functions."""
    used: set[str] = set()
    functions, at = [function], 0
    while at < len(functions):
        for ins in functions[at].instructions:
            for op in ins.operands:
                op = op.base if isinstance(op, Address) else op
                if isinstance(op, Symbol) and op.name not in used:
                    used.add(op.name)
                    if op.name in module.functions:
                        functions.append(module.functions[op.name])
        at += 1
    return used, functions
