"""wgmma: what the emulator says about mistakes in its use."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from ptx_kernels import line_of
from wgmma_kernels import (
    COMMIT,
    FENCE,
    SPACE,
    WAIT,
    Problem,
    Shape,
    accumulator_to_threads,
    launch,
    module,
    problem,
    run,
    single,
)

from blockscale import emulator as em

S8 = Shape("bf16", "bf16", "f32", 8)
RS = Shape("bf16", "bf16", "f32", 8, True)


def fails(p: Problem, body: str, match: str, error: type = em.PtxError, **settings: Any) -> None:
    a, b = p.descriptors
    body = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n" + body
    source = module(body, p.shape.registers, p.shape)
    with pytest.raises(error, match=match) as caught:
        run(p, source, **settings)
    assert str(line_of(source, "wgmma.mma_async")) in str(caught.value)


D = S8.instruction("d", "%rd10", "%rd11", "%pt")
R = RS.instruction("d", "{%a0,%a1,%a2,%a3}", "%rd11", "%pt")


@pytest.mark.parametrize("completion", ["eager", "late"])
@pytest.mark.parametrize(
    ("body", "match"),
    [
        (
            FENCE + D + COMMIT + "add.f32 %f0, %d3, %d3;",
            r"add.f32 reads register %d3, .* must come",
        ),
        (
            FENCE + D + COMMIT + "add.f32 %d2, %f0, %f0;",
            r"add.f32 writes register %d2, which the wg",
        ),
        (FENCE + D + WAIT + "add.f32 %f0, %d0, %d0;", r"reads register %d0, .*commit_group"),
        (FENCE + R + COMMIT + "add.u32 %a1, %t, 1;", r"add.u32 writes register %a1"),
        (
            FENCE + R + COMMIT + "@%pf add.u32 %a1, %t, 1; add.u32 %t, %a3, 1;",
            r"reads register %a3",
        ),
        (D + COMMIT + WAIT, "wgmma.fence is missing: it must come before the first"),
        (FENCE + "add.f32 %d1, %f0, %f0;" + D, "wgmma.fence is missing: register %d1 was written"),
        (
            FENCE + "ld.global.b32 %a2, [%areg];" + R,
            "wgmma.fence is missing: register %a2 was writ",
        ),
    ],
)
def test_registers_in_use(body: str, match: str, completion: str) -> None:
    p = problem(RS if "%a" in body else S8)
    body = ".reg .f32 %f<2>; mov.f32 %f0, 0f00000000;\n" + body
    fails(p, body, match, completion=completion)
    a, b = p.descriptors
    source = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n" + body + COMMIT + WAIT
    run(p, module(source, 4, p.shape), completion=completion, check=("race", "uninitialized"))


@pytest.mark.parametrize(
    ("body", "good"),
    [
        (FENCE + D + COMMIT + WAIT + "add.f32 %d1, %f0, %f0;" + D, False),
        (FENCE + D + COMMIT + WAIT + "add.f32 %d1, %f0, %f0;" + FENCE + D, True),
        (FENCE + D + COMMIT + WAIT + D, True),
        (FENCE + D + D + COMMIT + D + COMMIT + "wgmma.wait_group.sync.aligned 1;" + D, True),
        ("@%pf add.f32 %d1, %f0, %f0;" + FENCE + "@%pf add.f32 %d1, %f0, %f0;" + D, True),
    ],
)
def test_where_a_fence_is_needed(body: str, good: bool) -> None:
    p = problem(S8)
    body = ".reg .f32 %f<2>; mov.f32 %f0, 0f00000000;\n" + body + COMMIT + WAIT
    a, b = p.descriptors
    source = module(f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n" + body, 4, p.shape)
    if good:
        run(p, source)
    else:
        with pytest.raises(em.PtxError, match="fence is missing: register %d1"):
            run(p, source)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Shape("f16", "f16", "f16", 16), Shape("f16", "f16", "f32", 8)),  # another shape
        (Shape("f16", "f16", "f16", 16), Shape("f16", "f16", "f16", 8)),
    ],
)
def test_other_shape_on_the_same_accumulator(first: Shape, second: Shape) -> None:
    p = problem(first)
    other = second.instruction("d", "%rd10", "%rd11", "%pt")
    this = first.instruction("d", "%rd10", "%rd11", "%pt")
    fails(p, FENCE + this + other, "uses register %d0, which the wgmma.* and is not of its shape")
    a, b = p.descriptors
    waited = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n" + FENCE + this + COMMIT + WAIT + FENCE
    run(p, module(waited + other + COMMIT + WAIT, first.registers, first))


def test_accumulator_in_flight_as_operand() -> None:
    first = Shape("f16", "f16", "f16", 16)
    second = Shape("f16", "f16", "f16", 8, True).instruction(
        "e", "{%d0,%d1,%d2,%d3}", "%rd11", "%pt"
    )
    body = FENCE + first.instruction("d", "%rd10", "%rd11", "%pt") + second
    fails(problem(first), body, "uses register %d0, which the wgmma")


STORE = "st.shared.u32 [shared+16], %r1;\n"


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (STORE + "bar.sync 0;" + FENCE + D, "missing fence.proxy.async: wgmma.mma_async"),
        (STORE + "fence.proxy.async.shared::cta;" + FENCE + D, ""),
        ("setp.gt.u32 %p2, %t, 126; @%p2 " + STORE + "fence.proxy.async;" + FENCE + D, ""),
    ],
)
def test_proxy_fence(body: str, match: str) -> None:
    """Every warp fences what it wrote itself; a product knows what its four warps know."""
    p = problem(S8)
    if match:
        body = "setp.eq.u32 %p1, %t, 0; @%p1 " + body
        fails(p, body, match, em.DataRace, completion="eager")
        return
    a, b = p.descriptors
    source = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b}; setp.eq.u32 %p1, %t, 0;"
    run(p, module(source + "@%p1 " * body.startswith("st") + body + COMMIT + WAIT, 4, p.shape))


@pytest.mark.parametrize("completion", ["eager", "late"])
@pytest.mark.parametrize("wait", [True, False])
def test_overwriting_an_operand(wait: bool, completion: str) -> None:
    p = problem(S8)
    body = FENCE + D + COMMIT + WAIT * wait + "setp.eq.u32 %p1, %t, 5; @%p1 " + STORE
    if not wait:
        if completion == "eager":
            match = "data race: st.shared.u32 .* after the read by"
        else:
            match = "data race|fence.proxy.async"
        fails(p, body + WAIT, match, em.DataRace, completion=completion)
        return
    a, b = p.descriptors
    run(p, module(f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n" + body, 4, p.shape))


def test_warpgroups_do_not_wait_for_each_other() -> None:
    """The second one overwrites what the product of the first one may still read."""
    p = problem(S8)
    a, b = p.descriptors
    body = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n" + FENCE + D + COMMIT + WAIT
    store = "setp.eq.u32 %p1, %t, 200; @%p1 " + STORE
    out = np.zeros((256, 4), np.float32)
    launch(module(body + "bar.sync 0;" + store, 4, p.shape), p.memory, out, block=256)
    source = module(body + store, 4, p.shape)
    with pytest.raises(em.DataRace, match="nothing orders it after the read by wgmma"):
        launch(source, p.memory, out, block=256, completion="eager")


def test_each_warpgroup_needs_its_fence() -> None:
    p = problem(S8)
    a, b = p.descriptors
    body = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b}; setp.gt.u32 %p1, %t, 127; @%p1 bra go;\n"
    source = module(body + FENCE + "go:" + D + COMMIT + WAIT, 4, p.shape)
    launch(source, p.memory, np.zeros((128, 4), np.float32))
    with pytest.raises(em.PtxError, match="fence is missing: it must come before the first"):
        launch(source, p.memory, np.zeros((256, 4), np.float32), block=256)


def test_reading_what_nobody_wrote() -> None:
    p = problem(S8)
    fails(
        p,
        f"mov.b64 %rd10, {p.descriptors[0] + (SPACE >> 4)};" + FENCE + D + COMMIT + WAIT,
        "out of bounds|nobody has written",
    )
    source = single(p).replace("fill:", "mov.u32 %r2, 20000;\nfill:", 1)
    source = source.replace("@%p0 bra fill", "@%pf bra fill").replace(
        "st.shared.v4.u32", "@%pf st.shared.v4.u32"
    )
    with pytest.raises(em.Uninitialized, match=r"reads byte 0x.* nobody has written"):
        launch(
            source.replace("ld.global.v4.u32 {%r6", "@%pf ld.global.v4.u32 {%r6"),
            p.memory,
            accumulator_to_threads(p.c),
        )


@pytest.mark.parametrize(
    ("body", "block", "match"),
    [
        (
            "setp.gt.u32 %p1, %t, 95; @%p1 bra end;",
            128,
            "all of warpgroup 0: warp 3 not here; warp 3 n",
        ),
        ("setp.eq.u32 %p1, %t, 40; @%p1 bra wait;", 128, "all of warpgroup 0: warp 1 not here"),
        ("", 160, "warpgroup 1: warp 5, 6, 7 not here; warp 5, 6, 7 never comes"),
    ],
)
@pytest.mark.parametrize("what", [FENCE, FENCE + D, COMMIT, WAIT])
def test_threads_that_do_not_come(body: str, block: int, match: str, what: str) -> None:
    p = problem(S8)
    a, b = p.descriptors
    body = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b}; {body} {what}"
    body += "bra end; wait: bar.sync 1, 256; end:"
    source = (
        module(body, 4, p.shape).replace("bra end; wait", "ret; wait").replace("end:", "end: ret;")
    )
    with pytest.raises(em.Deadlock, match=re.escape(match)):
        launch(source, p.memory, np.zeros((block, 4), np.float32), block=block)


def test_a_descriptor_that_differs() -> None:
    fails(
        problem(S8),
        FENCE + "cvt.u64.u32 %rd12, %t; add.u64 %rd10, %rd10, %rd12;" + D,
        "the descriptor of A differs between threads of a warpgroup",
    )
    fails(
        problem(S8), f"mov.b64 %rd10, {1 << 14};" + FENCE + D, "descriptor of A, 0x4000: .*reserved"
    )
    fails(problem(S8), "setp.eq.u32 %pt, %t, 3;" + FENCE + D, "scale-d differs between threads")


@pytest.mark.parametrize(
    ("shape", "operands", "match"),
    [
        (
            "m64n8k16.f32.bf16.bf16",
            "{%d0,%d1,%d2}, %rd1, DESC, 1, 1, 0, 0",
            "operand 0 has 3 registers",
        ),
        ("m64n12k16.f32.bf16.bf16", "D, %rd1, DESC, 1, 1, 0, 0", "N is 12"),
        ("m64n264k16.f32.bf16.bf16", "D, %rd1, DESC, 1, 1, 0, 0", "N is 264"),
        ("m64n8k8.f32.bf16.bf16", "D, %rd1, DESC, 1, 1, 0, 0", "K is 8; .bf16.bf16 takes 16"),
        ("m64n8k16.f16.bf16.bf16", "{%a0,%a1}, %rd1, DESC, 1, 1, 0, 0", "no .f16.bf16.bf16"),
        ("m64n8k16.f32.f16.bf16", "D, %rd1, DESC, 1, 1, 0, 0", "no .f32.f16.bf16"),
        ("m64n8k16.f32.f16.f16", "D, %rd1, DESC, 2, 1, 0, 0", "operand 4, a sign, is 2"),
        ("m64n8k16.f32.f16.f16", "D, %rd1, DESC, 1, 1, 0, 2", "operand 7, a transposition, is 2"),
        ("m64n8k16.f32.f16.f16", "D, %rd1, DESC, 1, 1, 0", "7 operands, too few"),
        ("m64n8k8.f32.tf32.tf32", "D, %rd1, DESC, 1, 1, 0, 0", "8 operands, 6 are expected"),
        ("m64n8k16.f32.f16.f16", "D, A, DESC, 1, 1, 0, 0", "8 operands, 7 are expected"),
        ("m64n8k16.f32.f16.f16", "D, {%a0,%a1}, DESC, 1, 1, 0", "operand 1 has 2 registers"),
        ("m64n8k16.f32.f16.f16", "{%d0,%d1,%d2,%rd3}, %rd1, DESC, 1, 1, 0, 0", "type .b64"),
        ("m64n8k32.s32.s8.s8", "D, %rd1, DESC, 1, 1", "6 operands, 4 are expected"),
        ("m64n8k32.s32.s8.e4m3", "D, %rd1, DESC", "no .s32.s8.e4m3"),
        ("m64n8k32.f32.s8.s8", "D, %rd1, DESC, 1, 1", "no .f32.s8.s8"),
        ("m64n40k32.s32.u8.u8", "D, %rd1, DESC", "N is 40; allowed with integers above 32"),
        ("m64n8k16.satfinite.f32.f16.f16", "D, %rd1, DESC, 1, 1, 0, 0", ".satfinite goes with"),
        ("m64n8k256.s32.b1.b1.and.popc", "A, %rd1, DESC", "single-bit"),
    ],
)
def test_malformed(shape: str, operands: str, match: str) -> None:
    for short, full in (
        ("DESC", "%rd2, %pt"), ("D,", "{%d0,%d1,%d2,%d3},"), ("A,", "{%a0,%a1,%a2,%a3},"),
    ):  # fmt: skip
        operands = operands.replace(short, full)
    source = module(f"wgmma.mma_async.sync.aligned.{shape} {operands};", 4)
    with pytest.raises(em.PtxError, match=re.escape(match) + r".*\(line \d+\)"):
        launch(source, np.zeros(SPACE, np.uint8), np.zeros((128, 4), np.float32))


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (
            "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%d0}, %rd1, %rd2, %r1, 0;",
            "sparse",
        ),
        ("wgmma.fence.sync;", r"expected .sync.aligned"),
        ("wgmma.wait_group.sync.aligned %r1;", "expected a number of groups"),
    ],
)
def test_malformed_others(line: str, match: str) -> None:
    with pytest.raises(em.PtxError, match=match):
        launch(module(line, 4), np.zeros(SPACE, np.uint8), np.zeros((128, 4), np.float32))


def test_needs_sm_90a() -> None:
    source = single(problem(S8)).replace(".target sm_90a", ".target sm_90")
    with pytest.raises(em.PtxError, match=r"needs sm_90a, \.target is sm_90"):
        launch(source, np.zeros(SPACE, np.uint8), np.zeros((128, 4), np.float32))
