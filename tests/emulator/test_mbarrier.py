"""mbarrier objects: PTX ISA 9.7.13.15, against a model of what its text says."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

import random

import numpy as np
import pytest
from asynchronous import outcome, refusal
from ptx_kernels import line_of, text

from blockscale import emulator as em

SHARED = """.shared .align 8 .b64 bar[4]; .shared .b32 word;
    mov.u32 %r1, bar; setp.eq.u32 %p1, %t, 0;
    cvt.u64.u32 %rd20, %r1; cvta.shared.u64 %rd20, %rd20;
"""


def init(count: int) -> str:
    return f"""@%p1 mbarrier.init.shared::cta.b64 [bar], {count};
    fence.mbarrier_init.release.cluster; bar.sync 0;
    """


class Model:
    """9.7.13.15.5: a phase ends when the pending count and the tx-count are zero."""

    def __init__(self, count: int) -> None:
        self.expected = self.pending = count
        self.tx = self.phase = 0

    def settle(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase, self.pending = self.phase + 1, self.expected

    def arrive(self, count: int = 1) -> None:
        assert 0 < count <= self.pending
        self.pending -= count
        self.settle()


def program(seed: int) -> tuple[str, list[int]]:
    """Operations of one thread, and the words that it stores: parities and counts after each."""
    rng = random.Random(seed)
    count = rng.choice([1, 2, 3, 7, 40])
    model, lines, wanted = Model(count), [init(count), "@!%p1 bra E;"], []

    def store(value: str, expected: int) -> None:
        lines.append(f"st.global.u32 [%out+{4 * len(wanted)}], {value};")
        wanted.append(expected)

    space = rng.choice([("", "%rd20"), (".shared", "%r1"), (".shared::cta", "bar")])
    for _ in range(40):
        where, at = space
        pending = model.pending
        choice = rng.randrange(6)
        token = True
        if choice == 0:
            n = rng.randint(1, pending)
            lines.append(f"mbarrier.arrive{where}.b64 %rd1, [{at}], {n};")
            model.arrive(n)
        elif choice == 1:
            lines.append(f"mbarrier.arrive.release.cta{where}.b64 %rd1, [{at}];")
            model.arrive()
        elif choice == 2 and pending > 1:
            n = rng.randint(1, pending - 1)
            lines.append(
                f"mov.u32 %r9, {n}; mbarrier.arrive.noComplete{where}.b64 %rd1, [{at}], %r9;"
            )
            model.arrive(n)
        elif choice == 3 and model.expected > 1 and pending > 0:
            n = rng.randint(1, min(pending, model.expected - 1))
            lines.append(f"mbarrier.arrive_drop{where}.b64 %rd1, [{at}], {n};")
            model.expected -= n
            model.arrive(n)
        elif choice == 4:
            n = 16 * rng.randrange(1, 100)
            lines.append(f"mbarrier.arrive.expect_tx{where}.b64 %rd1, [{at}], {n};")
            model.tx += n
            model.arrive()
        else:
            n = rng.choice([16, 4096])
            lines.append(f"mbarrier.expect_tx.relaxed.cluster{where}.b64 [{at}], {n};")
            model.tx += n
            token = False
        if token:
            lines.append("mbarrier.pending_count.b64 %r2, %rd1;")
            store("%r2", pending)
        while model.tx and (model.pending == 0 or rng.random() < 0.7):
            n = model.tx if rng.random() < 0.5 or model.tx <= 16 else 16
            lines.append(f"mbarrier.complete_tx{where}.b64 [{at}], {n};")
            model.tx -= n
            model.settle()
        for parity in (0, 1):
            verb = (
                rng.choice(["test_wait", "test_wait", "try_wait"])
                if model.phase & 1 != parity
                else "test_wait"
            )
            lines.append(
                f"mbarrier.{verb}.parity{where}.b64 %p2, [{at}], {parity}; selp.u32 %r3, 1, 0, %p2;"
            )
            store("%r3", int(model.phase & 1 != parity))
    return text(SHARED + "\n".join(lines) + "\nE:"), wanted


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    source, wanted = program(seed)
    out = outcome(source, [np.zeros(len(wanted), np.uint32)])[0]
    assert out.tolist() == wanted


@pytest.mark.parametrize("verb", ["test_wait", "try_wait"])
@pytest.mark.parametrize("order", ["", ".acquire.cta", ".acquire.cluster"])
def test_a_token_is_of_the_phase_before_the_arrival(verb: str, order: str) -> None:
    body = (
        init(64)
        + f"""mbarrier.arrive.shared.b64 %rd1, [bar];
    W: mbarrier.{verb}{order}.shared.b64 %p2, [bar], %rd1; @!%p2 bra W;
    mbarrier.arrive.shared.b64 %rd2, [bar];
    V: mbarrier.{verb}{order}.b64 %p2, [%rd20], %rd2; @!%p2 bra V;
    mbarrier.test_wait.shared.b64 %p2, [bar], %rd2;
    selp.u32 %r3, 1, 0, %p2; st.global.u32 [%at], %r3;"""
    )
    assert (outcome(text(SHARED + body), [np.zeros(64, np.uint32)], block=64)[0] == 1).all()


def test_a_state_two_phases_old() -> None:
    """The ISA forbids it, and an H200 says that the phase has not ended."""
    body = init(1) + "\n".join(
        f"mbarrier.arrive.shared.b64 %rd{i}, [bar]; mbarrier.test_wait.shared.b64 %p2, [bar], %rd1;"
        for i in (1, 2)
    )
    with pytest.raises(em.PtxError, match=r"state is of phase 0 of .* which is in phase 2"):
        em.Device("sm_90a").launch(text(SHARED + body), "k", 1, 1, [np.zeros(1, np.uint32)])


def test_the_arrivals_of_a_warp_count_each() -> None:
    """A ring of two stages between two warps: 32 consumers release what 1 producer fills."""
    body = """@%p1 mbarrier.init.shared.b64 [bar], 1; @%p1 mbarrier.init.shared.b64 [bar+8], 32;
    bar.sync 0;
    mov.u32 %r5, 0; mov.u32 %r6, 0;
    setp.ge.u32 %p3, %t, 32;
    L: and.b32 %r7, %r5, 1; xor.b32 %r8, %r7, 1;
    @%p3 bra C;
    P: mbarrier.try_wait.parity.shared.b64 %p2, [bar+8], %r8, 1000; @!%p2 bra P;
    @%p1 st.shared.u32 [word], %r5;
    @%p1 mbarrier.arrive.shared.b64 _, [bar];
    bra N;
    C: mbarrier.try_wait.parity.shared.b64 %p2, [bar], %r7; @!%p2 bra C;
    ld.shared.u32 %r9, [word]; mad.lo.u32 %r6, %r6, 3, %r9;
    mbarrier.arrive.shared.b64 %rd2, [bar+8];
    N: add.u32 %r5, %r5, 1; setp.lt.u32 %p4, %r5, 7; @%p4 bra L;
    st.global.u32 [%at], %r6;"""
    out = outcome(text(SHARED + body), [np.zeros(64, np.uint32)], block=64)[0]
    wanted = 0
    for i in range(7):
        wanted = 3 * wanted + i
    assert (out == [0] * 32 + [wanted] * 32).all()


@pytest.mark.parametrize("drop", ["arrive", "arrive_drop"])
def test_remote_arrivals(drop: str) -> None:
    """Every CTA of a cluster of four arrives at the barrier of CTA 2, which announces bytes, too."""
    body = f"""mov.u32 %r5, %cluster_ctarank; setp.eq.u32 %p2, %r5, 2;
    @%p1 mbarrier.init.shared.b64 [bar], 5; fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r6, %r1, 2;
    mapa.u64 %rd3, %rd20, 2;
    @%p1 mbarrier.{drop}.release.cluster.shared::cluster.b64 _, [%r6];
    and.pred %p3, %p1, %p2;
    @%p3 mbarrier.{drop}.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%r6], 64;
    setp.eq.u32 %p4, %r5, 1; and.pred %p4, %p1, %p4;
    @%p4 mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r6], 64;
    @!%p2 bra E;
    W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p5, [bar], 0; @!%p5 bra W;
    st.global.u32 [%at], 1;
    E: barrier.cluster.arrive; barrier.cluster.wait;"""
    out = outcome(text(SHARED + body), [np.zeros(32, np.uint32)], grid=4, cluster=4)[0]
    assert (out == 1).all()


def test_generic_address_of_another_cta() -> None:
    body = """mov.u32 %r5, %cluster_ctarank; xor.b32 %r6, %r5, 1;
    @%p1 mbarrier.init.b64 [%rd20], 32; fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive; barrier.cluster.wait;
    mapa.u64 %rd3, %rd20, %r6;
    mbarrier.arrive.release.cluster.b64 _, [%rd3];
    W: mbarrier.try_wait.parity.acquire.cluster.b64 %p5, [%rd20], 0; @!%p5 bra W;
    shl.b32 %r7, %r5, 7; cvt.u64.u32 %rd4, %r7; add.u64 %at, %at, %rd4;
    st.global.u32 [%at], 1;
    barrier.cluster.arrive; barrier.cluster.wait;"""
    out = outcome(text(SHARED + body), [np.zeros(64, np.uint32)], grid=2, cluster=2)[0]
    assert (out == 1).all()


def test_try_wait_may_give_up() -> None:
    """It is potentially blocking: with nothing that could end the phase it says false in the end."""
    body = (
        init(1)
        + """mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0, 100;
    selp.u32 %r3, 1, 0, %p2; st.global.u32 [%at], %r3;"""
    )
    assert (outcome(text(SHARED + body), [np.ones(32, np.uint32)])[0] == 0).all()


def test_threads_of_a_warp_wait_for_different_barriers() -> None:
    body = """@%p1 mbarrier.init.shared.b64 [bar], 1; @%p1 mbarrier.init.shared.b64 [bar+8], 1;
    bar.sync 0;
    and.b32 %r5, %t, 1; shl.b32 %r6, %r5, 3; add.u32 %r6, %r6, %r1;
    @%p1 mbarrier.arrive.shared.b64 _, [bar+8];
    setp.eq.u32 %p3, %t, 1;
    W: mbarrier.try_wait.parity.shared.b64 %p2, [%r6], 0; @!%p2 bra W;
    @%p3 mbarrier.arrive.shared.b64 _, [bar];
    st.global.u32 [%at], 1;"""
    body = body.replace("@%p1 mbarrier.arrive.shared.b64 _, [bar+8];",
                        "@%p3 bra A; bra B; A: mbarrier.arrive.shared.b64 _, [bar+8]; B:")  # fmt: skip
    body = body.replace("@%p3 bra A;", "setp.eq.u32 %p3, %t, 1; @%p3 bra A;")
    assert (outcome(text(SHARED + body), [np.zeros(32, np.uint32)])[0] == 1).all()


@pytest.mark.parametrize("mine", [True, False])
@pytest.mark.parametrize("order", ["eager", "late"])
def test_warps_set_up_their_own(order: str, mine: bool) -> None:
    """In one instruction of two warps, a barrier for each of them: none has to see the other's,
    and who uses the other's has not seen it set up."""
    body = f"""shr.u32 %r5, %t, 5; shl.b32 %r6, %r5, 3; add.u32 %r6, %r6, %r1;
    and.b32 %r7, %t, 31; setp.eq.u32 %p2, %r7, 0; xor.b32 %r8, %r6, {0 if mine else 8};
    @%p2 mbarrier.init.shared.b64 [%r6], 1;
    fence.mbarrier_init.release.cluster; bar.warp.sync -1;
    @%p2 mbarrier.arrive.shared.b64 _, [%r8];
    W: mbarrier.try_wait.parity.shared.b64 %p3, [%r8], 0; @!%p3 bra W;
    st.global.u32 [%at], 1;"""
    out = np.zeros(64, np.uint32)
    device, source = em.Device("sm_90a", completion=order), text(SHARED + body)
    if mine:
        device.launch(source, "k", 1, 64, [out])
        assert (out == 1).all()
    else:
        with pytest.raises(em.DataRace, match=r"mbarrier\.init"):
            device.launch(source, "k", 1, 64, [out])


