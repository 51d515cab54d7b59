"""Memory of other CTAs, hints, and calls through a register: PTX ISA 9.7.9.16 to 9.7.9.24,
9.7.12.5, 9.7.13.13, 9.7.19.5."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import run

from blockscale import emulator as em


def test_memory_of_the_other_cta() -> None:
    """mapa of a variable, of a register and of a generic address; getctarank tells them apart."""
    out = np.zeros(64, np.uint32)
    run(
        """.shared .align 4 .b32 s[33]; mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1;
        mad.lo.u32 %r3, %r1, 1000, %t; mov.u32 %r4, s; mad.lo.u32 %r5, %t, 4, %r4;
        st.shared.u32 [%r5+4], %r3;
        barrier.cluster.arrive; barrier.cluster.wait;
        mapa.shared::cluster.u32 %r6, s+4, %r2; mad.lo.u32 %r6, %t, 4, %r6;
        ld.shared::cluster.u32 %r7, [%r6];
        mapa.shared::cluster.u32 %r8, %r5, %r2; ld.shared::cluster.u32 %r9, [%r8+4];
        cvt.u64.u32 %rd1, %r5; cvta.shared.u64 %rd1, %rd1; mapa.u64 %rd2, %rd1, %r2;
        ld.u32 %r10, [%rd2+4];
        getctarank.shared::cluster.u32 %r11, %r6; getctarank.u64 %r12, %rd2;
        getctarank.u64 %r13, %rd1; getctarank.shared::cluster.u32 %r14, s+4;
        setp.eq.u32 %p1, %r7, %r9; setp.eq.and.u32 %p1, %r7, %r10, %p1;
        setp.eq.and.u32 %p1, %r11, %r2, %p1; setp.eq.and.u32 %p1, %r12, %r2, %p1;
        setp.eq.and.u32 %p1, %r13, %r1, %p1; setp.eq.and.u32 %p1, %r14, %r1, %p1;
        selp.b32 %r7, %r7, 77777, %p1;
        mad.lo.u32 %r15, %r1, 32, %t; mad.wide.u32 %rd3, %r15, 4, %out; st.global.u32 [%rd3], %r7;
        barrier.cluster.arrive; barrier.cluster.wait;""",
        out, grid=2, cluster=2,
    )  # fmt: skip
    assert out.tolist() == [*range(1000, 1032), *range(32)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mapa.shared::cta.u64 %rd1, %rd2, 1;", "unsupported modifier .shared::cta"),
        ("mapa.u64 %rd1, %out, 1;", "not in shared memory"),
        ("mapa.shared::cluster.u32 %r1, s, 2; ld.shared::cluster.u32 %r2, [%r1];", "CTA 2 of 1"),
    ],
)  # fmt: skip
def test_other_ctas_refused(body: str, message: str) -> None:
    with pytest.raises(em.PtxError, match=message):
        run(f".shared .b32 s; {body}", np.zeros(32, np.uint32))


def test_hints_change_nothing() -> None:
    """Policies can be made and used; the limits of registers, dependent launches and priorities
    do nothing."""
    out = np.zeros(64, np.uint32)
    out = out[-out.ctypes.data % 128 // 4 :][:32]
    run(
        """setmaxnreg.dec.sync.aligned.u32 24; setmaxnreg.inc.sync.aligned.u32 256;
        griddepcontrol.wait; griddepcontrol.launch_dependents;
        createpolicy.fractional.L2::evict_last.b64 %rd1;
        createpolicy.fractional.L2::evict_last.L2::evict_first.b64 %rd1, 0.5;
        createpolicy.range.global.L2::evict_last.L2::evict_unchanged.b64 %rd1, [%out], 64, 128;
        createpolicy.cvt.L2.b64 %rd2, %rd1;
        st.global.L2::cache_hint.u32 [%at], %t, %rd1;
        applypriority.global.L2::evict_normal [%out], 128;""",
        out,
    )  # fmt: skip
    assert out.tolist() == list(range(32))


@pytest.mark.undefined
def test_discarded_memory_is_not_what_it_was() -> None:
    raw = np.zeros(128, np.uint32)
    out = raw[-raw.ctypes.data % 128 // 4 :][:64]
    run("setp.eq.u32 %p1, %t, 0; @%p1 discard.global.L2 [%out], 128;", out)
    assert (out[:32] != 0).all()
    assert (out[32:] == 0).all()


def test_registers_that_nobody_has() -> None:
    """A warp that waits for more than others give up waits forever: of 12 warps each has 168 at
    most to begin with."""
    line = "setmaxnreg.inc.sync.aligned.u32 {};"
    out = np.zeros(384, np.uint32)
    run(line.format(168), out, block=384)
    with pytest.raises(em.PtxError, match="ask for 67584 registers in all, and have 64512"):
        run(line.format(176), out, block=384)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("setmaxnreg.inc.sync.aligned.u32 20;", "multiple of 8 from 24 to 256"),
        ("setmaxnreg.inc.sync.aligned.u32 264;", "multiple of 8 from 24 to 256"),
        ("setmaxnreg.inc.sync.aligned.u32 %r1;", "multiple of 8"),
        ("setmaxnreg.inc.u32 32;", "expected .inc or .dec"),
        ("griddepcontrol;", "expected .launch_dependents"),
        ("createpolicy.fractional.L2::evict_last.L2::evict_normal.b64 %rd1;", "expected one of"),
        ("createpolicy.fractional.b64 %rd1;", "expected one of"),
        ("discard.global.L2 [%out], 64;", "size of 128"),
        ("discard.global.L2 [%out+4], 128;", "not a multiple of 128"),
    ],
)
def test_hints_refused(line: str, message: str) -> None:
    with pytest.raises(em.PtxError, match=message):
        run(line, np.zeros(64, np.uint32))


def test_calls_through_a_register() -> None:
    """Lanes call different functions, one of them twice deep, and meet again."""
    before = """
    .func (.param .b32 back) triple(.param .b32 x) {
        .reg .b32 %v; ld.param.u32 %v, [x]; mul.lo.u32 %v, %v, 3; st.param.b32 [back], %v; ret; }
    .func (.param .b32 back) twice(.param .b64 f, .param .b32 x) {
        .reg .b32 %v; .reg .b64 %f; ld.param.u32 %v, [x]; ld.param.u64 %f, [f];
        { .param .b32 a; .param .b32 r; st.param.b32 [a], %v;
        proto: .callprototype (.param .b32 _) _ (.param .b32 _);
        call (r), %f, (a), proto; ld.param.b32 %v, [r]; st.param.b32 [a], %v;
        call (r), %f, (a), proto; ld.param.b32 %v, [r]; }
        st.param.b32 [back], %v; ret; }
    .func (.param .b32 back) nine(.param .b32 x) {
        .reg .b32 %v; .reg .b64 %f; ld.param.u32 %v, [x]; mov.u64 %f, triple;
        { .param .b64 g; .param .b32 a; .param .b32 r; st.param.b64 [g], %f; st.param.b32 [a], %v;
        call (r), twice, (g, a); ld.param.b32 %v, [r]; }
        st.param.b32 [back], %v; ret; }
    """
    out = np.zeros(32, np.uint32)
    run(
        """mov.u64 %rd1, triple; mov.u64 %rd2, nine; and.b32 %r1, %t, 1; setp.eq.u32 %p1, %r1, 0;
        selp.b64 %rd3, %rd1, %rd2, %p1;
        { .param .b32 a; .param .b32 r; st.param.b32 [a], %t;
        proto: .callprototype (.param .b32 _) _ (.param .b32 _);
        call (r), %rd3, (a), proto; ld.param.b32 %r2, [r]; }
        st.global.u32 [%at], %r2;""",
        out, before=before,
    )  # fmt: skip
    assert out.tolist() == [i * (9 if i % 2 else 3) for i in range(32)]


def test_calls_through_a_table() -> None:
    """Functions that initializers alone name, one of them with shared memory of its own."""
    function = """.func (.param .b32 back) {name}(.param .b32 x) {{ {more} .reg .b32 %v, %w;
        ld.param.u32 %v, [x]; {does} st.param.b32 [back], %v; ret; }}\n"""
    before = """.func (.param .b32 back) later(.param .b32 x);
        .func (.param .b32 back) twice(.param .b32 x);
        .func (.param .b32 back) through(.param .b32 x);
        .global .u64 table[3] = {later, twice, through}; .const .u64 one = later;
    """
    before += function.format(name="twice", more="", does="shl.b32 %v, %v, 1;")
    before += function.format(name="later", more="", does="add.u32 %v, %v, 100;")
    before += function.format(
        name="through",
        more=".shared .u32 kept[32];",
        does="""mov.u32 %w, kept; mad.lo.u32 %w, %v, 4, %w; st.shared.u32 [%w], 7;
        ld.shared.u32 %v, [%w];""",
    )
    out = np.zeros(32, np.uint32)
    run(
        """rem.u32 %r1, %t, 3; mul.wide.u32 %rd1, %r1, 8; mov.u64 %rd2, table;
        add.u64 %rd1, %rd1, %rd2; ld.global.u64 %rd3, [%rd1]; ld.const.u64 %rd4, [one];
        setp.eq.u32 %p1, %t, 31; selp.b64 %rd3, %rd4, %rd3, %p1;
        { .param .b32 a; .param .b32 r; st.param.b32 [a], %t;
        proto: .callprototype (.param .b32 _) _ (.param .b32 _);
        call (r), %rd3, (a), proto; ld.param.b32 %r2, [r]; }
        st.global.u32 [%at], %r2;""",
        out, before=before,
    )  # fmt: skip
    assert out.tolist() == [(i + 100, 2 * i, 7)[i % 3] for i in range(31)] + [131]


@pytest.mark.parametrize(
    ("value", "message"),
    [("generic(other)", "other is a function"), ("kept", "kept, which is no function")],
)
def test_initial_values_that_ptxas_refuses(value: str, message: str) -> None:
    with pytest.raises(em.PtxError, match=message):
        run(
            "mov.u64 %rd1, table; ld.global.u64 %rd2, [%rd1];", np.zeros(32, np.uint32),
            before=f".func other() {{ ret; }} .shared .u32 kept; .global .u64 table = {value};",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        ("mov.u64 %rd1, 16;", "no function at 0x10"),
        ("mov.u64 %rd1, other;", "other takes 0 arguments"),
        ("mov.u32 %r1, other;", "has 64 bits"),
    ],
)
def test_bad_calls_through_a_register(setup: str, message: str) -> None:
    with pytest.raises(em.PtxError, match=message):
        run(
            f"""{setup} {{ .param .b32 a; st.param.b32 [a], %t;
            proto: .callprototype _ (.param .b32 _); call %rd1, (a), proto; }}""",
            np.zeros(32, np.uint32), before=".func other() { ret; }\n",
        )  # fmt: skip
