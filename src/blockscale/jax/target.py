"""Which GPU kernels are called on, and what is said where there is none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import jax

from ..fallback import FallbackWarning
from ..kernels.common.gpu import GPUS, Gpu, arch_of, dram_rate, no_kernels
from .launch import launch

__all__ = ["Target", "current_target", "fall_back", "standing_in"]

#: The architecture that the CuTe DSL compiles for, if not that of the GPU which is here.
_ARCH = "CUTE_DSL_ARCH"


class Target(NamedTuple):
    """Where kernels run.

    Attributes:
        gpu: what they are chosen for.
        launch: what calls a kernel, as ``launch.launch``.
        platform: JAX's name of it.
    """

    gpu: Gpu
    launch: Callable[..., list[jax.Array]]
    platform: str = "cuda"


_standing_in: Target | None = None
_warned: set[str] = set()


def current_target() -> Target | None:
    """The GPU that is here, or that ``CUTE_DSL_ARCH`` names (sm_90a, sm_100a), which then has as
    many multiprocessors as an H200 or B200; None where neither has kernels. It is asked for when a
    function is traced, and JAX keeps what it traced."""
    if _standing_in is not None:
        return _standing_in
    named = os.environ.get(_ARCH, "")
    return _named(named) if named else _found()


@contextmanager
def standing_in(other: Target) -> Iterator[None]:
    """Inside, in all threads, what is traced is for another target."""
    global _standing_in
    before, _standing_in = _standing_in, other
    try:
        yield
    finally:
        _standing_in = before


def fall_back(operation: str, reason: str) -> None:
    """Say, once, that XLA computes for lack of a kernel."""
    message = f"{operation}: {reason}; XLA computes it, which is slower"
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, FallbackWarning, stacklevel=3)


@cache
def _named(arch: str) -> Target | None:
    return Target(GPUS[arch], launch) if _has_kernels(arch, f"{_ARCH}={arch}") else None


@cache
def _found() -> Target | None:
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return None
    arch = arch_of(*map(int, device.compute_capability.split(".")))
    if not _has_kernels(arch, f"architecture {arch}"):
        return None
    rate = dram_rate(device.local_hardware_id)
    gpu = replace(GPUS[arch], multiprocessors=device.core_count, dram_rate=rate)
    return Target(gpu, launch)


def _has_kernels(arch: str, name: str) -> bool:
    """Whether there are kernels for ``arch``, by whose ``name`` it is said if not."""
    if arch not in GPUS:
        fall_back("blockscale.jax", f"{name}: {no_kernels(arch, GPUS)}")
    elif find_spec("cutlass") is None:
        fall_back("blockscale.jax", "the CuTe DSL is not installed: pip install 'blockscale[cuda]'")
    else:
        return True
    return False
