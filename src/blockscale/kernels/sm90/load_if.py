# mypy: ignore-errors
"""Loads of global memory that some lanes do."""

from __future__ import annotations

from cutlass import Int32

from .ptx import _asm

__all__ = ["load_if"]


def load_if(address, offset: int, nbytes: int, wanted) -> list:
    """1, 2, 4, 8 or 16 bytes of global memory, ``offset`` bytes after ``address``, as words,
    zero-extended; zeros, and nothing read, unless ``wanted``."""
    count = max(nbytes // 4, 1)
    names = [f"w{i}" for i in range(count)]
    kind = {1: "u8", 2: "u16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}[nbytes]
    target = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    code = (
        f"{{ .reg .pred p; .reg .b32 w<{count}>; setp.ne.b32 p, ${count + 1}, 0; "
        + " ".join(f"mov.b32 {name}, 0;" for name in names)
        + f" @p ld.global.{kind} {target}, [${count} + {offset}]; "
        + " ".join(f"mov.b32 ${i}, {name};" for i, name in enumerate(names))
        + " }"
    )
    return _asm(code, [Int32] * count, [address, Int32(wanted)], ["l", "r"], memory=True)
