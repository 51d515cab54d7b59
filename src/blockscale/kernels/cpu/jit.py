# mypy: ignore-errors
"""How numba compiles what is in this folder."""

from __future__ import annotations

from numba import njit

# Without reference counts, which numba does not get out of the loops, some of them are twice as
# fast. All memory therefore comes from the caller. Functions that only compiled code calls need no
# wrappers; "spliced" become part of theirs, which saves optimizing the whole once more.
OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}
entry = njit(cache=True, **OPTIONS)
entry_without_cache = njit(**OPTIONS)
compiled = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)
inlined = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True, **OPTIONS)
spliced = njit(inline="always", **OPTIONS)
