"""The grammar of PTX, and what is said of text that is none."""

from __future__ import annotations

import random

import numpy as np
import pytest
from ptx_kernels import run, text

from blockscale import emulator as em
from blockscale.emulator.ptx.parse import parse
from blockscale.emulator.ptx.program import (
    Address,
    Immediate,
    Not,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
)

OUT = np.zeros(32, np.uint32)

SAMPLE = r"""
// comment
.version 8.8
.target sm_90a, debug
.address_size 64
.file 1 "/a/b \n.cu"
.extern .shared .align 16 .b8 dynamic[];
.visible .global .align 8 .u64 table[2][3] = {1, -2, 0x10U, 0b101, 017, ~0};
.const .f32 pi = 3.25;  /* a
comment */
.extern .func (.param .b32 r) printf(.param .b64 a, .param .b64 b);
.func (.param .b32 back) twice(.param .b32 x)
{
    .reg .b32 %r<3>;
    ld.param.b32 %r1, [x]; add.s32 %r2, %r1, %r1; st.param.b32 [back], %r2; ret;
}
.visible .entry main(
    .param .u64 .ptr .global .align 16 p,
    .param .align 64 .b8 map[128]
)
.maxntid 128, 1, 1
.minnctapersm 2
.pragma "nounroll";
{
    .reg .pred %p<4>;
    .reg .b32 %r<10>, %single;
    .reg .b64 %rd<4>;
    .loc 1 12 0
    .loc 1 13 5, function_name $L__info_string0, inlined_at 1 12 0
    mov.b64 {%r1, _}, %rd1;
    @!%p1 bra $L__BB0_2;
    { .reg .b32 %r<2>; $again: mov.u32 %r1, 1; @%p2 bra $again; }
    { .reg .b32 %r<2>; $again: mov.u32 %r1, 2; @%p2 bra $again; }
    setp.lt.and.s32 %p1|%p2, %r1, -5, !%p3;
    ld.shared.v4.f32 {%r1, %r2, %r3, %r4}, [%rd2+-16];
    ld.shared.b32 %r5, [dynamic+8];
    mov.f32 %r6, 0f3F800000; mov.f64 %rd3, 0dBFF0000000000000; mov.f32 %r6, -1.5e2;
    mov.u32 %single, %tid.x;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile [%r1], [map, {%r2, %r3}], [%r4];
$L__BB0_2:
    ret;
}
.section .debug_str { $L__info_string0: .b8 95,90 { } .b32 .debug_abbrev }
"""


def test_module() -> None:
    module = parse(SAMPLE)
    assert (module.version, module.target) == ("8.8", ("sm_90a", "debug"))
    assert module.files == {1: r"/a/b \n.cu"}
    assert set(module.functions) == {"twice", "main"}
    dynamic, table = module.variables["dynamic"], module.variables["table"]
    assert (dynamic.extern, dynamic.count, dynamic.align) == (True, 0, 16)
    assert np.frombuffer(table.data or b"", np.int64).tolist() == [1, -2, 16, 5, 15, -1]
    assert np.frombuffer(module.variables["pi"].data or b"", np.float32)[0] == 3.25
    main = module.functions["main"]
    assert main.is_entry
    assert main.directives == {"maxntid": (128, 1, 1), "minnctapersm": (2,)}
    assert [(p.nbytes, p.align) for p in main.parameters] == [(8, 8), (128, 64)]


