"""Ways to write a kernel that ptxas takes: declarations, constants, addresses, the runtime's calls.

Every module here was given to ptxas 13.0 for sm_100a, which accepts those that run and refuses
those that are refused, where not said otherwise.
"""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

import re

import numpy as np
import pytest
from asynchronous import outcome
from ptx_kernels import HEAD, fault, line_of, run, text
from test_tcgen05 import alloc, free, kernel, launch

from blockscale import emulator as em
from blockscale.emulator.ptx.parse import parse, parse_once

# --- declarations ---------------------------------------------------------------------------------


def value(body: str, **more: str) -> int:
    """What thread 5 stores from %r1."""
    out = np.zeros(32, np.uint32)
    run(body + " st.global.b32 [%at], %r1;", out, **more)
    return int(out[5])


RUNS = [
    (".reg.b64 x; mov.b64 x, 7; cvt.u32.u64 %r1, x;", 7),
    (".reg .align 4 .b32 x; mov.b32 x, 7; mov.b32 %r1, x;", 7),
    (".reg .v2 .b32 v; mov.b32 v.x, 3; mov.b32 v.y, %t; add.u32 %r1, v.x, v.y;", 8),
    (".reg .v4 .b32 v, u; mov.v4.b32 v, {1, 2, 3, %t}; mov.v4.b32 u, v; add.u32 %r1, u.b, u.a;", 8),
    (".reg.v2.b32 v<3>; mov.b32 v2.y, 9; mov.b32 v1.y, 8; mov.b32 %r1, v2.y;", 9),
    (".shared .align 16 .b32 s[4]; .reg .v2 .u32 v; mov.v2.u32 v, {1, 6}; st.shared.v2.u32 [s+8], v; bar.sync 0; ld.shared.u32 %r1, [s+12];", 6),
    (".shared.align 8 .b8 s[16]; st.shared.b32 [s+4], 3; bar.sync 0; ld.shared.b32 %r1, [s+4];", 3),
    (".shared.b32 s; st.shared.b32 [s], 3; bar.sync 0; ld.shared.b32 %r1, [s];", 3),
    (".local.align 16 .b8 l[32]; st.local.b32 [l+4], %t; ld.local.b32 %r1, [l+4];", 5),
    ("mov .b32 %r1, 6;", 6),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), RUNS)
def test_declarations_in_a_kernel(body: str, expected: int) -> None:
    assert value(body) == expected


def test_two_params_in_one_declaration() -> None:
    """A call follows: ptxas crashes without one."""
    before = """.func (.param .b32 r) twice(.param .b32 x) { .reg .b32 %x;
    ld.param.b32 %x, [x]; add.s32 %x, %x, %x; st.param.b32 [r], %x; ret; }"""
    body = """{ .param .b32 p, q; st.param.b32 [p], %t; call.uni (q), twice, (p);
    ld.param.b32 %r1, [q]; }"""
    assert value(body, before=before) == 10


CONSTANTS = [
    ("(1+2)*3", 9), ("1+2*3", 7), ("7-2-1", 4), ("1 << 4", 16), ("-8 >> 1", -4), ("-7/2", -3),
    ("-7 % 4", 1), ("7 % -4", 7), ("-7 / 2U", 0xFFFFFFFC), ("-1 < 0U", 0), ("~1", -2), ("!5", 0), ("+3", 3), ("5 == 5", 1), ("1 < 2 && 3 != 3", 0),
    ("1 ? 2 : 3", 2), ("0 ? 2 : 1 ? 4 : 5", 4), ("6 & 3 | 8 ^ 1", 11), ("WARP_SZ*2", 64),
    ("(.s64)5", 5), ("0xFFFFFFFFFFFFFFFF / 0x100000000", 0xFFFFFFFF), ("0X1fU", 31), ("0B11", 3),
    ("(.u64)-1 > 0", 1), ("-1 > 0", 0), ("1.5 < 2.5", 1),
]  # fmt: skip


@pytest.mark.parametrize(("constant", "expected"), CONSTANTS)
def test_constant_expressions(constant: str, expected: int) -> None:
    """PTX ISA 4.6, with the values that ptxas puts into its initial values; in operands, too."""
    assert value(f"mov.b32 %r1, {constant};") == expected & 0xFFFFFFFF
    before = f".global .b32 g[2] = {{0, {constant}}};"
    assert value("ld.global.b32 %r1, [g+2*2];", before=before) == expected & 0xFFFFFFFF


