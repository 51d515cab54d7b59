"""Short ways to write and run a kernel in a test."""

from __future__ import annotations

from typing import Any

import pytest

from blockscale import emulator as em

HEAD = ".version 9.0\n.target {target}\n.address_size 64\n"
#: Names the body of a kernel may use; %t is the thread's number in its CTA.
PROLOGUE = """
    .reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<40>; .reg .b64 %rd<40>; .reg .f32 %f<20>;
    .reg .b32 %t; .reg .b64 %out, %at;
    mov.u32 %t, %tid.x;
    ld.param.u64 %out, [out];
    mad.wide.u32 %at, %t, 4, %out;
"""


def text(body: str, parameters: str = "", before: str = "", target: str = "sm_90a") -> str:
    """A module whose kernel ``k`` takes ``out`` and ``parameters``; %at: its thread's word."""
    more = f", {parameters}" if parameters else ""
    return (
        HEAD.format(target=target)
        + before
        + f".visible .entry k(.param .u64 out{more}) {{{PROLOGUE}{body}\n    ret;\n}}\n"
    )


def run(body: str, out: Any, *args: Any, block: Any = 32, grid: Any = 1, **more: Any) -> em.Report:
    keys = {k: more.pop(k) for k in ("parameters", "before", "target") if k in more}
    device = em.Device(keys.get("target", "sm_90a"))
    return device.launch(text(body, **keys), "k", grid, block, [out, *args], **more)


def fault(body: str, out: Any, error: type[em.PtxError], message: str) -> em.PtxError:
    """What a kernel of one line raises; it must name that line."""
    body = "nanosleep.u32 1;\n" + body
    with pytest.raises(error, match=message) as caught:
        run(body, out)
    assert caught.value.line == line_of(text(body), "nanosleep") + 1
    return caught.value


def line_of(source: str, part: str) -> int:
    """Number of the first line that holds ``part``."""
    return next(i for i, line in enumerate(source.splitlines(), 1) if part in line)
