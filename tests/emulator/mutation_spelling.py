"""PTX of other compilers in the words of ``mutation_rules``, and which of its lines run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from blockscale import emulator as em
from blockscale.emulator.launches import calls

__all__ = ["lines_that_run", "respelled"]

#: Of inline assembly: declarations -> names that registers get there.
_NAMES = {
    ".reg .b64 a, b; .reg .b32 i;": {"a": "%rd9001", "b": "%rd9002", "i": "%r9003"},
    ".reg .b64 s;": {"s": "%rd9001"},
    ".reg .b16 m;": {"m": "%rs9001"},
    ".reg .b32 a;": {"a": "there"},
}
#: Numbers that become registers.
_NUMBERS = (
    r"(mbarrier\.arrive\.expect_tx\S+ _, \[%r\d+\], )(\d+)(;)",
    r"(mbarrier\.try_wait\S+ p, \[%r\d+\], )(\d+)(;)",
    r"(tcgen05\.alloc\S+ \[%r\d+\], )(\d+)(;)",
    r"(mapa\S+ there, %r\d+, )(\d+)(;)",
    r"(cp\.async\.bulk\.tensor\S+ (?:\[%r\d+\], )?\[%rd\d+, \{)(\d+)(, [^;]*;)",
    r"(cp\.async\.bulk\.tensor\S+ (?:\[%r\d+\], )?\[%rd\d+, \{%r\d+, )(\d+)(\}[^;]*;)",
)
_SUM = r"((?:mbarrier|cp)\.[^;\n]*?)\[(%r\d+)\+(-?\d+)\]([^;]*;)"


def respelled(ptx: str) -> str:
    """The same program: one register where there is a sum or a number, names of inline assembly
    as of registers."""
    lines = re.sub(r"[ \t]+", " ", ptx).split("\n")
    for i, line in enumerate(lines):
        for declared, names in _NAMES.items():
            if declared in line:
                for old, new in names.items():
                    line = re.sub(rf"(?<![\w.%]){old}(?![\w.])", new, line)
        lines[i] = line
    text = "\n".join(lines)
    for pattern in _NUMBERS:
        text = re.sub(
            pattern,
            r"{ .reg .b32 %r9008; mov.b32 %r9008, \g<2>; \g<1>%r9008\g<3> }",
            text,
        )
    return re.sub(_SUM, r"{ .reg .b32 %r9009; add.s32 %r9009, \2, \3; \1[%r9009]\4 }", text)


def lines_that_run(run: Callable[[], bool]) -> frozenset[int]:
    """Of the text that ``run`` launches, which must give the right result."""
    found: set[int] = set()
    finish = calls.finish

    def counted(watch: Any, codes: Any, alarms: Any) -> em.Report:
        for code in codes:
            pairs = zip(code.function.instructions, code.counts, strict=False)
            found.update(ins.line for ins, count in pairs if count)
        return finish(watch, codes, alarms)

    with patch.object(calls, "finish", counted):
        assert run()
    return frozenset(found)
