"""The committed results of mutating the products for Blackwell, and a sample of it done again."""

from __future__ import annotations

import json
from functools import cache

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from mutation import Mutant, reason
from mutation_sm100 import KERNELS, REASONS, RESULTS, attempt, every

RESULT = json.loads(RESULTS.read_text())
_SAMPLE = 80  # every so many-th mutant


@cache
def _mutants() -> list[Mutant]:
    return list(every())


def test_results_are_of_these_kernels() -> None:
    assert set(RESULT["kernels"]) == set(KERNELS)
    counts = {name: entry["mutants"] for name, entry in RESULT["kernels"].items()}
    assert sum(counts.values()) == RESULT["mutants"] == len(RESULT["every"])
    for name, count in counts.items():  # which the compiler may change a little
        assert [m.kernel for m in _mutants()].count(name) == pytest.approx(count, rel=0.1)


def test_nearly_all_are_caught() -> None:
    """Apart from those that are as right as the kernel, or not told apart on purpose."""
    missed = [s for s in RESULT["survivors"] if s["kind"] == "missed"]
    assert len(RESULT["survivors"]) == RESULT["mutants"] - RESULT["caught"]
    assert len(missed) <= 0.05 * RESULT["mutants"]


def test_survivors_have_reasons() -> None:
    assert all(survivor["reason"] for survivor in RESULT["survivors"])
    used = {
        key
        for s in RESULT["survivors"]
        for key in (
            (s["kernel"], f"{s['rule']} at {s['line']}"),
            (s["kernel"], s["rule"]),
            ("", s["rule"]),
        )
    }
    assert REASONS.keys() <= used


def test_a_sample_is_caught_again() -> None:
    """Each by the first order that notices it; one that may survive has a reason."""
    for mutant in _mutants()[::_SAMPLE]:
        outcome = attempt(mutant)
        assert outcome.by is not None or reason(REASONS, outcome) != ("", ""), outcome
