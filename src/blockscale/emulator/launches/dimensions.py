"""Grid, block and cluster of a launch, and their limits."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex

from ..ptx.program import Function

__all__ = ["dimensions"]

_MOST_CTAS = ((1 << 31) - 1, 65535, 65535)  # of a grid
_MOST_THREADS = (1024, 1024, 64)  # of a block

Dim = tuple[int, int, int]


def _three(value: int | Sequence[int], what: str) -> Dim:
    given = tuple(value) if isinstance(value, Sequence) else (value,)
    if not all(isinstance(n, SupportsIndex) for n in given):
        raise TypeError(f"{what}: got {value!r}; expected one to three integers")
    if not 1 <= len(given) <= 3 or any(operator.index(n) < 1 for n in given):
        raise ValueError(f"{what}: got {value!r}; expected one to three positive numbers")
    x, y, z = (*map(operator.index, given), 1, 1)[:3]
    return x, y, z


def dimensions(
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
    for name, got, most in (("grid", dims[0], _MOST_CTAS), ("block", dims[1], _MOST_THREADS)):
        if any(n > limit for n, limit in zip(got, most, strict=True)):
            raise ValueError(f"{name}: got {got}; at most {most}")
    return dims
