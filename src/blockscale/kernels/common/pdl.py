# mypy: ignore-errors
"""Kernels that are there when the one before them ends: programmatic dependent launch.

A kernel launched with ``use_pdl`` may be started while its predecessor still writes memory, and
reads what is to be overwritten: no thread reads or writes global memory before ``pdl_wait``, nor by
``ld.global.nc`` after it. The emulator says where one does. It comes when all CTAs of its
predecessor are over, or have called ``pdl_launch_dependents``.
"""

from __future__ import annotations

from cutlass import cute

__all__ = ["pdl_launch_dependents", "pdl_wait"]


def pdl_wait() -> None:
    """Wait until the kernel before is over, and memory is as it leaves it."""
    cute.arch.griddepcontrol_wait()


def pdl_launch_dependents() -> None:
    """Let CTAs of the next kernel come where there is room: what this one still does is short."""
    cute.arch.griddepcontrol_launch_dependents()
