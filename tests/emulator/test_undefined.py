"""What nobody wrote is undefined, whatever is made of it; who uses it is told."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from asynchronous import outcome, refusal
from ptx_kernels import line_of, text

from blockscale import emulator as em

#: s: thread t's word is at %r3; the words of threads from 16 on are written, as t.
SHARED = """.shared .align 128 .b8 s[1024]; .shared .align 8 .b8 other[256];
    mov.u32 %r1, s; shl.b32 %r2, %t, 2; add.u32 %r3, %r1, %r2; mov.u32 %r20, other; add.u32 %r21, %r20, %r2;
    setp.ge.u32 %p1, %t, 16; @%p1 st.shared.u32 [%r3], %t; bar.sync 0;
    ld.shared.u32 %r4, [%r3]; // READ
"""
STORE = "\nst.global.u32 [%at], %r5;"

#: What hides that a word is undefined, and what comes out of it.
HIDDEN = [
    ("nobody uses it", "mov.u32 %r5, 7;", lambda t: 7 + 0 * t),
    ("threads that do not store", "mov.u32 %r5, %r4; @!%p1 mov.u32 %r5, 3;", lambda t: np.where(t < 16, 3, t)),
    ("selp", "selp.u32 %r5, %r4, 3, %p1;", lambda t: np.where(t < 16, 3, t)),
    ("bits that are cut off", "and.b32 %r5, %r4, 0;", lambda t: 0 * t),
    ("bits that are set", "or.b32 %r5, %r4, 0xffffffff;", lambda t: 0xffffffff + 0 * t),
    ("the same bits twice", "lop3.b32 %r5, %r4, %r4, 1, 0x3c; and.b32 %r5, %r5, 0;", lambda t: 0 * t),
    ("half of a word", "mov.b64 %rd1, {%r4, %t}; mov.b64 {%r6, %r5}, %rd1;", lambda t: t),
    ("bytes", "prmt.b32 %r5, %r4, %t, 0x7654;", lambda t: t),
    ("shifted out", "mov.b64 %rd1, {%r4, %t}; shr.u64 %rd1, %rd1, 32; cvt.u32.u64 %r5, %rd1;", lambda t: t),
    ("another lane", "shfl.sync.idx.b32 %r5, %r4, 20, 31, -1;", lambda t: 20 + 0 * t),
    ("memory written again", "st.shared.u32 [%r21], %r4; st.shared.u32 [%r21], 5; ld.shared.u32 %r5, [%r21];", lambda t: 5 + 0 * t),
    ("a register written again", "add.u32 %r5, %r4, 1; mov.u32 %r5, 2; add.u32 %r5, %r5, %r5;", lambda t: 4 + 0 * t),
    ("a branch around", "mov.u32 %r5, 1; @!%p1 bra E; add.u32 %r5, %r4, 1; E:", lambda t: np.where(t < 16, 1, t + 1)),
]  # fmt: skip


@pytest.mark.parametrize(("body", "wanted"), [h[1:] for h in HIDDEN], ids=[h[0] for h in HIDDEN])
def test_what_is_not_used_is_no_fault(
    body: str, wanted: Callable[[np.ndarray], np.ndarray]
) -> None:
    out = outcome(text(SHARED + body + STORE), [np.zeros(32, np.uint32)])[0]
    assert (out == wanted(np.arange(32, dtype=np.int64))).all()


#: How it gets to memory that somebody reads, or decides something: the last line is at fault.
USES = [
    ("stored", "mov.u32 %r5, %r4;" + STORE),
    ("computed", "mad.lo.u32 %r5, %r4, 3, 1;" + STORE),
    ("converted", "cvt.rn.f32.u32 %f1, %r4; cvt.rzi.u32.f32 %r5, %f1;" + STORE),
    ("one bit", "and.b32 %r5, %r4, 0x100;" + STORE),
    ("packed", "mov.b64 %rd1, {%r4, %t}; mov.b64 {%r5, %r6}, %rd1;" + STORE),
    ("shuffled", "shfl.sync.bfly.b32 %r5, %r4, 16, 31, -1;" + STORE),
    ("reduced", "redux.sync.add.u32 %r5, %r4, -1;" + STORE),
    ("a sleep", "nanosleep.u32 %r4;"),
    ("voted", "setp.ne.u32 %p2, %r4, 3; vote.sync.ballot.b32 %r5, %p2, -1;" + STORE),
    ("selected by", "setp.ne.u32 %p2, %r4, 3; selp.u32 %r5, 1, 2, %p2;" + STORE),
    ("guard of a value", "setp.ne.u32 %p2, %r4, 3; mov.u32 %r5, 1; @%p2 mov.u32 %r5, 2;" + STORE),
    ("through memory", "st.shared.u32 [%r21], %r4; ld.shared.u32 %r5, [%r21];" + STORE),
    ("through half a word of memory", "st.shared.u32 [%r21], 0; cvt.u16.u32 %h1, %r4; st.shared.u16 [%r21+2], %h1; ld.shared.u32 %r5, [%r21];" + STORE),
    ("through generic memory", "cvt.u64.u32 %rd1, %r21; cvta.shared.u64 %rd1, %rd1; st.u32 [%rd1], %r4; ld.u32 %r5, [%rd1];" + STORE),
    ("through local memory", ".local .align 4 .b8 l[8]; st.local.u32 [l], %t; st.local.u32 [l+4], %r4; ld.local.u32 %r5, [l+4];" + STORE),
    ("a matrix", "add.u32 %r9, %r3, %r2; and.b32 %r9, %r9, -16; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [s];" + STORE),
    ("its own address", "cvt.u64.u32 %rd1, %r3; ld.shared.u32 %rd1, [%rd1]; cvt.u32.u64 %r5, %rd1;" + STORE),
    ("an address", "and.b32 %r5, %r4, 4; add.u32 %r5, %r5, %r1;\nld.shared.u32 %r6, [%r5];"),
    ("a branch", "setp.ne.u32 %p2, %r4, 3;\n@%p2 bra E; E:"),
    ("the guard of a store", "setp.ne.u32 %p2, %r4, 3;\n@%p2 st.global.u32 [%at], 1;"),
    ("a barrier", "and.b32 %r5, %r4, 1;\nbar.sync %r5;"),
    ("an atomic operation", "\natom.global.add.u32 %r5, [%at], %r4;"),
    ("a bulk store", "fence.proxy.async; setp.eq.u32 %p2, %t, 0;\n@%p2 cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 128;"),
    ("a bulk store of what was stored", "st.shared.u32 [%r21], %r4; fence.proxy.async; bar.sync 0; setp.eq.u32 %p2, %t, 0;\n@%p2 cp.async.bulk.global.shared::cta.bulk_group [%out], [other], 128;"),
]  # fmt: skip


@pytest.mark.parametrize("body", [body for _, body in USES], ids=[name for name, _ in USES])
def test_uses_are_faults(body: str) -> None:
    last = body.splitlines()[-1]
    end = "\ncp.async.bulk.commit_group; cp.async.bulk.wait_group 0; bar.sync 0;"
    source = text(SHARED + body.replace("[s];", "[%r1];") + end)
    for error in refusal(source, [np.zeros(32, np.uint32)], em.Uninitialized):
        assert error.line == line_of(source, last)
        assert "reads byte 0x400 of the shared memory of CTA (0, 0, 0), which nobody" in str(error)


def test_a_bulk_copy_carries_it_to_another_place() -> None:
    """Of 64 bytes that are copied, those of one half are undefined, there as here."""
    body = """.shared .align 8 .b64 bar; fence.proxy.async; bar.sync 0; setp.eq.u32 %p2, %t, 0; @!%p2 bra W;
    mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [other], [s], 128, [bar]; W: bar.sync 0;
    L: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra L;
    ld.shared.u32 %r5, [%r21];"""
    right = text(SHARED + body + "\n@%p1 st.global.u32 [%at], %r5;")
    out = outcome(right, [np.zeros(32, np.uint32)])[0]
    assert (out[16:] == np.arange(16, 32)).all()
    for error in refusal(text(SHARED + body + STORE), [np.zeros(32, np.uint32)], em.Uninitialized):
        assert "cp.async.bulk.shared::cluster" in str(error)


#: A: rows 0 to 7 are written, rows 8 to 15 are beyond M; B is all written.
MMA = """.shared .align 128 .b8 s[1024];
    mov.u32 %r1, s; shl.b32 %r2, %t, 2; add.u32 %r3, %r1, %r2; mov.u32 %r5, 0x3f803f80; mov.f32 %f1, 0f00000000;
    st.shared.u32 [%r3], %r5; bar.sync 0;
    ld.shared.u32 %r6, [%r3]; ld.shared.u32 %r7, [%r3+512];
"""


def test_rows_of_a_product_are_as_defined_as_their_factors() -> None:
    product = """mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f2, %f3, %f4, %f5}, {%r6, %r7}, {%r5}, {%f1, %f1, %f1, %f1};"""
    body = MMA + product
    out = outcome(text(body + "st.global.f32 [%at], %f3;"), [np.zeros(32, np.float32)])[0]
    assert (out == 8).all()
    wrong = text(body + "\nst.global.f32 [%at], %f4;")
    for error in refusal(wrong, [np.zeros(32, np.float32)], em.Uninitialized):
        assert "reads byte 0x600 of the shared memory" in str(error)