def test_operands() -> None:
    code = parse(SAMPLE).functions["main"].instructions
    (
        unpack,
        branch,
        first,
        again,
        second,
        _,
        compare,
        load,
        extern,
        single,
        double,
        minus,
        tid,
        tensor,
        _,
    ) = code
    assert isinstance(unpack.operands[0], Vector)
    assert unpack.operands[0].items[1] is None
    assert branch.negated
    assert branch.operands[0].target == len(code) - 1  # type: ignore[union-attr]
    assert (unpack.source, branch.line - unpack.line) == (((1, 13), (1, 12)), 1)
    # Two blocks, two registers %r1 and two labels of one name.
    assert first.operands[0] != second.operands[0]
    assert again.operands[0].target == code.index(first)  # type: ignore[union-attr]
    assert isinstance(compare.operands[0], Pair)
    assert compare.operands[2] == Immediate(-5)
    assert isinstance(compare.operands[3], Not)
    assert isinstance(load.operands[1], Address)
    assert (load.operands[1].offset, len(load.operands[0].items)) == (-16, 4)  # type: ignore[union-attr]
    assert extern.operands[1] == Address(Symbol("dynamic"), 8)
    assert single.operands[1] == Immediate(0x3F800000, 32)
    assert double.operands[1] == Immediate(0xBFF0000000000000, 64)
    assert minus.operands[1] == Immediate(int(np.float64(-150).view(np.uint64)), 64)
    assert tid.operands[1] == Special("%tid.x")
    tensor_map = tensor.operands[1]
    assert isinstance(tensor_map, Address)
    assert isinstance(tensor_map.more[0], Vector)
    assert isinstance(tensor.operands[0].base, Register)  # type: ignore[union-attr]


def test_blocks_repeat_names_of_variables() -> None:
    """Two calls in two blocks name their parameters alike, with different sizes."""
    module = parse(
        text("{ .param .b32 p; st.param.b32 [p], 1; } "
             "{ .param .b64 p; st.param.b64 [p], 2; } .shared .b32 s;",
             before=".func f(.param .b32 p) { .shared .b64 s; ret; }\n")
    )  # fmt: skip
    kernel, function = module.functions["k"], module.functions["f"]
    assert sorted(p.nbytes for p in kernel.locals.values()) == [4, 8]
    names = [i.operands[0].base.name for i in kernel.instructions if i.opcode.startswith("st")]  # type: ignore[union-attr]
    assert names == list(kernel.locals)
    assert len({*kernel.variables, *function.variables}) == 2


MALFORMED = [
    ("", "not PTX: no .version directive", 1, 1),
    (".target sm_90a\n.visible .entry k() { ret; }", "no .version", 2, 1),
    (".version 8.0\n#include", "unexpected character '#'", 2, 1),
    (".version 8.0\nhello", "unexpected 'hello' outside of a function", 2, 1),
    (".version 8.0\n.address_size 32", ".address_size must be 64", 2, 1),
    (".version 8.0\n.file nothing", "expected .file number", 2, 1),
    (".version 8.0\n.global .u32 x", "expected ';'", 2, 15),
    (".version 8.0\n.global .u99 x;", "unknown type .u99", 2, 1),
    (".version 8.0\n.global .u32 x[-1];", "a length of -1", 2, 16),
    (".version 8.0\n.global .u32 x = y;", "there is no variable or function 'y'", 2, 18),
    (".version 8.0\n.func f(.param .b8 a) { }\n.func f() { ret; }", "'f' is defined twice", 3, 7),
    (".version 8.0\n.entry k() {", "a block is not closed", 2, 13),
    (".version 8.0\n.entry k() { ret }", "expected ','|expected an operand", 2, 18),
    (".version 8.0\n.entry k() { bra nowhere; }", "label 'nowhere' is not defined", 2, 18),
    (".version 8.0\n.entry k() { { in: } bra in; }", "label 'in' is not defined", 2, 26),
    (".version 8.0\n.entry k() { a: a: ret; }", "label 'a' is defined twice", 2, 17),
    (".version 8.0\n.entry k() {\n  @%p bra a; a: }", "'%p' is no predicate register", 3, 4),
    (".version 8.0\n.entry k() {\n .reg .b32 %p; @%p ret; }", "'%p' is no predicate", 3, 17),
    (".version 8.0\n.entry k() { .reg .b77 %p; }", "unknown type .b77", 2, 19),
    (".version 8.0\n.entry k() { .shared .b8 s; .shared .b8 s; }", "'s' is defined twice", 2, 41),
    (".version 8.0\n.entry k() { ld.b32 a, [b; }", "expected ']'", 2, 26),
    (".version 8.0\n.entry k() { add.u32 1 2; }", "expected ','", 2, 24),
    (".version 8.0\n.entry k() { add.u32 1, 09; }", "'09' is not an integer", 2, 25),
    (".version 8.0\n.entry k() { 5; }", "expected an instruction, found '5'", 2, 14),
    (".version 8.0\n.entry k() {" + "{" * 200, "more than 100 levels", 2, 112),
    (".version 8.0\n.section .x {", "a block is not closed", 2, 14),
    (".version 8.0\n.pragma", "the text ends too early", 2, 8),
]  # fmt: skip


