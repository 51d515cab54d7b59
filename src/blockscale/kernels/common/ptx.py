# mypy: ignore-errors
"""Single PTX instructions as functions on CuTe DSL values, where the DSL has none of its own.

Addresses are integers: 64 bits in global memory, 32 in shared memory.
"""

from __future__ import annotations

from cutlass import Float32, Float64, Int32, Uint32
from cutlass.cute.arch import inline_ptx

__all__ = [
    "add",
    "add_doubles",
    "add_global",
    "add_pairs",
    "add_shared",
    "add_square",
    "below",
    "copy_async",
    "copy_bulk",
    "divide",
    "double_of_words",
    "e2m1_of_eight",
    "e4m3_value",
    "fma",
    "fma_pairs",
    "fp8_of_four",
    "half_to_float",
    "load_float",
    "load_global",
    "load_global_float",
    "load_shared",
    "load_words",
    "magnitude_at_most",
    "max_global",
    "max_shared",
    "max_u16x2",
    "maximum",
    "multiply",
    "multiply2",
    "multiply_pairs",
    "reciprocal_of_minus",
    "round_pair",
    "select_negative",
    "square",
    "square_root",
    "store_global",
    "store_shared",
    "subtract",
    "wait_async",
    "words_of_double",
]

_VECTOR = {1: "b8", 2: "b16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}


def _one(code: str, result, *args):
    return inline_ptx(code, write_only_types=[result], read_only_args=list(args))


def _registers(letter: str, first: int, count: int) -> str:
    names = ", ".join("{$" + f"{letter}{first + i}" + "}" for i in range(count))
    return names if count == 1 else "{ " + names + " }"


def load_shared(address, nbytes: int) -> list:
    """``nbytes`` (1, 2, 4, 8 or 16) of shared memory as words; less than one is zero-extended."""
    if nbytes < 4:
        return [_one(f"ld.shared.u{8 * nbytes} {{$w0}}, [{{$r0}}];", Uint32, address)]
    count = nbytes // 4
    words = inline_ptx(
        f"ld.shared.{_VECTOR[nbytes]} {_registers('w', 0, count)}, [{{$r0}}];",
        write_only_types=[Uint32] * count,
        read_only_args=[address],
    )
    return list(words) if count > 1 else [words]


def load_float(address):
    """An fp32 value of shared memory."""
    return _one("ld.shared.f32 {$w0}, [{$r0}];", Float32, address)


def load_words(address) -> list:
    """Four words of global memory."""
    code = f"ld.global.v4.b32 {_registers('w', 0, 4)}, [{{$r0}}];"
    return list(inline_ptx(code, write_only_types=[Uint32] * 4, read_only_args=[address]))


def load_global(address, nbytes: int):
    """1, 2 or 4 bytes of global memory, zero-extended."""
    return _one(f"ld.global.u{8 * nbytes} {{$w0}}, [{{$r0}}];", Uint32, address)


def load_global_float(address):
    """An fp32 value of global memory."""
    return _one("ld.global.f32 {$w0}, [{$r0}];", Float32, address)


def store_shared(address, words: list, nbytes: int) -> None:
    """Words, or the low ``nbytes`` (1 or 2) of one, to shared memory."""
    _store("shared", address, words, nbytes)


def store_global(address, words: list, nbytes: int) -> None:
    """Words, or the low ``nbytes`` (1 or 2) of one, to global memory."""
    _store("global", address, words, nbytes)


def _store(space: str, address, words: list, nbytes: int) -> None:
    inline_ptx(
        f"st.{space}.{_VECTOR[nbytes]} [{{$r0}}], {_registers('r', 1, len(words))};",
        read_only_args=[address, *words],
    )


def copy_async(shared, source, nbytes) -> None:
    """Start to copy 16 bytes from global to shared memory; those after the first ``nbytes`` are
    zeros, and not read."""
    inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[shared, source, nbytes],
    )


