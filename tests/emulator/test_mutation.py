"""The committed results of the mutation run, and a sample of its mutants run again."""

from __future__ import annotations

import json

import pytest
from mutation import PIPELINES, REASONS, RESULTS, Mutant, mutants, trial

RESULT = json.loads(RESULTS.read_text())
MUTANTS = list(mutants())
#: What became of each: (policy, what was said).
FATES = {key: (by, how) for key, by, how in (line.split(" | ") for line in RESULT["every"])}
SAMPLE = MUTANTS[::11]


def key(mutant: Mutant) -> str:
    return f"{mutant.kernel}:{mutant.line} {mutant.rule}"


def test_results_are_of_these_mutants() -> None:
    assert [key(mutant) for mutant in MUTANTS] == list(FATES)
    assert len(MUTANTS) == RESULT["mutants"]


def test_kernels_are_mutated_and_nearly_all_mutants_caught() -> None:
    assert {mutant.kernel for mutant in MUTANTS} == set(PIPELINES)
    assert len(PIPELINES) >= 4
    assert len(MUTANTS) >= 60
    survivors = [name for name, (by, _) in FATES.items() if by == "None"]
    assert len(survivors) <= 0.05 * len(MUTANTS)


def test_survivors_have_reasons() -> None:
    assert all(survivor["reason"] for survivor in RESULT["survivors"])
    assert {
        (kernel, rule)
        for kernel, rule in REASONS
        if not any(s["rule"] == rule and kernel in ("", s["kernel"]) for s in RESULT["survivors"])
    } == set()


@pytest.mark.parametrize("mutant", SAMPLE, ids=key)
def test_sample_is_caught_again(mutant: Mutant) -> None:
    by, _ = FATES[key(mutant)]
    if by == "None":
        pytest.skip("survived")
    completion, _, seed = by.partition(", seed ")
    assert trial(mutant, [(completion, int(seed or 0))]).by == by