@pytest.mark.parametrize(("source", "message", "line", "column"), MALFORMED)
def test_malformed(source: str, message: str, line: int, column: int) -> None:
    with pytest.raises(em.PtxError, match=message) as caught:
        parse(source)
    assert (caught.value.line, caught.value.column) == (line, column)


def mutated(source: str, rng: random.Random) -> str:
    """Cut, double, swap or replace a piece."""
    kind = rng.randrange(5)
    a, b = sorted(rng.randrange(len(source) + 1) for _ in range(2))
    b = min(b, a + rng.randrange(1, 40))
    if kind == 0:
        return source[:a]
    if kind == 1:
        return source[:a] + source[b:]
    if kind == 2:
        return source[:b] + source[a:]
    if kind == 3:
        return source[:a] + rng.choice("{}()[];:,@!|<>-+%._$\"'0x9\0é\n") + source[a + 1 :]
    lines = source.splitlines(keepends=True)
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return "".join(lines)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(8))
def test_mutated_text_is_parsed_or_refused(seed: int) -> None:
    """Nothing but PtxError ever leaves the parser, whatever the text."""
    rng, refused = random.Random(seed), 0
    for _ in range(150):
        source = mutated(SAMPLE, rng)
        for _ in range(rng.randrange(3)):
            source = mutated(source, rng) if source else source
        try:
            parse(source)
        except em.PtxError as error:
            refused += error.line is not None
    assert refused > 20


KERNEL = """.shared .b32 s[32]; mov.u32 %r1, s; mad.lo.u32 %r1, %t, 4, %r1;
    setp.lt.u32 %p1, %t, 9; @%p1 bra low; add.u32 %r2, %t, 1; bra join;
    low: shl.b32 %r2, %t, 3; join: st.shared.u32 [%r1], %r2; bar.sync 0;
    shfl.sync.down.b32 %r3|%p2, %r2, 1, 31, -1;
    cvt.rn.f32.u32 %f1, %r3; fma.rn.f32 %f1, %f1, 0f40000000, %f1;
    atom.shared.add.u32 %r4, [%r1], 5;
    ld.shared.u32 %r5, [%r1]; prmt.b32 %r5, %r5, %r4, 0x3201;
    st.global.v2.b32 [%out+8], {%r5, %f1};"""


@pytest.mark.parametrize("seed", range(4))
def test_mutated_kernels_run_or_are_refused(seed: int) -> None:
    """Operands and modifiers swapped about: wrong results perhaps, but no error except PtxError."""
    rng, refused = random.Random(seed), 0
    words = KERNEL.replace(",", " , ").replace(".", " .").split(" ")
    for _ in range(100):
        some = list(words)
        for _ in range(rng.randrange(1, 3)):
            some[rng.randrange(len(some))] = rng.choice(words)
        body = (
            " ".join(some)
            .replace(" .", ".")
            .replace("bra low", "bra.uni join" if rng.random() < 0.3 else "bra low")
        )
        try:
            run(body, OUT)
        except em.PtxError:
            refused += 1
    assert refused > 20
