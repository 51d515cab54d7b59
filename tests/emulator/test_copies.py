"""cp.async, cp.async.bulk, cp.reduce.async.bulk and their groups: PTX ISA 9.7.9.25."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from asynchronous import ORDERS, outcome, refusal
from ptx_kernels import line_of, text

from blockscale import emulator as em

RNG = np.random.default_rng(25)
SHARED = """.shared .align 128 .b8 s[4096]; .shared .align 8 .b64 bar[2];
    mov.u32 %r1, s; setp.eq.u32 %p1, %t, 0; mov.u32 %r2, bar;
"""
IN = ".param .u64 in"
LOAD = "ld.param.u64 %rd1, [in];\n"
BAR = """@%p1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;\n"
TOLD = "mbarrier::complete_tx::bytes"


def kernel(body: str, parameters: str = IN) -> str:
    return text(SHARED + (LOAD if parameters else "") + body, parameters)


# --- cp.async -------------------------------------------------------------------------------------

NON_BULK = [
    ("ca", 4, "", None), ("ca", 8, "", None), ("ca", 16, "", None), ("cg", 16, "", None),
    ("ca", 4, ", %r5", "r"), ("ca", 16, ", %r5", "r"), ("cg", 16, ", %r5", "r"),
    ("cg", 16, ", 5", 5), ("ca", 8, ", 0", 0), ("ca", 16, ", %p2", "p"), ("ca", 4, ", !%p2", "!p"),
]  # fmt: skip


@pytest.mark.sampled(32)
@pytest.mark.parametrize(("level", "size", "more", "kept"), NON_BULK)
@pytest.mark.parametrize("hints", ["", ".L2::128B", ".L2::cache_hint", ".L2::cache_hint.L2::256B"])
def test_cp_async(level: str, size: int, more: str, kept: object, hints: str) -> None:
    """src-size: the rest is filled with zeros; ignore-src: all is."""
    hint = ", %rd9" if "cache_hint" in hints else ""
    words = size // 4
    body = f"""mad.lo.u32 %r3, %t, {size}, %r1; mad.wide.u32 %rd2, %t, {size}, %rd1;
    rem.u32 %r5, %t, {size + 1}; and.b32 %r6, %t, 1; setp.eq.u32 %p2, %r6, 1;
    cp.async.{level}.shared{"::cta" if hint else ""}.global{hints} [%r3], [%rd2], {size}{more}{hint};
    cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
    mad.wide.u32 %rd3, %t, {size}, %out;
    """
    body += "\n".join(
        f"ld.shared.u32 %r7, [%r3+{4 * i}]; st.global.u32 [%rd3+{4 * i}], %r7;"
        for i in range(words)
    )
    data = RNG.integers(1, 256, (64, size), np.uint8)
    out = outcome(kernel(body), [np.zeros_like(data), data], block=64)[0]
    t = np.arange(64)
    length = {
        None: np.full(64, size), "r": t % (size + 1), 5: np.full(64, 5), 0: np.zeros(64, int),
        "p": np.where(t % 2, 0, size), "!p": np.where(t % 2, size, 0),
    }[kept]  # fmt: skip
    assert (out == np.where(np.arange(size) < length[:, None], data, 0)).all()


def test_bytes_that_are_not_taken_may_lie_outside() -> None:
    """src-size 2 of what ends after two bytes; other lanes take all, or nothing."""
    body = """mad.lo.u32 %r3, %t, 4, %r1; mad.wide.u32 %rd2, %t, 4, %rd1;
    mov.u32 %r5, 4; setp.eq.u32 %p2, %t, 31; selp.u32 %r5, 2, %r5, %p2;
    setp.eq.u32 %p2, %t, 3; selp.u32 %r5, 0, %r5, %p2;
    cp.async.ca.shared.global [%r3], [%rd2], 4, %r5; cp.async.wait_all; bar.warp.sync -1;
    ld.shared.u32 %r7, [%r3]; mad.wide.u32 %rd3, %t, 4, %out; st.global.u32 [%rd3], %r7;"""
    data = RNG.integers(1, 1 << 16, 63, np.uint16)
    out = outcome(kernel(body), [np.ones(64, np.uint16), data])[0]
    want = np.append(data, np.uint16(0))
    want[6:8] = 0
    assert (out == want).all()


