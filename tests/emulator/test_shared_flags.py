"""Flags in shared memory: which strong accesses order what is around them. PTX ISA 8.8."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

import numpy as np
import pytest
from asynchronous import outcome, refusal
from ptx_kernels import text

from blockscale.emulator.alarms.errors import DataRace

#: Warp 0 writes a word and tells warp 1, which waits and reads it.
BODY = """.shared .b32 flag; .shared .b32 other; .shared .align 128 .b8 s[256];
    and.b32 %r6, %t, 31; setp.eq.u32 %p1, %r6, 0; setp.lt.u32 %p2, %t, 32; mov.u32 %r5, 1;
    mov.u32 %r7, 0; @%p1 st.shared.u32 [flag], 0; bar.sync 0; @!%p1 bra E; @!%p2 bra B;
    st.shared.u32 [s], 7; <release> bra E;
    B: <acquire> setp.ne.u32 %p3, %r4, 1; @%p3 bra B; <after>
    ld.shared.u32 %r8, [s]; st.global.u32 [%out], %r8; E:"""
RELEASES = [
    "st.release.cta.shared.u32 [flag], %r5;",
    "st.release.sys.shared.u32 [flag], %r5;",
    "fence.acq_rel.cta; st.relaxed.cta.shared.u32 [flag], %r5;",
    "fence.release.gpu; st.volatile.shared.u32 [flag], %r5;",
    "membar.cta; st.volatile.shared.u32 [flag], %r5;",
    "atom.release.cta.shared.add.u32 %r9, [flag], 1;",
    "atom.acq_rel.gpu.shared.cas.b32 %r9, [flag], 0, 1;",
    "fence.sc.cta; red.shared.add.u32 [flag], 1;",
    "red.release.cta.shared.add.u32 [flag], 1;",
    "st.release.cta.shared.u32 [flag], %r7; st.relaxed.cta.shared.u32 [flag], %r5;",
]
ACQUIRES = [
    ("ld.acquire.cta.shared.u32 %r4, [flag];", ""),
    ("ld.relaxed.cta.shared.u32 %r4, [flag];", "fence.acquire.cta;"),
    ("ld.volatile.shared.u32 %r4, [flag];", "membar.cta;"),
    ("atom.acquire.cta.shared.add.u32 %r4, [flag], 0;", ""),
    ("atom.shared.or.b32 %r4, [flag], 0;", "fence.sc.cta;"),
]
NO_RELEASES = [
    "st.relaxed.cta.shared.u32 [flag], %r5;",
    "st.volatile.shared.u32 [flag], %r5;",
    "atom.shared.add.u32 %r9, [flag], 1;",
    "red.shared.add.u32 [flag], 1;",
    "fence.acquire.cta; st.relaxed.cta.shared.u32 [flag], %r5;",
    "st.relaxed.cta.shared.u32 [flag], %r5; fence.acq_rel.cta;",
    "st.release.cta.shared.u32 [other], %r5; st.relaxed.cta.shared.u32 [flag], %r5;",
    "atom.acquire.cta.shared.add.u32 %r9, [flag], 1;",
]
NO_ACQUIRES = [
    ("ld.relaxed.cta.shared.u32 %r4, [flag];", ""),
    ("ld.volatile.shared.u32 %r4, [flag];", ""),
    ("fence.acquire.cta; ld.relaxed.cta.shared.u32 %r4, [flag];", "fence.release.cta;"),
    ("atom.shared.or.b32 %r4, [flag], 0;", "ld.acquire.cta.shared.u32 %r9, [other];"),
    ("atom.release.cta.shared.or.b32 %r4, [flag], 0;", ""),
]


def kernel(release: str, acquire: tuple[str, str]) -> str:
    body = BODY.replace("<release>", release).replace("<acquire>", acquire[0])
    return text(body.replace("<after>", acquire[1]))


@pytest.mark.parametrize("acquire", ACQUIRES)
@pytest.mark.parametrize("release", RELEASES)
def test_patterns_that_synchronize(release: str, acquire: tuple[str, str]) -> None:
    out = np.zeros(64, np.uint32)
    assert outcome(kernel(release, acquire), [out], block=64)[0][0] == 7


@pytest.mark.parametrize("release", NO_RELEASES)
def test_no_release(release: str) -> None:
    refusal(kernel(release, ACQUIRES[0]), [np.zeros(64, np.uint32)], DataRace, block=64)
    refusal(kernel(release, ACQUIRES[1]), [np.zeros(64, np.uint32)], DataRace, block=64)


@pytest.mark.parametrize("acquire", NO_ACQUIRES)
def test_no_acquire(acquire: tuple[str, str]) -> None:
    refusal(kernel(RELEASES[0], acquire), [np.zeros(64, np.uint32)], DataRace, block=64)
    refusal(kernel(RELEASES[2], acquire), [np.zeros(64, np.uint32)], DataRace, block=64)


#: C waits for ``last``, which tells nothing: whoever saw the first value of the flag would know.
CHAIN = """.shared .b32 flag; .shared .b32 last; .shared .align 128 .b8 s[256];
    and.b32 %r6, %t, 31; setp.eq.u32 %p1, %r6, 0; shr.u32 %r7, %t, 5; mov.u32 %r5, 1;
    @%p1 st.shared.u32 [flag], 0; @%p1 st.shared.u32 [last], 0; bar.sync 0; @!%p1 bra E;
    setp.eq.u32 %p4, %r7, 1; @%p4 bra B; setp.eq.u32 %p4, %r7, 2; @%p4 bra C;
    st.shared.u32 [s], 7; st.release.cta.shared.u32 [flag], 1; bra E;
    B: ld.relaxed.cta.shared.u32 %r4, [flag]; setp.ne.u32 %p3, %r4, 1; @%p3 bra B; <second>
    st.relaxed.cta.shared.u32 [last], 1; bra E;
    C: ld.relaxed.cta.shared.u32 %r4, [last]; setp.ne.u32 %p3, %r4, 1; @%p3 bra C;
    ld.acquire.cta.shared.u32 %r4, [flag]; setp.ne.u32 %p3, %r4, 2; @%p3 trap;
    ld.shared.u32 %r8, [s]; st.global.u32 [%out], %r8; E:"""


@pytest.mark.parametrize(
    ("second", "ordered"),
    [
        ("atom.shared.add.u32 %r9, [flag], 1;", True),
        ("red.shared.add.u32 [flag], 1;", True),
        ("st.relaxed.cta.shared.u32 [flag], 2;", False),
        ("st.shared.u32 [flag], 2;", False),
    ],
)
def test_read_modify_writes_hand_on_what_was_released(second: str, ordered: bool) -> None:
    """8.8: "observation" goes through atomic operations; other writes end it."""
    kernel, out = text(CHAIN.replace("<second>", second)), np.zeros(64, np.uint32)
    if ordered:
        assert outcome(kernel, [out], block=96)[0][0] == 7
    else:
        refusal(kernel, [out], DataRace, block=96)


ACROSS = """.shared .b32 flag; .shared .align 128 .b8 s[256]; mov.u32 %r10, %cluster_ctarank;
    setp.eq.u32 %p1, %t, 0; setp.eq.u32 %p2, %r10, 0; @%p1 st.shared.u32 [flag], 0;
    barrier.cluster.arrive; barrier.cluster.wait; @!%p1 bra E; @!%p2 bra B;
    mov.u32 %r11, s; mapa.shared::cluster.u32 %r11, %r11, 1; mov.u32 %r12, flag;
    mapa.shared::cluster.u32 %r12, %r12, 1; st.shared::cluster.u32 [%r11], 7; <release> bra E;
    B: <acquire> setp.ne.u32 %p3, %r4, 1; @%p3 bra B; <after>
    ld.shared.u32 %r8, [s]; st.global.u32 [%out], %r8;
    E: barrier.cluster.arrive; barrier.cluster.wait;"""


@pytest.mark.parametrize(
    ("release", "acquire", "after", "ordered"),
    [
        ("st.release.cluster", "ld.acquire.cluster", "", True),
        ("fence.acq_rel.cluster; st.relaxed.cluster", "ld.acquire.sys", "", True),
        ("fence.acq_rel.cluster; st.relaxed.sys", "ld.relaxed.gpu", "fence.acquire.cluster;", True),
        ("st.release.cta", "ld.acquire.cluster", "", False),
        ("st.release.cluster", "ld.acquire.cta", "", False),
        ("fence.acq_rel.cta; st.relaxed.cluster", "ld.acquire.cluster", "", False),
        ("st.release.cluster", "ld.relaxed.cluster", "fence.acquire.cta;", False),
    ],
)
def test_a_scope_must_include_the_other_cta(
    release: str, acquire: str, after: str, ordered: bool
) -> None:
    body = ACROSS.replace("<release>", f"{release}.shared::cluster.u32 [%r12], 1;")
    body = body.replace("<acquire>", f"{acquire}.shared.u32 %r4, [flag];")
    kernel, out = text(body.replace("<after>", after)), np.zeros(64, np.uint32)
    if ordered:
        assert outcome(kernel, [out], grid=2, cluster=2)[0][0] == 7
    else:
        refusal(kernel, [out], DataRace, grid=2, cluster=2)


TOTAL = """.shared .b32 flag; .shared .align 128 .b8 s[256];
    setp.eq.u32 %p1, %t, 0; setp.lt.u32 %p2, %t, 64; setp.eq.u32 %p4, %t, 64;
    @%p1 st.shared.u32 [flag], 0; bar.sync 0; @!%p2 bra B;
    mov.u32 %r1, s; mad.lo.u32 %r1, %t, 4, %r1; st.shared.u32 [%r1], 7; <fence>
    bar.sync 1, 64; <more>
    @%p1 st.volatile.shared.u32 [flag], 1; bra E;
    B: @!%p4 bra E; ld.volatile.shared.u32 %r4, [flag]; setp.ne.u32 %p3, %r4, 1; @%p3 bra B; <last>
    ld.shared.u32 %r8, [s+252]; st.global.u32 [%out], %r8; E:"""


@pytest.mark.parametrize(
    ("fence", "more", "last", "ordered"),
    [
        ("membar.cta;", "", "membar.cta;", True),
        ("fence.sc.cta;", "", "fence.sc.gpu;", True),
        ("fence.acq_rel.cta;", "", "fence.sc.cta;", False),
        ("fence.sc.cta;", "", "fence.acq_rel.cta;", False),
        ("", "fence.acq_rel.cta;", "fence.acq_rel.cta;", True),
        ("", "@%p1 fence.acq_rel.cta;", "fence.acq_rel.cta;", True),
    ],
)
def test_fences_before_a_barrier(fence: str, more: str, last: str, ordered: bool) -> None:
    """8.10.2: __threadfence(); __syncthreads(); and a store by one thread tell of all threads,
    for the fence.sc after the read must come after theirs; weaker fences order what is around them
    in their own thread alone."""
    body = TOTAL.replace("<fence>", fence).replace("<more>", more).replace("<last>", last)
    kernel, out = text(body), np.zeros(64, np.uint32)
    if ordered:
        assert outcome(kernel, [out], block=96)[0][0] == 7
    else:
        refusal(kernel, [out], DataRace, block=96)


def test_warps_that_touch_unrelated_words_are_not_ordered() -> None:
    body = BODY.replace("<release>", "st.release.cta.shared.u32 [other], %r5;")
    body = body.replace("<acquire>", "ld.acquire.cta.shared.u32 %r4, [flag]; mov.u32 %r4, 1;")
    kernel = text("nanosleep.u32 0;" + body.replace("B:", "B: nanosleep.u32 9999;").replace(
        "<after>", ""))  # fmt: skip
    refusal(kernel, [np.zeros(64, np.uint32)], DataRace, block=64)


# --- several of them ------------------------------------------------------------------------------

START = """.shared .b32 f1; .shared .b32 f2; .shared .align 128 .b8 s[256];
    setp.eq.u32 %p1, %t, 0; @%p1 st.shared.u32 [f1], 0; @%p1 st.shared.u32 [f2], 0; mov.u32 %r5, %t;
