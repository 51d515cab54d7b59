# mypy: ignore-errors
"""Counters in the memory of ranks: whoever adds to one releases what was written before, whoever
reads it acquires that.

Addresses are integers of 64 bits.
"""

from __future__ import annotations

from cutlass import Int32, Int64, cute
from cutlass._mlir.dialects import llvm

__all__ = [
    "add_release",
    "add_shared",
    "arrive",
    "claim",
    "fence_async",
    "fetch_add",
    "load_acquire",
    "nanoseconds",
    "wait_for",
    "wait_for_peer",
]

_LETTERS = {Int32: "r", Int64: "l"}


def _asm(code: str, result, *args) -> object:
    """Volatile inline PTX, of one result or none."""
    kinds = [Int64 if isinstance(arg, Int64) else Int32 for arg in args]
    constraints = [f"={_LETTERS[result]}"] if result else []
    constraints += [_LETTERS[kind] for kind in kinds] + ["~{memory}"]
    values = [kind(arg).ir_value() for kind, arg in zip(kinds, args, strict=True)]
    kind = result.mlir_type if result else None
    out = llvm.inline_asm(kind, values, code, ",".join(constraints), has_side_effects=True)
    return result(out) if result else None


def add_release(address, value, scope: str) -> None:
    """Add to a counter, when all is there that was written before; ``scope``: "gpu" or "sys"."""
    _asm(f"red.release.{scope}.global.add.u32 [$0], $1;", None, address, Int32(value))


def load_acquire(address, scope: str):
    """A counter; what was written before it had this value is seen."""
    return _asm(f"ld.acquire.{scope}.global.u32 $0, [$1];", Int32, address)


def fetch_add(address, value):
    """Add to a word that orders nothing; what it was before."""
    return _asm("atom.relaxed.gpu.global.add.u32 $0, [$1], $2;", Int32, address, Int32(value))


def arrive(address):
    """Add 1 to a counter of this rank; what it was before. Whoever comes later sees all that those
    did who came earlier."""
    return _asm("atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;", Int32, address)


def add_shared(address, value):
    """Add to a word of shared memory; what it was before."""
    return _asm("atom.shared.add.u32 $0, [$1], $2;", Int32, Int32(address), Int32(value))


def claim(address, value) -> None:
    """Set a word that is 0."""
    code = "{ .reg .b32 old; atom.relaxed.gpu.global.cas.b32 old, [$0], 0, $1; }"
    _asm(code, None, address, Int32(value))


def fence_async() -> None:
    """Order what threads wrote, or will, with what TMA reads of global memory."""
    _asm("fence.proxy.async.global;", None)


def nanoseconds():
    """A clock."""
    return _asm("mov.u64 $0, %globaltimer;", Int64)


@cute.jit
def wait_for(address, least):
    """Until a counter of this rank has ``least``. Whoever adds to it is a CTA that runs."""
    while load_acquire(address, "gpu") < least:
        pass


@cute.jit
def wait_for_peer(address, least, rank, status, limit):
    """Until a counter that ``rank`` adds to has ``least``; no longer than ``limit`` ns, after which
    ``status`` says which rank is missing, or, where it says so of any, not at all. Counters may
    begin anew after 2**32."""
    waits = load_acquire(address, "sys") - least < 0
    start = nanoseconds()
    while waits:
        waits = load_acquire(address, "sys") - least < 0
        if waits:
            if nanoseconds() - start > limit:
                claim(status, rank + 1)
            if load_acquire(status, "gpu") != 0:
                waits = False
