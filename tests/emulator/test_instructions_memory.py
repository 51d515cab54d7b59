"""Loads, stores, atomics, moves and address spaces: PTX ISA 9.7.9 and 9.7.13."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ptx_floats import add, flush
from ptx_kernels import run

from blockscale import emulator as em

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "type", ["b8", "u8", "s8", "b16", "u16", "s16", "b32", "s32", "f32", "b64", "u64", "f64"]
)
def test_load_extends_and_store_truncates(type: str) -> None:
    """Through a 64-bit register: zeros or the sign above what was loaded."""
    size = int(type[1:]) // 8
    data = RNG.integers(0, 256, 32 * size, dtype=np.uint8)
    out, back = np.zeros(32, np.uint64), np.zeros(32 * size, np.uint8)
    run(
        f"""ld.param.u64 %rd1, [in]; mad.wide.u32 %rd2, %t, {size}, %rd1;
        ld.global.{type} %rd3, [%rd2];
        mad.wide.u32 %rd4, %t, 8, %out; st.global.b64 [%rd4], %rd3;
        ld.param.u64 %rd1, [back]; mad.wide.u32 %rd2, %t, {size}, %rd1;
        st.global.b{8 * size} [%rd2], %rd3;""",
        out, data, back, parameters=".param .u64 in, .param .u64 back",
    )  # fmt: skip
    for i in range(32):
        raw = data[i * size : (i + 1) * size].tobytes()
        wanted = int.from_bytes(raw, "little", signed=type[0] == "s") & (1 << 64) - 1
        assert int(out[i]) == wanted
    assert (back == data).all()


@pytest.mark.parametrize(
    "hints",
    ["", ".nc", ".L1::no_allocate", ".relaxed.gpu", ".volatile", ".L1::evict_last.L2::128B"],
)
@pytest.mark.parametrize("vector", ["v2.b32", "v4.f32", "v2.b64", "v4.u16", "v4.u8"])
def test_vectors(vector: str, hints: str) -> None:
    count, type = int(vector[1]), vector[3:]
    size = int(type[1:]) // 8
    data = RNG.integers(0, 256, (32, count * size), dtype=np.uint8)
    out = np.zeros_like(data)
    kind = {1: "h", 2: "h", 4: "r", 8: "rd"}[size]
    names = ", ".join(f"%{kind}{i + 10}" for i in range(count))
    order = f"{hints}.global" if hints in (".relaxed.gpu", ".volatile") else f".global{hints}"
    run(
        f"""ld.param.u64 %rd1, [in]; mad.wide.u32 %rd2, %t, {count * size}, %rd1;
        ld{order}.{vector} {{{names}}}, [%rd2];
        mad.wide.u32 %rd4, %t, {count * size}, %out; st.global.{vector} [%rd4], {{{names}}};""",
        out, data, parameters=".param .u64 in",
    )  # fmt: skip
    assert (out == data).all()


def aligned(words: int) -> np.ndarray:
    """Zeros at an address that is a multiple of 32: numpy itself promises 16."""
    raw = np.zeros(words + 8, np.uint32)
    lead = -raw.ctypes.data % 32 // 4
    return raw[lead : lead + words].reshape(-1, 8)


def test_b128_and_eight_words() -> None:
    data, out = aligned(256), aligned(256)
    data[:] = RNG.integers(0, 1 << 32, (32, 8), dtype=np.uint32)
    names = "{%r10,%r11,%r12,%r13,%r14,%r15,%r16,%r17}"
    run(
        f"""ld.param.u64 %rd1, [in]; mad.wide.u32 %rd2, %t, 32, %rd1;
        mad.wide.u32 %rd4, %t, 32, %out;
        ld.global.v8.b32 {names}, [%rd2]; st.global.v8.b32 [%rd4], {names};""",
        out, data, parameters=".param .u64 in", target="sm_100a",
    )  # fmt: skip
    assert (out == data).all()
    out[:] = 0
    run(
        """.reg .b128 %q; ld.param.u64 %rd1, [in]; mad.wide.u32 %rd2, %t, 32, %rd1;
        mad.wide.u32 %rd4, %t, 32, %out;
        ld.global.b128 %q, [%rd2]; mov.b128 {%rd5, %rd6}, %q; mov.b128 %q, {%rd6, %rd5};
        st.global.b128 [%rd4+16], %q;""",
        out, data, parameters=".param .u64 in",
    )  # fmt: skip
    assert (out[:, 4:] == data[:, [2, 3, 0, 1]]).all()


def test_masked_lanes_and_sinks() -> None:
    """A sink drops its part; a false predicate stores nothing."""
    data, out = np.arange(64, dtype=np.uint32), np.zeros(32, np.uint32)
    run(
        """ld.param.u64 %rd1, [in]; mad.wide.u32 %rd2, %t, 8, %rd1;
        ld.global.v2.b32 {_, %r1}, [%rd2];
        setp.lt.u32 %p1, %t, 10; @!%p1 st.global.b32 [%at], %r1;""",
        out, data, parameters=".param .u64 in",
    )  # fmt: skip
    assert out.tolist() == [0] * 10 + [2 * i + 1 for i in range(10, 32)]


def test_pack_and_unpack() -> None:
    out = np.zeros(32, np.uint64)
    run(
        """cvt.u16.u32 %h1, %t; mov.b32 %r1, {%h1, 7}; mov.b64 %rd1, {%r1, %t};
        mov.b64 {%r2, %r3}, %rd1;
        mov.b64 {%h2, %h3, _, _}, %rd1; cvt.u32.u16 %r4, %h3; add.u32 %r2, %r2, %r4;
        mov.b64 %rd2, {%r3, %r2};
        mad.wide.u32 %rd4, %t, 8, %out; st.global.b64 [%rd4], %rd2;""",
        out,
    )  # fmt: skip
    assert out.tolist() == [i | (7 << 16 | i) + 7 << 32 for i in range(32)]


def test_spaces_and_generic_addresses() -> None:
    """One generic load reads shared, local and global memory in neighbouring lanes."""
    out = np.zeros(32, np.uint32)
    run(
        """.shared .align 4 .b32 s[32]; .local .align 4 .b32 mine[2];
        mov.u32 %r1, s; mad.lo.u32 %r2, %t, 4, %r1; add.u32 %r3, %t, 100; st.shared.u32 [%r2], %r3;
        add.u32 %r3, %t, 200; st.local.u32 [mine+4], %r3; st.local.u32 [mine], 1;
        add.u32 %r3, %t, 300; st.global.u32 [%at], %r3;
        cvt.u64.u32 %rd1, %r2; cvta.shared.u64 %rd1, %rd1; mov.u64 %rd2, mine;
        cvta.local.u64 %rd2, %rd2; add.u64 %rd2, %rd2, 4;
        rem.u32 %r4, %t, 3; setp.eq.u32 %p1, %r4, 0; setp.eq.u32 %p2, %r4, 1;
        selp.b64 %rd3, %rd1, %rd2, %p1; selp.b64 %rd3, %rd3, %at, %p1; @%p2 mov.b64 %rd3, %rd2;
        @%p1 mov.b64 %rd3, %rd1;
        ld.u32 %r5, [%rd3]; add.u32 %r5, %r5, 1000; st.u32 [%rd3], %r5;
        isspacep.shared %p3, %rd3; isspacep.local %p4, %rd3; isspacep.global %p5, %rd3;
        selp.u32 %r6, 1, 0, %p3; selp.u32 %r7, 2, 0, %p4; selp.u32 %r8, 4, 0, %p5;
        add.u32 %r6, %r6, %r7; add.u32 %r6, %r6, %r8;
        ld.local.u32 %r9, [mine+4]; ld.shared.u32 %r10, [%r2]; @%p1 mov.u32 %r5, %r10;
        @%p2 mov.u32 %r5, %r9;
        mad.lo.u32 %r5, %r5, 10, %r6; st.global.u32 [%at], %r5;""",
        out,
    )  # fmt: skip
    for i in range(32):
        base, space = ((1100, 1), (1200, 2), (1300, 4))[i % 3]
        assert out[i] == (base + i) * 10 + space


def test_module_variables() -> None:
    """.const and .global data with initializers; a store into .const memory is refused."""
    before = """.global .align 4 .f32 g[4] = {1.5, 0f40200000, -2.0, 3.0};
    .const .align 8 .b8 c[8] = {1, 2, 3, 0xff};\n.global .u64 big = 0x1122334455667788;\n"""
    out = np.zeros(32, np.float32)
    body = """and.b32 %r1, %t, 3; mov.u64 %rd1, g; mad.wide.u32 %rd2, %r1, 4, %rd1;
        ld.global.f32 %f1, [%rd2];
        mov.u64 %rd3, c; cvt.u64.u32 %rd4, %r1; add.u64 %rd3, %rd3, %rd4;
        ld.const.u8 %r2, [%rd3]; ld.global.u8 %r3, [big+1];
        add.u32 %r2, %r2, %r3; cvt.rn.f32.u32 %f2, %r2; add.f32 %f1, %f1, %f2;
        st.global.f32 [%at], %f1;"""
    run(body, out, before=before)
    assert out[:4].tolist() == [1.5 + 1 + 0x77, 2.5 + 2 + 0x77, -2 + 3 + 0x77, 3 + 255 + 0x77]
    with pytest.raises(em.PtxError, match="read-only"):
        run("mov.u64 %rd1, c; st.b8 [%rd1], 1;", out, before=before)


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "add.u32": lambda old, b: old + b,
    "min.s32": lambda old, b: min(old - (old >> 31 << 32), b - (b >> 31 << 32)),
    "max.u32": max,
    "and.b32": lambda old, b: old & b,
    "or.b32": lambda old, b: old | b,
    "xor.b32": lambda old, b: old ^ b,
    "exch.b32": lambda old, b: b,
    "inc.u32": lambda old, b: 0 if old >= b else old + 1,
    "dec.u32": lambda old, b: b if old == 0 or old > b else old - 1,
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_take_turns(name: str, space: str) -> None:
    """Lanes that share a word see each other's results, in order; each gets the old value."""
    values, words = RNG.integers(0, 1 << 32, 64, dtype=np.uint32), 7
    values[::5] &= 3
    if name[:3] in ("inc", "dec"):
        values[:] = 5
    old, final = np.zeros(64, np.uint32), np.zeros(words, np.uint32)
    where = "%rd3" if space == "global" else "%r3"
    run(
        f""".shared .b32 s[7]; ld.param.u64 %rd1, [in]; mad.wide.u32 %rd1, %t, 4, %rd1;
        ld.global.u32 %r1, [%rd1];
        ld.param.u64 %rd2, [final]; rem.u32 %r2, %t, {words}; mad.wide.u32 %rd3, %r2, 4, %rd2;
        mov.u32 %r3, s; mad.lo.u32 %r3, %r2, 4, %r3; st.shared.u32 [%r3], 0; bar.sync 0;
        atom.relaxed.cta.{space}.{name} %r4, [{where}], %r1; st.global.u32 [%at], %r4; bar.sync 0;
        {"ld.shared.u32 %r5, [%r3]; st.global.u32 [%rd3], %r5;" if space == "shared" else ""}""",
        old, values, final, parameters=".param .u64 in, .param .u64 final", block=64,
    )  # fmt: skip
    state = [0] * words
    for i, value in enumerate(values.tolist()):
        assert old[i] == state[i % words]
        state[i % words] = ATOMICS[name](state[i % words], value) & 0xFFFFFFFF
    assert final.tolist() == state


