"""Floating-point instructions against exact fractions: PTX ISA 9.7.3 to 9.7.5."""

from __future__ import annotations

import functools
import math
import operator
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import ptx_floats as pf
import ptx_forms
import pytest
from ptx_forms import Form, check
from ptx_kernels import run

from blockscale import emulator as em
from blockscale.emulator.ieee import exact_fp64, fma64

Model = Callable[..., int]
ROUNDINGS = ("rn", "rz", "rm", "rp")


def subtract(a: int, b: int, name: str, rounding: str = "rn") -> int:
    return pf.add(a, pf.negate(b, name), name, rounding)


ARITHMETIC: dict[str, tuple[Model, int]] = {
    "add": (pf.add, 2),
    "sub": (subtract, 2),
    "mul": (pf.multiply, 2),
    "fma": (pf.fma, 3),
}


def flushed(function: Model, name: str = "f32") -> Model:
    """.ftz: of what comes in and what goes out."""
    return lambda *v: pf.flush(function(*(pf.flush(x, name) for x in v)), name)


def saturated(function: Model, name: str) -> Model:
    one = pf.encode(pf.Fraction(1), name)

    def run(*values: int) -> int:
        out = function(*values)
        if pf.decode(out, name) == pf.NAN or pf.sign(out, name):
            return 0
        return min(out, one)

    return run


def relu(function: Model, name: str) -> Model:
    def run(*values: int) -> int:
        out = function(*values)
        return 0 if pf.decode(out, name) != pf.NAN and pf.sign(out, name) else out

    return run


def lanes(function: Model, size: int) -> Model:
    """A function of halves on packed registers."""
    mask = (1 << size) - 1
    return lambda *v: (
        function(*(x & mask for x in v)) & mask | (function(*(x >> size for x in v)) & mask) << size
    )


def signs(a: int, name: str, flip: bool) -> int:
    """neg, or abs; an H200 gives the canonical NaN."""
    if pf.decode(a, name) == pf.NAN:
        return pf.nan(name)
    return pf.negate(a, name) if flip else a & _rest(name)


def out_of_bounds(function: Model, name: str) -> Model:
    """+0 where a factor is the NaN that stands for what lies outside of a tensor, as on an H200."""
    return lambda a, b, c: 0 if {a, b} & {0x7FF7, 0xFFF7} else function(a, b, c)


def mixed(function: Model, narrow: str, rounding: str) -> Model:
    """fp32 arithmetic whose sources but the last are narrow."""

    def run(*values: int) -> int:
        *first, last = values
        return function(*(widened(v, narrow) for v in first), last, "f32", rounding)

    return run


def widened(a: int, name: str) -> int:
    value = pf.decode(a, name)
    if isinstance(value, str):
        return pf.nan("f32") if value == pf.NAN else pf.infinity(pf.sign(a, name), "f32")
    return pf.encode(value, "f32", "rn", pf.sign(a, name))


def extreme(
    name: str, low: bool, nan: bool = False, xorsign: bool = False, absolute: bool = False
) -> Model:
    top = 1 << pf.width(name) - 1

    def run(*values: int) -> int:
        if nan and any(pf.decode(v, name) == pf.NAN for v in values):
            out = pf.nan(name)
        else:
            each = [v & top - 1 for v in values] if absolute else list(values)
            out = functools.reduce(lambda a, b: pf.pick(a, b, name, low), each)
        flips = xorsign and pf.decode(out, name) != pf.NAN
        return out ^ ((values[0] ^ values[1]) & top) if flips else out

    return run


def compare(name: str, test: str) -> Model:
    """setp: of numbers, and what a NaN makes of it."""
    base = test[:2]
    plain = {
        "eq": operator.eq,
        "ne": operator.ne,
        "lt": operator.lt,
        "le": operator.le,
        "gt": operator.gt,
        "ge": operator.ge,
    }

    def value(bits: int) -> Any:
        found = pf.decode(bits, name)
        return (-math.inf if pf.sign(bits, name) else math.inf) if found == pf.INFINITY else found

    def run(a: int, b: int) -> bool:
        unordered = pf.NAN in (pf.decode(a, name), pf.decode(b, name))
        if test in ("num", "nan"):
            return unordered == (test == "nan")
        if unordered:
            return test.endswith("u")
        return plain[base](value(a), value(b))

    return run


