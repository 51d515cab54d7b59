# mypy: ignore-errors
"""Scans of a warp's lanes."""

from __future__ import annotations

from cutlass import Int32, cute, select_

__all__ = ["inclusive_scan"]


def inclusive_scan(value, combine):
    """What ``combine`` makes of the values of all lanes up to one: int32, none negative."""
    lane = cute.arch.lane_idx()
    for i in range(5):
        other = cute.arch.shuffle_sync_up(value, 1 << i, mask_and_clamp=0)
        value = combine(value, Int32(select_(lane >= (1 << i), other, Int32(0))))
    return value
