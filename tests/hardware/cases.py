"""What runs on the GPU and in the emulator beside the tests of the emulator: forms and kernels."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ptx_floats
from ptx_forms import Form

from gpu import Map

# --- instruction forms without a model: what the hardware says is right ---------------------------


def _no_model(*values: int) -> int:
    raise NotImplementedError


def extra_forms() -> list[Form]:
    """Approximations on edges, and 64-bit fields whose position or length exceed 255."""
    rng, found = random.Random(0), []
    edges, exponents = ptx_floats.edges("f32"), range(1, 255)
    wide = [rng.getrandbits(1) << 31 | e << 23 | rng.getrandbits(23) for e in exponents]
    operands = tuple(edges + wide)
    names = [f"{n}.approx" for n in ("ex2", "lg2", "sin", "cos", "tanh", "rsqrt", "rcp", "sqrt")]
    for name in names:
        for ftz in ("", ".ftz") if name != "tanh.approx" else ("",):
            found.append(Form(f"{name}{ftz}.f32", "f32", ("f32",), _no_model, pools=(operands,)))
    for name in ("div.approx", "div.full"):
        for ftz in ("", ".ftz"):
            found.append(Form(f"{name}{ftz}.f32", "f32", ("f32", "f32"), _no_model))
    for name in ("ex2.approx", "tanh.approx"):
        for half in ("f16", "f16x2", "bf16", "bf16x2"):
            ftz = ".ftz" if name[0] == "e" and half[0] == "b" else ""
            found.append(Form(f"{name}{ftz}.{half}", half, (half,), _no_model))
    fields, values = (0, 8, 63, 255, 256, 264, 1 << 31), (0xA5A5A5A5DEADBEEF, 1 << 63, 77)
    for type in ("u64", "s64"):
        pools = (values, fields, fields)
        found.append(Form(f"bfe.{type}", type, (type, "u32", "u32"), _no_model, pools=pools))
    pools = (values, values, fields, fields)
    found.append(Form("bfi.b64", "b64", ("b64", "b64", "u32", "u32"), _no_model, pools=pools))
    return found


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A launch of ``entry`` of kernels/``source``.cu; arguments from a generator with a seed."""

    name: str
    source: str
    entry: str
    grid: int
    block: int
    args: Callable[[np.random.Generator], list[Any]]
    cluster: int | None = None
    shared: int = 0

    def arguments(self) -> list[Any]:
        return self.args(np.random.default_rng(zlib.crc32(self.name.encode())))


def _words(count: int) -> np.ndarray:
    return np.full(count, 0xCCCCCCCC, np.uint32)


def _bits(rng: np.random.Generator, shape: Any, dtype: str = "uint32") -> np.ndarray:
    size = np.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * size), dtype=np.uint8).view(dtype)


# (swizzle, dtype, box): the rows of a box are as long as the swizzle allows.
_BOXES = (
    ("none", "uint8", (6, 48)),
    ("none", "uint16", (11, 40)),
    ("none", "float32", (4, 64)),
    ("32B", "uint16", (20, 16)),
    ("64B", "uint8", (17, 64)),
    ("64B", "uint32", (9, 16)),
    ("128B", "uint16", (32, 64)),
    ("128B", "uint8", (8, 128)),
    ("128B", "float32", (13, 32)),
    ("128B", "uint64", (10, 16)),
)