def test_initial_values_are_addresses() -> None:
    before = """.global .b32 y[4] = {10, 11, 12, 13};
    .global .u64 one = y+4; .global .u64 more[2] = {generic(y), generic(y)+8};
    .global .align 8 .u8 bytes[8] = {0xff(y), 0xff00(y), 0xff0000(y), 0xff000000(y), 0xff00000000(y), 0xff0000000000(y), 0xff000000000000(y), 0xff00000000000000(y)};"""
    for place, expected in (("one", 11), ("more", 10), ("more+8", 12), ("bytes", 10)):
        body = f"ld.global.u64 %rd1, [{place}]; ld.global.b32 %r1, [%rd1];"
        assert value(body, before=before) == expected


MODULE = [
    (".global.b32 g = 5;", 5),
    (".global.align 8 .b32 g = 5;", 5),
    (".global .attribute(.managed) .align 4 .b32 g = 5;", 5),
]


@pytest.mark.parametrize(("before", "expected"), MODULE)
def test_declarations_of_a_module(before: str, expected: int) -> None:
    assert value("ld.global.b32 %r1, [g];", before=before) == expected


def test_an_alias_is_the_function() -> None:
    before = """.visible .func (.param .b32 r) b() { .reg .b32 %x; mov.b32 %x, 8; st.param.b32 [r], %x; ret; }
    .visible .func (.param .b32 r) a(); .alias a, b;"""
    body = "{ .param .b32 back; call (back), a, (); ld.param.b32 %r1, [back]; }"
    assert value(body, before=before) == 8


def test_parameters_with_dots_between() -> None:
    code = HEAD.format(target="sm_90a") + (
        ".entry k(.param.u64 p, .param .u64.ptr.global.align 8 q) { .reg.b64 a; .reg.b32 x;"
        " ld.param.u64 a, [q]; ld.global.u32 x, [a]; ld.param.u64 a, [p]; st.global.u32 [a], x; }"
    )
    out = np.zeros(1, np.uint32)
    em.Device().launch(code, "k", 1, 1, [out, np.full(2, 9, np.uint32)])
    assert out[0] == 9


# --- what is read of a module ---------------------------------------------------------------------

TWO = """.global .u32 table[2] = {1, 2};
.global .u32 unused[2] = {1, frob};
.func helper() { .reg .b32 %r; ld.global.u32 %r, [table]; ret; }
.visible .entry other() { nonsense nonsense nonsense; }
"""


def test_only_what_the_entry_reaches_is_read() -> None:
    code = text("call helper;", before=TWO)
    module = parse(code, "k")
    assert set(module.functions) == {"k", "helper"}
    assert set(module.variables) == {"table"}
    with pytest.raises(em.PtxError, match=r"\(line 7, column"):
        parse(code, "other")
    with pytest.raises(em.PtxError, match=r"'frob'.*\(line 5, column 30\)"):
        parse(code)
    with pytest.raises(em.PtxError, match="entry: 'none' is not in the module, which has other, k"):
        parse(code, "none")


def test_braces_match_everywhere() -> None:
    for more, message in (
        (".visible .entry other() { { }\n", "a block is not closed; the outermost one starts in line 4"),
        (".visible .entry other() { } }\n", r"'}' closes no block \(line 4, column 29\)"),
    ):  # fmt: skip
        with pytest.raises(em.PtxError, match=message):
            parse(text("", before=more), "k")
    parse(text("", before='.visible .entry o() { // }\n /* } */ .pragma "}"; }\n'))


def test_a_module_is_read_once() -> None:
    code = text("mov.b32 %r1, 1;")
    assert parse_once(code, "k") is parse_once("".join(code), "k")
    assert parse_once(code, "k") is not parse_once(code + " ", "k")


# --- addresses ------------------------------------------------------------------------------------

GENERIC = ".shared .align 16 .b32 s[32]; mov.u32 %r5, s; mad.lo.u32 %r5, %t, 4, %r5; cvt.u64.u32 %rd1, %r5; cvta.shared.u64 %rd1, %rd1; sub.u32 %r6, 31, %t; mov.u32 %r7, s; mad.lo.u32 %r7, %r6, 4, %r7; cvt.u64.u32 %rd2, %r7; cvta.shared.u64 %rd2, %rd2;"


@pytest.mark.parametrize("space", ["shared", "shared::cta", "shared::cluster"])
def test_shared_memory_by_generic_addresses(space: str) -> None:
    """Hardware uses the low 32 bits of a wide register."""
    body = f"""{GENERIC} st.{space}.u32 [%rd1], %t; bar.sync 0; ld.{space}.u32 %r1, [%rd2];
    bar.sync 0; atom.{space}.add.u32 %r2, [%rd2+0], 100; ld.{space}.u32 %r2, [%rd2]; add.u32 %r1, %r1, %r2;"""
    assert value(body) == 26 + 126


def test_asynchronous_copies_by_generic_addresses() -> None:
    body = f"""{GENERIC} cp.async.ca.shared.global [%rd1], [%at], 4; cp.async.wait_all; bar.sync 0;
    ld.shared.u32 %r1, [%rd2]; bar.sync 0; st.global.u32 [%at], %r1;"""
    (out,) = outcome(text(body), [np.arange(32, dtype=np.uint32)])
    assert out.tolist() == list(range(31, -1, -1))


