"""cvt.rs: a step away from zero where the random bits carry: PTX ISA 9.7.9.21."""

from __future__ import annotations

import random
import struct
from fractions import Fraction

import numpy as np
import ptx_floats as pf
import pytest
from ptx_forms import Form, check
from ptx_kernels import run
from test_instructions_convert import BITS, LARGEST, NARROW, narrow

from blockscale import emulator as em

RNG = random.Random(5)
POOL = [
    *pf.edges("f32"),
    *(struct.unpack("<I", struct.pack("<f", RNG.uniform(-7, 7)))[0] for _ in range(40)),
    *(RNG.getrandbits(32) for _ in range(10)),
]
WORDS = [0, 0xFFFFFFFF, 0x1FFF0001, 0x8000FFFF, *(RNG.getrandbits(32) for _ in range(20))]


def half(a: int, name: str, noise: int, digits: int, relu: bool, satfinite: bool) -> int:
    """The exact magnitude plus the random fraction of a step, cut off."""
    value, negative = pf.decode(a, "f32"), pf.sign(a, "f32")
    if value == pf.NAN:
        return pf.nan(name)
    if relu and negative:
        return 0
    top = pf.infinity(0, name)
    if value == pf.INFINITY:
        code = top
    else:
        down = pf.encode(abs(value), name, "rz")
        step = pf.decode(min(down + 1, top - 1), name) - pf.decode(min(down, top - 2), name)
        rest = (abs(value) - pf.decode(down, name)) / step
        code = down + (rest + Fraction(noise, 1 << digits) >= 1)
        code = top if abs(value) >= 2 * pf.decode(top - 1, name) else min(code, top)
    if satfinite:
        code = min(code, top - 1)
    return code | pf.zero(negative, name)


def halves(name: str, relu: bool, satfinite: bool) -> Form:
    digits = 13 if name == "f16" else 16
    mask = (1 << digits) - 1

    def model(a: int, b: int, word: int) -> int:
        high = half(a, name, word >> 16 & mask, digits, relu, satfinite)
        return high << 16 | half(b, name, word & mask, digits, relu, satfinite)

    marks = ".relu" * relu + ".satfinite" * satfinite
    return Form(
        f"cvt.rs{marks}.{name}x2.f32", f"{name}x2", ("f32", "f32", "b32"), model,
        target="sm_100a", pools=(POOL, POOL, WORDS),
    )  # fmt: skip


@pytest.mark.parametrize("satfinite", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_halves(name: str, relu: bool, satfinite: bool) -> None:
    check(halves(name, relu, satfinite))


def converted(
    element: str, values: np.ndarray, words: np.ndarray, relu: bool = False
) -> np.ndarray:
    """(threads, 4) codes of (threads, 4) fp32, the first source first."""
    threads, size = len(words), 4 if element == "e2m1" else 8
    out = np.zeros(threads, np.uint32)
    store = "cvt.u32.u16 %r2, %h1;" if size == 4 else ""
    run(
        f"""ld.param.u64 %rd1, [values]; mad.wide.u32 %rd1, %t, 16, %rd1;
        ld.global.v4.f32 {{%f1, %f2, %f3, %f4}}, [%rd1];
        ld.param.u64 %rd2, [words]; mad.wide.u32 %rd2, %t, 4, %rd2; ld.global.u32 %r1, [%rd2];
        cvt.rs{".relu" * relu}.satfinite.{element}x4.f32 {"%h1" if size == 4 else "%r2"},
            {{%f1, %f2, %f3, %f4}}, %r1;
        {store} st.global.u32 [%at], %r2;""",
        out, values, words, parameters=".param .u64 values, .param .u64 words",
        block=threads, target="sm_100a",
    )  # fmt: skip
    return np.stack([out >> at & (1 << size) - 1 for at in range(3 * size, -1, -size)], 1)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("element", NARROW)
def test_narrow_results_are_neighbours(element: str, relu: bool) -> None:
    """One of the two codes around the value; the code itself where it has one; saturated; no random
    bits cut off."""
    rng = np.random.default_rng(2)
    values = rng.choice(np.array(POOL, np.uint32), (256, 4))
    codes = np.arange(LARGEST[element] + 1, dtype=np.uint8).view(NARROW[element])
    levels = [Fraction(float(level)) for level in codes]
    words = rng.integers(0, 1 << 32, 256, dtype=np.uint32)
    words[::2] = 0
    got = converted(element, values.view(np.float32), words, relu)
    sign_bit = 1 << BITS[element] - 1
    for i in range(256):
        for a, code in zip(values[i].tolist(), got[i].tolist(), strict=True):
            value = pf.decode(a, "f32")
            near = narrow(a, element, "f32", relu)
            if isinstance(value, str) or abs(value) >= levels[-1] or (relu and pf.sign(a, "f32")):
                assert code == near
                continue
            assert code & sign_bit == sign_bit * pf.sign(a, "f32")
            down = max(k for k, level in enumerate(levels) if level <= abs(value))
            exact = levels[down] == abs(value) or i % 2 == 0
            assert code & ~sign_bit in ((down,) if exact else (down, down + 1))


@pytest.mark.parametrize("element", NARROW)
def test_frequency_is_the_remainder(element: str) -> None:
    """A quarter of the way to the next code: a quarter of the random numbers step there, in every
    place."""
    rng = np.random.default_rng(4)
    codes = np.arange(3, 7, dtype=np.uint8).view(NARROW[element]).astype(np.float32)
    low, high = codes[0], codes[1]
    values = np.full((1024, 4), low + (high - low) / 4, np.float32)
    got = converted(element, values, rng.integers(0, 1 << 32, 1024, dtype=np.uint32))
    share = (got == 4).mean(0)
    assert ((got == 3) | (got == 4)).all()
    assert (abs(share - 0.25) < 0.06).all()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cvt.rs.e4m3x4.f32 %r1, {%f1, %f2, %f3, %f4}, %r2;", "takes .satfinite"),
        ("cvt.rs.satfinite.e4m3x4.f32 %r1, {%f1, %f2}, %r2;", "2 sources, 4 are expected"),
        ("cvt.rs.satfinite.e4m3x2.f32 %h1, %f1, %f2, %r2;", "expected two or four"),
    ],
)
def test_refused(line: str, message: str) -> None:
    with pytest.raises(em.PtxError, match=message):
        run(line, np.zeros(32, np.uint32), target="sm_100a")
