"""Threads that part and meet again: branches, calls, warps, barriers, clusters."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import run, text

from blockscale import emulator as em


def words(count: int) -> np.ndarray:
    return np.zeros(count, np.uint32)


# --- branches -------------------------------------------------------------------------------------


def test_nested_ifs_and_loops_with_trip_counts_of_their_own() -> None:
    """Collatz steps, with a break out of the middle and a continue."""
    out = words(96)
    run(
        """add.u32 %r1, %t, 1; mov.u32 %r2, 0;
        loop: setp.eq.u32 %p1, %r1, 1; @%p1 bra done;
        add.u32 %r2, %r2, 1; setp.gt.u32 %p3, %r2, 40; @%p3 bra done;
        and.b32 %r3, %r1, 1; setp.eq.u32 %p2, %r3, 0; @%p2 bra even;
        mad.lo.u32 %r1, %r1, 3, 1; bra loop;
        even: shr.u32 %r1, %r1, 1; bra.uni loop;
        done: st.global.u32 [%at], %r2;""",
        out, block=96,
    )  # fmt: skip
    for i in range(96):
        n, steps = i + 1, 0
        while n != 1:
            steps += 1
            if steps > 40:
                break
            n = n // 2 if n % 2 == 0 else 3 * n + 1
        assert out[i] == steps


def test_threads_meet_again() -> None:
    """After an if, all lanes are one fragment: a full-mask shuffle needs no waiting."""
    out = words(32)
    run(
        """and.b32 %r1, %t, 1; setp.eq.u32 %p1, %r1, 0; @%p1 bra even;
        add.u32 %r2, %t, 1000; bra join; even: add.u32 %r2, %t, 2000;
        join: activemask.b32 %r4; shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;
        setp.ne.u32 %p2, %r4, -1; @%p2 trap; st.global.u32 [%at], %r3;""",
        out,
    )  # fmt: skip
    assert out.tolist() == [(1000 if i % 2 == 0 else 2000) + (i ^ 1) for i in range(32)]


def test_early_exit() -> None:
    """Lanes that left are not waited for, neither at shuffles nor at barriers."""
    out = words(64)
    run(
        """setp.ge.u32 %p1, %t, 40; @%p1 exit; setp.lt.u32 %p2, %t, 3; @%p2 ret;
        vote.sync.ballot.b32 %r1, 1, -1; bar.sync 0; st.global.u32 [%at], %r1;""",
        out, block=64,
    )  # fmt: skip
    assert out.tolist() == [0] * 3 + [0xFFFFFFF8] * 29 + [0xFF] * 8 + [0] * 24


def test_switch() -> None:
    out = words(32)
    run(
        """and.b32 %r1, %t, 3;
        table: .branchtargets a, b, c, b;
        brx.idx %r1, table;
        a: mov.u32 %r2, 10; bra end; b: mov.u32 %r2, 20; bra end; c: mov.u32 %r2, 30;
        end: st.global.u32 [%at], %r2;""",
        out,
    )  # fmt: skip
    assert out.tolist() == [10, 20, 30, 20] * 8
    with pytest.raises(em.PtxError, match="index 31 of 1 targets"):
        run("table: .branchtargets a; brx.idx %t, table; a:", out)


def test_predicated_call_and_falling_off_the_end() -> None:
    before = """.func bump(.param .b64 where) {
        .reg .b64 %rd; ld.param.b64 %rd, [where]; st.global.u32 [%rd], 7;
    }\n"""
    out = words(32)
    run(
        """setp.gt.u32 %p1, %t, 29;
        { .param .b64 p; st.param.b64 [p], %at; @%p1 call.uni bump, (p); }""",
        out,
        before=before,
    )
    assert out.tolist() == [0] * 30 + [7, 7]


# --- calls ----------------------------------------------------------------------------------------

FACTORIAL = """
.func (.param .b32 back) factorial(.param .b32 n)
{
    .reg .pred %p; .reg .b32 %n, %m, %x; .local .align 4 .b32 kept;
    ld.param.b32 %n, [n]; st.local.b32 [kept], %n; mov.b32 %x, 1;
    setp.lt.u32 %p, %n, 2; @%p bra end;
    sub.u32 %m, %n, 1;
    { .param .b32 arg; .param .b32 res; st.param.b32 [arg], %m; call.uni (res), factorial, (arg);
    ld.param.b32 %x, [res]; }
    ld.local.b32 %n, [kept]; mul.lo.u32 %x, %x, %n;
    end: st.param.b32 [back], %x; ret;
}
.func (.param .align 4 .b8 back[8]) swap(.param .align 4 .b8 pair[8])
{
    .reg .b32 %a, %b; ld.param.b32 %a, [pair]; ld.param.b32 %b, [pair+4];
    st.param.b32 [back], %b; st.param.v2.b32 [back], {%b, %a}; ret;
}
"""


def test_recursion_to_depths_of_their_own() -> None:
    """Every depth has registers and local memory of its own; so has every thread."""
    out = words(32)
    run(
        """and.b32 %r1, %t, 7; setp.gt.u32 %p1, %t, 20; @%p1 bra other;
        { .param .b32 a; .param .b32 r; st.param.b32 [a], %r1; call (r), factorial, (a);
        ld.param.b32 %r2, [r]; } bra end;
        other: { .param .align 4 .b8 a[8]; .param .align 4 .b8 r[8];
        st.param.v2.b32 [a], {%t, 5}; call (r), swap, (a); ld.param.v2.b32 {%r2, %r3}, [r]; }
        mad.lo.u32 %r2, %r3, 100, %r2;
        end: st.global.u32 [%at], %r2;""",
        out, before=FACTORIAL,
    )  # fmt: skip
    wanted = [1, 1, 2, 6, 24, 120, 720, 5040] * 3
    assert out.tolist() == wanted[:21] + [100 * i + 5 for i in range(21, 32)]


@pytest.mark.parametrize("meanwhile", ["bar.warp.sync -1;", "nanosleep.u32 1;"])
def test_two_diverged_callers_keep_their_arguments(meanwhile: str) -> None:
    """Half a warp waits inside the function while the other half enters it from elsewhere."""
    before = f""".func (.param .b32 back) add7(.param .b32 n) {{ .reg .b32 %n, %m;
        ld.param.b32 %m, [n]; {meanwhile} ld.param.b32 %n, [n]; add.u32 %n, %n, 7;
        st.param.b32 [back], %n; }}\n"""
    out = words(32)
    run(
        """setp.lt.u32 %p1, %t, 16; @%p1 bra low;
        { .param .b32 x; .param .b32 y; st.param.b32 [x], %t; call (y), add7, (x);
        ld.param.b32 %r1, [y]; } bra end;
        low: add.u32 %r2, %t, 500; { .param .b32 x; .param .b32 y; st.param.b32 [x], %r2;
        call (y), add7, (x); ld.param.b32 %r1, [y]; }
        end: st.global.u32 [%at], %r1;""",
        out, before=before,
    )  # fmt: skip
    assert out.tolist() == [i + 507 for i in range(16)] + [i + 7 for i in range(16, 32)]


# --- warps ----------------------------------------------------------------------------------------


def test_shuffles() -> None:
    """The pseudo-code of the PTX ISA, for every mode, segment and distance."""
    for mode, clamp in (("up", 0), ("down", 31), ("bfly", 31), ("idx", 31)):
        for segment in (32, 16, 8):
            for by in (0, 1, 5, 9, 17):
                out = words(64)
                c = (32 - segment) << 8 | clamp
                run(
                    f"""add.u32 %r1, %t, 100; shfl.sync.{mode}.b32 %r2|%p1, %r1, {by}, {c}, -1;
                    selp.u32 %r3, 1000, 0, %p1; add.u32 %r2, %r2, %r3;
                    st.global.u32 [%at], %r2;""",
                    out, block=64,
                )  # fmt: skip
                for t in range(64):
                    lane, first = t % 32, t % 32 & ~(segment - 1)
                    last = first + segment - 1
                    source = {
                        "up": lane - by,
                        "down": lane + by,
                        "bfly": lane ^ by,
                        "idx": first | by & segment - 1,
                    }[mode]
                    good = source >= first if mode == "up" else source <= last
                    assert out[t] == 100 + t - lane + (source if good else lane) + 1000 * good


def test_collectives_with_partial_masks() -> None:
    """Both halves of a warp run the same instructions, each with its own mask."""
    out = np.zeros((32, 8), np.uint32)
    run(
        """setp.lt.u32 %p1, %t, 12; selp.b32 %r1, 0xfff, 0xfffff000, %p1; and.b32 %r2, %t, 1;
        setp.eq.u32 %p2, %r2, 1;
        vote.sync.ballot.b32 %r10, %p2, %r1; vote.sync.all.pred %p3, !%p1, %r1;
        selp.u32 %r11, 1, 0, %p3;
        redux.sync.add.u32 %r12, %t, %r1; redux.sync.max.s32 %r13, %t, %r1;
        match.any.sync.b32 %r14, %r2, %r1;
        elect.sync %r15|%p4, %r1; selp.u32 %r16, 1, 0, %p4; match.all.sync.b32 %r17|%p5, %r1, %r1;
        mad.wide.u32 %rd1, %t, 32, %out; st.global.v4.u32 [%rd1], {%r10, %r11, %r12, %r13};
        st.global.v4.u32 [%rd1+16], {%r14, %r15, %r16, %r17};""",
        out,
    )  # fmt: skip
    for t in range(32):
        mine = [i for i in range(32) if (i < 12) == (t < 12)]
        mask = sum(1 << i for i in mine)
        same = sum(1 << i for i in mine if i % 2 == t % 2)
        odd = sum(1 << i for i in mine if i % 2)
        assert out[t].tolist() == [
            odd,
            int(t >= 12),
            sum(mine),
            max(mine),
            same,
            mine[0],
            int(t == mine[0]),
            mask,
        ]


def test_diverged_lanes_meet_at_a_collective() -> None:
    """Lanes come to one shuffle along different ways and at different times."""
    out = words(64)
    run(
        """and.b32 %r1, %t, 3; mov.u32 %r2, 0; loop: setp.ge.u32 %p1, %r2, %r1; @%p1 bra out_;
        add.u32 %r2, %r2, 1; bra loop;
        out_: redux.sync.add.u32 %r3, %r2, -1; st.global.u32 [%at], %r3;""",
        out, block=64,
    )  # fmt: skip
    assert (out == 48).all()


# --- spinning and barriers ------------------------------------------------------------------------


def test_spinning_does_not_starve_the_warp_that_is_waited_for() -> None:
    """A warp spins on shared memory, at smaller program counters than the one that writes it."""
    out = words(64)
    run(
        """.shared .b32 flag; setp.ne.u32 %p1, %t, 0; @!%p1 st.shared.u32 [flag], 0; bar.sync 0;
        setp.ge.u32 %p1, %t, 32; @%p1 bra writer;
        spin: ld.volatile.shared.u32 %r1, [flag]; and.b32 %r2, %t, 1; setp.eq.u32 %p2, %r2, 1;
        @%p2 bra odd; add.u32 %r3, %r3, 1;
        odd: setp.eq.u32 %p3, %r1, 0; @%p3 bra spin; bra end;
        writer: mov.u32 %r1, 0; work: add.u32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 5000;
        @%p4 bra work; st.volatile.shared.u32 [flag], %r1;
        end: st.global.u32 [%at], %r1;""",
        out, block=64,
    )  # fmt: skip
    assert (out == 5000).all()


def test_spinning_on_another_cta() -> None:
    """CTA 0 waits for global memory that CTA 1 writes, with and without a cluster of both."""
    body = """mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1; @%p1 bra writer;
        spin: ld.relaxed.gpu.global.u32 %r2, [%out]; setp.eq.u32 %p2, %r2, 0; @%p2 bra spin;
        st.global.u32 [%out+4], 5; bra end;
        writer: st.relaxed.gpu.global.u32 [%out], 9; end:"""
    for cluster in (1, 2):
        out = words(32)
        run(body, out, grid=2, cluster=cluster)
        assert out[:2].tolist() == [9, 5]


def test_barriers_of_some_warps() -> None:
    """Producers arrive, consumers wait: two named barriers, the number in a register."""
    out = words(128)
    run(
        """.shared .b32 s[64]; shr.u32 %r1, %t, 6; and.b32 %r2, %t, 63; mov.u32 %r3, s;
        mad.lo.u32 %r3, %r2, 4, %r3;
        mov.u32 %r9, 0; mov.u32 %r8, 0; setp.eq.u32 %p1, %r1, 1; @%p1 bra consumer;
        produce: bar.sync 2, 128; mad.lo.u32 %r4, %r9, 1000, %t; st.shared.u32 [%r3], %r4;
        bar.arrive 1, 128;
        add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 5; @%p2 bra produce; bra end;
        consumer: bar.arrive 2, 128; bar.sync 1, 128; ld.shared.u32 %r4, [%r3];
        add.u32 %r8, %r8, %r4;
        add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 5; @%p2 bra consumer; st.global.u32 [%at], %r8;
        end:""",
        out, block=128,
    )  # fmt: skip
    assert out[64:].tolist() == [5 * i + 10000 for i in range(64)]
    run(
        """shr.u32 %r1, %t, 6; add.u32 %r1, %r1, 1; bar.sync %r1, 64; bar.sync %r1, 64;
        st.global.u32 [%at], %r1;""",
        out,
        block=128,
    )
    assert out.tolist() == [1] * 64 + [2] * 64


def test_more_warps_than_a_barrier_takes_share_its_phases() -> None:
    out = words(128)
    run("bar.sync 1, 64; st.global.u32 [%at], 1;", out, block=128)
    assert (out == 1).all()
    with pytest.raises(em.Deadlock, match="32 of 64 threads are there"):
        run("bar.sync 1, 64;", out, block=96)


def test_lanes_arrive_at_a_barrier_one_after_the_other() -> None:
    """A warp counts once all its lanes are there; a loop of barriers keeps its phases apart."""
    out = words(96)
    run(
        """.shared .b32 s; setp.eq.u32 %p1, %t, 0; @%p1 st.shared.u32 [s], 0; mov.u32 %r1, 0;
        bar.sync 0;
        loop: and.b32 %r2, %t, 3; setp.eq.u32 %p2, %r2, 0; @%p2 bra slow; bra go;
        slow: add.u32 %r3, %r3, 1;
        go: @%p2 red.shared.add.u32 [s], 1; bar.sync 0; ld.shared.u32 %r4, [s]; bar.sync 0;
        mad.lo.u32 %r5, %r1, 24, 24; setp.ne.u32 %p3, %r4, %r5; @%p3 trap;
        add.u32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 10; @%p4 bra loop; st.global.u32 [%at], %r4;""",
        out, block=96,
    )  # fmt: skip
    assert (out == 240).all()


def test_barrier_reductions() -> None:
    out = words(64)
    run(
        """setp.lt.u32 %p1, %t, 45; bar.red.popc.u32 %r1, 0, %p1; bar.red.and.pred %p2, 0, %p1;
        bar.red.or.pred %p3, 0, !%p1;
        selp.u32 %r2, 100, 0, %p2; selp.u32 %r3, 1000, 0, %p3; add.u32 %r1, %r1, %r2;
        add.u32 %r1, %r1, %r3; st.global.u32 [%at], %r1;""",
        out, block=64,
    )  # fmt: skip
    assert (out == 1045).all()


def test_cluster_barrier_and_shared_memory_of_the_other_cta() -> None:
    out = words(2 * 64)
    run(
        """.shared .b32 s[64]; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, s;
        mad.lo.u32 %r2, %t, 4, %r2;
        mad.lo.u32 %r3, %r1, 1000, %t; st.shared.u32 [%r2], %r3; mov.u32 %r9, 0; mov.u32 %r8, 0;
        loop: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
        xor.b32 %r4, %r2, 0x1000000; ld.shared::cluster.u32 %r5, [%r4]; add.u32 %r8, %r8, %r5;
        barrier.cluster.arrive; barrier.cluster.wait; st.shared.u32 [%r2], %r8;
        add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 3; @%p1 bra loop;
        mov.u32 %r6, %ctaid.x; mad.lo.u32 %r6, %r6, 64, %t; mad.wide.u32 %rd1, %r6, 4, %out;
        st.global.u32 [%rd1], %r8;""",
        out, block=64, grid=2, cluster=2,
    )  # fmt: skip
    own, total = [[r * 1000 + t for t in range(64)] for r in (0, 1)], [[0] * 64, [0] * 64]
    for _ in range(3):
        total = [[total[r][t] + own[1 - r][t] for t in range(64)] for r in (0, 1)]
        own = [list(row) for row in total]
    assert out.reshape(2, 64).tolist() == total


def test_special_registers() -> None:
    """Three dimensions of threads, CTAs and clusters."""
    names = [
        "tid.x",
        "tid.y",
        "tid.z",
        "ctaid.x",
        "ctaid.y",
        "clusterid.y",
        "cluster_ctaid.y",
        "cluster_ctarank",
        "ntid.y",
        "nctaid.y",
        "nclusterid.y",
        "laneid",
        "warpid",
        "lanemask_lt",
        "lanemask_ge",
        "cluster_nctarank",
    ]
    out = np.zeros((3, 4, 48, len(names)), np.uint32)
    stores = "".join(
        f"mov.u32 %r5, %{n}; st.global.u32 [%rd1+{4 * i}], %r5;" for i, n in enumerate(names)
    )
    run(
        f"""mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mad.lo.u32 %r1, %r1, 4, %r2;
        mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mad.lo.u32 %r4, %r3, 3, %r2;
        mad.lo.u32 %r4, %r4, 8, %t;
        mad.lo.u32 %r4, %r1, 48, %r4; mad.wide.u32 %rd1, %r4, {4 * len(names)}, %out; {stores}""",
        out, block=(8, 3, 2), grid=(3, 4), cluster=(1, 2),
    )  # fmt: skip
    for x, y, t in np.ndindex(3, 4, 48):
        lane = t % 32
        assert out[x, y, t].tolist() == [
            t % 8, t // 8 % 3, t // 24, x, y, y // 2, y % 2, y % 2, 3, 4, 2, lane, t // 32,
            (1 << lane) - 1, 0xFFFFFFFF & ~((1 << lane) - 1), 2,
        ]  # fmt: skip


def test_instructions_are_counted_once() -> None:
    """In threads: what had to wait, or was executed by parts, is not counted twice."""
    report = run(
        """setp.lt.u32 %p1, %t, 10; @%p1 bra low; shfl.sync.idx.b32 %r1, %t, 0, 31, 0xfffffc00;
        low: bar.sync 0; @%p1 exit; vote.sync.any.pred %p2, %p1, -1;""",
        words(64), block=32,
    )  # fmt: skip
    counts = {k: v for k, v in report.instructions.items() if v}
    wanted = {"setp.lt.u32": 32, "bra": 32, "shfl.sync.idx.b32": 22, "bar.sync": 32, "exit": 10}
    assert {k: counts[k] for k in wanted} == wanted
    assert (counts["vote.sync.any.pred"], counts["ret"]) == (22, 22)
    assert report.total == sum(counts.values())


def test_what_is_kept_of_a_kernel_is_right_for_other_launches() -> None:
    """One text; other arguments, numbers of threads and CTAs, and sizes of shared memory."""
    source = text(
        """.reg .b64 %far; ld.param.u32 %r1, [add]; ld.param.u64 %far, [from];
        mov.u32 %r2, %nctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %dynamic_smem_size;
        ld.global.u32 %r5, [%far];
        mad.lo.u32 %r6, %r2, 1000, %r1; mad.lo.u32 %r6, %r3, 100000, %r6; add.u32 %r6, %r6, %r4;
        add.u32 %r6, %r6, %r5; st.global.u32 [%at], %r6;""",
        ".param .u32 add, .param .u64 from",
    )
    for grid, block, shared, add, far in ((1, 32, 0, 5, 1), (3, 64, 16, 7, 2), (1, 32, 32, 5, 3)):
        out = words(64)
        args = [out, add, np.full(1, far, np.uint32)]
        em.Device().launch(source, "k", grid, block, args, shared=shared)
        assert (out[:block] == add + 1000 * grid + 100000 * block + shared + far).all()


def test_tiles_of_several_warps_have_shared_memory_of_the_system() -> None:
    """Cooperative groups find it by %reserved_smem_offset_1, PTX ISA 10.29: 288 bytes."""
    body = """mov.u32 %r1, %reserved_smem_offset_1; shl.b32 %r2, %t, 2; add.u32 %r2, %r1, %r2;
        st.shared.u32 [%r2], %t; bar.sync 0; ld.shared.u32 %r3, [%r2+PLUS];"""
    out = np.zeros(32, np.uint32)
    run(f"{body.replace('PLUS', '0')} st.global.u32 [%at], %r3;", out)
    assert (out == np.arange(32)).all()
    beyond = "mov.u32 %r1, %reserved_smem_offset_1; st.shared.u32 [%r1+288], %t;"
    with pytest.raises(em.MemoryFault, match="out of bounds"):
        run(beyond, out)
    with pytest.raises(em.MemoryFault, match="out of bounds"):
        run(beyond.replace("+288", "-4"), out)
    with pytest.raises(em.MemoryFault, match="out of bounds"):  # who has not asked for it
        run("mov.u32 %r1, 0x3f0; st.shared.u32 [%r1], %t;", out)


def test_barriers_there_hold_what_was_there_and_the_other_words_nobody_has_written() -> None:
    """Cooperative groups clear the bits that they use. A GPU has older kernels' words there."""
    body = """mov.u32 %r1, %reserved_smem_offset_1; setp.ge.u32 %p1, %t, 5; @%p1 bra E;
        shl.b32 %r2, %t, 2; add.u32 %r2, %r1, %r2; atom.shared.and.b32 %r3, [%r2+PLUS], 0xfffffffe;
        ld.shared.u32 %r3, [%r2+PLUS]; and.b32 %r3, %r3, 1; st.global.u32 [%at], %r3; E:"""
    out = np.ones(32, np.uint32)
    run(body.replace("PLUS", "0"), out)
    assert (out[:5] == 0).all()
    with pytest.raises(em.Uninitialized):
        run(body.replace("PLUS", "4"), out)