PROPERTIES: dict[str, Callable[[int, str], bool]] = {
    "finite": lambda a, t: not isinstance(pf.decode(a, t), str),
    "infinite": lambda a, t: pf.decode(a, t) == pf.INFINITY,
    "number": lambda a, t: pf.decode(a, t) != pf.NAN,
    "notanumber": lambda a, t: pf.decode(a, t) == pf.NAN,
    "normal": lambda a, t: (
        not isinstance(pf.decode(a, t), str)
        and (pf.flush(a, t) & _rest(t) != 0 or a & _rest(t) == 0)
    ),
    "subnormal": lambda a, t: a & _rest(t) != 0 and pf.flush(a, t) & _rest(t) == 0,
}


def _rest(name: str) -> int:
    return (1 << pf.width(name) - 1) - 1


def forms() -> list[Form]:
    found = []

    def form(opcode: str, result: str, operands: str, model: Model, **more: Any) -> None:
        found.append(Form(opcode, result, tuple(operands.split()), model, **more))  # type: ignore[arg-type]

    for name, (function, count) in ARITHMETIC.items():
        for rounding in ROUNDINGS:
            single = functools.partial(function, name="f32", rounding=rounding)
            many = " ".join(["f32"] * count)
            form(f"{name}.{rounding}.f32", "f32", many, single)
            form(f"{name}.{rounding}.ftz.f32", "f32", many, flushed(single))
            form(f"{name}.{rounding}.sat.f32", "f32", many, saturated(single, "f32"))
            double = functools.partial(function, name="f64", rounding=rounding)
            form(f"{name}.{rounding}.f64", "f64", " ".join(["f64"] * count), double, any_nan="f64")
            form(
                f"{name}.{rounding}.f32x2", "f32x2", " ".join(["f32x2"] * count),
                lanes(single, 32), target="sm_100a",
            )  # fmt: skip
        for half in ("f16", "bf16"):
            model = functools.partial(function, name=half)
            form(f"{name}.rn.{half}", half, " ".join([half] * count), model)
            form(
                f"{name}.rn.{half}x2",
                half + "x2",
                " ".join([half + "x2"] * count),
                lanes(model, 16),
            )
        half_model = functools.partial(function, name="f16")
        many = " ".join(["f16"] * count)
        form(f"{name}.rn.sat.f16", "f16", many, saturated(half_model, "f16"))
        form(f"{name}.rn.ftz.f16", "f16", many, flushed(half_model, "f16"))
    form("mad.rn.f32", "f32", "f32 f32 f32", functools.partial(pf.fma, name="f32"))
    for half in ("f16", "bf16"):
        clamped = relu(functools.partial(pf.fma, name=half), half)
        form(f"fma.rn.relu.{half}", half, f"{half} {half} {half}", clamped)
        sources = (0x7FF7, 0xFFF7, 0x7FF6, pf.nan(half), *pf.edges(half))
        for mark, model in (("", functools.partial(pf.fma, name=half)), (".relu", clamped)):
            bounded = out_of_bounds(model, half)
            form(
                f"fma.rn.oob{mark}.{half}", half, f"{half} {half} {half}", bounded,
                pools=(sources,) * 3,
            )  # fmt: skip
            pairs = [a << 16 | b for a in sources for b in sources[:6]]
            form(
                f"fma.rn.oob{mark}.{half}x2", f"{half}x2", " ".join([f"{half}x2"] * 3),
                lanes(bounded, 16), pools=(pairs,) * 3,
            )  # fmt: skip
        for name in ("add", "sub", "fma"):
            function, count = ARITHMETIC[name]
            for rounding in ROUNDINGS:
                sources = " ".join([half] * (count - 1) + ["f32"])
                model = mixed(function, half, rounding)
                form(f"{name}.{rounding}.f32.{half}", "f32", sources, model, target="sm_100a")
            form(
                f"{name}.rz.sat.f32.{half}", "f32", sources,
                saturated(mixed(function, half, "rz"), "f32"), target="sm_100a",
            )  # fmt: skip
    for name in ("min", "max"):
        low = name == "min"
        for t in ("f32", "f16", "bf16"):
            two = f"{t} {t}"
            form(f"{name}.{t}", t, two, extreme(t, low))
            form(f"{name}.NaN.{t}", t, two, extreme(t, low, nan=True))
            form(f"{name}.xorsign.abs.{t}", t, two, extreme(t, low, xorsign=True, absolute=True))
        form(f"{name}.ftz.f32", "f32", "f32 f32", flushed(extreme("f32", low)))
        form(f"{name}.f16x2", "f16x2", "f16x2 f16x2", lanes(extreme("f16", low), 16))
        form(f"{name}.NaN.bf16x2", "bf16x2", "bf16x2 bf16x2", lanes(extreme("bf16", low, True), 16))
        form(f"{name}.f64", "f64", "f64 f64", extreme("f64", low), any_nan="f64")
        for mark, more in (
            (".NaN", {"nan": True}),
            (".NaN.abs", {"nan": True, "absolute": True}),
            ("", {}),
        ):
            form(
                f"{name}{mark}.f32",
                "f32",
                "f32 f32 f32",
                extreme("f32", low, **more),
                target="sm_100a",
            )
    for t in ("f32", "f64", "f16", "bf16"):
        nan = {"any_nan": "f64"} if t == "f64" else {}
        form(f"abs.{t}", t, t, functools.partial(signs, name=t, flip=False), **nan)
        form(f"neg.{t}", t, t, functools.partial(signs, name=t, flip=True), **nan)
        for test in (
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "equ",
            "neu",
            "ltu",
            "leu",
            "gtu",
            "geu",
            "num",
            "nan",
        ):
            form(f"setp.{test}.{t}", "pred", f"{t} {t}", compare(t, test))
    form("abs.ftz.f32", "f32", "f32", lambda a: signs(pf.flush(a), "f32", False))
    form("neg.ftz.f32", "f32", "f32", lambda a: signs(pf.flush(a), "f32", True))
    form("abs.ftz.f16", "f16", "f16", lambda a: signs(pf.flush(a, "f16"), "f16", False))
    form("abs.bf16x2", "bf16x2", "bf16x2", lanes(lambda a: signs(a, "bf16", False), 16))
    form("neg.f16x2", "f16x2", "f16x2", lanes(lambda a: signs(a, "f16", True), 16))
    less = compare("f32", "lt")
    form("setp.lt.ftz.f32", "pred", "f32 f32", lambda a, b: less(pf.flush(a), pf.flush(b)))
    form("set.gtu.u32.f32", "u32", "f32 f32", lambda a, b: -compare("f32", "gtu")(a, b))
    form(
        "slct.f32.f32", "f32", "f32 f32 f32", lambda a, b, c: a if compare("f32", "ge")(c, 0) else b
    )
    form("selp.f32", "f32", "f32 f32 pred", lambda a, b, p: a if p else b)
    for t in ("f32", "f64"):
        form(f"copysign.{t}", t, f"{t} {t}", lambda a, b, t=t: (a & _rest(t) + 1) | (b & _rest(t)))
        for name, holds in PROPERTIES.items():
            form(f"testp.{name}.{t}", "pred", t, lambda a, t=t, f=holds: f(a, t))
    one = {"f32": 0x3F800000, "f64": 0x3FF << 52}
    for rounding in ROUNDINGS:
        quotient = functools.partial(pf.divide, name="f32", rounding=rounding)
        form(f"div.{rounding}.f32", "f32", "f32 f32", quotient)
        form(f"div.{rounding}.ftz.f32", "f32", "f32 f32", flushed(quotient))
        form(f"rcp.{rounding}.f32", "f32", "f32", functools.partial(quotient, one["f32"]))
        root = functools.partial(pf.square_root, name="f32", rounding=rounding)
        form(f"sqrt.{rounding}.f32", "f32", "f32", root)
    form("div.rn.f64", "f64", "f64 f64", functools.partial(pf.divide, name="f64"), any_nan="f64")
    form("rcp.rn.f64", "f64", "f64", lambda a: pf.divide(one["f64"], a, "f64"), any_nan="f64")
    return found