def test_compare_and_swap_and_red() -> None:
    """A lock-free maximum through cas; red.add of 64 bits and of floats."""
    out, total, sums = np.zeros(64, np.uint32), np.zeros(1, np.uint64), np.zeros(2, np.float32)
    run(
        """ld.param.u64 %rd1, [total]; cvt.u64.u32 %rd2, %t; red.global.add.u64 [%rd1], %rd2;
        ld.param.u64 %rd3, [sums]; cvt.rn.f32.u32 %f1, %t; red.global.add.f32 [%rd3], %f1;
        ld.global.u32 %r1, [%out];
        again: max.u32 %r2, %r1, %t; atom.global.cas.b32 %r3, [%out], %r1, %r2;
        setp.ne.u32 %p1, %r3, %r1; mov.u32 %r1, %r3; @%p1 bra again;""",
        out, total, sums, parameters=".param .u64 total, .param .u64 sums", block=64,
    )  # fmt: skip
    assert out[0] == 63
    assert total[0] == sums[0] == 63 * 32


@pytest.mark.parametrize(("space", "flushes"), [("global", True), ("shared", False)])
def test_atomic_float_add_of_subnormals(space: str, flushes: bool) -> None:
    """On global memory fp32 atomic addition flushes subnormal numbers, on shared it does not."""
    a, b = 0x00000005, 0x00400000
    out = np.array([a], np.uint32)
    run(
        f""".shared .b32 s; ld.global.u32 %r1, [%out]; st.shared.u32 [s], %r1; mov.u32 %r2, s;
        mov.b32 %f1, {b};
        atom.{space}.add.f32 %f2, [{"%out" if space == "global" else "%r2"}], %f1;
        {"ld.shared.u32 %r1, [s]; st.global.u32 [%out], %r1;" if space == "shared" else ""}""",
        out, block=1,
    )  # fmt: skip
    assert out[0] == (flush(add(flush(a), flush(b), "f32")) if flushes else add(a, b, "f32"))


