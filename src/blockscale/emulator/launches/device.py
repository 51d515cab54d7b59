"""The device, as users see it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..alarms.alarm import ON_ERROR, wanted
from ..alarms.suppressions import read_suppressions
from ..machine.engine import COMPLETIONS
from ..observe.report import Report
from .calls import Call, launch_together
from .launch import Settings

__all__ = ["Device"]

TARGETS = ("sm_90a", "sm_100a", "sm_103a")


class Device:
    """An emulated GPU.

    Args:
        target: "sm_90a", "sm_100a" or "sm_103a".
        completion: when asynchronous work completes: "eager", "late" (when nothing else can move)
            or "random".
        seed: of the random order.
        check: what to look after: "none", "all" (that is on by default) and kinds to add to it, or
            only some kinds; several with commas between or in a sequence. ``alarms.KINDS`` has
            them, and docs/emulator.md explains each.
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
        _at_least("seed", seed, 0)
        _at_least("workers", workers, 1)
        if resident is not None:
            _at_least("resident", resident, 1, ", or None")
        if workers > 1 and not hasattr(os, "fork"):
            raise ValueError(f"workers: got {workers}; 1 is all there is without fork")
        if workers > 1 and "global" in wanted(check):
            raise ValueError(
                f"check: global looks at all clusters in one process; got workers={workers}: "
                "give it workers=1"
            )
        self.target, self.workers = target, workers
        self.settings = Settings(target, completion, seed, exact, resident)
        self.checks, self.collecting = wanted(check), on_error == "collect"
        self.suppressions = read_suppressions(suppress)

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
        buffers: Mapping[str, Any] | Sequence[tuple[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
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
                arrays or tensors by name, or pairs of both.
            variables: arrays or tensors for module variables (``__constant__``, ``__device__``) by
                name; the kernel writes them in place. Others begin with their initial values.
            profile: report memory traffic, bank conflicts, products and waits, too.
            trace: and what each warp and engine did when, for ``Report.trace``.
            programmatic: the kernel may start while the one before it still runs (programmatic
                dependent launch, ``use_pdl`` of CuTe DSL). Memory is as that one leaves it all the
                same; with the check "pdl", EarlyAccess says what in global memory is touched
                without being ordered after a griddepcontrol.wait.

        Raises PtxError (a ValueError) for what is not PTX, not supported or not allowed, and
        Deadlock where nothing can move.
        """
        call = Call(
            self, ptx, name, grid, block, args, cluster=cluster, shared=shared, buffers=buffers,
            variables=variables, profile=profile, trace=trace, programmatic=programmatic,
        )  # fmt: skip
        return launch_together([call])[0]


def _at_least(name: str, given: Any, least: int, more: str = "") -> None:
    if isinstance(given, bool) or not isinstance(given, int | np.integer):
        raise TypeError(f"{name}: got {given!r}; expected an integer{more}")
    if given < least:
        raise ValueError(f"{name}: got {given}; at least {least}{more}")
