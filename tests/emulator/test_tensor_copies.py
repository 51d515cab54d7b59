"""cp.async.bulk.tensor and relatives in kernels: PTX ISA 9.7.9.27, layouts of 5.5.

What a tensor map means byte for byte is in test_tensormap_copies.py; here the model is one element
at a time, and the instructions around it count.
"""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from asynchronous import outcome, refusal
from ptx_kernels import line_of, text

from blockscale import emulator as em

RNG = np.random.default_rng(27)
TOLD = "mbarrier::complete_tx::bytes"
PARAMETERS = ".param .u64 in, .param .align 64 .b8 tm[128]"
HEAD = """.shared .align 1024 .b8 s[16384]; .shared .align 8 .b64 bar;
    mov.u32 %r1, s; setp.eq.u32 %p1, %t, 0; mov.u32 %r2, bar; ld.param.u64 %rd1, [in];
    mov.b64 %rd2, tm; cvta.param.u64 %rd2, %rd2; mov.u32 %r20, %cluster_ctarank;
"""
BAR = """@%p1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;\n"
#: XORed into the address: bits 7 and up, at bit 4.
SWIZZLES = {"none": 0, "32B": 1, "64B": 3, "128B": 7}


def kernel(body: str, target: str = "sm_90a") -> str:
    return text(HEAD + body, PARAMETERS, target=target)


def swizzle(offset: int, name: str) -> int:
    return offset ^ (offset >> 7 & SWIZZLES[name]) << 4


def image(
    array: np.ndarray, box: Sequence[int], starts: Sequence[int], name: str = "none"
) -> np.ndarray:
    """What a load puts into shared memory; ``box`` and ``starts`` innermost first."""
    size = array.itemsize
    out = np.zeros(int(np.prod(box)) * size, np.uint8)
    for place, index in enumerate(itertools.product(*map(range, box[::-1]))):
        at = tuple(i + s for i, s in zip(index, starts[::-1], strict=True))
        if all(0 <= i < n for i, n in zip(at, array.shape, strict=True)):
            for byte in range(size):
                where = swizzle(place * size + byte, name)
                out[where] = array[at].tobytes()[byte]
    return out


def load_body(
    count: int, size: int, starts: Sequence[int], target: str, more: str = "", hint: str = ""
) -> str:
    """Load a box, then copy the whole image to ``out``."""
    where = ", ".join(map(str, starts))
    return (
        BAR
        + f"""@!%p1 bra N;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], {size};
    cp.async.bulk.tensor.{count}d.{target}.global{more}.{TOLD}{hint} [s], [%rd2, {{{where}}}], [bar]{", %rd9" if hint else ""};
    N: {WAIT}
    shl.b32 %r4, %t, 2;
    L: add.u32 %r5, %r1, %r4; ld.shared.u32 %r6, [%r5];
    cvt.u64.u32 %rd3, %r4; add.u64 %rd3, %rd3, %out; st.global.u32 [%rd3], %r6;
    add.u32 %r4, %r4, 256; setp.lt.u32 %p2, %r4, {size}; @%p2 bra L;"""
    )


def store_body(
    count: int,
    size: int,
    starts: Sequence[int],
    verb: str = "cp.async",
    mode: str = "",
    hint: str = "",
) -> str:
    """Take the image from ``in``, then store it."""
    where = ", ".join(map(str, starts))
    return f"""shl.b32 %r4, %t, 2;
    L: cvt.u64.u32 %rd3, %r4; add.u64 %rd3, %rd3, %rd1; ld.global.u32 %r6, [%rd3];
    add.u32 %r5, %r1, %r4; st.shared.u32 [%r5], %r6;
    add.u32 %r4, %r4, 256; setp.lt.u32 %p2, %r4, {size}; @%p2 bra L;
    fence.proxy.async.shared::cta; bar.sync 0;
    @!%p1 bra E;
    {verb}.bulk.tensor.{count}d.global.shared::cta{mode}.bulk_group{hint} [%rd2, {{{where}}}], [s]{", %rd9" if hint else ""};
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    E:"""


def random_bytes(shape: Sequence[int], dtype: Any) -> np.ndarray:
    return RNG.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8).view(dtype)[..., 0]


# dtype, shape (outermost first), box, start (innermost first), swizzle
BOXES = [
    ("u1", (304,), (256,), (64,), "none"),
    ("u4", (80,), (64,), (32,), "none"),
    ("u2", (20, 40), (32, 8), (8, 4), "64B"),
    ("u1", (40, 160), (128, 16), (16, 7), "128B"),
    ("f4", (9, 40), (32, 16), (-8, -3), "128B"),
    ("u2", (9, 24), (16, 16), (16, 2), "32B"),
    ("u1", (5, 6, 48), (32, 4, 3), (16, 3, 3), "32B"),
    ("u2", (3, 4, 5, 16), (8, 4, 2, 2), (8, 1, -1, 2), "none"),
    ("u4", (3, 2, 4, 3, 8), (4, 2, 2, 2, 2), (4, 2, 1, 1, 1), "none"),
    ("u8", (4, 6), (16, 4), (-2, 1), "128B"),
]


@pytest.mark.parametrize(("dtype", "shape", "box", "start", "name"), BOXES)
@pytest.mark.parametrize(("target", "more", "hint"), [
    ("shared::cluster", "", ""), ("shared::cta", ".tile", ".L2::cache_hint"),
])  # fmt: skip
def test_load(
    dtype: str, shape: Any, box: Any, start: Any, name: str, target: str, more: str, hint: str
) -> None:
    array = random_bytes(shape, dtype)
    wanted = image(array, box, start, name)
    body = load_body(len(shape), len(wanted), start, target, more, hint)
    args = [
        np.full(len(wanted), 77, np.uint8),
        array,
        lambda out, a: em.TensorMap.of(a, box, swizzle=name),
    ]
    assert (outcome(kernel(body), args, block=64)[0] == wanted).all()


@pytest.mark.parametrize(
    ("dtype", "shape", "box", "start", "name"), [c for c in BOXES if min(c[3]) >= 0]
)
@pytest.mark.parametrize(("mode", "hint"), [("", ""), (".tile", ".L2::cache_hint")])
def test_store(
    dtype: str, shape: Any, box: Any, start: Any, name: str, mode: str, hint: str
) -> None:
    """What is out of bounds is left out."""
    array, new = random_bytes(shape, dtype), random_bytes(shape, dtype)
    data = image(new, box, start, name)
    inside = tuple(
        slice(s, min(s + n, e)) for s, n, e in zip(start[::-1], box[::-1], shape, strict=True)
    )
    wanted = array.copy()
    wanted[inside] = new[inside]
    body = store_body(len(shape), len(data), start, mode=mode, hint=hint)
    args = [array, data, lambda a, data: em.TensorMap.of(a, box, swizzle=name)]
    assert outcome(kernel(body), args, block=64)[0].tobytes() == wanted.tobytes()


REDUCTIONS = [
    ("add", "u4"), ("add", "i4"), ("add", "u8"), ("add", "f2"), ("add", "bf16"), ("add", "f4"),
    ("min", "u4"), ("max", "i4"), ("min", "i8"), ("max", "u8"), ("min", "f2"), ("max", "bf16"),
    ("and", "u4"), ("or", "u4"), ("xor", "u8"), ("inc", "u4"), ("dec", "u4"),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "dtype"), REDUCTIONS)
def test_reduce(operation: str, dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bf16" else np.dtype(dtype)
    if dtype in ("f2", "bf16", "f4"):
        array, new = ((RNG.standard_normal((12, 64)) * 9).astype(kind) for _ in range(2))
    else:
        array, new = (random_bytes((12, 64), kind) for _ in range(2))
        new[:, ::5] = array[:, ::5]
    box, start = (16, 8), (16, 2)
    old = array[2:10, 16:32]
    data = new[2:10, 16:32]
    with np.errstate(over="ignore"):
        result = {
            "add": lambda: (old + data if kind.kind in "ui" else old.astype("f8") + data.astype("f8")),
            "min": lambda: np.minimum(old, data), "max": lambda: np.maximum(old, data),
            "and": lambda: old & data, "or": lambda: old | data, "xor": lambda: old ^ data,
            "inc": lambda: np.where(old >= data, 0, old + 1),
            "dec": lambda: np.where((old == 0) | (old > data), data, old - 1),
        }[operation]()  # fmt: skip
    wanted = array.copy()
    wanted[2:10, 16:32] = result.astype(kind)
    body = store_body(2, data.nbytes, start, "cp.reduce.async", f".{operation}.tile")
    args = [array.view(f"u{kind.itemsize}"), image(new, box, start),
            lambda a, data: em.TensorMap.of(a, box, element=ELEMENTS[dtype])]  # fmt: skip
    assert outcome(kernel(body), args, block=64)[0].tobytes() == wanted.tobytes()


ELEMENTS = {
    "u4": "u32",
    "i4": "s32",
    "u8": "u64",
    "i8": "s64",
    "f2": "f16",
    "bf16": "bf16",
    "f4": "f32",
}


@pytest.mark.parametrize("group", ["", ".cta_group::1"])
def test_gather4(group: str) -> None:
    """Four rows of a 2D tensor; one of them is out of bounds."""
    array = random_bytes((20, 128), "u2")
    wanted = np.concatenate([image(array, (64, 1), (32, row)) for row in (3, 17, -1, 3)])
    wanted = np.array([wanted[swizzle(i, "128B")] for i in range(len(wanted))])
    body = load_body(2, 512, (32, 3, 17, -1, 3), "shared::cta", ".tile::gather4")
    body = body.replace(f".{TOLD}", f".{TOLD}{group}")
    args = [
        np.zeros(512, np.uint8),
        array,
        lambda out, a: em.TensorMap.of(a, (64, 1), swizzle="128B"),
    ]
    assert (outcome(kernel(body, "sm_100a"), args, block=64, target="sm_100a")[0] == wanted).all()


def test_scatter4() -> None:
    array, new = random_bytes((20, 64), "u4"), random_bytes((4, 32), "u4")
    wanted = array.copy()
    wanted[[9, 0, 19], 8:40] = new[:3]  # the last row is out of bounds
    body = store_body(2, 512, (8, 9, 0, 19, 20), mode=".tile::scatter4")
    args = [array, new, lambda a, new: em.TensorMap.of(a, (32, 1))]
    assert (outcome(kernel(body, "sm_100a"), args, block=64, target="sm_100a")[0] == wanted).all()


def test_multicast() -> None:
    """Two ranks of four load halves of a box for ranks 0, 2 and 3."""
    array = random_bytes((32, 64), "u2")
    body = f"""@%p1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    setp.eq.u32 %p4, %r20, 1;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 2048;
    barrier.cluster.arrive; barrier.cluster.wait; mov.u16 %h1, 13; mov.u64 %rd9, 0;
    shl.b32 %r3, %r20, 3; shl.b32 %r4, %r20, 10; add.u32 %r4, %r4, %r1;
    setp.lt.u32 %p5, %r20, 2; and.pred %p5, %p5, %p1;
    @%p5 cp.async.bulk.tensor.2d.shared::cluster.global.{TOLD}.multicast::cluster.L2::cache_hint [%r4], [%rd2, {{0, %r3}}], [bar], %h1, %rd9;
    mov.u32 %r6, 0; @%p4 bra N;
    {WAIT} shl.b32 %r5, %t, 2; add.u32 %r5, %r5, %r1; ld.shared.u32 %r6, [%r5];
    N: mad.wide.u32 %at, %r20, 2048, %at; st.global.u32 [%at], %r6;
    barrier.cluster.arrive; barrier.cluster.wait;"""
    args = [np.zeros((4, 1024), np.uint16), array, lambda out, a: em.TensorMap.of(a, (64, 8))]
    out = outcome(kernel(body), args, block=512, grid=4, cluster=4)[0]
    assert (out == np.array([[1], [0], [1], [1]]) * array.reshape(-1)[:1024]).all()


def test_cta_group_2_tells_the_even_cta() -> None:
    """Both CTAs of a pair load their own half, both tell the mbarrier of the even one."""
    array = random_bytes((16, 64), "u2")
    for multicast in (False, True):
        more, mask = (".multicast::cluster", ", %h1") if multicast else ("", "")
        body = f"""@%p1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
        setp.eq.u32 %p4, %r20, 0; and.pred %p5, %p4, %p1;
        @%p5 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 2048;
        barrier.cluster.arrive; barrier.cluster.wait;
        shl.b32 %r3, %r20, 3; and.b32 %r4, %r2, 0xfeffffff; mov.u32 %r9, 1; shl.b32 %r9, %r9, %r20; cvt.u16.u32 %h1, %r9;
        @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.{TOLD}{more}.cta_group::2 [%r1], [%rd2, {{0, %r3}}], [%r4]{mask};
        @!%p4 bra N; {WAIT}
        N: barrier.cluster.arrive; barrier.cluster.wait;
        shl.b32 %r5, %t, 2; add.u32 %r5, %r5, %r1; ld.shared.u32 %r6, [%r5];
        mad.wide.u32 %at, %r20, 1024, %at; st.global.u32 [%at], %r6;"""
        args = [np.zeros((16, 64), np.uint16), array, lambda out, a: em.TensorMap.of(a, (64, 8))]
        out = outcome(
            kernel(body, "sm_100a"), args, block=256, grid=2, cluster=2, target="sm_100a"
        )[0]
        assert (out == array).all()
        plain = body.replace(".cta_group::2", "")
        if not multicast:
            for error in refusal(
                kernel(plain, "sm_100a"), args, block=256, grid=2, cluster=2, target="sm_100a"
            ):
                assert "is not in the CTA of the destination" in str(error)


def test_a_pipeline_of_tiles() -> None:
    """Load, add one, store, with two stages and four warps: the order of completion is free."""
    array = RNG.integers(0, 1000, (64, 32), np.int32)
    body = f""".shared .align 8 .b64 full[2];
    @%p1 mbarrier.init.shared.b64 [full], 1; @%p1 mbarrier.init.shared.b64 [full+8], 1;
    fence.mbarrier_init.release.cluster; bar.sync 0; mov.u32 %r8, 0; mov.u32 %r9, 0; mov.u32 %r15, full;
    @!%p1 bra L;
    mbarrier.arrive.expect_tx.shared.b64 _, [full], 1024;
    cp.async.bulk.tensor.2d.shared::cta.global.{TOLD} [s], [%rd2, {{0, 0}}], [full];
    L: and.b32 %r10, %r8, 1; shr.u32 %r11, %r8, 1; and.b32 %r11, %r11, 1;
    xor.b32 %r12, %r10, 1; add.u32 %r13, %r8, 1; shl.b32 %r14, %r13, 3;
    setp.lt.u32 %p4, %r13, 8; and.pred %p4, %p4, %p1;
    mad.lo.u32 %r16, %r12, 8, %r15; mad.lo.u32 %r17, %r12, 1024, %r1;
    @!%p4 bra N;
    cp.async.bulk.wait_group.read 0;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r16], 1024;
    cp.async.bulk.tensor.2d.shared::cta.global.{TOLD} [%r17], [%rd2, {{0, %r14}}], [%r16];
    N: mad.lo.u32 %r16, %r10, 8, %r15;
    W: mbarrier.try_wait.parity.shared.b64 %p3, [%r16], %r11; @!%p3 bra W;
    mad.lo.u32 %r17, %r10, 1024, %r1; mad.lo.u32 %r18, %t, 8, %r17;
    ld.shared.v2.u32 {{%r21, %r22}}, [%r18]; add.u32 %r21, %r21, 1; add.u32 %r22, %r22, 1;
    st.shared.v2.u32 [%r18], {{%r21, %r22}};
    fence.proxy.async.shared::cta; bar.sync 0;
    shl.b32 %r14, %r8, 3;
    @!%p1 bra M;
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {{0, %r14}}], [%r17];
    cp.async.bulk.commit_group;
    M: add.u32 %r8, %r8, 1; setp.lt.u32 %p5, %r8, 8; @%p5 bra L;
    @%p1 cp.async.bulk.wait_group 0;"""
    args = [np.zeros(4, np.uint8), array, lambda out, a: em.TensorMap.of(a, (32, 8))]
    assert (outcome(kernel(body), args, block=128)[1] == array + 1).all()


def test_prefetches_change_nothing() -> None:
    body = """@!%p1 bra E; cp.async.bulk.prefetch.tensor.2d.L2.global [%rd2, {0, 0}];
    cp.async.bulk.prefetch.tensor.2d.L2.global.tile.L2::cache_hint [%rd2, {0, 0}], %rd9;
    prefetch.tensormap [%rd2]; prefetch.param.tensormap [tm]; E:"""
    array = random_bytes((16, 16), "u4")
    args = [np.zeros(4, np.uint8), array, lambda out, a: em.TensorMap.of(a, (16, 1))]
    assert (outcome(kernel(body), args)[1] == array).all()
    body = "@%p1 cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4 [%rd2, {0, 0, 1, 2, 3}];"
    outcome(kernel(body, "sm_100a"), args, target="sm_100a")


@pytest.mark.undefined  # the map holds an address of this machine, nothing for a GPU
def test_a_map_in_global_memory() -> None:
    array = random_bytes((16, 16), "u4")
    raw = np.frombuffer(em.TensorMap.of(array, (16, 4)).encode(), np.uint8)
    body = "mov.u64 %rd2, %out;" + load_body(2, 256, (0, 8), "shared::cta")
    for completion in ("eager", "late"):
        room = np.zeros(512, np.uint8)
        out = room[-room.ctypes.data % 128 :][:256]
        out[:128] = raw
        em.Device(completion=completion).launch(kernel(body), "k", 1, 64, [out, array, bytes(128)])
        assert (out.view("u4") == array[8:12].ravel()).all()


MISUSES = [
    (
        "cp.async.bulk.tensor.1d.shared::cta.global.{TOLD} [s], [%rd2, {0}], [bar];",
        "of rank 2, not 1",
    ),
    (
        "cp.async.bulk.tensor.3d.shared::cta.global.{TOLD} [s], [%rd2, {0, 0, 0}], [bar];",
        "of rank 2, not 3",
    ),
    (
        "cp.async.bulk.tensor.2d.shared::cta.global.{TOLD} [s], [%rd2, {0, 0, 0}], [bar];",
        "coordinates",
    ),
    (
        "cp.async.bulk.tensor.2d.shared::cta.global.{TOLD} [s+64], [%rd2, {0, 0}], [bar];",
        "a multiple of 128",
    ),
    (
        "cp.async.bulk.tensor.2d.shared::cta.global.{TOLD} [s], [%rd2, {1, 0}], [bar];",
        "coordinate 1",
    ),
    (
        "cp.async.bulk.tensor.2d.shared::cta.global.{TOLD} [s], [%rd2+8, {0, 0}], [bar];",
        "a multiple of 64",
    ),
    (
        "cp.async.bulk.tensor.2d.shared::cta.global.{TOLD} [s+16384], [%rd2, {0, 0}], [bar];",
        "out of bounds",
    ),
    ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {0, -1}], [s];", "negative"),
    (
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {0, 0}], [s+16];",
        "a multiple of 128",
    ),
    (
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.inc.bulk_group [%rd2, {0, 0}], [s];",
        ".inc of f32 is not",
    ),
]


@pytest.mark.parametrize(("line", "says"), MISUSES)
def test_misuse(line: str, says: str) -> None:
    line = line.replace("{TOLD}", TOLD)
    body = (
        BAR
        + f"""@!%p1 bra E; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 64;
    {line}
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    {WAIT} E:"""
    )
    args = [
        np.zeros(4, np.uint8),
        np.zeros((8, 16), np.float32),
        lambda out, a: em.TensorMap.of(a, (16, 1)),
    ]
    for error in refusal(kernel(body), args):
        assert says in str(error), str(error)
        assert error.line == line_of(kernel(body), line)


# Refused by ptxas 13.0.
ILLEGAL = [
    ("cp.async.bulk.tensor.2d.shared::cta.global.{TOLD}.multicast::cluster [s], [%rd2, {0, 0}], [bar], %h1;", "sm_90a"),
    ("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.{TOLD} [s], [%rd2, {0, 0, 0, 0, 0}], [bar];", "sm_90a"),
    ("cp.async.bulk.tensor.3d.shared::cta.global.tile::gather4.{TOLD} [s], [%rd2, {0, 0, 0, 0, 0}], [bar];", "sm_100a"),
    ("cp.async.bulk.tensor.2d.shared::cta.global.{TOLD}.cta_group::2 [s], [%rd2, {0, 0}], [bar];", "sm_90a"),
    ("cp.async.bulk.tensor.5d.global.shared::cta.tile::scatter4.bulk_group [%rd2, {0, 0, 0, 0, 0}], [s];", "sm_100a"),
    ("cp.async.bulk.tensor.2d.global.shared::cta.tile::gather4.bulk_group [%rd2, {0, 0, 0, 0, 0}], [s];", "sm_100a"),
    ("cp.async.bulk.tensor.2d.global.shared::cluster.bulk_group [%rd2, {0, 0}], [s];", "sm_90a"),
    ("cp.async.bulk.tensor.2d.global.shared::cta.{TOLD} [%rd2, {0, 0}], [s], [bar];", "sm_90a"),
    ("cp.async.bulk.tensor.2d.shared::cta.global.bulk_group [s], [%rd2, {0, 0}];", "sm_90a"),
    ("cp.reduce.async.bulk.tensor.2d.shared::cluster.global.add.{TOLD} [s], [%rd2, {0, 0}], [bar];", "sm_90a"),
    ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {0, 0}], [s];", "sm_90a"),
    ("cp.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd2, {0, 0}], [s];", "sm_90a"),
    ("cp.async.bulk.tensor.6d.shared::cta.global.{TOLD} [s], [%rd2, {0, 0, 0, 0, 0, 0}], [bar];", "sm_90a"),
    ("cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4 [%rd2, {0, 0, 1, 2, 3}];", "sm_90a"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "target"), ILLEGAL)
def test_illegal_forms(line: str, target: str) -> None:
    line = line.replace("{TOLD}", TOLD)
    source = kernel(f"bra E;\n{line}\nE:", target)
    args = [np.zeros(4, np.uint8), np.zeros(4, np.uint8), bytes(128)]
    with pytest.raises(em.PtxError) as caught:
        em.Device(target).launch(source, "k", 1, 32, args)
    assert caught.value.line == line_of(source, line)