def _copy(
    rank: int, swizzle: str, dtype: str, box: tuple[int, ...], at: tuple[int, ...], nan: bool
) -> Case:
    """``at``: innermost first. The array is a little larger than the box, in rows of more bytes."""
    assert at[0] * np.dtype(dtype).itemsize % 16 == 0, "copies start at multiples of 16 bytes"
    nbytes = int(np.prod(box)) * np.dtype(dtype).itemsize
    padding = 32 // np.dtype(dtype).itemsize

    def arguments(rng: np.random.Generator) -> list[Any]:
        shape = [n + 3 for n in box]
        whole = _bits(rng, (*shape[:-1], box[-1] + padding), dtype)
        whole = np.ascontiguousarray(whole)
        out = np.zeros_like(whole)
        inner = box[-1] + padding // 2 + 1
        maps = [Map(a[..., :inner], box, swizzle, nan) for a in (whole, out)]
        return [*maps, _words(nbytes // 4 + 32), nbytes, *at, *[0] * (5 - rank)]

    fill = ", NaN fill" if nan else ""
    name = f"copy {rank}D {swizzle} {dtype} {box} at {at}{fill}"
    return Case(name, "tma_copy", f"copy_{rank}d", 1, 64, arguments, shared=nbytes + 128)


def _copies() -> Iterator[Case]:
    for swizzle, dtype, box in _BOXES:
        step = 16 // np.dtype(dtype).itemsize
        middle = box[1] // 2 // step * step
        for at in ((0, 0), (step, 3), (-2 * step, -2), (middle, box[0] - 1), (-64 * step, 0)):
            yield _copy(2, swizzle, dtype, box, at, dtype == "float32")
    for swizzle, inner in (("none", 16), ("32B", 8), ("64B", 16), ("128B", 32)):
        yield _copy(3, swizzle, "float32", (3, 5, inner), (4, -1, 2), False)
        yield _copy(4, swizzle, "uint32", (2, 3, 3, inner), (-8, 2, 1, -1), False)
        yield _copy(5, swizzle, "uint32", (2, 2, 3, 2, inner), (4, -1, 0, 1, 1), False)
    yield _copy(1, "none", "uint32", (64,), (4,), False)
    yield _copy(1, "none", "float16", (64,), (-8,), True)


def _multicast(rng: np.random.Generator) -> list[Any]:
    return [Map(_bits(rng, (40, 64), "uint16"), (16, 64), "128B"), _words(2 * 1024), 4096, 0, 5, 16]


def _reduce_tensor(rng: np.random.Generator) -> list[Any]:
    return [Map(_bits(rng, (12, 20)), (8, 16)), _bits(rng, (128,)), 128, 8, 7]


def _bulk(nbytes: int) -> Callable[[np.random.Generator], list[Any]]:
    def arguments(rng: np.random.Generator) -> list[Any]:
        words = nbytes // 4
        return [
            _bits(rng, (words,)),
            _words(words),
            _bits(rng, (words,)),
            _words(words + 32),
            nbytes,
        ]

    return arguments


def _copy_async(rng: np.random.Generator) -> list[Any]:
    return [_bits(rng, (16 * 96,), "uint8"), _words(96 * 12)]


def _quantize(rng: np.random.Generator) -> list[Any]:
    data = rng.standard_normal((24, 256)).astype(np.float32)
    data *= np.exp2(rng.integers(-140, 120, (24, 8))).repeat(32, 1).astype(np.float32)
    data[20, :64] = 0
    data[21, 5], data[21, 70], data[21, 140] = np.inf, np.nan, -np.inf
    data[22] = _bits(rng, (256,)).view(np.float32)
    data[23, ::32] = np.exp2(np.arange(8)) * 448
    return [data, np.zeros((24, 256), np.uint8), np.zeros((24, 8), np.uint8), 24, 256]


def _ring(ranks: int) -> Callable[[np.random.Generator], list[Any]]:
    return lambda rng: [_bits(rng, (2 * ranks * 64,)), _words(2 * ranks * 128), ranks]


def _matrices(rng: np.random.Generator) -> list[Any]:
    rows = rng.permutation(128)[:32].astype(np.uint32)
    return [_bits(rng, (512,)), rows, _words(32 * 14), _words(1536)]


def _atomics(rng: np.random.Generator) -> list[Any]:
    words = np.array([0, 0, 0, 0, 0, 0, 0, 0xFFFFFFFF], np.uint32)
    return [_bits(rng, (192,)), words, np.zeros(4, np.float32), np.zeros(2, np.uint64)]


# --- wgmma ----------------------------------------------------------------------------------------

#: bits of exponent and mantissa, bytes of an element
_FORMATS = {
    "bf16": (8, 7, 2),
    "f16": (5, 10, 2),
    "tf32": (8, 23, 4),
    "e4m3": (4, 3, 1),
    "e5m2": (5, 2, 1),
    "f32": (8, 23, 4),
}
#: kind of the kernel: formats of A, B and D
_KINDS = {
    "bf16_f32": ("bf16", "bf16", "f32"),
    "bf16_f32_negated": ("bf16", "bf16", "f32"),
    "bf16_f32_columns": ("bf16", "bf16", "f32"),
    "f16_f32": ("f16", "f16", "f32"),
    "f16_f16": ("f16", "f16", "f16"),
    "tf32_f32": ("tf32", "tf32", "f32"),
    "e4m3_f32": ("e4m3", "e4m3", "f32"),
    "e4m3_f16": ("e4m3", "e4m3", "f16"),
    "e5m2_f32": ("e5m2", "e5m2", "f32"),
    "e4m3_e5m2_f32": ("e4m3", "e5m2", "f32"),
    "e5m2_e4m3_f32": ("e5m2", "e4m3", "f32"),
}


def wgmma_formats(kind: str) -> tuple[str, str, str]:
    """Of A, B and D."""
    return _KINDS[kind]


def numbers(rng: np.random.Generator, format: str, count: int, mode: str) -> np.ndarray:
    """Bits of numbers: "near" one, of "wide" range, or with any bits among them ("special")."""
    exponent, mantissa, size = _FORMATS[format]
    bias, dtype = (1 << exponent - 1) - 1, f"u{size}"
    low, high = (
        (max(1, bias - 30), min(2 * bias, bias + 31)) if mode == "wide" else (bias - 3, bias + 3)
    )
    field = rng.integers(low, high, count).astype(np.uint64)
    rest = rng.integers(0, 1 << mantissa, count).astype(np.uint64)
    sign = rng.integers(0, 2, count).astype(np.uint64)
    bits = (sign << np.uint64(8 * size - 1) | field << np.uint64(mantissa) | rest).astype(dtype)
    if mode == "special":
        odd = rng.random(count) < 0.01
        bits[odd] = rng.integers(0, 1 << 8 * size, int(odd.sum())).astype(dtype)
        bits[rng.random(count) < 0.05] = 0
        infinite = ((1 << exponent) - 1) << mantissa
        bits[rng.integers(0, count, 2)] = infinite
    return bits


def _wgmma(kind: str, source: str, mode: str, pitch: int, block: int, start: int) -> Case:
    a_format, b_format, d_format = _KINDS[kind]

    def arguments(rng: np.random.Generator) -> list[Any]:
        a = numbers(rng, a_format, block // 2 * pitch // _FORMATS[a_format][2], mode)
        b = numbers(rng, b_format, 128 * pitch // _FORMATS[b_format][2], mode)
        d = numbers(rng, d_format, block // 2 * 128, mode)
        return [a, b, d, pitch, start]

    name = f"wgmma {kind} A from {source}, {mode}, {pitch // 128} x 128 bytes of K, M {block // 2}"
    shared = block // 2 * 128 + 16384
    return Case(name, "wgmma", f"{kind}_{source}", 1, block, arguments, shared=shared)


_RUNS = (("near", 384, 256, 0), ("wide", 256, 128, 1), ("special", 128, 128, 1))


def cases() -> list[Case]:
    return [
        *_copies(),
        Case("multicast", "tma_copy", "multicast", 2, 64, _multicast, 2, 4096),
        Case("reduce_tensor", "tma_copy", "reduce_tensor", 1, 64, _reduce_tensor, shared=512),
        *(
            Case(f"bulk {n} bytes", "tma_copy", "bulk", 1, 64, _bulk(n), shared=n + 128)
            for n in (16, 2048, 4112)
        ),
        Case("copy_async", "tma_copy", "copy_async", 1, 96, _copy_async, shared=96 * 48),
        Case("quantize", "quantize", "quantize", 3, 256, _quantize),
        *(Case(f"ring of {n}", "cluster", "ring", 2 * n, 64, _ring(n), n) for n in (2, 4, 8)),
        Case(
            "store_async", "cluster", "store_async", 4, 64,
            lambda rng: [_bits(rng, (256,)), _words(256)], 2,
        ),
        Case(
            "bulk_to_neighbour", "cluster", "bulk_to_neighbour", 4, 64,
            lambda rng: [_bits(rng, (1024,)), _words(2048), 1024], 2, 2048,
        ),
        Case(
            "collectives", "warp", "collectives", 1, 64,
            lambda rng: [_bits(rng, (64,)), _words(64 * 14)],
        ),
        Case("atomics", "warp", "atomics", 2, 96, _atomics),
        Case("matrices", "warp", "matrices", 1, 32, _matrices, shared=6144),
        *(
            _wgmma(kind, source, *run)
            for kind, source, run in itertools.product(_KINDS, ("shared", "registers"), _RUNS)
        ),
    ]  # fmt: skip
