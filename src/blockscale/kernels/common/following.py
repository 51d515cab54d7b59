# mypy: ignore-errors
"""Kernels that are there when the one before them ends: programmatic dependent launch.

A kernel launched with ``use_pdl`` may be started while its predecessor still writes memory, and
reads what is to be overwritten: no thread reads or writes global memory before ``follow``, nor by
``ld.global.nc`` after it. The emulator says where one does. It comes when all blocks of its
predecessor are over, or have called ``precede``.
"""

from __future__ import annotations

from cutlass import cute

__all__ = ["follow", "precede"]


def follow() -> None:
    """Wait until the kernel before is over, and memory is as it leaves it."""
    cute.arch.griddepcontrol_wait()


def precede() -> None:
    """Blocks of the next kernel may come where there is room: this one has read what is much."""
    cute.arch.griddepcontrol_launch_dependents()
