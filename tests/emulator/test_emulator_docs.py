"""docs/emulator.md says what is true: its code runs, its list is the list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blockscale import emulator as em
from blockscale.emulator import isa

TEXT = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text()


def test_list_of_instructions() -> None:
    listed = TEXT.split("<!-- families -->")[1].split("<!-- end -->")[0]
    assert re.findall(r"`([^`]+)`", listed) == isa.families()


def test_the_structure_names_every_module() -> None:
    """Where a row lists modules, it lists all of its package; no other module lies beside them."""
    rows = re.findall(
        r"^\| `(\w+)/` \| (.*?) \|", TEXT.split("## Structure")[1].split("##")[0], re.M
    )
    root = Path(em.__file__).parent
    assert {name for name, _ in rows} == {x.parent.name for x in root.glob("*/__init__.py")}
    for package, listed in rows:
        named = set(re.findall(r"`(\w+)`", listed))
        assert not named or named == {x.stem for x in (root / package).glob("[a-z]*.py")}, package
    assert {x.stem for x in root.glob("[a-z]*.py")} == {"ieee"}


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(import numpy.*?)```", TEXT, re.DOTALL)
    assert example is not None
    exec(example[1], {})
    assert capsys.readouterr().out == "40\n"
