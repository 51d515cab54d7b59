"""alloca, stacksave and stackrestore (PTX ISA 9.7.17)."""

import numpy as np
import pytest

from blockscale import emulator as em

HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"

#: A sum of 1 to n by recursion: each call keeps its n in what it allocates.
CALLS = (
    HEAD
    + """
.func (.param .b32 sum) add_up(.param .b32 of) {
    .reg .pred %p; .reg .b32 %n, %r, %left; .reg .b64 %size, %at;
    .local .b32 beside;
    ld.param.u32 %n, [of];
    mul.wide.u32 %size, %n, 40;
    alloca.u64 %at, %size, 32;
    cvta.local.u64 %at, %at;
    st.u32 [%at+4], %n;
    st.local.u32 [beside], 7;
    mov.u32 %r, 0;
    setp.eq.u32 %p, %n, 0;
    @%p bra out;
    sub.u32 %left, %n, 1;
    { .param .b32 given, got;
      st.param.b32 [given], %left;
      call (got), add_up, (given);
      ld.param.b32 %r, [got]; }
    ld.u32 %n, [%at+4];
    add.u32 %r, %r, %n;
out:
    st.param.b32 [sum], %r;
    ret;
}
.visible .entry kernel(.param .u64 data) {
    .reg .b32 %t, %r; .reg .b64 %to, %wide;
    mov.u32 %t, %tid.x;
    { .param .b32 given, got;
      st.param.b32 [given], %t;
      call (got), add_up, (given);
      ld.param.b32 %r, [got]; }
    ld.param.u64 %to, [data];
    mad.wide.u32 %to, %t, 4, %to;
    st.global.u32 [%to], %r;
    ret;
}
"""
)

#: A thousand turns of 1024 bytes, more than there is unless each gives back what it took.
TURNS = (
    HEAD
    + """
.visible .entry kernel(.param .u64 data) {
    .reg .pred %p; .reg .b32 %i, %r, %size, %at, %saved; .reg .b64 %to;
    mov.u32 %i, 0;
    mov.u32 %size, 1024;
turn:
    stacksave.u32 %saved;
    alloca.u32 %at, %size;
    st.local.u32 [%at+1020], %i;
    ld.local.u32 %r, [%at+1020];
    RESTORE
    add.u32 %i, %i, 1;
    setp.lt.u32 %p, %i, 1000;
    @%p bra turn;
    ld.param.u64 %to, [data];
    st.global.u32 [%to], %r;
    ret;
}
"""
)


def test_a_function_gives_back_what_it_took() -> None:
    data = np.zeros(40, np.int32)
    em.Device("sm_90a").launch(CALLS, "kernel", 1, 40, [data])
    assert data.tolist() == [n * (n + 1) // 2 for n in range(40)]


def test_stackrestore() -> None:
    data = np.zeros(1, np.int32)
    ptx = TURNS.replace("RESTORE", "stackrestore.u32 %saved;")
    em.Device("sm_90a").launch(ptx, "kernel", 1, 1, [data])
    assert data.tolist() == [999]


def test_overflow() -> None:
    with pytest.raises(em.MemoryFault, match="stack overflow: alloca of 1024 bytes"):
        em.Device("sm_90a").launch(
            TURNS.replace("RESTORE", ""), "kernel", 1, 1, [np.zeros(1, np.int32)]
        )


@pytest.mark.parametrize("align", ["3", "16777216"])
def test_alignment(align: str) -> None:
    ptx = TURNS.replace("%at, %size;", f"%at, %size, {align};").replace("RESTORE", "")
    with pytest.raises(em.PtxError, match="powers of 2"):
        em.Device("sm_90a").launch(ptx, "kernel", 1, 1, [np.zeros(1, np.int32)])
