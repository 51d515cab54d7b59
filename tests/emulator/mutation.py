"""Mutation of the pipelines: does the emulator notice when one thing in a kernel is wrong?

Each place where a rule matches is one mutant. It runs under several completion policies until one
of them catches it: by an error, a wrong result, or no end. ``python mutation.py`` runs all of them
and writes RESULTS.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol

from mutation_rules import RULES, Rule
from pipelines import PIPELINES

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
RESULTS = FOLDER / "emulator_mutants.json"
#: The first that catches a mutant ends its trial.
POLICIES = (("late", 0), ("eager", 0), *(("random", seed) for seed in range(6)))
_SECONDS = 30  # a kernel takes one


class Subject(Protocol):
    """A kernel that is mutated."""

    @property
    def ptx(self) -> str: ...

    def run(self, completion: str, seed: int = 0, ptx: str | None = None) -> bool:
        """Launch, with this text in place of its own; whether the outputs are right."""
        ...


@dataclass(frozen=True)
class Mutant:
    kernel: str
    rule: str
    line: int
    was: str
    ptx: str


def mutants(
    subjects: Mapping[str, Subject] = PIPELINES, rules: Sequence[Rule] = RULES
) -> Iterator[Mutant]:
    for kernel, subject in subjects.items():
        text = subject.ptx
        for rule in rules:
            for match in re.finditer(rule.pattern, text):
                into = match.expand(rule.into)  # other lines stay where they are
                into += "\n" * (match[0].count("\n") - into.count("\n"))
                changed = text[: match.start()] + into + text[match.end() :]
                line = text.count("\n", 0, match.start()) + 1
                was = re.sub(r"\{%f\d+, [^}]*\}", "{...}", " ".join(match[0].split()))[:160]
                yield Mutant(kernel, rule.name, line, was, changed)


@dataclass(frozen=True)
class Outcome:
    """``by``: the policy that caught it, None if it survived; ``how``: what was said."""

    kernel: str
    rule: str
    line: int
    was: str
    by: str | None
    how: str = ""


class _Endless(Exception):
    pass


def _stop(*_: Any) -> None:
    raise _Endless


def trial(
    mutant: Mutant,
    policies: Iterable[tuple[str, int]] = POLICIES,
    subjects: Mapping[str, Subject] = PIPELINES,
    seconds: int = _SECONDS,
) -> Outcome:
    known = mutant.kernel, mutant.rule, mutant.line, mutant.was
    signal.signal(signal.SIGALRM, _stop)
    for completion, seed in policies:
        by = f"{completion}, seed {seed}" if completion == "random" else completion
        signal.alarm(seconds)
        try:
            if not subjects[mutant.kernel].run(completion, seed, mutant.ptx):
                return Outcome(*known, by, "wrong result")
        except _Endless:
            return Outcome(*known, by, "no end")
        except Exception as error:
            said = str(error).split("\n")[0].replace(" | ", " ")
            return Outcome(*known, by, f"{type(error).__name__}: {said}"[:120])
        finally:
            signal.alarm(0)
    return Outcome(*known, None)


_LOADED = (
    "what the arrival gives back was read by tcgen05.ld alone, one piece of work of the warp, "
    "which a lane that uses its part has waited for"
)
#: Why a mutant survives: (kernel or "", rule) -> (kind, reason). "equivalent": the mutant is as
#: right as the kernel; "not modelled": the emulator does not tell them apart, on purpose; "missed".
Reasons = dict[tuple[str, str], tuple[str, str]]
REASONS: Reasons = {
    ("", "delete tcgen05.fence"): (
        "equivalent",
        "another fence of the thread orders the same: tcgen05.alloc and .dealloc are synchronous, "
        "and every role has one after it waits or before it arrives",
    ),
    ("", "arrive relaxed"): (
        "equivalent",
        "the arrival gives back Tensor Memory, for which execution order and tcgen05.fence "
        "suffice: the ISA's own example of 9.7.16.6.4 is relaxed",
    ),
    ("", "source of tcgen05.cp: base offset"): (
        "equivalent",
        "a base offset moves the pattern of a swizzle, and scales lie without one: Triton sets it",
    ),
    ("gemm_wgmma", "wgmma always accumulates"): (
        "equivalent", "the second and later steps of a tile always accumulate",
    ),
    ("gemm_wgmma", "mapa of another rank"): (
        "equivalent", "lanes 0 and 1 arrive at CTAs 1 and 0 instead of 0 and 1",
    ),
    ("gemm_mxfp8", "mbarrier.init count sub 1"): (
        "missed",
        f"128 threads arrive and 127 are waited for: {_LOADED}",
    ),
    ("gemm_nvfp4", "delete bar.warp.sync"): (
        "missed", f"a lane arrives for its warp: {_LOADED}",
    ),
}  # fmt: skip


def reason(reasons: Reasons, outcome: Outcome) -> tuple[str, str]:
    """That of the one place, of the rule in the kernel, or of the rule."""
    kernel, rule = outcome.kernel, outcome.rule
    keys = ((kernel, f"{rule} at {outcome.line}"), (kernel, rule), ("", rule))
    return next((reasons[key] for key in keys if key in reasons), ("", ""))


def summary(
    outcomes: list[Outcome],
    what: str,
    subjects: Mapping[str, Subject] = PIPELINES,
    reasons: Reasons = REASONS,
    policies: Sequence[tuple[str, int]] = POLICIES,
) -> dict[str, Any]:
    """What is committed: figures, then every mutant in short."""
    kernels = {
        kernel: {
            "mutants": len(mine := [o for o in outcomes if o.kernel == kernel]),
            "caught": sum(o.by is not None for o in mine),
        }
        for kernel in subjects
    }
    rules: dict[str, dict[str, Any]] = {}
    for o in outcomes:
        entry = rules.setdefault(o.rule, {"mutants": 0, "caught": 0, "by": Counter()})
        entry["mutants"] += 1
        if o.by is not None:
            entry["caught"] += 1
            entry["by"][o.how.partition(":")[0]] += 1
    caught = [o for o in outcomes if o.by is not None]
    return {
        "what": what,
        "date": str(date.today()),
        "policies": [f"{name}, seed {seed}" for name, seed in policies],
        "mutants": len(outcomes),
        "caught": len(caught),
        "caught percent": round(100 * len(caught) / len(outcomes), 1),
        "first caught by": dict(Counter((o.by or "").partition(",")[0] for o in caught)),
        "how": dict(Counter(o.how.partition(":")[0] for o in caught).most_common()),
        "kernels": kernels,
        "rules": rules,
        "survivors": [
            {
                **{key: getattr(o, key) for key in ("kernel", "rule", "line", "was")},
                **dict(zip(("kind", "reason"), reason(reasons, o), strict=True)),
            }
            for o in outcomes
            if o.by is None
        ],
        "every": [f"{o.kernel}:{o.line} {o.rule} | {o.by} | {o.how}" for o in outcomes],
    }


def main() -> None:
    with ProcessPoolExecutor() as pool:
        outcomes = list(pool.map(trial, mutants(), chunksize=4))
    what = (
        "tests/emulator/mutation.py: kernels of tests/emulator/pipelines with one thing wrong, run "
        "under completion policies until one of them notices"
    )
    result = summary(outcomes, what)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    for survivor in result["survivors"]:
        print(*survivor.values(), sep=" | ")
    print(result["caught"], "of", result["mutants"])


if __name__ == "__main__":
    main()