def test_a_source_that_is_not_read_may_be_anywhere() -> None:
    body = """mov.u64 %rd5, 64; cp.async.cg.shared.global [%r1], [%rd5], 16, 0; cp.async.wait_all;
    bar.warp.sync -1; ld.shared.u32 %r3, [%r1+12]; st.global.u32 [%at], %r3;"""
    assert (outcome(kernel(body, ""), [np.ones(32, np.uint32)])[0] == 0).all()


def test_groups_of_cp_async() -> None:
    """A pipeline of three stages: wait_group n leaves the n latest groups pending."""
    body = """shl.b32 %r3, %t, 2; add.u32 %r3, %r3, %r1; mad.wide.u32 %rd2, %t, 4, %rd1;
    cp.async.ca.shared.global [%r3], [%rd2], 4; cp.async.commit_group;
    cp.async.ca.shared.global [%r3+256], [%rd2+256], 4; cp.async.commit_group;
    mov.u32 %r4, 0; mov.u32 %r5, 0; mov.u32 %r9, %r3;
    L:
    setp.lt.u32 %p2, %r4, 6; add.u64 %rd2, %rd2, 256;
    rem.u32 %r6, %r4, 3; add.u32 %r7, %r4, 2; rem.u32 %r7, %r7, 3;
    mad.lo.u32 %r6, %r6, 256, %r3; mad.lo.u32 %r7, %r7, 256, %r3;
    @%p2 cp.async.ca.shared.global [%r7], [%rd2+256], 4;
    cp.async.commit_group;
    cp.async.wait_group 2;
    ld.shared.u32 %r8, [%r6]; mad.lo.u32 %r5, %r5, 31, %r8;
    add.u32 %r4, %r4, 1; setp.lt.u32 %p3, %r4, 8; @%p3 bra L;
    st.global.u32 [%at], %r5;"""
    data = RNG.integers(0, 1 << 16, (8, 64), np.uint32)
    wanted = np.zeros(64, np.uint32)
    for row in data:
        wanted = wanted * np.uint32(31) + row
    assert (outcome(kernel(body), [np.zeros(64, np.uint32), data], block=64)[0] == wanted).all()


@pytest.mark.parametrize(("noinc", "count"), [("", 1), (".noinc", 65)])
@pytest.mark.parametrize("space", ["", ".shared", ".shared::cta"])
def test_cp_async_arrives_at_an_mbarrier(noinc: str, count: int, space: str) -> None:
    """Without .noinc it counts itself: the 64 arrivals are no more than zero, net."""
    where = "[%rd8]" if not space else "[bar]"
    body = f"""@%p1 mbarrier.init.shared.b64 [bar], {count}; bar.sync 0;
    cvt.u64.u32 %rd8, %r2; cvta.shared.u64 %rd8, %rd8;
    shl.b32 %r3, %t, 2; add.u32 %r3, %r3, %r1; mad.wide.u32 %rd2, %t, 4, %rd1;
    cp.async.ca.shared.global [%r3], [%rd2], 4;
    cp.async.mbarrier.arrive{noinc}{space}.b64 {where};
    bar.sync 0;
    @%p1 mbarrier.arrive.shared.b64 _, [bar];
    {WAIT} xor.b32 %r4, %r3, 128; ld.shared.u32 %r5, [%r4]; st.global.u32 [%at], %r5;"""
    data = np.arange(100, 164, dtype=np.uint32)
    out = outcome(kernel(body), [np.zeros(64, np.uint32), data], block=64)[0]
    assert (out == data[np.arange(64) ^ 32]).all()


@pytest.mark.parametrize("line", [
    "cp.async.cg.shared.global [%r1], [%rd1], 8;",
    "cp.async.ca.shared.global [%r1], [%rd1], 32;",
    "cp.async.ca.shared.global [%r1], [%rd1], 8, 9;",
])  # fmt: skip
def test_sizes_of_cp_async(line: str) -> None:
    for error in refusal(kernel(line), [np.zeros(32, np.uint32), np.zeros(64, np.uint8)]):
        assert "cp.async" in str(error)
        assert error.line == line_of(kernel(line), line)


