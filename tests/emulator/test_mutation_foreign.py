"""The committed results of mutating two kernels of other projects: benchmarks/foreign/mutate.py."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULT = json.loads((BENCHMARKS / "results" / "foreign" / "mutants.json").read_text())
#: What became of each: (kernel, rule and line) -> the order that caught it.
FATES = [line.split(" | ") for line in RESULT["every"]]


def test_figures_are_of_these_mutants() -> None:
    caught = [name for name, by, _ in FATES if by != "None"]
    assert (len(FATES), len(caught)) == (RESULT["mutants"], RESULT["caught"])
    kernels = Counter(name.partition(":")[0] for name, _, _ in FATES)
    assert kernels == {name: entry["mutants"] for name, entry in RESULT["kernels"].items()}
    assert len(kernels) == len(RESULT["versions"]) == 2
    assert min(kernels.values()) >= 100


def test_nearly_all_that_are_wrong_are_caught() -> None:
    equal = [s for s in RESULT["survivors"] if s["kind"] == "equivalent"]
    share = 100 * RESULT["caught"] / (RESULT["mutants"] - len(equal))
    assert share >= 98
    assert RESULT["caught percent of those that are not equivalent"] == round(share, 1)


def test_each_survivor_has_a_reason_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernel, rule and line; and no reason is left over."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    from foreign.mutation_reasons import REASONS

    survived = {
        (s["kernel"], f"{s['rule']} at {s['line']}"): (s["kind"], s["reason"])
        for s in RESULT["survivors"]
    }
    assert len(survived) == len(RESULT["survivors"]) == RESULT["mutants"] - RESULT["caught"]
    assert survived == REASONS
    assert {kind for kind, _ in REASONS.values()} <= {"equivalent", "missed"}
