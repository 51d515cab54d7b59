"""Comparisons of halves, and what set writes: PTX ISA 9.7.6.1, 9.7.7; redux of fp32: 9.7.13.12."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import numpy as np
import ptx_floats as pf
import pytest
from ptx_forms import Form, bits, check
from ptx_kernels import run
from test_instructions_floating import compare, extreme
from test_instructions_integer import typed

from blockscale import emulator as em

TESTS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
TRUE = {
    "u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "u16": 0xFFFF, "s16": 0xFFFF,
    "f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80,
}  # fmt: skip
LOGIC = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def forms() -> list[Form]:
    found = []

    def form(
        opcode: str, result: str, operands: str, model: Callable[..., int], line: str = ""
    ) -> None:
        found.append(Form(opcode, result, tuple(operands.split()), model, line))

    for half in ("f16", "bf16"):
        pair = f"{half}x2"
        for test in TESTS:
            one = compare(half, test)
            ways = {"d|_": (one, 0), "_|d": (one, 16), "d": (one, 0)}
            for target, (model, at) in ways.items():
                form(
                    f"setp.{test}.{pair} {target}", "pred", f"{pair} {pair}",
                    lambda a, b, f=model, at=at: f(a >> at & 0xFFFF, b >> at & 0xFFFF),
                    f"setp.{test}.{pair} {target}, a, b",
                )  # fmt: skip
            for to, true in ((pair, TRUE[half]), ("u32", 0xFFFF), ("s32", 0xFFFF)):
                form(
                    f"set.{test}.{to}.{pair}", "b32", f"{pair} {pair}",
                    lambda a, b, f=one, true=true: (
                        f(a & 0xFFFF, b & 0xFFFF) * true | (f(a >> 16, b >> 16) * true) << 16
                    ),
                )  # fmt: skip
            for to in ("u16", "s16", "u32", "s32", "bf16", *(("f16",) if half == "f16" else ())):
                form(
                    f"set.{test}.{to}.{half}", to, f"{half} {half}",
                    lambda a, b, f=one, true=TRUE[to]: f(a, b) * true,
                )  # fmt: skip
        for name, function in LOGIC.items():
            less = compare(half, "lt")
            form(
                f"setp.lt.{name}.{pair} _|d", "pred", f"{pair} {pair} pred",
                lambda a, b, p, f=function, less=less: f(less(a >> 16, b >> 16), not p),
                f"setp.lt.{name}.{pair} _|d, a, b, !c",
            )  # fmt: skip
            form(
                f"set.lt.{name}.u16.{half}", "u16", f"{half} {half} pred",
                lambda a, b, p, f=function, less=less: f(less(a, b), bool(p)) * 0xFFFF,
            )  # fmt: skip
    less = compare("f16", "lt")
    form(
        "setp.lt.ftz.f16", "pred", "f16 f16",
        lambda a, b: less(pf.flush(a, "f16"), pf.flush(b, "f16")),
    )  # fmt: skip
    for source in ("u16", "s64", "f32", "f64"):
        for to in ("f16", "bf16", "f32", "s32"):
            model = compare(source, "lt") if source[0] == "f" else typed(source, operator.lt)
            form(
                f"set.lt.{to}.{source}", to, f"{source} {source}",
                lambda a, b, f=model, true=TRUE[to]: f(a, b) * true,
            )  # fmt: skip
    for t in ("b16", "b32", "b64"):
        form(f"setp.ne.{t}", "pred", f"{t} {t}", operator.ne)
    return found


@pytest.mark.sampled(45)
@pytest.mark.parametrize("form", forms(), ids=str)
def test_compare(form: Form) -> None:
    assert bits(form.result) in (16, 32)
    check(form)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("setp.lt.bf16 %p1|%p2, %h1, %h2;", "takes one predicate"),
        ("setp.lt.ftz.bf16 %p1, %h1, %h2;", ".ftz is not supported"),
        ("setp.ltu.u32 %p1, %r1, %r2;", "not supported with .u32"),
        ("setp.lo.s32 %p1, %r1, %r2;", "not supported with .s32"),
        ("setp.lt.b32 %p1, %r1, %r2;", "not supported with .b32"),
        ("set.lt.f16x2.bf16x2 %r1, %r2, %r3;", "f16x2, bf16x2 are not supported"),
        ("set.lt.f16.bf16 %h1, %h2, %h3;", "f16, bf16 are not supported"),
        ("set.lt.u16.f32 %h1, %f2, %f3;", "u16, f32 are not supported"),
        ("set.lt.ftz.bf16.f16 %h1, %h2, %h3;", "are not supported"),
        ("redux.sync.min.f32 %f1, %f2, -1;", "needs sm_100f"),
        ("redux.sync.min.NaN.s32 %r1, %r2, -1;", "need .f32"),
    ],
)
def test_refused(line: str, message: str) -> None:
    with pytest.raises(em.PtxError, match=message):
        run(line, np.zeros(32, np.uint32))


@pytest.mark.parametrize("mark", ["", ".abs", ".NaN", ".abs.NaN"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_redux_of_floats(name: str, mark: str) -> None:
    """Of two halves of a warp apart, with NaN and zeros of both signs among the values."""
    values = np.array(pf.edges("f32"), np.uint32)
    model = extreme("f32", name == "min", "NaN" in mark, absolute="abs" in mark)
    rng = np.random.default_rng(3)
    for _ in range(30):
        data = rng.choice(values[rng.permutation(len(values))[:6]], 32)
        out = np.zeros(32, np.uint32)
        run(
            f"""ld.param.u64 %rd1, [in]; mad.wide.u32 %rd1, %t, 4, %rd1; ld.global.f32 %f1, [%rd1];
            setp.lt.u32 %p1, %t, 16; selp.b32 %r1, 0xffff, 0xffff0000, %p1;
            redux.sync.{name}{mark}.f32 %f2, %f1, %r1; st.global.f32 [%at], %f2;""",
            out, data, parameters=".param .u64 in", target="sm_100a",
        )  # fmt: skip
        for half in (slice(16), slice(16, 32)):
            wanted = functools.reduce(model, data[half].tolist())
            assert (out[half] == wanted).all()
