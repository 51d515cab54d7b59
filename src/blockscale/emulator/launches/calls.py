"""Launches: each taken apart, and all that are there run together."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..alarms.alarm import Alarms
from ..global_races.races import Races
from ..memory.buffers import GlobalMemory
from ..observe.collect import collect, finish
from ..observe.report import Report
from ..ptx.parse import parse_once
from ..ptx.program import Module, PtxError
from ..ptx.targets import has
from .arguments import add_buffers, lay_out
from .cells import cell_size
from .clock import Clock
from .code import Program
from .dimensions import dimensions
from .grid import run_grids
from .launch import Launch
from .variables import place_heap, place_shared, place_variables, place_workspace, shared_start
from .workers import Peers, run_forked

if TYPE_CHECKING:
    from .device import Device

__all__ = ["Call", "launch_together"]


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
    _check(calls)
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
        if "global" in calls[0].device.checks:
            races = Races(memory, cell_size([program.module for program in programs], "global"))
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


def _check(calls: Sequence[Call]) -> None:
    """Whether they are launches, and may run together."""
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
    looked_at = {"global" in call.device.checks for call in calls}
    if len(looked_at) > 1:
        raise ValueError(
            "check: of launches that run together some look for races in global memory and "
            "others do not; give global to all of their devices or to none"
        )


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


def _prepare(
    call: Call, module: Module, memory: GlobalMemory, clock: Clock, rank: int | None, device: int
) -> Launch:
    function = module.functions[call.name]
    dims = dimensions(function, call.grid, call.block, call.cluster)
    whose = "" if rank is None else f" of rank {rank}"
    add_buffers(call.buffers, memory, whose)
    parameters, offsets = lay_out(function, call.args, memory, whose)
    variables = place_variables(module, memory, call.variables or {})
    static, shared = place_shared(module, function, call.shared)
    owner = call.device
    heap = place_heap(module, memory, whose) if owner.workers == 1 else None
    own = [parameters, *(b for b in variables.values() if not b.writable)]
    return Launch(
        *dims,
        shared_bytes=shared,
        dynamic_shared=call.shared,
        shared_start=shared_start(call.ptx),
        static_shared=static,
        memory=memory,
        parameters=parameters,
        parameter_offsets=offsets,
        module_variables=variables,
        heap=heap,
        workspace=place_workspace(call.ptx, memory),
        settings=owner.settings,
        cell=cell_size([module], "shared"),
        programmatic=call.programmatic and "pdl" in owner.checks,
        clock=clock,
        rank=rank,
        device=device,
        alarms=Alarms(
            owner.checks,
            owner.collecting,
            [entry for entry in owner.suppressions if entry.is_for(call.name)],
        ),
        own=(*own, heap.buffer) if heap else tuple(own),
    )
