"""A kernel of another project: where its PTX lies, and a launch that knows the right answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from blockscale import emulator as em
from blockscale.emulator.alarms.alarm import KINDS

__all__ = ["Foreign", "Launch", "allocated"]


def allocated(array: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 256 bytes, as cudaMalloc's memory does."""
    room = np.empty(array.nbytes + 256, np.uint8)
    start = -room.ctypes.data % 256
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@dataclass
class Launch:
    """Launches of one module; called with what ``Device.launch`` takes after the name of the entry.

    Attributes:
        device: where they go.
        ptx: the module.
        entry: part of the name of the entry that no other entry has.
        folder: of what the project's own build made.
        reports: one of each launch so far.
    """

    device: em.Device
    ptx: str
    entry: str
    folder: Path
    reports: list[em.Report] = field(default_factory=list)

    def __call__(self, *args: Any, **named: Any) -> em.Report:
        self.reports.append(self.device.launch(self.ptx, self._name(), *args, **named))
        return self.reports[-1]

    def _name(self) -> str:
        listed = r"^\s*(?:\.visible |\.weak )*\.entry\s+(\S+?)\("
        names: list[Any] = re.findall(listed, self.ptx, re.M)
        found = [name for name in names if self.entry in name]
        if len(found) != 1:
            raise ValueError(
                f"entry: {self.entry!r} is in {len(found)} of the names {', '.join(names)}; "
                "give a part that one of them has"
            )
        return str(found[0])


@dataclass(frozen=True)
class Foreign:
    """One compiled kernel and one problem for it.

    Attributes:
        name: of the PTX file, ``<folder>/<project>/<name>.ptx``, and of the results.
        project: owner/name on GitHub without the owner.
        version: the commit or release whose code it is.
        target: of the device, "sm_90a", "sm_100a" or "sm_103a".
        entry: part of the name of the entry that no other entry of the module has; mangled
            names are long.
        made: how the PTX is made, in words: which file of theirs, which arguments of the
            template, which flags.
        run: builds arguments and tensor maps, calls its argument once or more, and compares with
            a reference that numpy or torch compute independently.
        off: default checks that it runs without, and why: what these find in it is no fault by the
            PTX ISA. A fault has an entry in ``<project>.suppress`` instead.
    """

    name: str
    project: str
    version: str
    target: str
    entry: str
    made: str
    run: Callable[[Launch], bool]
    off: Mapping[str, str] = field(default_factory=dict)

    @property
    def checks(self) -> list[str]:
        return [kind.name for kind in KINDS.values() if kind.default and kind.name not in self.off]

    def ptx(self, folder: Path) -> str:
        """The text of the module; FileNotFoundError says how to make it."""
        path = folder / self.project / f"{self.name}.ptx"
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there; to make it: {self.made}")
        return path.read_text()

    def launch(self, device: em.Device, ptx: str, folder: Path) -> tuple[bool, list[em.Report]]:
        """Run it: whether the output is right, and a report of each launch."""
        launch = Launch(device, ptx, self.entry, folder / self.project)
        return self.run(launch), launch.reports
