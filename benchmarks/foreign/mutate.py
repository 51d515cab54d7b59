"""Mutants of two kernels of other projects: is it noticed when one thing in their PTX is wrong?

    python benchmarks/foreign/mutate.py FOLDER

FOLDER is that of ``run.py``. The rules and the trial are those of ``tests/emulator/mutation.py``. A
compiler that unrolls repeats itself: of a rule's places that run, ``PLACES`` at most are mutated,
evenly spaced. Writes RESULTS, with every survivor and the reason.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # not this folder: it has a triton.py
sys.path.append(str(HERE.parents[1] / "tests" / "emulator"))
from foreign import deepgemm, triton  # noqa: E402
from foreign.kernel import Foreign  # noqa: E402
from foreign.mutation_reasons import REASONS  # noqa: E402
from mutation import POLICIES, Mutant, Outcome, mutants, summary, trial  # noqa: E402
from mutation_rules import PRODUCT_RULES, RULES, Rule  # noqa: E402
from mutation_spelling import lines_that_run, respelled  # noqa: E402

from blockscale import emulator as em  # noqa: E402
from blockscale.emulator.alarms.alarm import KINDS  # noqa: E402

RESULTS = HERE.parent / "results" / "foreign" / "mutants.json"
ORDERS = POLICIES
PLACES = 3
_SECONDS = 30  # a run takes one or two
#: Kernels and their files.
_KERNELS = {"fp8_fp4_2cta": deepgemm, "tma_persistent_ws_fp16_sm100": triton}

_ORDERING = r"(?:mbarrier|cp|tcgen05|fence|barrier|bar|wgmma)"
_PREDICATED = rf"@(!?)(%p\d+) ({_ORDERING}\.[^;]*;)"
#: Spellings of these compilers -> those that ``respelled`` and the rules know.
_SPELLINGS = (
    (r'(\.file[^"\n]*")[^"\n]*/', r"\1"),  # sources without the folder where they were made
    (r"// (?:begin|end) inline asm\n", "\n"),
    (r"[ \t]+", " "),
    (r"(?<![\w.%])(?:P1|complete)(?!\w)", "p"),
    (r"(?<![\w.%])remAddr32(?!\w)", "there"),
    (r"\[ (%r\d+) \+ 0 \]", r"[\1]"),
    (r"(mbarrier\.try_wait\S+ p, \[%r\d+\], %r\d+), %r\d+;", r"\1;"),  # a hint
)
_ACCUMULATES = r"(tcgen05\.mma[^;]*), %?p\d*;"
_FIXED = r"{ .reg .pred mutant; setp.%s.b32 mutant, 0, 0; \1, mutant; }"
_FURTHER = r"{ .reg .b%s mutant; add.u%s mutant, \2, 8; \1[mutant]\3 }"
#: Of instructions that our kernels do not have, or have in another form.
FOREIGN_RULES = [
    Rule("delete barrier.sync", r"barrier\.sync\s[^;]*;", ""),
    Rule("delete tcgen05.wait::st", r"tcgen05\.wait::st\S*;", ""),
    Rule("delete mbarrier.inval", r"mbarrier\.inval[^;]*;", ""),
    Rule("tcgen05.mma always accumulates", _ACCUMULATES, _FIXED % "eq"),
    Rule("tcgen05.mma never accumulates", _ACCUMULATES, _FIXED % "ne"),
    Rule(
        "commits to the next mbarrier",
        r"(tcgen05\.commit\S+ )\[(%rd\d+)\](;)",
        _FURTHER % (64, 64),
    ),
    Rule(
        "tells the next mbarrier",
        r"(cp\.async\.bulk\S+ \[%r\d+\], [^;]*)\[(%r\d+)\](, %rd\d+;)",
        _FURTHER % (32, 32),
    ),
]


def _unpredicated(text: str) -> str:
    """A branch over each instruction that orders, so that to delete it leaves no predicate."""
    places = iter(range(text.count("@")))

    def around(match: re.Match[str]) -> str:
        negated, predicate, instruction = match.groups()
        label = f"$mutant{next(places)}"
        return f"@{'' if negated else '!'}{predicate} bra {label}; {instruction} {label}:"

    return re.sub(_PREDICATED, around, text)


Key = tuple[str, int, int]  # an alarm: its kind and the lines of the two accesses


@dataclass(frozen=True)
class Subject:
    """A kernel, as ``mutation.py`` wants it. An alarm that it has itself catches no mutant."""

    kernel: Foreign
    folder: Path

    @cached_property
    def ptx(self) -> str:
        text = self.kernel.ptx(self.folder)
        for pattern, into in _SPELLINGS:
            text = re.sub(pattern, into, text)
        return respelled(_unpredicated(text))

    def alarms(self, completion: str, seed: int, ptx: str) -> tuple[bool, dict[Key, em.Alarm]]:
        """Whether the output is right, and what the checks found."""
        device = em.Device(
            self.kernel.target, completion=completion, seed=seed, check=list(KINDS),
            on_error="collect",
        )  # fmt: skip
        right, reports = self.kernel.launch(device, ptx, self.folder)
        found = [alarm for report in reports for alarm in report.alarms]
        return right, {(alarm.kind, alarm.line, alarm.other): alarm for alarm in found}

    @cached_property
    def known(self) -> frozenset[Key]:
        """Alarms of the kernel itself, in any order."""
        keys: set[Key] = set()
        for order in ORDERS:
            right, found = self.alarms(*order, self.ptx)
            assert right
            keys |= found.keys()
        return frozenset(keys)

    def run(self, completion: str, seed: int = 0, ptx: str | None = None) -> bool:
        right, found = self.alarms(completion, seed, ptx or self.ptx)
        for key, alarm in found.items():
            if key not in self.known:
                raise KINDS[alarm.kind].error(alarm.message, alarm.line)
        return right

    @cached_property
    def rules(self) -> list[Rule]:
        ours = {rule.name for rule in FOREIGN_RULES if "accumulates" in rule.name}
        return [r for r in (*RULES, *PRODUCT_RULES) if r.name not in ours] + FOREIGN_RULES


def every(subjects: dict[str, Subject]) -> Iterator[Mutant]:
    """The mutants to try."""
    for name, subject in subjects.items():
        lines = lines_that_run(lambda subject=subject: subject.run("late"))  # type: ignore[misc]
        places: dict[str, list[Mutant]] = {}
        for mutant in mutants({name: subject}, subject.rules):
            if mutant.line in lines:
                places.setdefault(mutant.rule, []).append(mutant)
        for found in places.values():
            count = min(PLACES, len(found))
            yield from (found[i * len(found) // count] for i in range(count))


@cache
def subjects_of(folder: Path) -> dict[str, Subject]:
    return {
        name: Subject(next(k for k in module.KERNELS if k.name == name), folder)
        for name, module in _KERNELS.items()
    }


def attempt(folder: Path, mutant: Mutant) -> Outcome:
    outcome = trial(mutant, ORDERS, subjects_of(folder), _SECONDS)
    print(*outcome.__dict__.values(), sep=" | ", flush=True)
    return outcome


def main() -> None:
    folder = Path(sys.argv[1])
    subjects = subjects_of(folder)
    made = list(every(subjects))
    assert all(subject.known is not None for subject in subjects.values())  # before the fork
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        outcomes = list(pool.map(partial(attempt, folder), made))
    what = (
        "benchmarks/foreign/mutate.py: kernels of other projects with one thing wrong; of each "
        f"rule's places that run {PLACES} at most, evenly spaced"
    )
    result = summary(outcomes, what, subjects, REASONS, ORDERS)
    result["versions"] = {
        name: f"{s.kernel.project} {s.kernel.version}" for name, s in subjects.items()
    }
    result["checks"] = list(KINDS)
    result["alarms of the kernels themselves, which catch nothing"] = {
        name: sorted(f"{kind} at {line}, {other}" for kind, line, other in s.known)
        for name, s in subjects.items()
    }
    equal = sum(s["kind"] == "equivalent" for s in result["survivors"])
    share = result["caught"] / (len(outcomes) - equal)
    result["caught percent of those that are not equivalent"] = round(100 * share, 1)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