def test_inval_and_another_life() -> None:
    body = (
        init(1)
        + """@!%p1 bra E;
    mbarrier.arrive.shared.b64 _, [bar]; mbarrier.inval.shared.b64 [bar];
    mbarrier.init.shared.b64 [bar], 2;
    mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0;
    selp.u32 %r3, 1, 0, %p2; st.global.u32 [%out], %r3;
    mbarrier.arrive.shared.b64 %rd1, [bar]; mbarrier.pending_count.b64 %r3, %rd1;
    st.global.u32 [%out+4], %r3; E:"""
    )
    assert outcome(text(SHARED + body), [np.ones(2, np.uint32)])[0].tolist() == [0, 2]


MISUSES = [
    ("mbarrier.arrive.shared.b64 _, [bar], 3;", "3 arrivals at mbarrier 0x400 of CTA (0, 0, 0), "
     "where 2 of 2 are pending in phase 0"),
    ("mbarrier.arrive.noComplete.shared.b64 _, [bar], 2;", "completes phase 0"),
    ("mbarrier.arrive_drop.noComplete.release.cta.shared::cta.b64 %rd1, [bar], 2;", "completes phase 0"),
    ("mbarrier.arrive.shared.b64 _, [bar+8];", "no mbarrier was initialized at 0x408"),
    ("mbarrier.test_wait.parity.shared.b64 %p2, [bar+8], 0;", "no mbarrier was initialized"),
    ("mbarrier.inval.shared.b64 [bar+8];", "no mbarrier was initialized"),
    ("mbarrier.inval.shared.b64 [bar]; mbarrier.expect_tx.shared.b64 [bar], 16;",
     "no mbarrier was initialized"),
    ("mbarrier.init.shared.b64 [bar+8], 0;", "count 0; allowed are 1 to 1048575"),
    ("mbarrier.init.shared.b64 [bar+8], 1048576;", "count 1048576; allowed are 1 to 1048575"),
    ("mbarrier.expect_tx.shared.b64 [bar], 1048576;", "at most 1048575"),
    ("mbarrier.test_wait.parity.shared.b64 %p2, [bar], 2;", "phase parity 2; allowed are 0 and 1"),
    ("mbarrier.arrive.b64 _, [%out];", "the address is not in shared memory"),
    ("mbarrier.init.shared.b64 [bar+32], 1; mbarrier.init.shared.b64 [bar+40], 1;", "out of bounds"),
    ("mbarrier.arrive.shared.b64 _, [bar], 2; mbarrier.complete_tx.shared.b64 [bar], 16;"
     "mbarrier.arrive.shared.b64 _, [bar], 2;", "wrong transaction bytes: 16 more bytes came"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "says"), MISUSES)
