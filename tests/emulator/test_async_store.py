"""st.async and red.async: PTX ISA 9.7.9.12 and 9.7.13.8. Forms as ptxas 13.0 takes them."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from asynchronous import ORDERS, outcome, refusal
from ptx_kernels import line_of, text

from blockscale import emulator as em

RNG = np.random.default_rng(912)
FEW = (*ORDERS[:2], ORDERS[-1])
TOLD = "mbarrier::complete_tx::bytes"
IN = ".param .u64 in"
#: Each CTA has bar, with the bytes to come announced, and knows s and bar of its neighbour.
HEAD = """.shared .align 128 .b8 s[2048]; .shared .align 8 .b64 bar; .reg .f64 %fd<9>; .reg .b32 %all;
    mov.u32 %r1, s; mov.u32 %r2, bar; setp.eq.u32 %p1, %t, 0; mov.u32 %r5, %cluster_ctarank;
    mov.u32 %all, %ntid.x; mad.lo.u32 %r7, %r5, %all, %t; ld.param.u64 %rd1, [in];
    @%p1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], {size};
    xor.b32 %r6, %r5, 1;
    mapa.shared::cluster.u32 %r10, %r1, %r6; mapa.shared::cluster.u32 %r11, %r2, %r6;
"""
SYNC = "barrier.cluster.arrive; barrier.cluster.wait;\n"
WAIT = (
    "W: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p3, [bar], 0; @!%p3 bra W; // WAIT\n"
)


def kernel(size: int, body: str, target: str = "sm_90a") -> str:
    return text(HEAD.format(size=size) + body + SYNC, IN, target=target)


def registers(type: str, count: int) -> str:
    kind = {"f32": "f", "f64": "fd"}.get(type, "r" if type.endswith("32") else "rd")
    first = 5 if kind[0] == "f" else 20
    names = [f"%{kind}{first + i}" for i in range(count)]
    return names[0] if count == 1 else f"{{{', '.join(names)}}}"


def at(space: str, place: str, register: str) -> str:
    """Makes 64-bit ``register`` the generic address of ``place``, or leaves it all to ``place``."""
    if space:
        return ""
    return f"cvt.u64.u32 {register}, {place}; cvta.shared::cluster.u64 {register}, {register};\n"


# --- st.async -------------------------------------------------------------------------------------

STORES = [
    *((type, count, ".shared::cluster")
      for type in ("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
      for count in (1, 2, 4) if int(type[1:]) * count <= 128),
    *((type, count, order)
      for type, count in (("b32", 1), ("f64", 2), ("s32", 4))
      for order in (".weak.shared::cluster", ".cluster.shared::cluster", ".weak", "")),
]  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("type", "count", "order"), STORES)
def test_stores_to_the_neighbour(type: str, count: int, order: str) -> None:
    """Every thread of two CTAs stores its element, at the other end."""
    size, vector = int(type[1:]) // 8 * count, f".v{count}" if count > 1 else ""
    space = "shared::cluster" if "shared" in order else ""
    to, bar = ("%r12", "%r11") if space else ("%rd12", "%rd11")
    names = registers(type, count)
    body = f"""mad.wide.u32 %rd2, %r7, {size}, %rd1; ld.global{vector}.{type} {names}, [%rd2];
    xor.b32 %r8, %t, 31; mad.lo.u32 %r12, %r8, {size}, %r10; {at(space, "%r12", "%rd12")}{at(space, "%r11", "%rd11")}
    {SYNC}
    st.async{order}.{TOLD}{vector}.{type} [{to}], {names}, [{bar}];
    {WAIT} mad.lo.u32 %r13, %t, {size}, %r1; ld.shared{vector}.{type} {names}, [%r13];
    mad.wide.u32 %rd3, %r7, {size}, %out; st.global{vector}.{type} [%rd3], {names};
    """
    data = RNG.integers(0, 256, (2, 32, size), np.uint8)
    args = [np.zeros_like(data), data]
    out = outcome(kernel(32 * size, body), args, grid=2, cluster=2, orders=FEW)[0]
    assert (out == data[::-1, ::-1]).all()


def test_stores_of_some_lanes_to_several_ctas() -> None:
    """Lane i of rank 1 stores to CTA i % 4, its own included; each barrier counts its own bytes."""
    body = f"""rem.u32 %r8, %t, 4; mapa.shared::cluster.u32 %r12, %r1, %r8; mapa.shared::cluster.u32 %r13, %r2, %r8;
    shl.b32 %r14, %t, 2; add.u32 %r12, %r12, %r14; setp.eq.u32 %p2, %r5, 1; add.u32 %r15, %t, 500;
    {SYNC}
    @%p2 st.async.shared::cluster.{TOLD}.b32 [%r12], %r15, [%r13];
    {WAIT} setp.eq.u32 %p4, %r8, %r5; add.u32 %r14, %r14, %r1; mov.u32 %r16, 0;
    @%p4 ld.shared.u32 %r16, [%r14]; mad.wide.u32 %rd3, %r7, 4, %out; st.global.u32 [%rd3], %r16;
    """
    args = [np.ones((4, 32), np.uint32), np.zeros(4, np.uint32)]
    out = outcome(kernel(32, body), args, grid=4, cluster=4)[0]
    lane, rank = np.arange(32), np.arange(4)[:, None]
    assert (out == np.where(lane % 4 == rank, lane + 500, 0)).all()


def test_immediates_and_later_phases() -> None:
    """A ping-pong: each phase rank 0 stores, rank 1 answers, through one word."""
    body = f"""mov.u32 %r8, 0; mov.u32 %r9, 0; setp.eq.u32 %p2, %r5, 0;
    {SYNC} @!%p1 bra E;
    L: @%p2 bra SEND;
    RECEIVE: and.b32 %r13, %r8, 1;
    W: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p3, [bar], %r13; @!%p3 bra W;
    ld.shared.u32 %r14, [s+4]; add.u32 %r9, %r9, %r14;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], 8;
    @%p2 bra NEXT;
    SEND: mad.lo.u32 %r15, %r5, 1000, %r8; add.u32 %r9, %r9, 1;
    st.async.shared::cluster.{TOLD}.v2.u32 [%r10], {{7, %r15}}, [%r11];
    @%p2 bra RECEIVE;
    NEXT: add.u32 %r8, %r8, 1; setp.lt.u32 %p4, %r8, 5; @%p4 bra L;
    mad.wide.u32 %rd3, %r5, 4, %out; st.global.u32 [%rd3], %r9;
    E:
    """
    out = outcome(
        kernel(8, body), [np.zeros(2, np.uint32), np.zeros(2, np.uint32)], grid=2, cluster=2
    )[0]
    sums = sum(range(5)) + 5
    assert out.tolist() == [5000 + sums, sums]


# --- red.async ------------------------------------------------------------------------------------


def wrapped(type: str, value: int) -> int:
    bits = int(type[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if type[0] == "s" and value >> bits - 1 else value


OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[[int, int], int]]] = {
    "inc": (("u32",), lambda old, new: 0 if old >= new else old + 1),
    "dec": (("u32",), lambda old, new: new if old == 0 or old > new else old - 1),
    "min": (("u32", "s32"), min),
    "max": (("u32", "s32"), max),
    "and": (("b32",), lambda old, new: old & new),
    "or": (("b32",), lambda old, new: old | new),
    "xor": (("b32",), lambda old, new: old ^ new),
    "add": (("u32", "s32", "u64", "s64"), lambda old, new: old + new),
}
REDUCTIONS = [(name, type) for name, (types, _) in OPERATIONS.items() for type in types]


def operands(type: str, shape: tuple[int, ...]) -> np.ndarray:
    values = RNG.integers(0, 256, (*shape, int(type[1:]) // 8), np.uint8)
    values[..., 0, :], values[..., 1, :-1] = 0, 0
    values[..., 3, :] = 255
    return values.view(f"{'i' if type[0] == 's' else 'u'}{int(type[1:]) // 8}")[..., 0]


@pytest.mark.sampled(11)
@pytest.mark.parametrize("space", ["shared::cluster", ""])
@pytest.mark.parametrize(("name", "type"), REDUCTIONS)
def test_reductions(name: str, type: str, space: str) -> None:
    """Lane i of each CTA combines its value with word i of the neighbour."""
    size = int(type[1:]) // 8
    new, old = registers(f"b{8 * size}", 2).strip("{}").split(", ")
    to, bar = ("%r12", "%r11") if space else ("%rd12", "%rd11")
    body = f"""mad.wide.u32 %rd2, %r7, {2 * size}, %rd1; ld.global.v2.b{8 * size} {{{new}, {old}}}, [%rd2];
    mad.lo.u32 %r13, %t, {size}, %r1; st.shared.b{8 * size} [%r13], {old};
    mad.lo.u32 %r12, %t, {size}, %r10; {at(space, "%r12", "%rd12")}{at(space, "%r11", "%rd11")}
    {SYNC}
    red.async.relaxed.cluster{"." if space else ""}{space}.{TOLD}.{name}.{type} [{to}], {new}, [{bar}];
    {WAIT} ld.shared.b{8 * size} {old}, [%r13];
    mad.wide.u32 %rd3, %r7, {size}, %out; st.global.b{8 * size} [%rd3], {old};
    """
    values = np.stack([operands(type, (2, 32)), np.roll(operands(type, (2, 32)), 3, 1)], -1)
    args = [np.zeros((2, 32), values.dtype), values]
    out = outcome(kernel(32 * size, body), args, grid=2, cluster=2, orders=FEW)[0]
    function = OPERATIONS[name][1]
    for rank in range(2):
        for lane in range(32):
            added, before = int(values[1 - rank, lane, 0]), int(values[rank, lane, 1])
            assert int(out[rank, lane]) == wrapped(type, function(before, added))


def test_lanes_that_reduce_into_one_word() -> None:
    body = f"""@%p1 st.shared.u32 [s], 1000; {SYNC}
    red.async.relaxed.cluster.shared::cluster.{TOLD}.add.u32 [%r10], %t, [%r11];
    {WAIT} ld.shared.u32 %r14, [s]; mad.wide.u32 %rd3, %r7, 4, %out; st.global.u32 [%rd3], %r14;
    """
    args = [np.zeros((2, 32), np.uint32), np.zeros(2, np.uint32)]
    assert (
        outcome(kernel(128, body), args, grid=2, cluster=2, orders=FEW)[0] == 1000 + sum(range(32))
    ).all()


def test_ctas_that_reduce_into_one_word() -> None:
    """Two warps in each of CTAs 1 to 3: relaxed reductions of one place do not race."""
    body = f"""@%p1 st.shared.u32 [s], 0; mapa.shared::cluster.u32 %r12, %r1, 0; mapa.shared::cluster.u32 %r13, %r2, 0;
    setp.ne.u32 %p2, %r5, 0; {SYNC}
    @%p2 red.async.relaxed.cluster.shared::cluster.{TOLD}.add.u32 [%r12], %r7, [%r13];
    @%p2 bra E;
    {WAIT} ld.shared.u32 %r14, [s]; st.global.u32 [%at], %r14;
    E:
    """
    args = [np.zeros(64, np.uint32), np.zeros(2, np.uint32)]
    out = outcome(kernel(3 * 64 * 4, body), args, block=64, grid=4, cluster=4)[0]
    assert (out == sum(range(64, 256))).all()


# --- what is wrong --------------------------------------------------------------------------------

BODIES = {
    "st": f"st.async.shared::cluster.{TOLD}.b32 [%r12], %t, [%r11]; // ISSUED\n",
    "red": f"red.async.relaxed.cluster.shared::cluster.{TOLD}.add.u32 [%r12], %t, [%r11]; // ISSUED\n",
}


def shared_words(before: str, after: str) -> str:
    return f"""shl.b32 %r13, %t, 2; add.u32 %r12, %r13, %r10; add.u32 %r13, %r13, %r1; st.shared.u32 [%r13], 5;
    {SYNC} {before}
    {after} mad.wide.u32 %rd3, %r7, 4, %out; st.global.u32 [%rd3], %r14;
    """


ARGS = [np.zeros((2, 32), np.uint32), np.zeros(2, np.uint32)]
READ = "ld.shared.u32 %r14, [%r13]; // READ\n"


@pytest.mark.parametrize("name", BODIES)
def test_reading_before_the_wait_is_a_race(name: str) -> None:
    right = kernel(128, shared_words(BODIES[name], WAIT + READ))
    wanted = np.arange(32) + (5 if name == "red" else 0)
    assert (outcome(right, ARGS, grid=2, cluster=2, orders=FEW)[0] == wanted).all()
    wrong = kernel(128, shared_words(BODIES[name], READ + WAIT))
    for error in refusal(wrong, ARGS, em.DataRace, grid=2, cluster=2):
        assert error.line in (line_of(wrong, "// ISSUED"), line_of(wrong, "// READ"))
        assert "async" in str(error)
        assert "ld.shared.u32" in str(error)


@pytest.mark.parametrize("name", BODIES)
def test_writing_before_the_wait_is_a_race(name: str) -> None:
    source = kernel(128, shared_words(BODIES[name], f"st.shared.u32 [%r13], 6;\n{WAIT}{READ}"))
    for error in refusal(source, ARGS, em.DataRace, grid=2, cluster=2):
        assert "st.shared.u32" in str(error)


@pytest.mark.parametrize(
    ("size", "says"),
    [(124, ("data race", "which exits without")), (132, ("4 bytes announced have not come",))],
)
@pytest.mark.parametrize("name", BODIES)
def test_wrong_bytes(name: str, size: int, says: tuple[str, ...]) -> None:
    for error in refusal(
        kernel(size, shared_words(BODIES[name], WAIT + READ)), ARGS, grid=2, cluster=2
    ):
        assert any(part in str(error) for part in says)


RUNS = [
    (f"st.async.shared::cluster.{TOLD}.b32 [%r12], %t, [bar];", "is not in the CTA of the destination"),
    (f"st.async.shared::cluster.{TOLD}.b32 [%r13], %t, [%r11];", "is not in the CTA of the destination"),
    (f"red.async.relaxed.cluster.shared::cluster.{TOLD}.add.u32 [%r13], %t, [bar];", "in the CTA that executes it"),
    (f"st.async.shared::cluster.{TOLD}.b32 [%r12+2], %t, [%r11];", "not a multiple of 4"),
    (f"st.async.shared::cluster.{TOLD}.v2.b32 [%r12], {{%t, %t}}, [%r11];", "not a multiple of 8"),
    (f"st.async.shared::cluster.{TOLD}.b32 [%r12+3000], %t, [%r11];", "out of bounds"),
    (f"st.async.shared::cluster.{TOLD}.b32 [%r12], %t, [%r11+8];", "no mbarrier|out of bounds"),
    (f"st.async.{TOLD}.b32 [%rd1], %t, [%rd1];", "not in shared memory"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "says"), RUNS)
def test_where_it_may_not_go(line: str, says: str) -> None:
    source = kernel(128, shared_words(line, WAIT + READ))
    for device in (em.Device(completion=c, check="race") for c, _ in ORDERS[:3]):
        with pytest.raises(em.PtxError, match=says) as caught:
            device.launch(source, "k", 2, 32, [a.copy() for a in ARGS], cluster=2)
        assert caught.value.line == line_of(source, line)


@pytest.mark.parametrize("name", BODIES)
def test_a_cluster_of_one(name: str) -> None:
    source = kernel(128, shared_words(BODIES[name], ""))
    with pytest.raises(em.PtxError, match="more than one CTA"):
        em.Device().launch(source, "k", 1, 32, [a.copy() for a in ARGS])


# --- into global memory ---------------------------------------------------------------------------

GLOBAL = [
    ("st.async.release.gpu.global", "u32"), ("st.async.mmio.release.sys.global", "b64"), ("st.async.release.sys", "s16"),
    ("st.async.sys.release.global", "f32"), ("st.async.release.gpu.global", "f64"),
    ("red.async.release.gpu.global.add", "u32"), ("red.async.release.sys.add", "s64"), ("red.async.mmio.release.sys.global.add", "u64"),
    ("red.async.release.gpu.global.add", "s32"),
]  # fmt: skip


@pytest.mark.parametrize(("opcode", "type"), GLOBAL)
def test_global_memory(opcode: str, type: str) -> None:
    """Every thread to a place of its own, in both CTAs of the grid to the same."""
    size = int(type[1:]) // 8
    name = "%h1" if size == 2 else registers(type, 1)
    body = f"""ld.param.u64 %rd1, [in]; mad.wide.u32 %rd2, %t, {size}, %rd1; ld.global.{type} {name}, [%rd2];
    mad.wide.u32 %rd3, %t, {size}, %out; {opcode}.{type} [%rd3], {name};"""
    source = text(".reg .f64 %fd<9>;\n" + body, IN, target="sm_100a")
    start, data = (RNG.integers(0, 100, 64).astype(f"u{size}") for _ in range(2))
    out = outcome(source, [start, data], block=64, grid=2, target="sm_100a", orders=FEW)[0]
    assert (out == (start + 2 * data if opcode.startswith("red") else data)).all()


def test_global_reductions_of_two_processes() -> None:
    body = "red.async.release.gpu.global.add.u32 [%out], %t;"
    out = np.zeros(1, np.uint32)
    em.Device("sm_100a", completion="late", workers=2).launch(
        text(body, target="sm_100a"), "k", 16, 64, [out]
    )
    assert out[0] == 16 * sum(range(64))


def test_a_global_store_faults_where_it_is_issued() -> None:
    source = text("st.async.release.gpu.global.u32 [%at+128], %t;", target="sm_100a")
    for error in refusal(source, [np.zeros(32, np.uint32)], em.MemoryFault, target="sm_100a"):
        assert error.line == line_of(source, "st.async")


# --- forms ----------------------------------------------------------------------------------------

# Refused by ptxas 13.0 for sm_90a.
SHARED_ST, SHARED_RED = f"shared::cluster.{TOLD}", f"relaxed.cluster.shared::cluster.{TOLD}"
ILLEGAL = [
    f"st.async.relaxed.cluster.{SHARED_ST}.b32 [%r1], %r2, [bar];",
    f"st.async.weak.cluster.{SHARED_ST}.b32 [%r1], %r2, [bar];",
    "st.async.shared::cluster.b32 [%r1], %r2, [bar];",
    f"st.async.{SHARED_ST}.b16 [%r1], %h1, [bar];",
    f"st.async.{SHARED_ST}.b8 [%r1], %h1, [bar];",
    f"st.async.{SHARED_ST}.b128 [%r1], %q1, [bar];",
    f"st.async.{SHARED_ST}.v4.b64 [%r1], {{%rd2, %rd3, %rd2, %rd3}}, [bar];",
    f"st.async.{SHARED_ST}.v8.b32 [%r1], {{%r2, %r3, %r2, %r3, %r2, %r3, %r2, %r3}}, [bar];",
    f"st.async.{SHARED_ST}.v2.b32 [%r1], %r2, [bar];",
    f"st.async.{SHARED_ST}.b32 [%r1], %rd2, [bar];",
    f"st.async.release.cluster.{SHARED_ST}.b32 [%r1], %r2, [bar];",
    f"st.async.global.{TOLD}.b32 [%rd1], %r2, [bar];",
    "st.async.release.gpu.global.b32 [%rd1], %r2;",
    "st.async.release.gpu.b32 [%rd1], %r2;",
    f"red.async.{SHARED_ST}.inc.u32 [%r1], %r2, [bar];",
    f"red.async.relaxed.{SHARED_ST}.inc.u32 [%r1], %r2, [bar];",
    f"red.async.weak.{SHARED_ST}.inc.u32 [%r1], %r2, [bar];",
    f"red.async.relaxed.cta.{SHARED_ST}.inc.u32 [%r1], %r2, [bar];",
    f"red.async.relaxed.gpu.{SHARED_ST}.inc.u32 [%r1], %r2, [bar];",
    f"red.async.relaxed.cluster.shared::cta.{TOLD}.inc.u32 [%r1], %r2, [bar];",
    f"red.async.relaxed.cluster.global.{TOLD}.inc.u32 [%rd1], %r2, [bar];",
    f"red.async.{SHARED_RED}.inc.s32 [%r1], %r2, [bar];",
    f"red.async.{SHARED_RED}.max.u64 [%r1], %rd2, [bar];",
    f"red.async.{SHARED_RED}.and.u32 [%r1], %r2, [bar];",
    f"red.async.{SHARED_RED}.and.b64 [%r1], %rd2, [bar];",
    f"red.async.{SHARED_RED}.add.f32 [%r1], %f1, [bar];",
    f"red.async.{SHARED_RED}.exch.b32 [%r1], %r2, [bar];",
    f"red.async.{SHARED_RED}.v2.add.u32 [%r1], {{%r2, %r3}}, [bar];",
    f"red.async.{SHARED_RED}.add.u32 [%r1], %rd2, [bar];",
    "red.async.relaxed.cluster.shared::cluster.add.u32 [%r1], %r2;",
    "red.async.release.gpu.global.add.u32 [%rd1], %r2;",
]
# And for sm_100a.
ILLEGAL_GLOBAL = [
    "st.async.release.cluster.global.b32 [%rd1], %r2;",
    "st.async.release.cta.global.b32 [%rd1], %r2;",
    "st.async.release.global.b32 [%rd1], %r2;",
    "st.async.relaxed.gpu.global.b32 [%rd1], %r2;",
    "st.async.mmio.global.b32 [%rd1], %r2;",
    "st.async.release.gpu.global.v2.b32 [%rd1], {%r2, %r3};",
    "st.async.release.gpu.global.b16 [%rd1], %r2;",
    "st.async.release.gpu.global.b32 [%rd1], %r2, [bar];",
    "st.async.release.gpu.shared::cluster.b32 [%r1], %r2;",
    f"st.async.mmio.{SHARED_ST}.b32 [%r1], %r2, [bar];",
    "red.async.release.gpu.global.min.u64 [%rd1], %rd2;",
    "red.async.release.gpu.global.add.f32 [%rd1], %f1;",
    "red.async.release.gpu.global.add.b32 [%rd1], %r2;",
    "red.async.release.cta.global.add.u32 [%rd1], %r2;",
    "red.async.global.add.u32 [%rd1], %r2;",
]


def check_form(line: str, target: str, legal: bool) -> None:
    head = ".shared .align 128 .b8 s[256]; .shared .align 8 .b64 bar; .reg .b128 %q<3>;\n"
    source = text(f"{head}bra E;\n{line}\nE:", target=target)
    device, args = em.Device(target), [np.zeros(32, np.uint32)]
    if legal:
        device.launch(source, "k", 1, 32, args)
        return
    with pytest.raises(em.PtxError) as caught:
        device.launch(source, "k", 1, 32, args)
    assert caught.value.line == line_of(source, line)


@pytest.mark.parametrize("line", ILLEGAL)
def test_illegal_forms(line: str) -> None:
    check_form(line, "sm_90a", legal=False)


@pytest.mark.parametrize("line", ILLEGAL_GLOBAL)
def test_illegal_forms_in_global_memory(line: str) -> None:
    check_form(line, "sm_100a", legal=False)


@pytest.mark.parametrize("line", [
    f"st.async.shared::cta.{TOLD}.b32 [%r1], %r2, [bar];", f"st.async.shared.{TOLD}.b32 [%r1], %r2, [bar];",
    f"st.async.{SHARED_ST}.b32 [s+4], 5, [bar+8];", f"st.async.{SHARED_ST}.f32 [%r1], %r2, [bar];",
    f"red.async.{SHARED_RED}.add.u32 [%r1], 7, [bar];", f"red.async.{SHARED_RED}.add.s64 [%r1], %rd2, [bar];",
])  # fmt: skip
def test_legal_forms(line: str) -> None:
    check_form(line, "sm_90a", legal=True)


@pytest.mark.parametrize("line", [
    "st.async.release.gpu.global.s8 [%rd1], 1;", "st.async.release.gpu.global.u16 [%rd1], %h1;", "st.async.weak.global.b32 [%rd1], %r2;",
    "red.async.release.gpu.global.inc.u32 [%rd1], %r2;", "red.async.relaxed.gpu.global.add.u32 [%rd1], %r2;",
    "red.async.release.gpu.global.and.b32 [%rd1], %r2;", "red.async.release.gpu.global.min.s32 [%rd1], %r2;",
])  # fmt: skip
def test_legal_forms_in_global_memory(line: str) -> None:
    check_form(line, "sm_100a", legal=True)


def test_targets() -> None:
    line = f"st.async.{SHARED_ST}.b32 [%r1], %r2, [bar];"
    source = text(f".shared .b64 bar;\n{line}", target="sm_80")
    with pytest.raises(em.PtxError, match="needs sm_90"):
        em.Device().launch(source, "k", 1, 32, [np.zeros(32, np.uint32)])
