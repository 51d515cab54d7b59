"""docs/emulator.md says what is true: its code runs, its list is the list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blockscale.emulator import isa

TEXT = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text()


def test_list_of_instructions() -> None:
    listed = TEXT.split("<!-- families -->")[1].split("<!-- end -->")[0]
    assert re.findall(r"`([^`]+)`", listed) == isa.families()


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(import numpy.*?)```", TEXT, re.DOTALL)
    assert example is not None
    exec(example[1], {})
    assert capsys.readouterr().out == "40\n"