def test_misuse(line: str, says: str) -> None:
    source = text(SHARED + init(2) + f"@!%p1 bra E;\n{line}// A\nE:")
    for error in refusal(source, [np.zeros(32, np.uint32)]):
        assert says in str(error)
        assert error.line == line_of(source, "// A")


def test_another_cta_can_only_be_arrived_at() -> None:
    head = "@%p1 mbarrier.init.shared.b64 [bar], 1; barrier.cluster.arrive; barrier.cluster.wait;"
    head += "mov.u32 %r5, %cluster_ctarank; xor.b32 %r5, %r5, 1; mapa.shared::cluster.u32 %r6, %r1, %r5;"
    for line, says in (
        ("mbarrier.init.shared::cta.b64 [%r6+8], 1;", "lies in the shared memory of another CTA"),
        ("mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r6], 0;", "an mbarrier of another CTA"),
    ):
        for error in refusal(
            text(SHARED + head + line), [np.zeros(32, np.uint32)], grid=2, cluster=2
        ):
            assert says in str(error)


# Checked with ptxas 13.0, for both targets.
ILLEGAL = [
    "mbarrier.arrive.shared::cluster.b64 %rd1, [%r1];",
    "mbarrier.arrive_drop.expect_tx.shared::cluster.b64 %rd1, [%r1], 16;",
    "mbarrier.arrive.shared.b64 [%r1];",
    "mbarrier.arrive.noComplete.shared.b64 %rd1, [%r1];",
    "mbarrier.arrive.noComplete.shared::cluster.b64 _, [%r1], 1;",
    "mbarrier.arrive.noComplete.relaxed.cta.shared.b64 %rd1, [%r1], 1;",
    "mbarrier.arrive.noComplete.release.cluster.shared.b64 %rd1, [%r1], 1;",
    "mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1];",
    "mbarrier.arrive.release.shared.b64 %rd1, [%r1];",
    "mbarrier.arrive.cta.shared.b64 %rd1, [%r1];",
    "mbarrier.arrive.acquire.cta.shared.b64 %rd1, [%r1];",
    "mbarrier.expect_tx.relaxed.shared.b64 [%r1], 16;",
    "mbarrier.expect_tx.release.cta.shared.b64 [%r1], 16;",
    "mbarrier.test_wait.shared::cluster.b64 %p2, [%r1], %rd1;",
    "mbarrier.try_wait.parity.acquire.shared.b64 %p2, [%r1], 0;",
    "mbarrier.try_wait.parity.release.cta.shared.b64 %p2, [%r1], 0;",
    "mbarrier.test_wait.shared.b64 %p2, [%r1], %rd1, 5;",
    "mbarrier.init.shared::cluster.b64 [%r1], 1;",
    "mbarrier.inval.shared::cluster.b64 [%r1];",
    "mbarrier.init.shared.b32 [%r1], 1;",
    "mbarrier.pending_count.shared.b64 %r2, %rd1;",
]