# --- bulk copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["shared::cluster", "shared::cta"])
@pytest.mark.parametrize("size", [16, 48, 2048])
def test_bulk_into_shared_and_out(target: str, size: int) -> None:
    hint = ".L2::cache_hint" if size == 48 else ""
    policy = ", %rd9" if hint else ""
    body = (
        BAR
        + f"""mov.u64 %rd9, 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], {size};
    @%p1 cp.async.bulk.{target}.global.{TOLD}{hint} [s], [%rd1+16], {size}, [bar]{policy};
    {WAIT}
    @!%p1 bra E;
    cp.async.bulk.global.shared::cta.bulk_group{hint} [%out+32], [s], {size}{policy};
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    E:"""
    )
    data = RNG.integers(0, 256, size + 16, np.uint8)
    out = outcome(kernel(body), [np.zeros(size + 64, np.uint8), data], block=64)[0]
    assert (out[32 : 32 + size] == data[16:]).all()
    assert not out[:32].any()
    assert not out[32 + size :].any()


def test_bulk_copies_of_many_threads() -> None:
    """Each of 64 threads copies 32 bytes and announces them itself."""
    body = (
        """@%p1 mbarrier.init.shared.b64 [bar], 64; fence.mbarrier_init.release.cluster; bar.sync 0;
    shl.b32 %r3, %t, 5; add.u32 %r4, %r1, %r3; mad.wide.u32 %rd2, %t, 32, %rd1;
    xor.b32 %r5, %r3, 1504;
    mbarrier.expect_tx.relaxed.cta.shared.b64 [bar], 32;
    """
        + f"""cp.async.bulk.shared::cluster.global.{TOLD} [%r4], [%rd2], 32, [bar];
    mbarrier.arrive.shared.b64 _, [bar];
    {WAIT}
    add.u32 %r5, %r5, %r1; cvt.u64.u32 %rd3, %r3; add.u64 %rd3, %rd3, %out;
    cp.async.bulk.global.shared::cta.bulk_group [%rd3], [%r5], 32;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    )
    data = RNG.integers(0, 256, (64, 32), np.uint8)
    out = outcome(kernel(body), [np.zeros_like(data), data], block=64)[0]
    assert (out == data[np.arange(64) ^ 47]).all()


def test_from_shared_to_another_cta() -> None:
    body = (
        """mov.u32 %r5, %cluster_ctarank; add.u32 %r6, %r5, 1; rem.u32 %r6, %r6, 3;
    @%p1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive; barrier.cluster.wait;
    shl.b32 %r7, %t, 2; add.u32 %r7, %r7, %r1; mad.lo.u32 %r8, %r5, 1000, %t;
    st.shared.u32 [%r7], %r8; fence.proxy.async.shared::cta; bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
    mapa.shared::cluster.u32 %r10, %r1, %r6; mapa.shared::cluster.u32 %r11, %r2, %r6;
    """
        + f"""@%p1 cp.async.bulk.shared::cluster.shared::cta.{TOLD} [%r10+256], [%r1], 256, [%r11];
    {WAIT}
    ld.shared.u32 %r9, [%r7+256];
    mad.lo.u32 %r12, %r5, 256, 0; cvt.u64.u32 %rd4, %r12; add.u64 %at, %at, %rd4;
    st.global.u32 [%at], %r9; barrier.cluster.arrive; barrier.cluster.wait;"""
    )
    out = outcome(kernel(body, ""), [np.zeros((3, 64), np.uint32)], block=64, grid=3, cluster=3)[0]
    assert (out == np.array([[2], [0], [1]]) * 1000 + np.arange(64)).all()


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
def test_multicast(hint: str) -> None:
    """Rank 1 sends to ranks 0, 1 and 3; each one's own mbarrier is told."""
    policy = ", %rd9" if hint else ""
    body = f"""mov.u32 %r5, %cluster_ctarank; setp.eq.u32 %p2, %r5, 1; and.pred %p4, %p1, %p2;
    @%p1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
    mov.u64 %rd9, 0; mov.u16 %h1, 11; mov.u32 %r9, 0;
    barrier.cluster.arrive; barrier.cluster.wait;
    @%p4 cp.async.bulk.shared::cluster.global.{TOLD}.multicast::cluster{hint} [s+128], [%rd1], 128, [bar], %h1{policy};
    setp.eq.u32 %p5, %r5, 2; @%p5 bra N;
    {WAIT} shl.b32 %r7, %t, 2; add.u32 %r7, %r7, %r1; ld.shared.u32 %r9, [%r7+128];
    N: shl.b32 %r12, %r5, 7; cvt.u64.u32 %rd4, %r12; add.u64 %at, %at, %rd4;
    st.global.u32 [%at], %r9; barrier.cluster.arrive; barrier.cluster.wait;"""
    data = np.arange(5, 37, dtype=np.uint32)
    args = [np.zeros((4, 32), np.uint32), data]
    out = outcome(kernel(body), args, grid=4, cluster=4)[0]
    assert (out == np.array([[1], [1], [0], [1]]) * data).all()
    for error in refusal(kernel(body.replace("%h1, 11", "%h1, 16")), args, grid=4, cluster=4):
        assert "multicast to CTAs 0x10 of a cluster of 4" in str(error)


def test_cp_mask() -> None:
    body = """shl.b32 %r3, %t, 2; add.u32 %r3, %r3, %r1; st.shared.u32 [%r3], 0x04030201;
    fence.proxy.async; bar.sync 0; @!%p1 bra E; mov.b16 %h1, 0x8421;
    cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%out], [s], 128, %h1;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; E:"""
    source = text(SHARED + body, target="sm_100a")
    out = outcome(source, [np.full(128, 9, np.uint8)], target="sm_100a")[0]
    written = 0x8421 >> np.arange(128) % 16 & 1 == 1
    assert (out == np.where(written, np.arange(128) % 4 + 1, 9)).all()


def reduction(operation: str, type: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """9.7.13: what red does with each element, in numpy."""
    with np.errstate(over="ignore"):
        if operation == "inc":
            return np.where(old >= new, 0, old + 1).astype(old.dtype)
        if operation == "dec":
            return np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)
        if type in ("f16", "bf16", "f32") and operation == "add":
            return (old.astype(np.float64) + new.astype(np.float64)).astype(old.dtype)
        function = {
            "add": np.add, "min": np.minimum, "max": np.maximum,
            "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
        }[operation]  # fmt: skip
        return function(old, new)


DTYPES = {
    **{f"{c}{8 * n}": np.dtype(f"{d}{n}") for c, d in (("u", "u"), ("s", "i"), ("b", "u"))
       for n in (4, 8)},
    "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}  # fmt: skip
# Those that ptxas 13.0 takes; the second half for shared memory, too.
GLOBAL_ONLY = [
    *(("add", type) for type in ("f32", "f64")), ("add.noftz", "f16"), ("add.noftz", "bf16"),
    *((operation, type) for operation in ("min", "max") for type in ("u64", "s64", "f16", "bf16")),
    *((operation, "b64") for operation in ("and", "or", "xor")),
]  # fmt: skip
EVERYWHERE = [
    *((operation, type) for operation in ("add", "min", "max") for type in ("u32", "s32")),
    ("add", "u64"), ("inc", "u32"), ("dec", "u32"),
    *((operation, "b32") for operation in ("and", "or", "xor")),
]  # fmt: skip


def operands(type: str) -> tuple[np.ndarray, np.ndarray]:
    dtype = DTYPES[type]
    if "f" in type:
        return tuple((RNG.standard_normal(128) * 100).astype(dtype) for _ in range(2))
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    old, new = (RNG.integers(low, high, 128, dtype, endpoint=True) for _ in range(2))
    old[:4] = new[:4] = 5
    old[4:6], new[4:8] = 0, 3
    return old, new


@pytest.mark.parametrize(("operation", "type"), GLOBAL_ONLY + EVERYWHERE)
def test_reduce_into_global(operation: str, type: str) -> None:
    old, new = operands(type)
    body = (
        BAR
        + f"""@!%p1 bra E;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], {new.nbytes};
    cp.async.bulk.shared::cta.global.{TOLD} [s], [%rd1], {new.nbytes}, [bar];
    {WAIT}
    cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{type} [%out], [s], {new.nbytes};
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; E:"""
    )
    out = outcome(kernel(body), [old, new])[0]
    assert out.tobytes() == reduction(operation.split(".")[0], type, old, new).tobytes()


@pytest.mark.parametrize(("operation", "type"), EVERYWHERE)
def test_reduce_into_shared(operation: str, type: str) -> None:
    """CTA 1 reduces into CTA 0."""
    old, new = operands(type)
    size = new.nbytes
    body = f"""mov.u32 %r5, %cluster_ctarank; setp.eq.u32 %p2, %r5, 1; and.pred %p4, %p1, %p2;
    @%p1 mbarrier.init.shared.b64 [bar], 1; @%p1 mbarrier.init.shared.b64 [bar+8], 1;
    fence.mbarrier_init.release.cluster; bar.warp.sync -1;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], {size};
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar+8], {size};
    mad.wide.u32 %rd3, %r5, {size}, %rd1;
    @%p1 cp.async.bulk.shared::cta.global.{TOLD} [s], [%rd3], {size}, [bar];
    {WAIT}
    barrier.cluster.arrive; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r6, %r1, 0; mapa.shared::cluster.u32 %r7, %r2, 0;
    @%p4 cp.reduce.async.bulk.shared::cluster.shared::cta.{TOLD}.{operation}.{type} [%r6], [s], {size}, [%r7+8];
    and.pred %p5, %p1, !%p2;
    @%p2 bra E; @!%p1 bra E;
    V: mbarrier.try_wait.parity.shared.b64 %p3, [bar+8], 0; @!%p3 bra V;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [s], {size};
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    E: barrier.cluster.arrive; barrier.cluster.wait;"""
    body = body.replace("and.pred %p5, %p1, !%p2;\n", "")
    data = np.concatenate([old, new])
    out = outcome(kernel(body), [np.zeros_like(old), data], grid=2, cluster=2)[0]
    assert out.tobytes() == reduction(operation, type, old, new).tobytes()


def test_reductions_of_many_copies() -> None:
    """Every thread of two CTAs adds its own words to the same place."""
    body = """mad.lo.u32 %r3, %t, 16, %r1; st.shared.v4.u32 [%r3], {1, 2, %t, 4};
    fence.proxy.async;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out], [%r3], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    out = outcome(kernel(body, ""), [np.zeros(4, np.uint32)], grid=2)[0]
    assert out.tolist() == [64, 128, 2 * sum(range(32)), 256]


def test_bulk_groups() -> None:
    """wait_group.read 1: the older source may be written again, the newer not yet."""
    body = """@!%p1 bra E; mov.u32 %r4, 0;
    L: and.b32 %r5, %r4, 1; mad.lo.u32 %r6, %r5, 16, %r1; mad.wide.u32 %rd2, %r4, 16, %out;
    cp.async.bulk.wait_group.read 1;
    st.shared.v4.u32 [%r6], {%r4, %r5, %r4, 7}; fence.proxy.async;
    cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r6], 16; cp.async.bulk.commit_group;
    add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 9; @%p2 bra L;
    cp.async.bulk.wait_group 0;
    E:"""
    out = outcome(kernel(body, ""), [np.zeros((9, 4), np.uint32)])[0]
    i = np.arange(9)
    assert (out == np.stack([i, i & 1, i, np.full(9, 7)], 1)).all()
    wrong = body.replace("wait_group.read 1", "wait_group.read 2")
    for error in refusal(kernel(wrong, ""), [np.zeros((9, 4), np.uint32)]):
        assert "data race" in str(error)


def test_a_copy_that_was_not_committed_is_in_no_group() -> None:
    body = """@!%p1 bra E; st.shared.v4.u32 [%r1], {1, 1, 1, 1}; fence.proxy.async;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%r1], 16; // A
    cp.async.bulk.wait_group 0; // without commit_group: waits for nothing
    E:"""
    source = kernel(body, "")
    device = em.Device(check="exit_stores")
    with pytest.raises(em.ExitRace) as caught:
        device.launch(source, "k", 1, 32, [np.zeros(4, np.uint32)])
    assert caught.value.line == line_of(source, "// A")


def test_running_off_the_end_with_stores_in_flight() -> None:
    """The second half of a store, after its source was read, may outlive every thread."""
    body = """@!%p1 bra E; st.shared.v4.u32 [%r1], {1, 2, 3, 4}; fence.proxy.async;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%r1], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    E:"""
    source = kernel(body, "").replace("    ret;\n}", "}")
    assert outcome(source, [np.zeros(4, np.uint32)])[0].tolist() == [1, 2, 3, 4]


def test_the_mbarrier_is_where_the_data_goes() -> None:
    body = f"""@%p1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive; barrier.cluster.wait; mov.u32 %r5, %cluster_ctarank; xor.b32 %r5, %r5, 1;
    mapa.shared::cluster.u32 %r6, %r1, %r5;
    @%p1 cp.async.bulk.shared::cluster.global.{TOLD} [%r6], [%out], 16, [bar];"""
    for error in refusal(kernel(body, ""), [np.zeros(4, np.uint32)], grid=2, cluster=2):
        assert "is not in the CTA of the destination" in str(error)


def test_bounds() -> None:
    for line, says in (
        (f"cp.async.bulk.shared::cta.global.{TOLD} [s], [%out], 144, [bar];", "out of bounds"),
        (f"cp.async.bulk.shared::cta.global.{TOLD} [s+4096], [%out], 128, [bar];", "out of bounds"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%out+16], [s], 128;", "out of bounds"),
        ("cp.async.ca.shared.global [s], [%out+128], 4;", "out of bounds"),
        ("cp.async.ca.shared.global [s+4112], [%out], 4;", "out of bounds"),
    ):
        body = (
            BAR
            + f"""@!%p1 bra E;
        mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
        {line} // A
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; cp.async.wait_all;
        {WAIT} E:"""
        )
        source = kernel(body, "")
        args = [np.zeros(32, np.uint32)]
        for device in (em.Device(completion=c, check="race") for c, _ in ORDERS[:3]):
            with pytest.raises(em.PtxError, match=says) as caught:
                device.launch(source, "k", 1, 32, args)
            assert caught.value.line == line_of(source, "// A")


# Refused by ptxas 13.0, for both targets.
ILLEGAL = [
    "cp.async.wait_group %r3;",
    "cp.async.bulk.wait_group %r3;",
    f"cp.async.bulk.shared::cluster.shared::cta.{TOLD}.L2::cache_hint [%r1], [%r1], 16, [bar], %rd9;",
    f"cp.async.bulk.shared::cta.global.{TOLD}.multicast::cluster [s], [%rd1], 16, [bar], %h1;",
    f"cp.async.bulk.shared::cta.shared::cta.{TOLD} [s], [s], 16, [bar];",
    "cp.async.bulk.shared::cluster.global.bulk_group [s], [%rd1], 16;",
    "cp.async.bulk.global.shared::cluster.bulk_group [%rd1], [s], 16;",
    f"cp.async.bulk.global.shared::cta.{TOLD} [%rd1], [s], 16, [bar];",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%rd1], [s], 16;",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f32 [%rd1], [s], 16;",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s64 [%rd1], [s], 16;",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32 [%rd1], [s], 16;",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.and.u32 [%rd1], [s], 16;",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.s32 [%rd1], [s], 16;",
    f"cp.reduce.async.bulk.shared::cluster.shared::cta.{TOLD}.add.f32 [s], [s], 16, [bar];",
    f"cp.reduce.async.bulk.shared::cluster.shared::cta.{TOLD}.and.b64 [s], [s], 16, [bar];",
    f"cp.reduce.async.bulk.shared::cluster.global.{TOLD}.add.u32 [s], [%rd1], 16, [bar];",
    "cp.async.mbarrier.arrive.shared::cluster.b64 [bar];",
]


@pytest.mark.parametrize("line", ILLEGAL)
def test_illegal_forms(line: str) -> None:
    source = kernel(f"bra E;\n{line}\nE:", "")
    with pytest.raises(em.PtxError) as caught:
        em.Device().launch(source, "k", 1, 32, [np.zeros(32, np.uint32)])
    assert caught.value.line == line_of(source, line)


def test_cp_mask_is_of_sm_100() -> None:
    line = "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%out], [s], 128, %h1;"
    with pytest.raises(em.PtxError, match="needs sm_100"):
        em.Device().launch(kernel(line, ""), "k", 1, 32, [np.zeros(32, np.uint32)])


def test_prefetches_change_nothing() -> None:
    body = """cp.async.bulk.prefetch.L2.global [%out], 128;
    cp.async.bulk.prefetch.L2.global.L2::cache_hint [%out], 128, %rd9;"""
    assert (outcome(kernel(body, ""), [np.ones(32, np.uint32)])[0] == 1).all()
