"""Kernels of other projects: the runners, their files of faults and the results belong together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOREIGN = ROOT / "benchmarks" / "foreign"
RESULTS = ROOT / "benchmarks" / "results" / "foreign"


@pytest.fixture(scope="module")
def kernels() -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(FOREIGN.parent), *sys.path])
        from foreign.run import kernels

        return kernels()


def results() -> dict[str, Any]:
    files = [file for file in RESULTS.glob("*.json") if file.stem != "mutants"]
    return {name: found for file in files for name, found in read(file)["kernels"].items()}


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def test_each_file_of_faults_is_of_a_project(kernels: list[Any]) -> None:
    assert {file.stem for file in FOREIGN.glob("*.suppress")} <= {
        kernel.project.lower() for kernel in kernels
    }


def test_every_kernel_has_its_result(kernels: list[Any]) -> None:
    names = [kernel.name for kernel in kernels]
    assert len(set(names)) == len(names)
    assert set(results()) == set(names)


def test_results_say_which_checks_are_off(kernels: list[Any]) -> None:
    found = results()
    off = {kernel.name: dict(kernel.off) for kernel in kernels}
    assert off == {name: found[name].get("checks that are off", {}) for name in off}


def test_a_kernel_holds_if_all_is_right_and_nothing_is_left_over() -> None:
    for found in results().values():
        runs = found["runs"].values()
        assert found["holds"] == all(r["said"] == "right" and not r["alarms"] for r in runs)


def test_docs_count_them() -> None:
    found = results().values()
    holds = [each for each in found if each["holds"]]
    clean = [each for each in holds if not any(r["suppressed"] for r in each["runs"].values())]
    text = " ".join((ROOT / "docs" / "emulator.md").read_text().split())
    assert f"orders: {len(found)} of ThunderKittens, " in text
    assert f" {len(holds)} hold: " in text
    assert f"({len(clean)} need none)" in text
    assert f"of the {len(found)} whose runs" in (ROOT / "docs" / "found.md").read_text()
