"""The device: takes a launch apart, runs its clusters, reports."""

from __future__ import annotations

import math
import multiprocessing
import operator
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .alarms import ON_ERROR, Alarms, wanted
from .arguments import add_memory, lay_out, place_variables
from .code import Program
from .collect import collect, finish
from .engine import COMPLETIONS
from .grid import run_grid
from .launch import Launch, Settings
from .memory import SYSTEM_SHARED, GlobalMemory
from .parse import parse_once
from .program import Address, Function, Module, PtxError, Symbol
from .report import Report
from .suppressions import read_suppressions
from .workers import Peers, run_forked

__all__ = ["Device"]

TARGETS = ("sm_90a", "sm_100a", "sm_103a")
_MOST_SHARED = 227 * 1024
_NARROW = {"b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16"}

Dim = tuple[int, int, int]


class Device:
    """An emulated GPU.

    Args:
        target: "sm_90a", "sm_100a" or "sm_103a".
        completion: when asynchronous work completes: "eager", "late" (when nothing else can move)
            or "random".
        seed: of the random order.
        check: what to look after: "none", "all" (that is on by default) and kinds to add to it, or
            only some kinds; several with commas between or in a sequence. The kinds are
            "race", "lanes" (threads of a warp are told apart in that), "fence", "uninitialized",
            "registers", "exit", "dsmem_exit", "tmem_lanes", "pdl", "bounds", which is always on,
            and "exit_stores", which "all" does not have.
        on_error: "raise", or "collect": the launch goes on, and its report has the alarms. Memory
            out of bounds then reads as NaN, and what is stored there is dropped.
        suppress: alarms that may stand, a file or its lines: ``kind [key=pattern ...]  # reason``
            with the keys kernel, line, source and opcode. They are neither raised nor kept.
        exact: sum products of the tensor cores exactly and round once, instead of as they do.
        workers: processes that the clusters of a grid are spread over.
        resident: clusters of a grid that start at once and take turns, in each process; None: 2,
            or with random completion 1 to 3, as the seed says. More start while these spin.
    """

    def __init__(
        self,
        target: str = "sm_90a",
        *,
        completion: str = "eager",
        seed: int = 0,
        check: str | Sequence[str] = "all",
        on_error: str = "raise",
        suppress: str | Path | Sequence[str] = (),
        exact: bool = False,
        workers: int = 1,
        resident: int | None = None,
    ) -> None:
        if target not in TARGETS:
            raise ValueError(f"target: got {target!r}; choose one of {', '.join(TARGETS)}")
        if completion not in COMPLETIONS:
            raise ValueError(
                f"completion: got {completion!r}; choose one of {', '.join(COMPLETIONS)}"
            )
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error: got {on_error!r}; choose one of {', '.join(ON_ERROR)}")
        if workers < 1 or (workers > 1 and not hasattr(os, "fork")):
            raise ValueError(f"workers: got {workers}; at least 1, and 1 where there is no fork")
        if resident is not None and resident < 1:
            raise ValueError(f"resident: got {resident}; at least 1, or None")
        self.target, self.workers = target, workers
        self._settings = Settings(target, completion, seed, exact, resident)
        self._checks, self._collecting = wanted(check), on_error == "collect"
        self._suppressions = read_suppressions(suppress)

    def launch(
        self,
        ptx: str,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        *,
        cluster: int | Sequence[int] | None = None,
        shared: int = 0,
        buffers: Sequence[tuple[str, Any]] = (),
        profile: bool = False,
        trace: bool = False,
        programmatic: bool = False,
    ) -> Report:
        """Run a kernel; buffers among ``args`` are written in place.

        Args:
            ptx: the text of a module.
            name: of the entry.
            grid, block, cluster: numbers or up to three of them; ``cluster`` defaults to what the
                kernel requires.
            args: numpy arrays or CPU torch tensors (passed as pointers), tensor maps, numbers, or
                bytes.
            shared: dynamic shared memory, bytes.
            buffers: more memory that the kernel may reach, by addresses that it finds elsewhere:
                (name, array or tensor).
            profile: report memory traffic, bank conflicts, products and waits, too.
            trace: and what each warp and engine did when, for ``Report.trace``.
            programmatic: the kernel may start while the one before it still runs (programmatic
                dependent launch, ``use_pdl`` of CuTe DSL). Memory is as that one leaves it all the
                same; with the check "pdl", EarlyAccess says what in global memory is touched
                without being ordered after a griddepcontrol.wait.

        Raises PtxError (a ValueError) for what is not PTX, not supported or not allowed, and
        Deadlock where nothing can move.
        """
        module = parse_once(ptx, name)
        _check_target(module, self.target)
        function = module.functions[name]
        dims = _dimensions(function, grid, block, cluster)
        alarms = Alarms(
            self._checks,
            self._collecting,
            [entry for entry in self._suppressions if entry.is_for(name)],
        )
        launch = _prepare(
            module,
            function,
            dims,
            shared,
            args,
            buffers,
            self._settings,
            programmatic and "pdl" in self._checks,
        )
        launch.alarms = alarms
        program = Program(module, launch)
        code = program.code(name)
        clusters = math.prod(-(-g // c) for g, c in zip(launch.grid, launch.cluster, strict=True))
        workers = min(self.workers, clusters)

        def run(number: int) -> Report:
            if profile or trace:
                launch.watch = collect(launch, trace=trace)
            run_grid(launch, code, number, workers)
            if launch.peers is not None:
                launch.peers.over(number)
            return finish(launch.watch, program.codes(), alarms)

        with np.errstate(all="ignore"):  # wrap-around, infinities and NaN are the hardware's too
            if workers == 1:
                return run(0)
            launch.lock, launch.peers = multiprocessing.get_context("fork").Lock(), Peers(workers)
            return Report.merge(run_forked(launch.memory, workers, run))


def _check_target(module: Module, target: str) -> None:
    """sm_90 runs on all that came later, sm_90a and sm_90f only where their letter is met."""
    pattern = r"sm_(\d+)([af]?)"
    wanted = [re.fullmatch(pattern, name) for name in module.target]
    here = re.fullmatch(pattern, target)
    for match in filter(None, wanted):
        number, letter = int(match[1]), match[2]
        assert here is not None
        have = int(here[1])
        fits = {
            "": number <= have,
            "a": number == have,
            "f": number // 10 == have // 10 and number <= have,
        }
        if fits[letter]:
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
    return dims


def _prepare(
    module: Module,
    function: Function,
    dims: tuple[Dim, Dim, Dim],
    shared: int,
    args: Sequence[Any],
    buffers: Sequence[tuple[str, Any]],
    settings: Settings,
    programmatic: bool,
) -> Launch:
    memory = GlobalMemory()
    for label, array in buffers:
        add_memory(array, f"buffers: {label}", memory)
    parameters, offsets = lay_out(function, args, memory)
    variables = place_variables(module, memory)
    static, size = _shared(module, function)
    dynamic = -(-size // 1024) * 1024 if shared else size
    if shared < 0 or dynamic + shared > _MOST_SHARED:
        raise ValueError(
            f"shared: {size} bytes static and {shared} dynamic; at most {_MOST_SHARED} in all"
        )
    for variable in module.variables.values():
        if variable.space == "shared" and variable.extern:
            static[variable.name] = SYSTEM_SHARED + dynamic
    return Launch(
        *dims,
        shared_bytes=dynamic + shared,
        dynamic_shared=shared,
        static_shared=static,
        memory=memory,
        parameters=parameters,
        parameter_offsets=offsets,
        module_variables=variables,
        settings=settings,
        cell=_cell(module),
        programmatic=programmatic,
        constants=(parameters, *(b for b in variables.values() if not b.writable)),
    )


def _cell(module: Module) -> int:
    """Bytes of shared memory that the checks tell apart: a word, if no instruction reaches less."""
    for function in module.functions.values():
        for ins in function.instructions:
            parts = ins.parts
            elsewhere = {"global", "param", "local", "const"} & set(parts)
            if parts[0] in ("ld", "st", "atom", "red") and _NARROW & set(parts) and not elsewhere:
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
