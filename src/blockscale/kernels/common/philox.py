# mypy: ignore-errors
"""Random bits of elements, as ``blockscale.philox`` has them: Philox4x32-10."""

from __future__ import annotations

from cutlass import Uint32
from cutlass.cute.arch import inline_ptx

__all__ = ["philox"]

_FACTORS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # what keys grow by in a round
_ROUNDS = 10


def _text() -> str:
    """Counter in r0 to r3, key in r4 and r5. The words take turns, so that none is moved."""
    lines = [
        ".reg .b32 a, b, c, d, k, l, s, t; .reg .b64 p, q;",
        "mov.b32 a, {$r0}; mov.b32 b, {$r1}; mov.b32 c, {$r2}; mov.b32 d, {$r3};",
    ]
    for i in range(_ROUNDS):
        grown = [w * i & 0xFFFFFFFF for w in _WEYL]
        lines += [
            f"mul.wide.u32 p, a, 0x{_FACTORS[0]:08X}; mul.wide.u32 q, c, 0x{_FACTORS[1]:08X};",
            f"add.u32 k, {{$r4}}, 0x{grown[0]:08X}; add.u32 l, {{$r5}}, 0x{grown[1]:08X};",
            "mov.b64 {c, s}, q; mov.b64 {a, t}, p;",  # low words and high ones
            "lop3.b32 s, s, b, k, 0x96; lop3.b32 t, t, d, l, 0x96;",  # exclusive or of three
            "mov.b32 b, c; mov.b32 d, a; mov.b32 a, s; mov.b32 c, t;",
        ]
    lines.append("mov.b32 {$w0}, a; mov.b32 {$w1}, b; mov.b32 {$w2}, c; mov.b32 {$w3}, d;")
    return "{ " + " ".join(lines) + " }"


_CODE = _text()


def philox(counter: list, key: list) -> list:
    """Four words of random bits of a ``counter`` of four words and a ``key`` of two."""
    given = [*counter, *key]
    return list(inline_ptx(_CODE, write_only_types=[Uint32] * 4, read_only_args=given))
