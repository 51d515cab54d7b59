"""Descriptors of wgmma and tcgen05: 64 bits for a matrix in shared memory, 32 for an instruction.

PTX ISA 9.7.15.5.1.2.2 (wgmma) and 9.7.16.4 (tcgen05), shapes of Table 39. A reserved bit that is
set, or a value that no table allows, is a ValueError that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NoReturn

__all__ = [
    "InstructionDescriptor",
    "SharedDescriptor",
    "instruction_descriptor",
    "tcgen05_descriptor",
    "wgmma_descriptor",
]


@dataclass(frozen=True, slots=True)
class SharedDescriptor:
    """A matrix in shared memory. ``start``, ``leading`` and ``stride`` are in bytes.

    ``base_offset`` is bits 7 to 9 of the address where the swizzle pattern starts, 0 if that is a
    multiple of the pattern's size. ``swizzle`` is "none", "32B", "64B", "128B" or "128B_atom_32B".
    With ``leading_absolute`` (sm_103a) ``leading`` is an address.
    """

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: str
    leading_absolute: bool = False


@dataclass(frozen=True, slots=True)
class InstructionDescriptor:
    """What a tcgen05.mma multiplies: D (m x n) += A (m x k) B (k x n); of the CTA pair if two.

    Types are PTX names ("e4m3", "bf16", "s32"). ``transpose_a``, ``transpose_b``: the operand is
    MN-major in shared memory. ``scale_type`` is None without block scaling. ``sfa_id`` and
    ``sfb_id`` are the byte in a word of Tensor Memory where the scales of a row start.
    ``max_shift`` is in columns.
    """

    kind: str
    a_type: str
    b_type: str
    d_type: str
    m: int
    n: int
    k: int
    transpose_a: bool
    transpose_b: bool
    negate_a: bool
    negate_b: bool
    saturate: bool
    sparse: bool
    sparse_selector: int
    scale_type: str | None
    sfa_id: int
    sfb_id: int
    max_shift: int


def _refuse(field: str, given: object, allowed: str) -> NoReturn:
    raise ValueError(f"{field} is {given}, allowed: {allowed}")


def _names(values: Mapping[int, str]) -> str:
    return ", ".join(f"{code} ({name})" for code, name in values.items())


class _Bits:
    """Fields of a number, taken out one by one; what nobody took is reserved."""

    def __init__(self, bits: int, size: int, what: str) -> None:
        if not 0 <= bits < 1 << size:
            _refuse(what, hex(bits), f"{size} bits")
        self.value, self.what, self.left = bits, what, bits

    def take(self, at: int, size: int) -> int:
        mask = (1 << size) - 1 << at
        self.left &= ~mask
        return (self.value & mask) >> at

    def pick(self, at: int, size: int, field: str, values: Mapping[int, str]) -> str:
        code = self.take(at, size)
        if code not in values:
            _refuse(field, code, _names(values))
        return values[code]

    def flag(self, at: int, field: str, allowed: bool, why: str = "") -> bool:
        value = bool(self.take(at, 1))
        if value and not allowed:
            _refuse(f"{field} (bit {at})", 1, f"0{why}")
        return value

    def end(self) -> None:
        if self.left:
            set_bits = [i for i in range(self.left.bit_length()) if self.left >> i & 1]
            raise ValueError(f"{self.what}: reserved bits {set_bits} are set, allowed: none")


_WGMMA_SWIZZLES = {0: "none", 1: "128B", 2: "64B", 3: "32B"}
_TCGEN05_SWIZZLES = {0: "none", 1: "128B_atom_32B", 2: "128B", 4: "64B", 6: "32B"}


@lru_cache(maxsize=1024)
def wgmma_descriptor(bits: int) -> SharedDescriptor:
    """The descriptor of an operand of wgmma.mma_async, PTX ISA 9.7.15.5.1.2.2."""
    b = _Bits(bits, 64, "wgmma matrix descriptor")
    found = _shared(b, b.pick(62, 2, "swizzling mode", _WGMMA_SWIZZLES), False)
    if found.base_offset and found.swizzle == "none":
        _refuse("matrix base offset", found.base_offset, "0 without swizzling")
    return found


@lru_cache(maxsize=1024)
def tcgen05_descriptor(bits: int) -> SharedDescriptor:
    """The descriptor of an operand of tcgen05.mma or tcgen05.cp, PTX ISA 9.7.16.4.1.

    Without swizzling the base offset is 0 whatever its bits say: it places a pattern that is not
    there. Triton sets it for tcgen05.cp, and its kernels are right on hardware.
    """
    b = _Bits(bits, 64, "tcgen05 shared memory descriptor")
    if (version := b.take(46, 3)) != 1:
        _refuse("fixed constant (bits 46 to 48)", bin(version), "0b001")
    swizzle = b.pick(61, 3, "swizzling mode", _TCGEN05_SWIZZLES)
    absolute = b.flag(52, "leading dimension stride mode", True)
    found = _shared(b, swizzle, absolute)
    if absolute and (swizzle != "128B" or found.base_offset):
        given = f"absolute with swizzle {swizzle}, base offset {found.base_offset}"
        _refuse("leading dimension stride mode", given, "absolute with swizzle 128B, base offset 0")
    return found if swizzle != "none" else replace(found, base_offset=0)


def _shared(b: _Bits, swizzle: str, absolute: bool) -> SharedDescriptor:
    start, leading, stride = (b.take(at, 14) << 4 for at in (0, 16, 32))
    base_offset = b.take(49, 3)
    b.end()
    return SharedDescriptor(start, leading, stride, base_offset, swizzle, absolute)


_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_FLOATS = {0: "f16", 1: "f32"}
_BYTES = ("e4m3", "e5m2", "u8", "s8")
_NARROW = ("e2m3", "e3m2", "e2m1")  # narrower than a byte


@dataclass(frozen=True, slots=True)
class _Kind:
    """A row of Tables 39, 42 to 44: codes of operand types, D types and scale types; dense K."""

    operands: Mapping[int, str]
    results: Mapping[int, str]
    k: int
    scales: Mapping[int, str] | None = None
    ids: tuple[int, ...] = ()


_KINDS = {
    "f16": _Kind({0: "f16", 1: "bf16"}, _FLOATS, 16),
    "tf32": _Kind({2: "tf32"}, {1: "f32"}, 8),
    "f8f6f4": _Kind(_F8F6F4, _FLOATS, 32),
    "i8": _Kind({0: "u8", 1: "s8"}, {2: "s32"}, 32),
    "mxf8f6f4": _Kind(_F8F6F4, {}, 32, {1: "ue8m0"}, (0, 1, 2, 3)),
    "mxf4": _Kind({1: "e2m1"}, {}, 64, {1: "ue8m0"}, (0, 2)),
    "mxf4nvf4": _Kind({1: "e2m1"}, {}, 64, {0: "ue4m3", 1: "ue8m0"}, (0, 2)),
}


@lru_cache(maxsize=1024)
def instruction_descriptor(
    bits: int, kind: str, cta_group: int = 1, ws: bool = False
) -> InstructionDescriptor:
    """The instruction descriptor of a tcgen05.mma(.ws), PTX ISA 9.7.16.4.2, for sm_100a.

    ``kind``: without the leading ".kind::". K = 96 (bit 31 of mxf4 and mxf4nvf4) is sm_103a only
    and refused. N goes in steps of 8 for M = 128 of one CTA too, as in Table 39; CUTLASS asks for
    16 there if A of kind f8f6f4 is in Tensor Memory.
    """
    if kind not in _KINDS:
        _refuse("kind", repr(kind), ", ".join(_KINDS))
    if cta_group not in (1, 2):
        _refuse("cta_group", cta_group, "1, 2")
    rules, b = _KINDS[kind], _Bits(bits, 32, f"instruction descriptor of kind::{kind}")
    fields = _scaled(b, rules) if rules.scales else _plain(b, rules, kind, ws)
    sparse = b.flag(2, "sparsity", True)
    found = InstructionDescriptor(
        kind=kind,
        n=b.take(17, 6) << 3,
        k=rules.k << sparse,
        transpose_a=b.flag(15, "transpose A", rules.k != 64, f" for kind::{kind}"),
        transpose_b=b.flag(16, "transpose B", rules.k != 64, f" for kind::{kind}"),
        negate_a=b.flag(13, "negate A", kind != "i8", " for kind::i8"),
        negate_b=b.flag(14, "negate B", kind != "i8", " for kind::i8"),
        sparse=sparse,
        **fields,  # type: ignore[arg-type]
    )
    b.end()
    _check_types(found)
    _check_shape(found, cta_group, ws)
    return found


def _plain(b: _Bits, rules: _Kind, kind: str, ws: bool) -> dict[str, object]:
    """Table 42: the fields that only kinds without block scaling have."""
    selector = b.take(0, 2)
    if selector and not b.value >> 2 & 1:
        _refuse("sparsity selector", selector, "0 without sparsity")
    if selector and rules.k == 32:  # 9.7.16.10.8.4.5
        _refuse("sparsity selector", selector, f"0 for kind::{kind}")
    shift = b.take(30, 2)
    if shift and not ws:
        _refuse("maximum shift", shift, "0 without .ws")
    return {
        "a_type": b.pick(7, 3, "atype", rules.operands),
        "b_type": b.pick(10, 3, "btype", rules.operands),
        "d_type": b.pick(4, 2, "dtype", rules.results),
        "m": b.take(24, 5) << 4,
        "saturate": b.flag(3, "saturate", kind == "i8", f" for kind::{kind}"),
        "sparse_selector": selector,
        "scale_type": None,
        "sfa_id": 0,
        "sfb_id": 0,
        "max_shift": (0, 8, 16, 32)[shift],
    }


def _scaled(b: _Bits, rules: _Kind) -> dict[str, object]:
    """Tables 43 and 44: the fields that only kinds with block scaling have."""
    packed = rules.k == 64
    ids = {"scale factor A ID": b.take(29, 2), "scale factor B ID": b.take(4, 2)}
    for field, code in ids.items():
        if code not in rules.ids:
            _refuse(field, code, ", ".join(map(str, rules.ids)))
    if packed:
        b.flag(31, "K dimension", False, ": K = 96 is for sm_103a")
    assert rules.scales is not None
    return {
        "a_type": b.pick(7, 3, "atype", rules.operands),
        "b_type": b.pick(10, 2 if packed else 3, "btype", rules.operands),
        "d_type": "f32",
        "m": b.take(27, 2) << 7,
        "saturate": False,
        "sparse_selector": 0,
        "scale_type": b.pick(23, 1, "scale matrix type", rules.scales),
        "sfa_id": ids["scale factor A ID"],
        "sfb_id": ids["scale factor B ID"],
        "max_shift": 0,
    }


def _check_types(found: InstructionDescriptor) -> None:
    if found.kind == "f16" and found.d_type == "f16":
        for field, type in (("atype", found.a_type), ("btype", found.b_type)):
            if type != "f16":
                _refuse(field, type, "f16 where dtype is f16")
    pairs = (("A", found.transpose_a, found.a_type), ("B", found.transpose_b, found.b_type))
    for operand, transposed, type in pairs:
        if transposed and type in _NARROW:  # Table 54
            _refuse(f"transpose {operand}", 1, f"0 for type {type}")


def _check_shape(found: InstructionDescriptor, cta_group: int, ws: bool) -> None:
    """Table 39, and Table 52 for an 8-bit transposed B."""
    scaled = found.scale_type is not None
    what = f"kind::{found.kind}{'.ws' if ws else ''} with cta_group::{cta_group}"
    if ws and (scaled or cta_group == 2):
        _refuse("ws", True, f"False for {what}")
    if ws:
        rows: tuple[int, ...] = (32, 64, 128)
        columns = [64, 128] if found.sparse else [64, 128, 256]
    elif cta_group == 2:
        rows = (256,) if scaled and found.sparse else (128, 256)
        columns = list(range(32, 257, 32) if found.kind == "i8" else range(16, 257, 16))
    else:
        rows = (128,) if scaled else (64, 128)
        columns = list(range(8, 257, 8))
        if found.kind == "i8":
            columns = [n for n in columns if n <= 32 or n % 16 == 0]
    if found.transpose_b and found.b_type in _BYTES:
        columns = [n for n in columns if n % (16 * cta_group) == 0]
    if found.m not in rows:
        _refuse("M", found.m, f"{', '.join(map(str, rows))} for {what}")
    if found.n not in columns:
        _refuse("N", found.n, f"{', '.join(map(str, columns))} for {what}")
