# mypy: ignore-errors
"""How numba compiles loops, and a cache on disk so that a second process starts at once.

numba's cache watches only the file that a function is in, and its index names classes of its
folder: one that was renamed since makes it unreadable. So each version of the sources has files of
its own, told apart by a checksum in the functions' names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from numba import cfunc, njit
from numba.core.caching import FunctionCache

# Without reference counts, which numba does not get out of the loops, some of them are twice as
# fast. All memory therefore comes from the caller. Functions that only compiled code calls need no
# wrappers; "spliced" become part of theirs, which saves optimizing the whole once more.
OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}
compiled = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)
inlined = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True, **OPTIONS)
spliced = njit(inline="always", **OPTIONS)
_entry = njit(cache=True, **OPTIONS)
_entry_without_cache = njit(**OPTIONS)


def cached(sources: Iterable[Path]) -> Callable:
    """The decorator of functions that Python calls; they are made of what ``sources`` hold."""
    version = _version(sources)

    def decorate(function):
        function.__qualname__ = f"{function.__name__}-{version}"
        try:
            kernel = _entry(function)
        except RuntimeError:  # none of the folders that numba tries can be written to
            return _entry_without_cache(function)

        def call(*args):
            try:
                return kernel(*args)
            except OSError:  # a full disk: the function is compiled by now, only not saved
                return kernel(*args)
            except Exception:  # a damaged file raises anything when it is unpickled
                kernel._cache.flush()
                return kernel(*args)

        return call

    return decorate


def c_function(sources: Iterable[Path], signature: object) -> Callable:
    """The decorator of functions that C calls, made of what ``sources`` hold, into their addresses:
    they are compiled, or read from disk, at once."""
    version = _version(sources)

    def decorate(function):
        function.__qualname__ = f"{function.__qualname__}-{version}"
        try:
            compiled = cfunc(signature, cache=True, **OPTIONS)(function)
        except Exception:  # no folder can be written to, a full disk, or a damaged file
            with suppress(RuntimeError, OSError):
                FunctionCache(function).flush()
            compiled = cfunc(signature, **OPTIONS)(function)
        _kept.append(compiled)
        return compiled.address

    return decorate


_kept = []  # C functions: their code is freed with them


def _version(sources: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
