# mypy: ignore-errors
"""fp32 arithmetic on CuTe DSL values, each result rounded, and what brings values in and out."""

from __future__ import annotations

import torch
from cutlass import Float32, Int32, Uint32
from cutlass.cute.arch import inline_ptx

from . import ptx

__all__ = [
    "add",
    "below",
    "bits_of",
    "copy_bulk",
    "elementwise",
    "floats",
    "load_float",
    "load_wide",
    "rounded",
    "square_root",
]


def bits_of(value):
    return value.bitcast(Uint32)


def load_float(address):
    return ptx.load_shared(address, 4)[0].bitcast(Float32)


def floats(words: list, dtype: torch.dtype) -> list:
    """fp32 values of the elements in words; exact."""
    if dtype == torch.float32:
        return [word.bitcast(Float32) for word in words]
    if dtype == torch.float16:
        return [ptx.half_to_float(word, bool(i)) for word in words for i in range(2)]
    return [
        half.bitcast(Float32) for word in words for half in (word << 16, word & Uint32(0xFFFF0000))
    ]


def rounded(values: list, dtype: torch.dtype) -> list:
    """Words of fp32 values rounded to ``dtype``, to nearest even."""
    if dtype == torch.float32:
        return [bits_of(value) for value in values]
    code = f"cvt.rn.{'bf16' if dtype == torch.bfloat16 else 'f16'}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};"
    return [
        inline_ptx(code, write_only_types=[Uint32], read_only_args=values[i : i + 2])
        for i in range(0, len(values), 2)
    ]


def add(a, b):
    return _one("add", a, b)


def elementwise(operation: str, a: list, b: list, blackwell: bool) -> list:
    """Sums ("add") or products ("mul") of two lists; Blackwell takes two items at a time."""
    if not blackwell or len(a) % 2:
        return [_one(operation, *pair) for pair in zip(a, b, strict=True)]
    pairs = range(0, len(a), 2)
    return [v for i in pairs for v in _pair(operation, *a[i : i + 2], *b[i : i + 2])]


def _one(operation: str, a, b):
    """The sum or product of two values: ".rn" keeps it from being fused with another."""
    code = f"{operation}.rn.f32 {{$w0}}, {{$r0}}, {{$r1}};"
    return inline_ptx(code, write_only_types=[Float32], read_only_args=[a, b])


def _pair(operation: str, a0, a1, b0, b1) -> list:
    """As ``_one`` of two pairs by one instruction (sm_100 and later)."""
    code = (
        "{ .reg .b64 x, y; mov.b64 x, { {$r0}, {$r1} }; mov.b64 y, { {$r2}, {$r3} };"
        f" {operation}.rn.f32x2 x, x, y; mov.b64 {{ {{$w0}}, {{$w1}} }}, x; }}"
    )
    return list(inline_ptx(code, write_only_types=[Float32] * 2, read_only_args=[a0, a1, b0, b1]))


def square_root(value):
    return inline_ptx(
        "sqrt.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value]
    )


def below(word, position, limit: int):
    """A word, or zero if ``position`` is not below ``limit``; never a constant, which ptxas does
    not take for every operand.
    """
    code = "{ .reg .pred p; setp.lt.s32 p, {$r1}, {$r2}; selp.b32 {$w0}, {$r0}, 0, p; }"
    return inline_ptx(
        code, write_only_types=[Uint32], read_only_args=[word, position, Int32(limit)]
    )


def load_wide(address) -> list:
    """Four words of global memory that no kernel writes meanwhile."""
    code = "ld.global.nc.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];"
    return list(inline_ptx(code, write_only_types=[Uint32] * 4, read_only_args=[address]))


def copy_bulk(shared, source, nbytes: int, barrier) -> None:
    """Copy a multiple of 16 bytes from global memory; ``barrier`` counts them."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[shared, source, Int32(nbytes), barrier],
    )
