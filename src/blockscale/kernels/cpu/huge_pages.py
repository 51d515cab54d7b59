"""Large results in huge pages: the first touch of small ones takes longer than quantizing does."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable

__all__ = ["ADVICE", "LEAST", "PAGE", "advise", "madvise"]

LEAST = 1 << 22  # bytes that are worth it
PAGE, ADVICE = mmap.PAGESIZE, getattr(mmap, "MADV_HUGEPAGE", 14)


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


#: The C function; None where there is none.
madvise = _find_madvise()


def advise(address: int, nbytes: int) -> None:
    """Ask for huge pages, if so many bytes are worth it."""
    if nbytes >= LEAST and madvise is not None:
        start = -(-address // PAGE) * PAGE
        madvise(start, (address + nbytes - start) // PAGE * PAGE, ADVICE)