def test_atomic_halves() -> None:
    out = np.zeros(2, np.float16)
    run("mov.b32 %r1, 0x40003C00; red.global.add.noftz.f16x2 [%out], %r1;", out)
    assert out.tolist() == [32, 64]


def test_variables_are_arrays() -> None:
    """Those that are given; others begin with their initial values, in every launch."""
    before = ".const .u32 c = 5; .global .u32 g; .global .u32 h = 7;\n"
    body = """ld.const.u32 %r1, [c]; ld.global.u32 %r2, [g]; ld.global.u32 %r3, [h];
        add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3; bar.sync 0; st.global.u32 [%at], %r1;
        st.global.u32 [g], 1; st.global.u32 [h], 1;"""
    out, g = np.zeros(32, np.uint32), np.array([100], np.uint32)
    for total in (112, 13):  # what the kernel wrote stays
        run(body, out, before=before, variables={"g": g})
        assert (out == total).all()
        assert g == 1
    run(body, out, before=before, variables={"c": np.uint32([1000]), "g": g})
    assert (out == 1008).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"d": np.zeros(1, np.uint32)}, "reaches no 'd' .*; what it reaches is g"),
        ({"g": np.zeros(1, np.uint64)}, "variables: g: got 8 bytes; it has 4"),
        ({"g": np.zeros(8, np.uint8)[1:5]}, "variables: g: the array begins at no multiple of 4"),
    ],
)
def test_arrays_that_do_not_fit_the_variables(given: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("st.global.u32 [g], 1;", np.zeros(1), before=".global .u32 g;\n", variables=given)


def test_where_static_shared_variables_lie() -> None:
    """Those of the entry first, then of functions in the order in which it comes to name them,
    then of the module by name; what another entry has takes no room."""
    head = ".param .b64 to) {{ .reg .b64 %a, %to; ld.param.u64 %to, [to]; .shared {own};"
    tell = "mov.u64 %a, {name}; st.global.u64 [%to + {at}], %a;"
    second = head.format(own=".align 2 .b8 of_second[6]") + tell.format(name="of_second", at=8)
    first = head.format(own=".align 8 .b8 of_first[4]") + tell.format(name="of_first", at=16)
    call = "{{ .param .b64 p; st.param.b64 [p], %to; call {name}, (p); }}"
    before = f"""
        .shared .b8 lies_last[64]; .shared .b8 of_another[256]; .shared .align 16 .b8 lies_16[5];
        .func second({second} {tell.format(name="lies_last", at=24)} ret; }}
        .func first({first} {tell.format(name="lies_16", at=32)} ret; }}
        .entry another({head.format(own=".b8 of_entry[99]")} {call.format(name="first")}
        {tell.format(name="of_another", at=0)} ret; }}
        """
    body = f""".shared .b8 own[3]; .reg .b64 %a, %to; mov.b64 %to, %out;
        {tell.format(name="own", at=0)} {call.format(name="second")} {call.format(name="first")}"""
    out = np.zeros(5, np.uint64)
    run(body, out, before=before, block=1)
    wanted = {"own": 0, "of_second": 4, "of_first": 16, "lies_last": 37, "lies_16": 32}
    assert (out - 1024).tolist() == list(wanted.values())


def test_further_buffers_have_names() -> None:
    data, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    body = "ld.param.u64 %rd1, [in]; ld.global.u32 %r1, [%rd1+8]; st.global.u32 [%at], %r1;"
    for buffers in ({"data": data}, [("data", data)]):
        run(body, out, data.ctypes.data, parameters=".param .u64 in", buffers=buffers)
        assert (out == 2).all()
    with pytest.raises(ValueError, match=r"buffers\[0\]: got ndarray; expected a name"):
        run(body, out, data.ctypes.data, parameters=".param .u64 in", buffers=[data])


def test_views_of_one_array() -> None:
    """Arguments may overlap; what lies between arrays is out of bounds."""
    data = np.arange(64, dtype=np.uint32)
    out = np.zeros(32, np.uint32)
    body = """ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mad.wide.u32 %rd1, %t, 4, %rd1;
        ld.global.u32 %r1, [%rd1+64]; ld.global.u32 %r2, [%rd2]; add.u32 %r1, %r1, %r2;
        st.global.u32 [%at], %r1;"""
    for views in ((data, data[4:8]), (data[:50], data[40:]), (data[:8], data)):
        run(body, out, *views, parameters=".param .u64 a, .param .u64 b")
        assert (out == views[0][0] + 16 + np.arange(32) + views[1][0]).all()


def test_spellings_that_compilers_no_longer_use() -> None:
    """None of the hints and fences changes a value; madc.lo adds the carry of add.cc."""
    data, out = np.array([*range(31), 1 << 31], np.uint32), np.zeros(32, np.uint32)
    run(
        """barrier.cta.sync 0; membar.cta; membar.gl; membar.sys; pmevent 7; pmevent.mask 3;
        ld.param.u64 %rd1, [in]; mad.wide.u32 %rd2, %t, 4, %rd1;
        prefetchu.L1 [%rd2]; prefetch.const.tensormap [map];
        ldu.global.u32 %r1, [%rd2]; add.cc.u32 %r2, %r1, -1; madc.lo.u32 %r3, %t, 3, %r1;
        st.global.u32 [%at], %r3;""",
        out, data, parameters=".param .u64 in", before=".const .align 64 .b8 map[128];\n",
    )  # fmt: skip
    assert (out == 3 * np.arange(32) + data + (data > 0)).all()
