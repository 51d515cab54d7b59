"""Atomics of vectors, of 128 and of 16 bits: PTX ISA 9.7.13.5 and 9.7.13.6."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_floats import add, flush
from ptx_kernels import run

from blockscale import emulator as em

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("space", [".global", ""])
@pytest.mark.parametrize("name", ["add", "min", "max"])
@pytest.mark.parametrize(
    ("count", "type"), [(2, "f16"), (4, "f16"), (8, "f16"), (2, "f16x2"), (4, "f16x2")]
)
def test_vector_atomics(name: str, count: int, type: str, space: str) -> None:
    """Each element by itself; 16 threads take turns on one of two vectors."""
    halves = count * (2 if type.endswith("x2") else 1)
    data = RNG.integers(-8, 8, (32, halves)).astype(np.float16)
    vectors = np.full((2, halves), 3, np.float16)
    old, state = np.zeros((32, halves), np.float16), vectors.copy()
    kind, size = ("r", 32) if type.endswith("x2") else ("h", 16)
    names = ", ".join(f"%{kind}{i + 10}" for i in range(count))
    pieces = [f"%{kind}{i + 10}" for i in range(count)]
    load = " ".join(f"ld.global.b{size} {p}, [%rd2+{i * size // 8}];" for i, p in enumerate(pieces))
    store = " ".join(
        f"st.global.b{size} [%rd3+{i * size // 8}], {p};" for i, p in enumerate(pieces)
    )
    run(
        f"""ld.param.u64 %rd1, [in]; mad.wide.u32 %rd2, %t, {2 * halves}, %rd1;
        mad.wide.u32 %rd3, %t, {2 * halves}, %out; {load}
        ld.param.u64 %rd4, [vectors]; and.b32 %r1, %t, 1;
        mad.wide.u32 %rd4, %r1, {2 * halves}, %rd4;
        atom{space}.{name}.noftz.v{count}.{type} {{{names}}}, [%rd4], {{{names}}}; {store}""",
        old, data, vectors, parameters=".param .u64 in, .param .u64 vectors",
    )  # fmt: skip
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[name]
    for i in range(32):
        assert (old[i] == state[i % 2]).all()
        state[i % 2] = function(state[i % 2], data[i])
    assert (vectors == state).all()


def test_vectors_of_floats_and_sinks() -> None:
    """red and atom of .v4.f32; a sink takes the whole vector, or one element."""
    sums, out = np.zeros(4, np.float32), np.zeros(32, np.float32)
    run(
        """ld.param.u64 %rd1, [sums]; cvt.rn.f32.u32 %f1, %t; mov.f32 %f2, 0f3F800000;
        red.global.add.v4.f32 [%rd1], {%f1, %f2, %f1, %f2};
        atom.add.v2.f32 _, [%rd1], {%f2, %f2};
        atom.global.add.v2.f32 {_, %f3}, [%rd1+8], {%f2, %f2}; st.global.f32 [%at], %f3;""",
        out, sums, parameters=".param .u64 sums",
    )  # fmt: skip
    assert sums.tolist() == [496 + 32, 64, 496 + 32, 64]
    assert out.tolist() == list(range(32, 64))


def test_atomics_of_128_bits() -> None:
    """An increment of a 128-bit number by cas, and exch."""
    number = np.array([2**64 - 5, 7], np.uint64)
    out = np.zeros((32, 2), np.uint64)
    run(
        """.reg .b128 %q<4>; mad.wide.u32 %rd9, %t, 16, %out; ld.param.u64 %rd1, [number];
        ld.global.b128 %q0, [%rd1];
        again: mov.b128 {%rd2, %rd3}, %q0; add.cc.u64 %rd4, %rd2, 1; addc.u64 %rd5, %rd3, 0;
        mov.b128 %q1, {%rd4, %rd5};
        atom.global.cas.b128 %q2, [%rd1], %q0, %q1; mov.b128 {%rd6, %rd7}, %q2;
        setp.ne.u64 %p1, %rd6, %rd2; setp.ne.or.u64 %p1, %rd7, %rd3, %p1;
        mov.b128 %q0, %q2; @%p1 bra again;
        atom.exch.b128 %q3, [%rd9], %q2; mov.b128 {%rd6, %rd7}, %q3;""",
        out, number, parameters=".param .u64 number",
    )  # fmt: skip
    assert number.tolist() == [27, 8]
    before = sorted(int(high) << 64 | int(low) for low, high in out)
    assert before == [(7 << 64) + 2**64 - 5 + i for i in range(32)]


def test_compare_and_swap_of_16_bits() -> None:
    """Only the half that is named changes."""
    out = np.full(32, 0x00050005, np.uint32)
    run("mov.b16 %h1, 5; mov.b16 %h2, 9; atom.global.cas.b16 %h3, [%at+2], %h1, %h2;", out)
    assert out.tolist() == [0x00090005] * 32


def test_generic_float_add_flushes_on_global_memory_only() -> None:
    out = np.array([5, 5], np.uint32)
    run(
        """.shared .b32 s; st.shared.u32 [s], 5; bar.warp.sync 3; mov.u32 %r2, s;
        cvt.u64.u32 %rd1, %r2; cvta.shared.u64 %rd1, %rd1; setp.eq.u32 %p1, %t, 0;
        selp.b64 %rd2, %out, %rd1, %p1; mov.b32 %f1, 7; atom.add.f32 %f2, [%rd2], %f1;
        bar.warp.sync 3;
        ld.shared.u32 %r1, [s];
        st.global.u32 [%out+4], %r1;""",
        out, block=2,
    )  # fmt: skip
    assert out.tolist() == [flush(add(flush(5), flush(7), "f32")), add(5, 7, "f32")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("atom.global.add.b32 %r1, [%at], %r2;", "type .b32 is not supported"),
        ("atom.global.add.s64 %rd1, [%at], %rd2;", "type .s64 is not supported"),
        ("atom.global.exch.u32 %r1, [%at], %r2;", "type .u32 is not supported"),
        ("atom.global.add.f16 %h1, [%at], %h2;", "takes .noftz"),
        ("atom.global.add.noftz.f32 %f1, [%at], %f2;", "takes no .noftz"),
        ("atom.global.min.noftz.f16 %h1, [%at], %h2;", "type .f16 is not supported"),
        ("atom.global.min.v2.f32 {%f1, %f2}, [%at], {%f1, %f2};", "type .f32 is not supported"),
        ("atom.global.exch.v2.b64 {%rd1, %rd2}, [%at], {%rd1, %rd2};", "vectors take .add"),
        ("atom.shared.add.v2.f32 {%f1, %f2}, [%r1], {%f1, %f2};", "must be in global memory"),
        ("atom.global.add.v4.f32 {%f1, %f2}, [%at], {%f1, %f2};", "2 items, not 4"),
        ("atom.global.add.b128 %r1, [%at], %r2;", "type .b128 is not supported"),
        ("red.global.exch.b32 [%at], %r2;", "operation is not supported"),
        ("red.acquire.gpu.global.add.u32 [%at], %r2;", "nothing to be acquired"),
    ],
)  # fmt: skip
def test_atomics_refused(line: str, message: str) -> None:
    with pytest.raises(em.PtxError, match=message):
        run(line, np.zeros(32, np.uint32))
