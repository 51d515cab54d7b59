"""wmma: loads, products and stores of whole warps, what is checked and what is refused."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from asynchronous import aligned
from ptx_kernels import text

from blockscale import emulator as em

#: Types of A and B, of C and D, and what holds an element; registers of A, B, and D by shape.
F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
F32, S32 = np.dtype(np.float32), np.dtype(np.int32)
HALVES = {"m16n16k16": (4, 4), "m8n32k16": (2, 8), "m32n8k16": (8, 2)}
BYTES = {"m16n16k16": (2, 2), "m8n32k16": (1, 4), "m32n8k16": (4, 1)}
KINDS: list[tuple[str, str, str, Any, Any, tuple[int, int, int]]] = [
    *(("f16", "f32", shape, F16, F32, (8, 8, 8)) for shape in HALVES),
    *(("f16", "f16", shape, F16, F16, (8, 8, 4)) for shape in HALVES),
    *(("bf16", "f32", shape, BF16, F32, (*count, 8)) for shape, count in HALVES.items()),
    *(("s8", "s32", shape, np.dtype(np.int8), S32, (*count, 8)) for shape, count in BYTES.items()),
    *(("u8", "s32", shape, np.dtype(np.uint8), S32, (*count, 8)) for shape, count in BYTES.items()),
    ("tf32", "f32", "m16n16k8", F32, F32, (4, 4, 8)),
    ("f64", "f64", "m8n8k4", np.dtype(float), np.dtype(float), (1, 1, 2)),
]  # fmt: skip


def listed(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def kernel(
    kind: str, sums: str, shape: str, counts: tuple[int, int, int], layouts: str, space: str = ".global",
    strides: tuple[str, ...] = ("", "", ""),
) -> str:  # fmt: skip
    """D = A B + C, in memory at ``out``, ``a`` and ``b``, C where D will be."""
    wide = 64 if kind == "f64" else 32
    a, b, c = (listed(p, n) for p, n in zip(("a", "b", "c"), counts, strict=True))
    la, lb, lc = layouts.split()
    types = f"{sums}.{sums}" if kind == "f16" else f"{sums}.{kind}.{kind}.{sums}"
    load = f"wmma.load.{{}}.sync.aligned.{{}}.{shape}{space}.{{}} {{}}, [{{}}]{{}};"
    body = f"""
        .reg .b{wide} %a<8>, %b<8>, %c<8>; .reg .b64 %A, %B;
        ld.param.u64 %A, [a]; ld.param.u64 %B, [b];
        {load.format("a", la, kind, a, "%A", strides[0])}
        {load.format("b", lb, kind, b, "%B", strides[1])}
        {load.format("c", lc, sums, c, "%out", strides[2])}
        wmma.mma.sync.aligned.{la}.{lb}.{shape}.{types} {c}, {a}, {b}, {c};
        wmma.store.d.sync.aligned.{lc}.{shape}{space}.{sums} [%out], {c}{strides[2]};"""
    return text(body, ".param .u64 a, .param .u64 b")


def in_memory(matrix: np.ndarray, layout: str, more: int = 0) -> np.ndarray:
    """A matrix as it lies in memory, with so many elements behind each row or column."""
    lying = matrix if layout == "row" else matrix.T
    return aligned(np.pad(lying, ((0, 0), (0, more))))


def from_memory(lying: np.ndarray, layout: str, more: int) -> np.ndarray:
    lying = lying[:, : lying.shape[1] - more]
    return lying if layout == "row" else lying.T


@pytest.mark.parametrize("more", [0, 16])
@pytest.mark.parametrize("layouts", ["row col row", "col row col"])
@pytest.mark.parametrize(("kind", "sums", "shape", "of_ab", "of_c", "counts"), KINDS)
def test_products(
    kind: str, sums: str, shape: str, of_ab: Any, of_c: Any, counts: Any, layouts: str, more: int
) -> None:
    rng = np.random.default_rng(0)
    m, n, k = map(int, re.findall(r"\d+", shape))
    low = 0 if kind == "u8" else -5
    a, b = rng.integers(low, 6, (m, k)).astype(of_ab), rng.integers(low, 6, (k, n)).astype(of_ab)
    c = rng.integers(-5, 6, (m, n)).astype(of_c)
    la, lb, lc = layouts.split()
    given = [in_memory(x, layout, more) for x, layout in ((a, la), (b, lb), (c, lc))]
    strides = tuple(f", {x.shape[1]}" if more else "" for x in given)
    source = kernel(kind, sums, shape, counts, layouts, strides=strides)
    views = [x.view(f"u{x.itemsize}") for x in given]
    em.Device().launch(source, "k", 1, 32, [views[2], views[0], views[1]])
    wanted = a.astype(float) @ b.astype(float) + c.astype(float)
    assert (from_memory(given[2], lc, more).astype(float) == wanted).all()


def test_shared_memory_generic_addresses_and_what_nobody_wrote() -> None:
    """A comes from shared memory, of which the last row may be blank."""
    body = """
        .shared .align 32 .b8 s[512]; .reg .b32 %a<8>, %b<8>, %c<8>, %zero; .reg .b64 %B, %S;
        ld.param.u64 %B, [b]; setp.ge.u32 %p1, %t, ROWS; mov.u64 %rd1, s; cvta.shared.u64 %S, %rd1;
        mad.wide.u32 %rd2, %t, 16, %S; mov.b32 %r1, 0x3c003c00; @!%p1 st.v4.b32 [%rd2], {%r1, %r1, %r1, %r1}; bar.warp.sync -1;
        wmma.load.a.sync.aligned.row.m16n16k16.f16 {%a0, %a1, %a2, %a3, %a4, %a5, %a6, %a7}, [%S];
        wmma.load.b.sync.aligned.col.m16n16k16.f16 {%b0, %b1, %b2, %b3, %b4, %b5, %b6, %b7}, [%B];
        mov.b32 %zero, 0;
        wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%c0, %c1, %c2, %c3, %c4, %c5, %c6, %c7}, {%a0, %a1, %a2, %a3, %a4, %a5, %a6, %a7},
            {%b0, %b1, %b2, %b3, %b4, %b5, %b6, %b7}, {%zero, %zero, %zero, %zero, %zero, %zero, %zero, %zero};
        wmma.store.d.sync.aligned.row.m16n16k16.f32 [%out], {%c0, %c1, %c2, %c3, %c4, %c5, %c6, %c7};"""
    out, b = aligned(np.zeros((16, 16), np.float32)), aligned(np.ones((16, 16), np.float16))
    source = text(body.replace("ROWS", "32"), ".param .u64 b")
    em.Device().launch(source, "k", 1, 32, [out, b.view(np.uint16)])
    assert (out == 16).all()
    source = text(body.replace("ROWS", "30"), ".param .u64 b")
    with pytest.raises(em.Uninitialized, match=r"wmma\.store.*wmma\.load\.a.* reads byte 0x5[ef]0"):
        em.Device().launch(source, "k", 1, 32, [out, b.view(np.uint16)])
    source = text(body.replace("ROWS", "32").replace("bar.warp.sync -1;", ""), ".param .u64 b")
    with pytest.raises(em.LaneRace):
        em.Device().launch(source, "k", 1, 32, [out, b.view(np.uint16)])


@pytest.mark.parametrize(
    ("here", "there", "message"),
    [
        (", 16;", ", 12;", "stride is 12, and a row or column in memory has 16"),
        (", 16;", ", 20;", "stride in bytes, 0x28, is no multiple of 16"),
        (", 16;", ", %t;", "the stride differs between lanes"),
        ("[%A]", "[%A+16]", "the address, .*, is no multiple of 32"),
        ("[%A]", "[%at]", "the address differs between lanes"),
        ("[%A]", "[%A+512]", "out of bounds"),
        ("load.a.sync.aligned.row.m16n16k16", "load.a.sync.aligned.row.m8n8k32", "expected .sync.aligned and a shape"),
        ("load.a.sync.aligned.row.m16n16k16.global.f16", "load.a.sync.aligned.row.m16n16k16.global.f32", "there is no .f32 of .m16n16k16"),
        ("m16n16k16.f32.f32 ", "m16n16k16.f16.f32 ", "there is no .f16.f16.f16.f32"),
        ("wmma.mma.sync.aligned.row.col", "wmma.mma.sync.aligned.row", "expected the layouts"),
    ],
)  # fmt: skip
def test_refused(here: str, there: str, message: str) -> None:
    source = kernel("f16", "f32", "m16n16k16", (8, 8, 8), "row col row", strides=(", 16",) * 3)
    assert here in source
    out, a, b = (aligned(np.zeros((16, 16), of)) for of in (np.float32, np.uint16, np.uint16))
    with pytest.raises(em.PtxError, match=message):
        em.Device().launch(source.replace(here, there, 1), "k", 1, 32, [out, a, b])


def test_a_warp_that_is_not_whole() -> None:
    source = kernel("f16", "f32", "m16n16k16", (8, 8, 8), "row col row")
    out, a, b = (aligned(np.zeros((16, 16), of)) for of in (np.float32, np.uint16, np.uint16))
    with pytest.raises(em.PtxError, match="needs all 32 lanes"):
        em.Device().launch(source, "k", 1, 16, [out, a, b])
