"""Special registers (PTX ISA 10): what each of them holds, of a launch, a CTA or a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..machine.state import CTA, Fragment
from .launch import Launch

__all__ = ["special_register"]

_HALF = (1 << 32) - 1
#: Registers that say the time, which is that of one clock, and which bits: a shift and a mask.
_CLOCKS = {
    "clock": (0, _HALF),
    "clock_hi": (32, _HALF),
    "clock64": (0, (1 << 64) - 1),
    "globaltimer": (0, (1 << 64) - 1),
    "globaltimer_lo": (0, _HALF),
    "globaltimer_hi": (32, _HALF),
}
#: Those that are the same in all of a launch; the number is that of the axis.
_OF_LAUNCH: Mapping[str, Callable[[Launch, int], int]] = {
    "ntid": lambda launch, axis: launch.block[axis],
    "nctaid": lambda launch, axis: launch.grid[axis],
    "cluster_nctaid": lambda launch, axis: launch.cluster[axis],
    "nclusterid": lambda launch, axis: launch.clusters_along[axis],
    "cluster_nctarank": lambda launch, axis: int(np.prod(launch.cluster)),
    "is_explicit_cluster": lambda launch, axis: int(np.prod(launch.cluster)) > 1,
    "nwarpid": lambda launch, axis: 64,
    "nsmid": lambda launch, axis: 132,
    "smid": lambda launch, axis: 0,
    "gridid": lambda launch, axis: 0,
    "dynamic_smem_size": lambda launch, axis: launch.dynamic_shared,
    "reserved_smem_offset_1": lambda launch, axis: launch.shared_start,
    "total_smem_size": lambda launch, axis: launch.shared_bytes,
}
#: Halves of the address of the workspace that cooperative launches have: shifts.
_OF_WORKSPACE = {"envreg1": 32, "envreg2": 0}
_OF_CTA: Mapping[str, Callable[[CTA, int], int]] = {
    "ctaid": lambda cta, axis: cta.index[axis],
    "clusterid": lambda cta, axis: cta.index[axis] // cta.launch.cluster[axis],
    "cluster_ctaid": lambda cta, axis: cta.index[axis] % cta.launch.cluster[axis],
    "cluster_ctarank": lambda cta, axis: cta.rank,
}
#: Of each thread of a CTA.
_OF_THREAD: Mapping[str, Callable[[CTA, int], np.ndarray]] = {
    "tid": lambda cta, axis: cta.tid[axis],
    "laneid": lambda cta, axis: cta.lane,
    "warpid": lambda cta, axis: cta.linear // 32,
    "lanemask_eq": lambda cta, axis: np.uint32(1) << cta.lane,
    "lanemask_lt": lambda cta, axis: (np.uint32(1) << cta.lane) - np.uint32(1),
    "lanemask_le": lambda cta, axis: (np.uint32(2) << cta.lane) - np.uint32(1),
    "lanemask_gt": lambda cta, axis: ~((np.uint32(2) << cta.lane) - np.uint32(1)),
    "lanemask_ge": lambda cta, axis: ~((np.uint32(1) << cta.lane) - np.uint32(1)),
}


def special_register(
    launch: Launch, name: str, dtype: np.dtype
) -> Callable[[Fragment], Any] | None:
    """The function that reads a register, as in "%tid.x", for the threads of a fragment; None if
    there is no such register here."""
    base, _, letter = name[1:].partition(".")
    axis = "xyz".find(letter) if letter else 0
    if base in _OF_LAUNCH:
        value = dtype.type(_OF_LAUNCH[base](launch, axis))
        return lambda w: value
    if base in _OF_WORKSPACE and launch.workspace is not None:
        half = dtype.type(launch.workspace.base >> _OF_WORKSPACE[base] & _HALF)
        return lambda w: half
    if base in _CLOCKS:
        shift, mask = _CLOCKS[base]
        return lambda w: dtype.type(launch.clock.read(w) >> shift & mask)
    if base in _OF_CTA:
        of_cta = _OF_CTA[base]
        return lambda w: dtype.type(of_cta(w.cta, axis))
    if base in _OF_THREAD:
        of_thread = _OF_THREAD[base]
        return lambda w: of_thread(w.cta, axis)[w.sel].astype(dtype)
    return None