@pytest.mark.parametrize("line", ILLEGAL)
def test_illegal_forms(line: str) -> None:
    source = text(SHARED + f"bra E;\n{line}\nE:")
    with pytest.raises(em.PtxError, match=r"mbarrier\.") as caught:
        em.Device().launch(source, "k", 1, 32, [np.zeros(32, np.uint32)])
    assert caught.value.line == line_of(source, line)


LEGAL = [
    f"mbarrier.{verb}{order}{space} {state}, [{at}]{more};"
    for verb, more in (
        ("arrive", ""), ("arrive", ", 2"), ("arrive", ", %r2"), ("arrive_drop", ""),
        ("arrive.expect_tx", ", 16"), ("arrive_drop.expect_tx", ", %r2"),
    )
    for order in ("", ".release.cta", ".release.cluster", ".relaxed.cta", ".relaxed.cluster")
    for space, at, state in (
        (".b64", "%rd20", "%rd1"), (".shared.b64", "bar+8", "_"), (".shared::cta.b64", "%r1", "%rd1"),
        (".shared::cluster.b64", "%r1", "_"),
    )
]  # fmt: skip


def test_legal_forms() -> None:
    source = text(SHARED + "bra E;\n" + "\n".join(LEGAL) + "\nE:")
    em.Device().launch(source, "k", 1, 32, [np.zeros(32, np.uint32)])
