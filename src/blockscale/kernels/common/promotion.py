# mypy: ignore-errors
"""Tensor maps whose loads make the L2 cache fetch more than it was asked for."""

from __future__ import annotations

from cutlass import Int64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import builtin, llvm

__all__ = ["promote_l2"]

_MAP = "!llvm.struct<(struct<(array<16 x i64>)>)>"  # a tensor map, as host code has it
_MORE = 1 << 17  # of a map's second word: 128 bytes a fetch become 256


def promote_l2(atom):
    """An atom whose tensor map has the L2 cache fetch 256 bytes at once, on the host.

    CuTe DSL builds maps that ask for 128, and has no argument for it: the bits are changed here.
    """
    value = atom._trait.value
    found = builtin.unrealized_conversion_cast([ir.Type.parse(_MAP)], [value])
    flags = llvm.extractvalue(Int64.mlir_type, found, [0, 0, 1])
    flags = (Int64(flags) | Int64(_MORE)).ir_value()
    changed = llvm.insertvalue(found, flags, [0, 0, 1])
    changed = builtin.unrealized_conversion_cast([value.type], [changed])
    return cute.CopyAtom(atom.op, type(atom._trait)(changed))