FAULTS = [
    ("add.u64 %rd1, %out, 0x7f0000000000; st.shared.u32 [%rd1], 1;", r"0x[0-9a-f]+ is no address in shared memory"),
    (".shared .b32 s; mov.u64 %rd1, s; cvta.shared.u64 %rd1, %rd1; st.shared.u32 [%rd1+4], 1;", r"shared address 0x404 \(\+4\) is out of bounds"),
    ("st.shared.u32 [%rd9], 1;", "0xfff5a5a5a5a5a5a5 is no address in shared memory"),
    (".local .b32 l; mov.u64 %rd1, l; cvta.local.u64 %rd1, %rd1; st.shared.u32 [%rd1], 1;", "0x200000000000000 is no address in shared memory"),
    (".shared .align 8 .b64 b; mov.u64 %rd1, b; mbarrier.init.b64 [%rd1], 1;", "the address is not in shared memory"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), FAULTS)
def test_what_is_elsewhere_is_refused(body: str, message: str) -> None:
    """ptxas cannot see these."""
    fault(body, np.zeros(32, np.uint32), em.MemoryFault, message)


def test_tensor_memory_is_allocated_by_a_generic_address() -> None:
    body = f"""mov.u64 %rd1, place; cvta.shared.u64 %rd1, %rd1;
    {alloc(32).replace("[place], ", "[%rd1], ")} {free(32)} st.global.u32 [%at], %r30;"""
    assert not launch(body, np.ones(128, np.uint32)).any()


def test_a_commit_to_an_address_without_its_window() -> None:
    """What Triton's tl.dot does: no state space, and an offset in shared memory."""
    body = """@%p1 mbarrier.init.shared.b64 [bar], 1; bar.sync 0; mov.u32 %r5, bar; cvt.u64.u32 %rd1, %r5;
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd1];
    W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W; st.global.u32 [%at], 1;"""
    assert launch(body, np.zeros(128, np.uint32)).all()


def test_lanes_of_other_warps() -> None:
    """Lane 0 in warps 1 to 3, or 32: the ISA asks for their own, hardware ignores these bits."""
    body = f"""{alloc(32)} tcgen05.st.sync.aligned.32x32b.x1.b32 [%r30], {{%t}}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r1}}, [%r31]; tcgen05.wait::ld.sync.aligned;
    st.global.u32 [%at], %r1; {free(32)}"""
    out = np.zeros(128, np.uint32)
    with pytest.raises(em.PtxError, match="lane 0 of the address is not of warp 1 of its group"):
        em.Device("sm_100a").launch(kernel(body), "k", 1, 128, [out])
    device = em.Device("sm_100a", check=("race", "uninitialized", "registers"))
    device.launch(kernel(body), "k", 1, 128, [out])
    assert out.tolist() == list(range(128))
    other = body.replace("[%r30], {%t}", "[%r30+0x200000], {%t}")
    out[:] = 0
    device.launch(kernel(other), "k", 1, 128, [out])
    assert out.tolist() == list(range(128))
    within = kernel(body.replace("[%r30], {%t}", "[%r30+0x080000], {%t}"))
    with pytest.raises(em.PtxError, match=r"lane 8 of the address: \.32x32b begins at lane 0 of"):
        device.launch(within, "k", 1, 128, [out])


# --- the runtime's functions ----------------------------------------------------------------------

RUNTIME = """.extern .func (.param .b32 back) vprintf(.param .b64 a, .param .b64 b);
.extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
"""


def string(name: str, value: str) -> str:
    numbers = ", ".join(map(str, (value + "\0").encode()))
    return f".global .align 1 .b8 {name}[{len(value.encode()) + 1}] = {{{numbers}}};\n"


PRINT = """.local .align 8 .b8 args[48]; .reg .b64 %fmt, %args; .reg .f64 %d;
    mov.u64 %fmt, fmt; cvta.global.u64 %fmt, %fmt; mov.u64 %args, args; cvta.local.u64 %args, %args;
    st.local.u32 [args], %t; mov.f64 %d, 2.5; st.local.f64 [args+8], %d;
    mov.u64 %rd1, word; cvta.global.u64 %rd1, %rd1; st.local.u64 [args+16], %rd1;
    st.local.s32 [args+24], -1; mov.b64 %rd1, -5; st.local.s64 [args+32], %rd1; st.local.b32 [args+40], 300;
    { .param .b64 a; .param .b64 b; .param .b32 back;
    st.param.b64 [a], %fmt; st.param.b64 [b], %args;
    call.uni (back), vprintf, (a, b); ld.param.b32 %r1, [back]; }"""


