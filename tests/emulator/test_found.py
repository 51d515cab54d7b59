"""The examples of docs/found.md: each is accused as it stands, and right with its fixes.

The page holds their text. A line with ``// fix: ...`` is a fix that is left out; the accesses that
clash are in lines with ``// 1:`` and ``// 2:``.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from asynchronous import FEW_ORDERS, aligned
from ptx_kernels import HEAD

from blockscale import emulator as em

PAGE = (Path(__file__).parents[2] / "docs" / "found.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- example: (\S+) -->\n```ptx\n(.*?)```", PAGE, re.DOTALL))
#: The kind of alarm of each; a copy that reads after the write is told as a race of lanes.
KIND = {
    "scale-before-wait": "pdl",
    "pointer-after-relaxed-arrive": "race",
    "init-before-relaxed-arrive": "race",
    "leader-alone-waits": "race lanes",
    "stores-not-committed": "race lanes",
    "load-at-exit": "exit",
    "arrive-at-exited-cta": "dsmem_exit",
    "address-then-copy": "fence",
    "map-then-copy": "fence",
    "commit-nobody-waits-for": "exit",
    "slot-after-vote": "lanes",
}
FIX = "// fix: "


def module(name: str, fixes: tuple[bool, ...]) -> str:
    """The example with those of its fixes that are true."""
    first, *parts = EXAMPLES[name].split(FIX)
    kept = "".join(("" if fix else "// ") + part for fix, part in zip(fixes, parts, strict=True))
    return HEAD.format(target="sm_100a") + first + kept


def alarms(ptx: str, order: tuple[str, int]) -> tuple[em.Alarm, ...]:
    block = re.search(r"\.reqntid (\d+)", ptx)
    assert block is not None
    ctas = 2 if ".reqnctapercluster 2" in ptx else 1
    args = [aligned(np.zeros(1024, np.uint8)) for _ in range(ptx.count(".param .u64"))]
    device = em.Device("sm_100a", completion=order[0], seed=order[1], on_error="collect")
    programmatic = "griddepcontrol" in ptx
    report = device.launch(
        ptx, "k", ctas, int(block[1]), args, cluster=ctas, programmatic=programmatic
    )
    return report.alarms


def all_fixes(name: str) -> list[tuple[bool, ...]]:
    return list(itertools.product((False, True), repeat=EXAMPLES[name].count(FIX)))


def test_the_page_has_all_of_them() -> None:
    assert EXAMPLES.keys() == KIND.keys()
    assert all(len(all_fixes(name)) > 1 for name in EXAMPLES)


@pytest.mark.parametrize("order", FEW_ORDERS, ids=str)
@pytest.mark.parametrize("name", KIND)
def test_an_example_is_accused_until_all_its_fixes_are_there(
    name: str, order: tuple[str, int]
) -> None:
    *wrong, right = all_fixes(name)
    for fixes in wrong:
        ptx = module(name, fixes)
        marked = {i for i, line in enumerate(ptx.splitlines(), 1) if re.search("// [12]:", line)}
        found = alarms(ptx, order)
        assert found
        assert {alarm.kind for alarm in found} <= {*KIND[name].split()}
        assert all({alarm.line, alarm.other} - {0} == marked for alarm in found)
    assert not alarms(module(name, right), order)
