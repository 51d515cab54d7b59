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
    section = TEXT.split("## Structure")[1].split("##")[0]
    named = set(re.findall(r"`([a-z_0-9/]+\*?)`", section))
    folder = Path(em.__file__).parent
    for module in sorted(folder.glob("[a-z]*.py")):
        assert any(module.match(f"{name}.py") for name in named), module.name


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(import numpy.*?)```", TEXT, re.DOTALL)
    assert example is not None
    exec(example[1], {})
    assert capsys.readouterr().out == "40\n"
