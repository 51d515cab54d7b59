"""A kernel of another project: where its PTX lies, and a launch that knows the right answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockscale import emulator as em

__all__ = ["Foreign", "Launch", "allocated"]

Launch = Callable[..., em.Report]  # Device.launch without its first two arguments


def allocated(array: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 256 bytes, as cudaMalloc's memory does."""
    room = np.empty(array.nbytes + 256, np.uint8)
    start = -room.ctypes.data % 256
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


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
        run: builds arguments and tensor maps, calls its argument once or more with what
            ``Device.launch`` takes after the name of the entry, and compares with a reference
            that numpy or torch compute independently.
    """

    name: str
    project: str
    version: str
    target: str
    entry: str
    made: str
    run: Callable[[Launch], bool]

    def ptx(self, folder: Path) -> str:
        """The text of the module; FileNotFoundError says how to make it."""
        path = folder / self.project / f"{self.name}.ptx"
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there; to make it: {self.made}")
        return path.read_text()

    def launch(self, device: em.Device, ptx: str) -> tuple[bool, list[em.Report]]:
        """Run it: whether the output is right, and a report of each launch."""
        reports: list[em.Report] = []

        def launch(*args: Any, **named: Any) -> em.Report:
            reports.append(device.launch(ptx, self._entry(ptx), *args, **named))
            return reports[-1]

        return self.run(launch), reports

    def _entry(self, ptx: str) -> str:
        names: list[Any] = re.findall(r"^\s*(?:\.visible |\.weak )*\.entry\s+(\S+?)\(", ptx, re.M)
        found = [name for name in names if self.entry in name]
        if len(found) != 1:
            raise ValueError(
                f"entry: {self.entry!r} is in {len(found)} of the names {', '.join(names)}; "
                "give a part that one of them has"
            )
        return str(found[0])
