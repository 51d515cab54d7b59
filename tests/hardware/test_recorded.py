"""The emulator against what an H200 gave: recorded/h200.npz, written by compare.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import test_instructions_convert
import test_instructions_floating
import test_instructions_integer
from cases import Case, cases
from compare import Launch, compiled, of_case, of_form

from gpu import content

_FILE = np.load(Path(__file__).parent / "recorded" / "h200.npz")
RECORD = dict(zip(_FILE["names"].tolist(), _FILE["digests"].tolist(), strict=True))


def digest(launch: Launch) -> int:
    assert launch.emulated is not None, launch.failure
    return int(content(launch.emulated), 16)


@pytest.mark.parametrize(
    "module",
    [test_instructions_integer, test_instructions_floating, test_instructions_convert],
    ids=lambda module: module.__name__,
)
def test_forms(module: ModuleType) -> None:
    """Every form for sm_90a on its operands; a form that is newer than the record is left out."""
    forms = [form for form in module.forms() if form.target == "sm_90a"]
    wrong, compared = [], 0
    for form in forms:
        launch = of_form(form)
        wanted = RECORD.get(launch.request.key())
        compared += wanted is not None
        if wanted not in (None, digest(launch)):
            wrong.append(str(form))
    assert not wrong
    assert compared > 0.8 * len(forms)


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    return compiled(sorted({case.source for case in cases()}))


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_kernels(case: Case, ptx: dict[str, str]) -> None:
    assert digest(of_case(case, ptx[case.source])) == RECORD[case.name]