def wait_async() -> None:
    """Wait for all copies that this thread started by ``copy_async``."""
    inline_ptx("cp.async.wait_all;", read_only_args=[])


def copy_bulk(shared, source, nbytes: int, barrier) -> None:
    """Copy a multiple of 16 bytes from global to shared memory; ``barrier`` counts them."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[shared, source, Int32(nbytes), barrier],
    )


def below(word, position, limit: int):
    """A word, or zero if ``position`` is not below ``limit``; never a constant, which ptxas does
    not take for every operand.
    """
    code = "{ .reg .pred p; setp.lt.s32 p, {$r1}, {$r2}; selp.b32 {$w0}, {$r0}, 0, p; }"
    return _one(code, Uint32, word, position, Int32(limit))


def max_u16x2(a, b):
    return _one("max.u16x2 {$w0}, {$r0}, {$r1};", Uint32, a, b)


def max_shared(address, word) -> None:
    """Replace a word of shared memory by the larger one, in one step."""
    inline_ptx("red.shared.max.u32 [{$r0}], {$r1};", read_only_args=[address, word])


def max_global(address, word) -> None:
    """Replace a word of global memory by the larger one, in one step."""
    inline_ptx("red.relaxed.gpu.global.max.u32 [{$r0}], {$r1};", read_only_args=[address, word])


def add_shared(address, word) -> None:
    """Add to a word of shared memory, in one step."""
    inline_ptx("red.shared.add.u32 [{$r0}], {$r1};", read_only_args=[address, word])


def add_global(address, word) -> None:
    """Add to a word of global memory, in one step."""
    inline_ptx("red.relaxed.gpu.global.add.u32 [{$r0}], {$r1};", read_only_args=[address, word])


def absmax_pairs(a, b, kind: str):
    """The larger magnitudes of two pairs of ``kind`` ("f16" or "bf16"), their signs anything; NaN
    where one is."""
    return _one(f"max.NaN.xorsign.abs.{kind}x2 {{$w0}}, {{$r0}}, {{$r1}};", Uint32, a, b)


def half_to_float(word, upper: bool):
    """fp32 value of one half of a word; exact."""
    code = "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, PART; }"
    return _one(code.replace("PART", "h" if upper else "l"), Float32, word)


def permute(a, b, order: int):
    """Bytes of ``a`` (0 to 3) and ``b`` (4 to 7), which digits of ``order`` name, lowest first."""
    return _one(f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, 0x{order:04x};", Uint32, a, b)


def fp8_of_four(values: list, element: str):
    """Four fp32 values to ``element`` ("e4m3" or "e5m2"), saturating, the first in the low byte."""
    code = (
        "{ .reg .b16 l, h; cvt.rn.satfinite.KINDx2.f32 l, {$r1}, {$r0};"
        " cvt.rn.satfinite.KINDx2.f32 h, {$r3}, {$r2}; mov.b32 {$w0}, {l, h}; }"
    )
    return _one(code.replace("KIND", element), Uint32, *values)


def e2m1_of_eight(values: list):
    """Eight fp32 values to E2M1, saturating, the first in the low nibble (sm_100a and later)."""
    convert = " ".join(
        f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(4)
    )
    code = "{ .reg .b8 b0, b1, b2, b3; " + convert + " mov.b32 {$w0}, {b0, b1, b2, b3}; }"
    return _one(code, Uint32, *values)


def e4m3_value(code):
    """fp32 value of an E4M3 code; exact."""
    text = (
        "{ .reg .b16 c, l, h; .reg .b32 p; cvt.u16.u32 c, {$r0}; cvt.rn.f16x2.e4m3x2 p, c;"
        " mov.b32 {l, h}, p; cvt.f32.f16 {$w0}, l; }"
    )
    return _one(text, Float32, code)


# --- IEEE operations that the compiler neither fuses nor reorders ---------------------------------


def add(a, b):
    return _one("add.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def subtract(a, b):
    return _one("sub.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def multiply(a, b):
    return _one("mul.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def add_pairs(a: list, b: list) -> list:
    """Two sums by one instruction (sm_100 and later)."""
    return _pairs("add", a, b)


def multiply_pairs(a: list, b: list) -> list:
    """Two products by one instruction (sm_100 and later)."""
    return _pairs("mul", a, b)


def multiply2(a, b, factor) -> list:
    """``a * factor`` and ``b * factor`` by one instruction (sm_100 and later)."""
    return multiply_pairs([a, b], [factor, factor])


def fma_pairs(a: list, b: list, c: list) -> list:
    """Two fused products and sums by one instruction (sm_100 and later)."""
    return _pairs("fma", a, b, c)


def _pairs(operation: str, *operands: list) -> list:
    names = "xyz"[: len(operands)]
    packed = [
        f"mov.b64 {name}, {{ {{$r{2 * i}}}, {{$r{2 * i + 1}}} }};" for i, name in enumerate(names)
    ]
    code = (
        f"{{ .reg .b64 {', '.join(names)}; {' '.join(packed)}"
        f" {operation}.rn.f32x2 x, {', '.join(names)}; mov.b64 {{ {{$w0}}, {{$w1}} }}, x; }}"
    )
    values = [value for pair in operands for value in pair]
    return list(inline_ptx(code, write_only_types=[Float32] * 2, read_only_args=values))


def fma(a, b, c):
    return _one("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", Float32, a, b, c)


def square(value):
    """fp64: of an fp32 value; exact."""
    code = "{ .reg .f64 d; cvt.f64.f32 d, {$r0}; mul.rn.f64 {$w0}, d, d; }"
    return _one(code, Float64, value)


def add_square(total, value):
    """fp64: what is given and the square of an fp32 value, rounded once."""
    code = "{ .reg .f64 d; cvt.f64.f32 d, {$r1}; fma.rn.f64 {$w0}, d, d, {$r0}; }"
    return _one(code, Float64, total, value)


def add_doubles(a, b):
    return _one("add.rn.f64 {$w0}, {$r0}, {$r1};", Float64, a, b)


def words_of_double(value) -> list:
    """Low and high."""
    code = "mov.b64 {{$w0}, {$w1}}, {$r0};"
    return list(inline_ptx(code, write_only_types=[Uint32] * 2, read_only_args=[value]))


def double_of_words(low, high):
    return _one("mov.b64 {$w0}, {{$r0}, {$r1}};", Float64, low, high)


def maximum(a, b):
    """The larger one; the other one where one is a NaN."""
    return _one("max.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def select_negative(g, a, b):
    """``a`` where g < 0, else ``b``."""
    code = "{ .reg .pred p; setp.lt.f32 p, {$r0}, 0f00000000; selp.f32 {$w0}, {$r1}, {$r2}, p; }"
    return _one(code, Float32, g, a, b)


def round_pair(low, high, kind: str):
    """A word of two fp32 values rounded to "bf16" or "f16"."""
    return _one(f"cvt.rn.{kind}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};", Uint32, low, high)


def divide(a, b):
    """The IEEE quotient, to nearest even; subnormals are kept."""
    return _one("div.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def square_root(value):
    return _one("sqrt.rn.f32 {$w0}, {$r0};", Float32, value)


def reciprocal_of_minus(value):
    """-1 / value within 1 ulp."""
    code = "{ .reg .f32 d; neg.f32 d, {$r0}; rcp.approx.ftz.f32 {$w0}, d; }"
    return _one(code, Float32, value)


def magnitude_at_most(value, largest):
    """The smaller of |value| and ``largest``, which it is for a NaN."""
    code = "{ .reg .f32 a; abs.f32 a, {$r0}; min.f32 {$w0}, a, {$r1}; }"
    return _one(code, Float32, value, largest)