def test_vprintf(capsys: pytest.CaptureFixture[str]) -> None:
    before = RUNTIME + string("fmt", "%d: %6.2f|%-4s|%x %lld %hd 100%%\n") + string("word", "ab")
    out = np.zeros(32, np.uint32)
    run(PRINT + "st.global.b32 [%at], %r1;", out, block=2, before=before)
    assert out[:2].tolist() == [6, 6]
    assert capsys.readouterr().out.splitlines() == [
        f"{t}:   2.50|ab  |ffffffff -5 300 100%" for t in range(2)
    ]


PRINTED = {  # what glibc prints
    "%#o": "0454",
    "%+u": "300",
    "% x": "12c",
    "%#x": "0x12c",
    "%#8X|": "   0X12C|",
    "%-#8x|": "0x12c   |",
    "%08.5d": "   00300",
    "%+08d": "+0000300",
    "% d": " 300",
    "%.0d": "300",
    "%-8i|": "300     |",
    "%#010x": "0x0000012c",
}


@pytest.mark.parametrize("form", PRINTED)
def test_vprintf_is_that_of_c(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = RUNTIME + string("fmt", form + "\n") + string("word", "ab")
    run(PRINT.replace("[args], %t", "[args], 300"), np.zeros(32, np.uint32), block=1, before=before)
    assert capsys.readouterr().out == PRINTED[form] + "\n"


@pytest.mark.parametrize(
    ("form", "printed"), [("%#x", "0"), ("%#o", "0"), ("%.0d|", "|"), ("%#.0o|", "0|")]
)
def test_vprintf_of_zero(form: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = RUNTIME + string("fmt", form + "\n") + string("word", "ab")
    run(PRINT, np.zeros(32, np.uint32), block=1, before=before)
    assert capsys.readouterr().out == printed + "\n"


@pytest.mark.parametrize("form", ["%hhd", "%zu", "%jd", "%td", "%.*f"])
def test_vprintf_of_what_a_gpu_does_not_print(form: str) -> None:
    """An H100 printed nonsense for the argument after each of these."""
    before = RUNTIME + string("fmt", form + "\n") + string("word", "ab")
    with pytest.raises(em.PtxError, match=re.escape(f"printf: {form}: CUDA's printf knows")):
        run(PRINT, np.zeros(32, np.uint32), block=1, before=before)


def test_vprintf_of_floats_in_hexadecimal(capsys: pytest.CaptureFixture[str]) -> None:
    before = RUNTIME + string("fmt", "%a\n") + string("word", "ab")
    body = PRINT.replace("st.local.u32 [args], %t; mov.f64 %d, 2.5; st.local.f64 [args+8], %d;",
                         "mov.f64 %d, 2.5; st.local.f64 [args], %d;")  # fmt: skip
    run(body, np.zeros(32, np.uint32), block=1, before=before)
    assert capsys.readouterr().out == "0x1.4p+1\n"


def test_a_failed_assertion_stops_the_kernel() -> None:
    before = (
        RUNTIME + string("what", "n < 3") + string("file", "a.cu") + string("where", "void k()")
    )
    body = "setp.lt.u32 %p1, %t, 3; @%p1 bra fine;" + "".join(
        f"mov.u64 %rd{i}, {name}; cvta.global.u64 %rd{i}, %rd{i};"
        for i, name in enumerate(("what", "file", "where"))
    ) + """{ .param .b64 a; .param .b64 b; .param .b32 c; .param .b64 d; .param .b64 e;
    st.param.b64 [a], %rd0; st.param.b64 [b], %rd1; st.param.b32 [c], 77; st.param.b64 [d], %rd2; st.param.b64 [e], 1;
    call.uni __assertfail, (a, b, c, d, e); } fine: """  # fmt: skip
    with pytest.raises(em.KernelStopped) as caught:
        run(body, np.zeros(32, np.uint32), block=4, before=before)
    message = "a.cu:77: void k(): thread (3, 0, 0) of CTA (0, 0, 0): assertion `n < 3` failed"
    assert str(caught.value).startswith(message)
    assert caught.value.line == line_of(text(body, before=before), "call.uni")
    run(body, np.zeros(32, np.uint32), block=3, before=before)


@pytest.mark.parametrize("name", ["trap", "brkpt"])
def test_stops(name: str) -> None:
    body = f"setp.eq.u32 %p1, %t, 4;\n@%p1 {name};"
    with pytest.raises(
        em.KernelStopped, match=re.escape(f"{name}, first thread (4, 0, 0) of CTA (0, 0, 0)")
    ) as caught:
        run(body, np.zeros(32, np.uint32))  # fmt: skip
    assert caught.value.line == line_of(text(body), f"@%p1 {name}")
    run(body, np.zeros(32, np.uint32), block=4)
