"""How fine the checks look at a memory."""

from __future__ import annotations

from collections.abc import Iterable

from ..ptx.program import Module

__all__ = ["cell_size"]

_NARROW = {"b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16"}


def cell_size(modules: Iterable[Module], space: str) -> int:
    """Bytes of shared or global memory that the checks tell apart: a word, if no instruction
    reaches less."""
    spaces = {"global", "shared", "param", "local", "const"} - {space}
    for function in (each for module in modules for each in module.functions.values()):
        for ins in function.instructions:
            parts = {part.partition("::")[0] for part in ins.parts}
            narrow = not _NARROW.isdisjoint(parts) and spaces.isdisjoint(parts)
            if narrow and ins.parts[0] in ("ld", "st", "atom", "red"):
                return 1
    return 4