@pytest.mark.sampled(46)
@pytest.mark.parametrize("form", forms(), ids=str)
def test_floating(form: Form) -> None:
    check(form)


def halfway(rng: random.Random) -> tuple[int, int, int]:
    """Operands whose exact fma lies close to the middle of two fp32 numbers."""
    a, b = (rng.getrandbits(23) | 0x3F800000 for _ in range(2))
    product = pf.decode(a, "f32") * pf.decode(b, "f32")
    near = pf.encode(product, "f32")
    gap = pf.decode(near + rng.choice((0, 1)), "f32") - product
    c = pf.encode(gap * pf.Fraction(rng.choice((1, 2, 3)), 2), "f32")
    return a, b, c ^ rng.getrandbits(1) | rng.choice((0, 1))


ONCE = [("f32", rounding) for rounding in ROUNDINGS] + [("f16", "rn"), ("bf16", "rn")]


@pytest.mark.parametrize(("name", "rounding"), ONCE)
def test_fma_is_rounded_once(name: str, rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triples for which a first rounding to fp64 or fp32 would decide the second one wrongly."""
    rng = random.Random(1)
    exponent, mantissa = pf.FORMATS[name]
    triples = [halfway(rng) for _ in range(150)] if name == "f32" else []
    one, top = ((1 << exponent - 1) - 1) << mantissa, pf.width(name) - 1
    for _ in range(150):  # 1.x * (1 + 2^-m) next to a middle, and an addend far below
        a = one | rng.getrandbits(mantissa)
        b = one + (1 << rng.randrange(mantissa))
        c = pf.encode(pf.Fraction(1, 1 << rng.randrange(2 * mantissa, 3 * mantissa + 8)), name)
        triples.append((a, b, c | rng.getrandbits(1) << top))
    monkeypatch.setattr(ptx_forms, "tuples", lambda form: triples)
    model = functools.partial(pf.fma, name=name, rounding=rounding)
    check(Form(f"fma.{rounding}.{name}", name, (name,) * 3, model))


def test_fma_of_fp64_equals_that_of_fractions() -> None:
    """Cancellation, ties that a tiny addend decides, the ends of the range, and any bits."""
    rng, n = np.random.default_rng(0), 1500
    exactly = np.vectorize(exact_fp64("fma", "rn"), [float])

    def some(bits: int, reach: int) -> np.ndarray:
        """Significands of so many bits, odd, at exponents up to ``reach``."""
        odd = rng.integers(0, 1 << bits, n) | 1
        return np.ldexp(odd.astype(float) * rng.choice([-1, 1], n), rng.integers(-reach, reach, n))

    a, b = rng.standard_normal((2, n))
    ends = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 5e-324, 1.7e308])
    cases = [
        (a, b, rng.standard_normal(n)), (a, b, -a * b), (a, b, np.nextafter(-a * b, 1)),
        (a, b, a * b * np.ldexp(rng.choice([-1, 1], n), rng.integers(-120, 120, n))),
        (some(27, 1), some(27, 1), some(1, 300)), (some(53, 60), some(2, 60), some(53, 60)),
        (some(53, 500), some(53, 500), some(53, 900)),
        rng.integers(0, 1 << 64, (3, n), np.uint64).view(np.float64),
        np.array(np.meshgrid(ends, ends, ends)).reshape(3, -1),
    ]  # fmt: skip
    with np.errstate(all="ignore"):
        for case in cases:
            got, wanted = fma64(*case), exactly(*case)
            same = got.view(np.uint64) == wanted.view(np.uint64)
            assert (same | np.isnan(got) & np.isnan(wanted)).all()


def test_approximations_are_close() -> None:
    """ex2, lg2, rsqrt, sin, cos, tanh, rcp, sqrt, div: within two units of fp32."""
    functions: dict[str, Callable[[float], float]] = {
        "ex2.approx.f32": lambda a: 2.0**a,
        "lg2.approx.f32": math.log2,
        "rsqrt.approx.f32": lambda a: a**-0.5,
        "sin.approx.f32": math.sin,
        "cos.approx.f32": math.cos,
        "tanh.approx.f32": math.tanh,
        "rcp.approx.f32": lambda a: 1 / a,
        "sqrt.approx.f32": math.sqrt,
    }
    rng = random.Random(3)
    pool = [struct.unpack("<I", struct.pack("<f", rng.uniform(0.01, 3)))[0] for _ in range(64)]

    def single(bits: int) -> float:
        return struct.unpack("<f", struct.pack("<I", bits))[0]

    for opcode, function in functions.items():
        model = lambda a, f=function: struct.unpack("<I", struct.pack("<f", f(single(a))))[0]  # noqa: E731
        check(Form(opcode, "f32", ("f32",), model, pools=(pool,)))


@pytest.mark.parametrize(
    ("opcode", "operand", "result"),
    [
        ("ex2.approx.ftz.f32", 0xFF800000, 0),
        ("ex2.approx.f32", 0x7F800000, 0x7F800000),
        ("lg2.approx.f32", 0x80000000, 0xFF800000),
        ("lg2.approx.f32", 0xBF800000, 0x7FFFFFFF),
        ("rsqrt.approx.f32", 0x80000000, 0xFF800000),
        ("rcp.approx.ftz.f32", 0x80000001, 0xFF800000),
        ("sqrt.rn.f32", 0x80000000, 0x80000000),
        ("sin.approx.f32", 0x7F800000, 0x7FFFFFFF),
        ("tanh.approx.f32", 0xFF800000, 0xBF800000),
    ],
)
def test_special_values(opcode: str, operand: int, result: int) -> None:
    check(Form(opcode, "f32", ("f32",), lambda a: result, pools=((operand,),)))


@pytest.mark.parametrize("name", ["rcp", "rsqrt"])
def test_upper_words_of_fp64(name: str) -> None:
    """9.7.3.14, 9.7.3.17: the tables, and the nearest of 20 bits; low words are ignored and 0."""
    infinite, odd = (0x7FF00000, 0xFFF00000), name == "rsqrt"
    quiet = 0x7FFFFFFF
    expected = {
        0x00000000: infinite[0], 0x80000000: infinite[1],  # zeros
        0x00000001: infinite[0], 0x80000001: infinite[1],  # subnormal numbers
        infinite[0]: 0, infinite[1]: quiet if odd else 0x80000000,
        0x7FF80000: quiet, 0xFFF80001: quiet,
        0x3FF00000: 0x3FF00000, 0x40100000: 0x3FE00000 if odd else 0x3FD00000,
        0xBFF00000: quiet if odd else 0xBFF00000,
        0x40080000: 0x3FE279A7 if odd else 0x3FD55555,  # of 3
        0x7FE00000: 0x1FF6A09E if odd else 0,  # of 2 ** 1023; 2 ** -1023 is subnormal
    }  # fmt: skip
    pool = [word << 32 | low for word in expected for low in (0, 0xFFFFFFFF)]
    model = lambda a: expected[a >> 32] << 32  # noqa: E731
    check(Form(f"{name}.approx.ftz.f64", "f64", ("f64",), model, pools=(pool,)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("add.f32.f16 %f1, %h1, %f2;", "needs sm_100, .target is sm_90a"),
        ("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;", "needs sm_100"),
        ("max.f32 %f1, %f2, %f3, %f4;", "needs sm_100"),
        ("mul.f32.f16 %f1, %h1, %f2;", "types f32, f16 are not supported"),
        ("add.sat.bf16 %h1, %h2, %h3;", "unsupported modifier"),
        ("fma.rn.relu.sat.f16 %h1, %h2, %h3, %h4;", "unsupported modifier"),
        ("fma.rn.oob.f32 %f1, %f2, %f3, %f4;", "unsupported modifier"),
        ("max.abs.f32 %f1, %f2, %f3;", "two inputs take .xorsign.abs"),
        ("min.ftz.bf16 %h1, %h2, %h3;", ".ftz is not supported"),
        ("ex2.approx.bf16 %h1, %h2;", "takes .ftz"),
        ("tanh.approx.ftz.f16 %h1, %h2;", "takes no .ftz"),
    ],
)
def test_refused(line: str, message: str) -> None:
    with pytest.raises(em.PtxError, match=message):
        run(line, np.zeros(32, np.uint32))