"""


def test_a_narrow_fence_does_not_spoil_a_wider_one() -> None:
    """An atomic of the other CTA, then one of this one, then fences of both scopes."""
    body = (
        START.replace("mov.u32 %r5, %t;", "mov.u32 %r5, %cluster_ctarank;")
        + """
    barrier.cluster.arrive; barrier.cluster.wait; setp.eq.u32 %p2, %r5, 1; @%p2 bra OTHER;
    setp.eq.u32 %p3, %t, 32; @!%p3 bra LAST; fence.release.cta;
    atom.relaxed.cluster.shared.add.u32 %r4, [f1], 1; bra E;
    LAST: @!%p1 bra E;
    W: ld.relaxed.cluster.shared.u32 %r4, [f1]; setp.ne.u32 %p3, %r4, 2; @%p3 bra W;
    fence.acquire.cta; fence.acquire.cluster; ld.shared.u32 %r4, [s]; st.global.u32 [%out], %r4; bra E;
    OTHER: @!%p1 bra E; mov.u32 %r6, s; mapa.shared::cluster.u32 %r6, %r6, 0;
    mov.u32 %r7, f1; mapa.shared::cluster.u32 %r7, %r7, 0; st.shared::cluster.u32 [%r6], 7;
    atom.release.cluster.shared::cluster.add.u32 %r4, [%r7], 1;
    E: barrier.cluster.arrive; barrier.cluster.wait;"""
    )
    out = outcome(text(body), [np.zeros(32, np.uint32)], grid=2, block=64, cluster=2)[0]
    assert out[0] == 7


def test_a_total_fence_passes_on_what_it_acquires() -> None:
    body = (
        START
        + """bar.sync 0; setp.lt.u32 %p2, %t, 32; @!%p2 bra B;
    @!%p1 bra E; st.shared.u32 [s], 7; fence.acq_rel.cta; st.relaxed.cta.shared.u32 [f1], 1; bra E;
    B: setp.lt.u32 %p2, %t, 64; @!%p2 bra C;
    W: ld.relaxed.cta.shared.u32 %r4, [f1]; setp.ne.u32 %p3, %r4, 1; @%p3 bra W;
    fence.sc.cta; bar.sync 1, 64; bra E;
    C: setp.lt.u32 %p2, %t, 96; @!%p2 bra D; bar.sync 1, 64; setp.eq.u32 %p3, %t, 64; @!%p3 bra E;
    st.relaxed.cta.shared.u32 [f2], 1; bra E;
    D: ld.relaxed.cta.shared.u32 %r4, [f2]; setp.ne.u32 %p3, %r4, 1; @%p3 bra D;
    fence.sc.cta; ld.shared.u32 %r4, [s]; st.global.u32 [%at], %r4; E:"""
    )
    out = outcome(text(body), [np.zeros(128, np.uint32)], block=128)[0]
    assert (out[96:] == 7).all()


def test_a_release_lasts_though_others_write_between() -> None:
    """A release, then another strong write by the same thread: 8.8."""
    body = (
        START
        + """bar.sync 0; setp.eq.u32 %p2, %t, 32; @%p2 bra B; setp.eq.u32 %p2, %t, 64; @%p2 bra C;
    @!%p1 bra E; st.shared.u32 [s], 7; st.release.cta.shared.u32 [f1], 1;
    A: ld.relaxed.cta.shared.u32 %r4, [f1]; setp.ne.u32 %p3, %r4, 2; @%p3 bra A;
    st.relaxed.cta.shared.u32 [f1], 3; bra E;
    B: ld.relaxed.cta.shared.u32 %r4, [f1]; setp.ne.u32 %p3, %r4, 1; @%p3 bra B;
    st.relaxed.cta.shared.u32 [f1], 2; bra E;
    C: ld.acquire.cta.shared.u32 %r4, [f1]; setp.ne.u32 %p3, %r4, 3; @%p3 bra C;
    ld.shared.u32 %r4, [s]; st.global.u32 [%out], %r4; E:"""
    )
    out = outcome(text(body), [np.zeros(96, np.uint32)], block=96)[0]
    assert out[0] == 7


# --- what is no race, and what is -----------------------------------------------------------------

#: Thread 0 runs A, then thread 32 runs B; the flag orders nothing but itself.
TWO = (
    START.replace("mov.u32 %r5, %t;", "")
    + """bar.sync 0; setp.eq.u32 %p2, %t, 32; @%p2 bra B; @!%p1 bra E; A: <a> bra E;
    B: nanosleep.u32 9999; <b> E:"""
)


@pytest.mark.parametrize(
    ("a", "b", "race"),
    [
        ("st.relaxed.cta.shared.u32 [f1], 1;", "ld.relaxed.cta.shared.u32 %r4, [f1];", False),
        ("st.relaxed.cta.shared.u32 [f1], 1;", "ld.relaxed.cta.shared.u8 %r4, [f1];", True),
        ("st.relaxed.cta.shared.u32 [s], 1;", "st.relaxed.cta.shared.u64 [s], 2;", True),
        ("st.shared.u32 [f1], 1; st.relaxed.cta.shared.u32 [f1], 2;",
         "ld.relaxed.cta.shared.u32 %r4, [f1];", True),
        ("ld.shared.u32 %r4, [f1]; ld.relaxed.cta.shared.u32 %r4, [f1];",
         "st.relaxed.cta.shared.u32 [f1], 1;", True),
        ("st.relaxed.cta.shared.u32 [f1], 1;",
         "ld.relaxed.cta.shared.u32 %r4, [f1]; st.shared.u32 [f1], 2;", False),
        ("st.relaxed.cta.shared.u32 [f1], 1;", "st.shared.u32 [f1], 2;", True),
    ],
)  # fmt: skip
def test_strong_accesses_to_one_place(a: str, b: str, race: bool) -> None:
    """8.7: they must overlap completely, a weak access beside a strong one counts, and who has
    observed a value comes after its write (8.9.5)."""
    kernel, out = text(TWO.replace("<a>", a).replace("<b>", b)), [np.zeros(64, np.uint32)]
    if race:
        refusal(kernel, out, DataRace, block=64)
    else:
        outcome(kernel, out, block=64)


SCOPES = """.shared .b32 flag; mov.u32 %r10, %cluster_ctarank; setp.eq.u32 %p1, %t, 0;
    setp.eq.u32 %p2, %r10, 0; @%p1 st.shared.u32 [flag], 0;
    barrier.cluster.arrive; barrier.cluster.wait; @!%p1 bra E; mov.u32 %r12, flag;
    mapa.shared::cluster.u32 %r12, %r12, 1; @!%p2 bra B;
    st.relaxed.<scope>.shared::cluster.u32 [%r12], 1; bra E;
    B: nanosleep.u32 9999; ld.relaxed.cluster.shared.u32 %r4, [flag];
    E: barrier.cluster.arrive; barrier.cluster.wait;"""


@pytest.mark.parametrize(("scope", "race"), [("cta", True), ("cluster", False)])
def test_scopes_of_strong_accesses(scope: str, race: bool) -> None:
    kernel, out = text(SCOPES.replace("<scope>", scope)), [np.zeros(32, np.uint32)]
    if race:
        refusal(kernel, out, DataRace, grid=2, cluster=2)
    else:
        outcome(kernel, out, grid=2, cluster=2)


OTHER = """.shared .b32 flag; .shared .align 128 .b8 s[256];
    setp.eq.u32 %p1, %t, 0; setp.lt.u32 %p2, %t, 32; setp.lt.u32 %p3, %t, 64;
    @%p1 st.shared.u32 [flag], 0; bar.sync 0; @!%p2 bra B;
    @!%p1 bra E; st.shared.u32 [s], 7; <first> st.relaxed.cta.shared.u32 [flag], 1; bra E;
    B: @!%p3 bra C; ld.relaxed.cta.shared.u32 %r4, [flag]; setp.ne.u32 %p4, %r4, 1; @%p4 bra B;
    bar.sync 1, 64; bra E;
    C: bar.sync 1, 64; <last> ld.shared.u32 %r4, [s]; st.global.u32 [%at], %r4; E:"""


@pytest.mark.parametrize(
    ("first", "last", "ordered"),
    [
        ("fence.sc.cta;", "fence.sc.cta;", True),
        ("fence.acq_rel.cta;", "fence.sc.cta;", False),
        ("fence.sc.cta;", "fence.acq_rel.cta;", False),
    ],
)
def test_a_total_fence_of_another_thread_than_the_reader(
    first: str, last: str, ordered: bool
) -> None:
    """8.9.3: warp 1 reads the flag, warp 2 fences after it has met warp 1."""
    kernel, out = text(OTHER.replace("<first>", first).replace("<last>", last)), np.zeros(96, "u4")
    if ordered:
        assert (outcome(kernel, [out], block=96)[0][64:] == 7).all()
    else:
        refusal(kernel, [out], DataRace, block=96)


#: Warps 0 and 1 write the second word, and warp 2 loads both later on.
PAIR = """.shared .align 8 .b32 s[2]; and.b32 %r6, %t, 31; shr.u32 %r7, %t, 5; mov.u32 %r5, 0;
    setp.eq.u32 %p1, %t, 0; @%p1 st.volatile.shared.v2.u32 [s], {%r5, %r5}; bar.sync 0;
    setp.ne.u32 %p1, %r6, 0; @%p1 bra E; setp.eq.u32 %p2, %r7, 2; @%p2 bra L;
    setp.eq.u32 %p2, %r7, 1; @%p2 bra B; <first> bra E;
    B: add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 3000; @%p3 bra B; st.volatile.shared.u32 [s+4], 2;
    bra E;
    L: add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 9000; @%p3 bra L;
    W: <before> ld.volatile.shared.v2.u32 {%r8, %r9}, [s]; setp.ne.u32 %p3, %r9, 2; @%p3 bra W;
    st.shared.u32 [s+4], 3; E:"""


def pair(first: str, before: str) -> str:
    return text(PAIR.replace("<first>", first).replace("<before>", before))


def test_a_scalar_of_a_vector_observes_its_own_word() -> None:
    """Whatever is written to the other one meanwhile, 8.2.4."""
    refusal(pair("st.volatile.shared.u32 [s+4], 1;", ""), [np.zeros(96, np.uint32)], DataRace,
            block=96)  # fmt: skip
    outcome(pair("", "st.volatile.shared.u32 [s], 1;"), [np.zeros(96, np.uint32)], block=96)


def test_the_lane_whose_value_is_left_is_observed() -> None:
    """Several lanes write a word at once; who reads it comes after the one that did so last."""
    body = """.shared .b32 s; setp.gt.u32 %p1, %t, 1; @%p1 bra E; st.volatile.shared.u32 [s], %t;
    setp.eq.u32 %p1, %t, 1; @%p1 bra E; ld.volatile.shared.u32 %r8, [s];
    st.shared.u32 [s], 7; E:"""
    outcome(text(body), [np.zeros(32, np.uint32)])
