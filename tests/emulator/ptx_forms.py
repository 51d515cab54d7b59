"""One PTX kernel per instruction form: operands in, result out, compared with a model in Python."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import ptx_floats

from blockscale import emulator as em

_HEAD = ".version 9.0\n.target {target}\n.address_size 64\n"
COUNT = 192  # tuples of operands for each form


@dataclass(frozen=True)
class Form:
    """``opcode`` with a result and operands of some types, and what it computes.

    ``line`` is the instruction with d, a, b, c for its operands, if they do not simply follow.
    """

    opcode: str
    result: str
    operands: tuple[str, ...]
    model: Callable[..., int]
    line: str = ""
    target: str = "sm_90a"
    pools: tuple[Sequence[int], ...] = ()
    any_nan: str = ""  # type whose NaN may have any payload

    def __str__(self) -> str:
        return self.opcode


def bits(type: str) -> int:
    """Width of a type; predicates travel as 32 bits."""
    if type == "pred":
        return 32
    return {"f16x2": 32, "bf16x2": 32}.get(type) or int(type.lstrip("bfsu").split("x")[0]) * (
        2 if type.endswith("x2") else 1
    )


def pool(type: str, rng: random.Random) -> list[int]:
    """Edges and random bits of a type."""
    size = bits(type)
    every = (1 << size) - 1
    if type == "pred":
        return [0, 1]
    if type.endswith("x2"):
        half = pool(type[:-2], rng)
        return [rng.choice(half) << size // 2 | rng.choice(half) for _ in range(3 * COUNT)]
    if type in ptx_floats.FORMATS:
        near = ptx_floats.edges(type)
        exponent, mantissa = ptx_floats.FORMATS[type]
        middle = (1 << exponent - 1) - 1
        close = [
            rng.getrandbits(1) << size - 1
            | min(middle + rng.randrange(-14, 14), (1 << exponent) - 2) << mantissa
            | rng.getrandbits(mantissa)
            for _ in range(40)
        ]
        return near + close + [rng.getrandbits(size) for _ in range(20)]
    top = 1 << size - 1
    near = [0, 1, 2, 3, every, every - 1, top, top - 1, top + 1, 31, 32, 33, 0x55 & every]
    return (
        near
        + [rng.getrandbits(size) for _ in range(20)]
        + [1 << rng.randrange(size) for _ in range(5)]
    )


def tuples(form: Form) -> list[tuple[int, ...]]:
    """Operands: all pairs of edges if they fit, else a sample, and random ones."""
    rng = random.Random(form.opcode)
    pools = [list(p) for p in form.pools] or [pool(type, rng) for type in form.operands]
    if np.prod([float(len(p)) for p in pools]) <= COUNT:
        found = list(itertools.product(*pools))
    else:
        found = [tuple(rng.choice(p) for p in pools) for _ in range(COUNT)]
    return found * -(-COUNT // len(found)) if len(found) < 8 else found


def kernel(form: Form) -> str:
    """PTX that loads a thread's operands, executes the form and stores the result."""
    letters = "abcdefg"[: len(form.operands)]
    letters = letters.replace("d", "h")
    body = []
    registers = [
        f".reg .b{max(bits(form.result), 16)} d;",
        ".reg .b32 t, n, ok; .reg .b64 at, base;",
    ]
    if form.result == "pred":
        registers[0] = ".reg .pred d; .reg .b32 word;"
    elif bits(form.result) == 8:
        registers[0] = ".reg .b8 d; .reg .b16 word;"
    for i, (letter, type) in enumerate(zip(letters, form.operands, strict=True)):
        size = bits(type)
        body.append(f"ld.param.u64 base, [in{i}]; mad.wide.u32 at, t, {size // 8}, base;")
        if type == "pred":
            registers.append(f".reg .pred {letter}; .reg .b32 {letter}_word;")
            body.append(
                f"ld.global.u32 {letter}_word, [at]; setp.ne.u32 {letter}, {letter}_word, 0;"
            )
        else:
            registers.append(f".reg .b{max(size, 16)} {letter};")
            body.append(f"ld.global.{'b' if size > 8 else 'u'}{size} {letter}, [at];")
    line = form.line or f"{form.opcode} d, {', '.join(letters)}"
    body.append(line if line.endswith("}") else line + ";")
    size, value = bits(form.result), "d"
    if form.result == "pred":
        body.append("selp.u32 word, 1, 0, d;")
        value = "word"
    elif size == 8:
        body.append("cvt.u16.u8 word, d;")
        value = "word"
    body.append(f"ld.param.u64 base, [out]; mad.wide.u32 at, t, {size // 8}, base;")
    body.append(f"st.global.b{size} [at], {value};")
    parameters = ", ".join(
        f".param .u64 {name}" for name in [*(f"in{i}" for i in range(len(letters))), "out"]
    )
    lines = [*registers, "mov.u32 t, %tid.x;", *body, "ret;"]
    text = "\n    ".join(lines)
    return (
        f"{_HEAD.format(target=form.target)}.visible .entry form({parameters}) {{\n    {text}\n}}\n"
    )


def check(form: Form) -> None:
    """Run a form on its operands and compare every result with the model's."""
    operands = tuples(form)
    arrays = [
        np.array(column, f"u{bits(type) // 8}")
        for column, type in zip(zip(*operands, strict=True), form.operands, strict=True)
    ]
    out = np.zeros(len(operands), f"u{bits(form.result) // 8}")
    em.Device(form.target).launch(kernel(form), "form", 1, len(operands), [*arrays, out])
    for given, got in zip(operands, out.tolist(), strict=True):
        wanted = form.model(*given) & (1 << bits(form.result)) - 1
        if form.any_nan and ptx_floats.decode(wanted, form.any_nan) == ptx_floats.NAN:
            assert ptx_floats.decode(got, form.any_nan) == ptx_floats.NAN, (given, hex(got))
            continue
        text = ", ".join(map(hex, given))
        assert got == wanted, f"{form.opcode} {text}: got {got:#x}, expected {wanted:#x}"
