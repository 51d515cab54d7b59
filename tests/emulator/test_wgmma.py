"""wgmma: every kind of product against numpy, and the order in which products are made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from wgmma_kernels import (
    COMMIT,
    FENCE,
    LINE,
    WAIT,
    Problem,
    Shape,
    a_to_threads,
    accumulator_to_threads,
    launch,
    module,
    problem,
    run,
    single,
)

from blockscale import emulator as em

POLICIES = [("eager", 0), ("late", 0), ("random", 1), ("random", 2)]
PAIRS = [
    ("tf32", "tf32", "f32"), ("bf16", "bf16", "f32"), ("f16", "f16", "f32"), ("f16", "f16", "f16"),
    *[(a, b, d) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for d in ("f32", "f16")],
]  # fmt: skip


@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize(("a", "b", "d"), PAIRS)
def test_types(a: str, b: str, d: str, from_registers: bool) -> None:
    p = problem(Shape(a, b, d, 16, from_registers))
    got = run(p, single(p))
    assert (got == accumulator_to_threads(p.expected())).all()
    close = accumulator_to_threads(p.rounded())
    step = 2e-3 if d == "f16" or a[0] == "e" else 1e-3 if a == "tf32" else 1e-5
    assert np.abs(got - close).max() < step * np.abs(close).max()


@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize("n", [24, 48])
@pytest.mark.parametrize(("a", "b"), [(a, b) for a in ("s8", "u8") for b in ("s8", "u8")])
def test_integers(a: str, b: str, n: int, from_registers: bool) -> None:
    """Sums wrap, or with .satfinite stay within 32 bits."""
    p, rng = problem(Shape(a, b, "s32", n, from_registers)), np.random.default_rng(1)
    p.c[:] = rng.choice([-(1 << 31), (1 << 31) - 1, 0, 1000], p.c.shape)
    total = p.a.astype(np.int64) @ p.b.T.astype(np.int64)
    wrapped = (total + p.c).astype(np.int32)
    clamped = np.clip(total + p.c, -(1 << 31), (1 << 31) - 1).astype(np.int32)
    assert (wrapped != clamped).any()
    assert (run(p, single(p)) == accumulator_to_threads(wrapped)).all()
    source = single(p).replace(".s32.", ".satfinite.s32.", 1)
    assert (run(p, source) == accumulator_to_threads(clamped)).all()
    assert (run(p, single(p, "%pf")) == accumulator_to_threads(total.astype(np.int32))).all()


@pytest.mark.parametrize("n", [8, 24, 64, 136, 256])
@pytest.mark.parametrize("d", ["f32", "f16"])
def test_columns(n: int, d: str) -> None:
    p = problem(Shape("f16", "f16", d, n))
    assert (run(p, single(p)) == accumulator_to_threads(p.expected())).all()


@pytest.mark.parametrize("majors", ["kk", "mk", "km", "mm"])
@pytest.mark.parametrize("swizzle", list(LINE))
def test_layouts(swizzle: str, majors: str) -> None:
    major_a, major_b = ("mn" if m == "m" else "k" for m in majors)
    p = problem(Shape("bf16", "bf16", "f32", 64, False, swizzle, major_a, major_b))
    assert (run(p, single(p)) == accumulator_to_threads(p.expected())).all()


@pytest.mark.parametrize("swizzle", list(LINE))
@pytest.mark.parametrize("kind", ["e4m3", "tf32"])
def test_layouts_of_other_sizes(kind: str, swizzle: str) -> None:
    p = problem(Shape(kind, kind, "f32", 24, swizzle=swizzle))
    assert (run(p, single(p)) == accumulator_to_threads(p.expected())).all()


@pytest.mark.parametrize("from_registers", [False, True])
def test_b_transposed_with_a_from_registers(from_registers: bool) -> None:
    p = problem(Shape("f16", "f16", "f32", 32, from_registers, major_b="mn"))
    assert (run(p, single(p)) == accumulator_to_threads(p.expected())).all()


@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize("signs", [(-1, 1), (1, -1), (-1, -1)])
@pytest.mark.parametrize("kind", ["e5m2", "bf16", "tf32"])
def test_signs(kind: str, signs: tuple[int, int], from_registers: bool) -> None:
    p = problem(Shape(kind, kind, "f32", 8, from_registers, signs=signs))
    assert (run(p, single(p)) == accumulator_to_threads(p.expected())).all()


def test_without_accumulator() -> None:
    p = problem(Shape("f16", "f16", "f32", 8))
    p.c[:] = np.nan
    got = run(p, single(p, "%pf"))
    assert (got == accumulator_to_threads(p.expected(accumulate=False))).all()


@pytest.mark.undefined
def test_exact() -> None:
    p = problem(Shape("e4m3", "e4m3", "f32", 64))
    exact = accumulator_to_threads(p.rounded()).astype(np.float32)
    assert (run(p, single(p), exact=True) == exact).all()
    assert (run(p, single(p)) != exact).any()


# --- groups and several products ------------------------------------------------------------------


def chain(p: Problem, count: int, between: str = "", wait: str = COMMIT + WAIT) -> str:
    a, b = p.descriptors
    body = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n{FENCE}"
    body += between.join(p.shape.instruction("d", "%rd10", "%rd11", "%pt") for _ in range(count))
    return module(body + wait, p.shape.registers, p.shape)


@pytest.mark.parametrize(("completion", "seed"), POLICIES)
@pytest.mark.parametrize("between", ["", COMMIT, COMMIT + FENCE, COMMIT + WAIT])
def test_several_products(completion: str, seed: int, between: str) -> None:
    p = problem(Shape("e4m3", "e5m2", "f32", 16))
    got = run(p, chain(p, 3, between), completion=completion, seed=seed)
    wanted = p
    for _ in range(3):
        wanted = replace(wanted, c=wanted.expected())
    assert (got == accumulator_to_threads(wanted.c)).all()


@pytest.mark.parametrize("seed", range(4))
def test_products_keep_their_order(seed: int) -> None:
    """The second one overwrites what the first one made."""
    p = problem(Shape("f16", "f16", "f16", 8))
    a, b = p.descriptors
    body = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n{FENCE}"
    for scale_d in ("%pt", "%pf"):
        body += p.shape.instruction("d", "%rd10", "%rd11", scale_d) + COMMIT
    got = run(p, module(body + WAIT, 2, p.shape), completion="random", seed=seed)
    assert (got == accumulator_to_threads(p.expected(False))).all()


@pytest.mark.parametrize(("completion", "seed"), POLICIES)
def test_two_warpgroups(completion: str, seed: int) -> None:
    """Each its own A (rows of 64) and accumulators; diverging lanes meet again before."""
    p = problem(Shape("f16", "f16", "f32", 16, True))
    second = problem(Shape("f16", "f16", "f32", 16, True), seed=1)
    _, b = p.descriptors
    body = f"""mov.b64 %rd11, {b}; and.b32 %r4, %t, 5; setp.eq.u32 %p1, %r4, 1; @%p1 bra odd;
    add.u32 %r5, %r4, 1; bra.uni join; odd: add.u32 %r5, %r4, 2;
    add.u32 %r5, %r5, 3; join: {FENCE}"""
    body += p.shape.instruction("d", "{%a0,%a1,%a2,%a3}", "%rd11", "%pt") + COMMIT + WAIT
    out = np.concatenate([accumulator_to_threads(x.c) for x in (p, second)])
    regs = np.concatenate([a_to_threads(x.a) for x in (p, second)])
    launch(module(body, 8, p.shape), p.memory, out, regs, 256, completion=completion, seed=seed)
    second.b = p.b
    wanted = [accumulator_to_threads(x.expected()) for x in (p, second)]
    assert (out == np.concatenate(wanted)).all()


def two_groups(p: Problem, more: str = "") -> str:
    """D and %e each get a product, in a group of its own; then all but one group are waited for."""
    a, b = p.descriptors
    body = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n{FENCE}"
    for name in "de":
        body += p.shape.instruction(name, "%rd10", "%rd11", "%pf") + COMMIT
    return module(body + "wgmma.wait_group.sync.aligned 1;\n" + more, 4, p.shape)


STORE_E = "".join(f"st.global.f32 [%areg+{4 * i}], %e{i};\n" for i in range(4))


@pytest.mark.undefined
def test_wait_group_finishes_the_older() -> None:
    p = problem(Shape("bf16", "bf16", "f32", 8))
    wanted, seen = accumulator_to_threads(p.expected(False)), np.zeros((128, 4), np.float32)
    out = np.zeros_like(wanted)
    source = two_groups(p, STORE_E + WAIT)
    launch(source, p.memory, out, seen, completion="late", check="race")
    assert (out == wanted).all()
    assert (seen != wanted).all()  # the younger product has not been made
    out[:] = 0
    launch(two_groups(p, WAIT + STORE_E), p.memory, out, seen, completion="late")
    assert (out == wanted).all()
    assert (seen == wanted).all()
    for completion in ("late", "eager"):
        with pytest.raises(em.PtxError, match=r"st.global.f32 reads register %e0, which the wgmma"):
            launch(source, p.memory, out, seen, completion=completion)


@pytest.mark.parametrize(("completion", "seed"), POLICIES)
def test_moves_go_along(completion: str, seed: int) -> None:
    """Compilers copy accumulators between products, and pack halves."""
    p = problem(Shape("f16", "f16", "f16", 8))
    a, b = p.descriptors
    body = f"""mov.b64 %rd10, {a}; mov.b64 %rd11, {b}; .reg .b16 %low, %high;\n{FENCE}"""
    body += "mov.b32 %e0, %d0; mov.b32 %e1, %d1;\n"
    body += p.shape.instruction("e", "%rd10", "%rd11", "%pt")
    body += "mov.b32 {%low, %high}, %e0; mov.b32 %d0, {%low, %high}; mov.b32 %d1, %e1;\n"
    body += p.shape.instruction("d", "%rd10", "%rd11", "%pt") + COMMIT + WAIT
    got = run(p, module(body, 2, p.shape), completion=completion, seed=seed)
    twice = replace(p, c=p.expected())
    assert (got == accumulator_to_threads(twice.expected())).all()
