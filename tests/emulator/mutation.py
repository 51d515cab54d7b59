"""Mutation of the pipelines: does the emulator notice when one thing in a kernel is wrong?

A rule is a pattern for one instruction and what to put in its place; each place where it matches is
one mutant. A mutant runs under several completion policies, until one of them catches it: an error,
a wrong result, or no end. ``python mutation.py`` runs all and writes RESULTS.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from pipelines import PIPELINES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "emulator_mutants.json"
#: The first that catches a mutant ends its trial.
POLICIES = (("late", 0), ("eager", 0), *(("random", seed) for seed in range(6)))
_SECONDS = 30  # a kernel takes one


@dataclass(frozen=True)
class Rule:
    """``pattern`` for one instruction; ``into`` refers to its groups, and may be empty."""

    name: str
    pattern: str
    into: str


def _delete(name: str, pattern: str) -> Rule:
    return Rule(f"delete {name}", pattern, "")


def _operand(name: str, before: str, operand: str, after: str, change: str, type: str) -> Rule:
    """One operand changed in passing: ``change`` is an instruction and its second source."""
    opcode, _, value = change.partition(" ")
    kind = "b" if opcode in ("xor", "and", "or") else "u"
    into = (
        rf"{{ .reg .b{type} mutant; {opcode}.{kind}{type} mutant, \g<operand>, {value}; "
        r"\g<before>mutant\g<after> }"
    )
    return Rule(name, rf"(?P<before>{before})(?P<operand>{operand})(?P<after>{after})", into)


_R, _RD, _RS, _REST = r"%r\d+", r"%rd\d+", r"%rs\d+", r"[^;]*;"
_MMA = r"tcgen05\.mma\S+ \[%r\d+\], "
_WGMMA = r"wgmma\.mma_async\S+ \{[^}]*\}, "
_CP = rf"tcgen05\.cp\S+ \[{_R}\], "
_TILE = r"cp\.async\.bulk\.tensor\S+ (?:\[%r\d+\], )?\[%rd\d+, \{"


def _bits(name: str, before: str, operand: str, after: str, type: str, **bits: int) -> list[Rule]:
    """One bit of a descriptor flipped; bits by field, with underscores for spaces."""
    return [
        _operand(
            f"{name}: {field.replace('_', ' ')}", before, operand, after, f"xor {1 << bit:#x}", type
        )
        for field, bit in bits.items()
    ]


_MATRIX = {
    "start": 3, "leading_offset": 16, "stride": 32, "stride_high": 35, "version": 46,
    "base_offset": 49, "swizzle_low": 61, "swizzle": 62, "swizzle_high": 63,
}  # fmt: skip
_WGMMA_MATRIX = {
    "start": 3, "leading_offset": 22, "stride": 32, "base_offset": 49, "swizzle_low": 62,
    "swizzle_high": 63,
}  # fmt: skip
_SHAPE = {
    "sparsity": 2, "scale_B_id": 4, "scale_B_id_high": 5, "type_of_A": 7, "type_of_B": 10,
    "negate_A": 13, "negate_B": 14, "transpose_A": 15, "transpose_B": 16, "N_low": 17, "N": 20,
    "scale_type": 23, "M_low": 27, "M": 28, "scale_A_id": 29, "scale_A_id_high": 30,
}  # fmt: skip

RULES = [
    # --- what orders things ---
    _delete("fence.proxy.async", r"fence\.proxy\.async\S*;"),
    _delete("fence.mbarrier_init", r"fence\.mbarrier_init\S*;"),
    _delete("tcgen05.fence", r"tcgen05\.fence\S*;"),
    _delete("wgmma.fence", r"wgmma\.fence\S*;"),
    _delete("bar.sync", r"bar\.sync\s[^;]*;"),
    _delete("bar.warp.sync", rf"bar\.warp\.sync{_REST}"),
    _delete("barrier.cluster", r"barrier\.cluster\.arrive\S*;\s*barrier\.cluster\.wait\S*;"),
    _delete("barrier.cluster.arrive", r"barrier\.cluster\.arrive\S*;"),
    _delete("barrier.cluster.wait", r"barrier\.cluster\.wait\S*;"),
    _delete("mbarrier.init", rf"mbarrier\.init{_REST}"),
    _delete("mbarrier.arrive", rf"mbarrier\.arrive{_REST}"),
    Rule(
        "delete mbarrier.try_wait", rf"mbarrier\.try_wait\S+ p, {_REST}", "setp.eq.b32 p, 0, 0;"
    ),
    _delete("tcgen05.commit", rf"tcgen05\.commit{_REST}"),
    _delete("tcgen05.wait::ld", r"tcgen05\.wait::ld\S*;"),
    _delete("wgmma.commit_group", r"wgmma\.commit_group\S*;"),
    _delete("wgmma.wait_group", rf"wgmma\.wait_group{_REST}"),
    _delete("cp.async.bulk.commit_group", r"cp\.async\.bulk\.commit_group;"),
    _delete("cp.async.bulk.wait_group", rf"cp\.async\.bulk\.wait_group{_REST}"),
    Rule("wgmma.wait_group n + 1", r"(wgmma\.wait_group\S+) 0;", r"\1 1;"),
    Rule("wgmma.wait_group n + 1", r"(wgmma\.wait_group\S+) 1;", r"\1 2;"),
    Rule("cp.async.bulk.wait_group n + 1", r"(cp\.async\.bulk\.wait_group\S*) 0;", r"\1 1;"),
    Rule("cp.async.bulk.wait_group n + 1", r"(cp\.async\.bulk\.wait_group\S*) 1;", r"\1 2;"),
    Rule("arrive relaxed", r"mbarrier\.arrive\.release(\.cluster[^;]*;)", r"mbarrier.arrive.relaxed\1"),
    # --- what they wait for ---
    _operand("parity flipped", rf"mbarrier\.try_wait\S+ p, \[{_R}\], ", _R, ";", "xor 1", "32"),
    _operand("waits at the next mbarrier", r"mbarrier\.try_wait\S+ p, \[", _R, rf"\]{_REST}", "add 8", "32"),
    _operand("arrives at the next mbarrier", r"mbarrier\.arrive\S+ _, \[", r"%r\d+|there", rf"\]{_REST}", "add 8", "32"),
    _operand("commits to the next mbarrier", r"tcgen05\.commit\S+ \[", _R, rf"\]{_REST}", "add 8", "32"),
    _operand("tells the next mbarrier", r"cp\.async\.bulk\S+ \[%r\d+\], [^;]*\[", _R, r"\](?:, %rs\d+)?;", "add 8", "32"),
    *(
        _operand(f"expect_tx {change}", rf"mbarrier\.arrive\.expect_tx\S+ _, \[{_R}\], ", _R, ";", change, "32")
        for change in ("add 16", "sub 16", "and 0")
    ),
    *(
        _operand(f"mbarrier.init count {change}", rf"mbarrier\.init\S+ \[{_R}\], ", _R, ";", change, "32")
        for change in ("add 1", "sub 1")
    ),
    _operand("mapa of another rank", rf"mapa\S+ there, {_R}, ", _R, ";", "xor 1", "32"),
    # --- copies ---
    _delete("copy", rf"cp\.async\.bulk\.(?:tensor|shared){_REST}"),
    _operand("x + 8", _TILE, _R, r", [^;]*;", "add 8", "32"),
    _operand("y + 8", rf"{_TILE}{_R}, ", _R, r"\}[^;]*;", "add 8", "32"),
    _operand("copies 16 bytes less", r"cp\.async\.bulk\.shared\S+ \[%r\d+\], \[%rd\d+\], ", _R, r", [^;]*;", "sub 16", "32"),
    _operand("lands 128 bytes further", r"cp\.async\.bulk\.(?:tensor|shared)\S+ \[", _R, r"\], [^;]*;", "add 128", "32"),
    _operand("stores from 128 bytes further", r"cp\.async\.bulk\.tensor\S+ \[%rd\d+, [^;]*\}\], \[", _R, r"\];", "add 128", "32"),
    *(
        _operand(f"CTA mask xor {bit}", r"(?:cp|tcgen05)[^;]*multicast::cluster[^;]* ", _RS, ";", f"xor {bit}", "16")
        for bit in (1, 2)
    ),
    Rule("copy without cta_group::2", r"(cp\.async\.bulk\.tensor\.2d)\.cta_group::2([^;]*;)", r"\1\2"),
    # --- tensor cores ---
    _delete("tcgen05.alloc", rf"tcgen05\.alloc{_REST}"),
    _delete("tcgen05.dealloc", rf"tcgen05\.dealloc{_REST}"),
    _delete("tcgen05.cp", rf"tcgen05\.cp{_REST}"),
    _delete("tcgen05.mma", rf"tcgen05\.mma{_REST}"),
    _delete("wgmma.mma_async", rf"wgmma\.mma_async{_REST}"),
    _operand("tcgen05.alloc of half", r"tcgen05\.alloc\S+ \[%r\d+\], ", _R, ";", "shr 1", "32"),
    *_bits("A of tcgen05.mma", _MMA, _RD, rf", {_REST}", "64", **_MATRIX),
    *_bits("B of tcgen05.mma", rf"{_MMA}{_RD}, ", _RD, rf", {_REST}", "64", **_MATRIX),
    *_bits("idesc", rf"{_MMA}{_RD}, {_RD}, ", _R, rf", {_REST}", "32", **_SHAPE),
    *_bits("source of tcgen05.cp", _CP, _RD, ";", "64", **_MATRIX),
    Rule("A and B swapped", rf"({_MMA})({_RD}), ({_RD})({_REST})", r"\1\3, \2\4"),
    Rule("scales swapped", rf"({_MMA}[^;]*)(\[{_R}\]), (\[{_R}\])({_REST})", r"\1\3, \2\4"),
    _operand("D one column further", r"tcgen05\.mma\S+ \[", _R, rf"\]{_REST}", "add 1", "32"),
    _operand("scale_A a column further", rf"{_MMA}[^;\[]*\[", _R, rf"\]{_REST}", "add 1", "32"),
    _operand("scale_B a column further", rf"{_MMA}[^;\[]*\[{_R}\], \[", _R, rf"\]{_REST}", "add 1", "32"),
    _operand("tcgen05.cp a column further", r"tcgen05\.cp\S+ \[", _R, rf"\]{_REST}", "add 1", "32"),
    _operand("tcgen05.ld a column further", r"tcgen05\.ld[^;]*\[", _R, r"\];", "add 1", "32"),
    _operand("tcgen05.ld 32 lanes further", r"tcgen05\.ld[^;]*\[", _R, r"\];", "add 0x200000", "32"),
    Rule("tcgen05.mma always accumulates", rf"(tcgen05\.mma{_REST})", r"setp.eq.b32 p, 0, 0; \1"),
    Rule("tcgen05.mma never accumulates", rf"(tcgen05\.mma{_REST})", r"setp.ne.b32 p, 0, 0; \1"),
    *_bits("A of wgmma", _WGMMA, _RD, rf", {_REST}", "64", **_WGMMA_MATRIX),
    *_bits("B of wgmma", rf"{_WGMMA}{_RD}, ", _RD, rf", {_REST}", "64", **_WGMMA_MATRIX),
    Rule("wgmma: A transposed", rf"({_WGMMA}[^;]*), 0, 1;", r"\1, 1, 1;"),
    Rule("wgmma: B not transposed", rf"({_WGMMA}[^;]*), 0, 1;", r"\1, 0, 0;"),
    Rule("wgmma: A negated", rf"({_WGMMA}[^;]*), p, 1,([^;]*;)", r"\1, p, -1,\2"),
    Rule("wgmma always accumulates", rf"({_WGMMA}{_REST})", r"setp.eq.b32 p, 0, 0; \1"),
    Rule("wgmma never accumulates", rf"({_WGMMA}{_REST})", r"setp.ne.b32 p, 0, 0; \1"),
]  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    kernel: str
    rule: str
    line: int
    was: str
    ptx: str


def mutants() -> Iterator[Mutant]:
    for kernel, pipeline in PIPELINES.items():
        text = pipeline.ptx
        for rule in RULES:
            for match in re.finditer(rule.pattern, text):
                changed = text[: match.start()] + match.expand(rule.into) + text[match.end() :]
                line = text.count("\n", 0, match.start()) + 1
                was = re.sub(r"\{%f\d+, [^}]*\}", "{...}", " ".join(match[0].split()))
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


def trial(mutant: Mutant) -> Outcome:
    known = mutant.kernel, mutant.rule, mutant.line, mutant.was
    signal.signal(signal.SIGALRM, _stop)
    for completion, seed in POLICIES:
        by = f"{completion}, seed {seed}" if completion == "random" else completion
        signal.alarm(_SECONDS)
        try:
            if not PIPELINES[mutant.kernel].run(completion, seed, mutant.ptx):
                return Outcome(*known, by, "wrong result")
        except _Endless:
            return Outcome(*known, by, "no end")
        except Exception as error:
            return Outcome(*known, by, f"{type(error).__name__}: {error}".split("\n")[0][:240])
        finally:
            signal.alarm(0)
    return Outcome(*known, None)


#: Why a mutant survives: (kernel or "", rule) -> (kind, reason). "equivalent": the mutant is as
#: right as the kernel; "not modelled": the emulator does not tell them apart, on purpose; "missed".
REASONS: dict[tuple[str, str], tuple[str, str]] = {
    ("", "delete tcgen05.fence"): (
        "not modelled",
        "the waits and barriers around it order the same accesses; compilers leave these fences out "
        "of kernels that run on hardware, so their lack is no error here",
    ),
    ("", "A of tcgen05.mma: leading offset"): ("equivalent", _UNUSED := (
        "the leading dimension byte offset is not used: K-major operand with a swizzle"
    )),
    ("", "B of tcgen05.mma: leading offset"): ("equivalent", _UNUSED),
    ("", "A of wgmma: leading offset"): ("equivalent", _UNUSED),
    ("", "source of tcgen05.cp: leading offset"): (
        "equivalent", "the leading dimension byte offset is not used: rows of a single 16-byte piece",
    ),
    ("gemm_wgmma", "mapa of another rank"): (
        "equivalent", "lanes 0 and 1 arrive at CTAs 1 and 0 instead of 0 and 1",
    ),
    ("gemm_mxfp8", "delete fence.mbarrier_init"): ("not modelled", _INIT := (
        "the barrier of the CTA orders the initialization before every use; whether the "
        "asynchronous proxy needs a fence on top is not checked"
    )),
    ("quantize", "delete fence.proxy.async"): ("not modelled", _INIT),
    ("gemm_mxfp8", "mbarrier.init count sub 1"): (
        "missed",
        "128 threads arrive and 127 are waited for: the checks tell warps apart, not threads, and "
        "the other 31 threads of the last one's warp have arrived",
    ),
    ("gemm_nvfp4", "delete bar.warp.sync"): (
        "missed", "the checks tell warps apart, not threads: a lane arrives for its warp anyway",
    ),
}  # fmt: skip


def reason(outcome: Outcome) -> tuple[str, str] | None:
    return REASONS.get((outcome.kernel, outcome.rule)) or REASONS.get(("", outcome.rule))


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """What is committed: figures, then every mutant in short."""
    kernels = {
        kernel: {
            "mutants": len(mine := [o for o in outcomes if o.kernel == kernel]),
            "caught": sum(o.by is not None for o in mine),
        }
        for kernel in PIPELINES
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
        "what": "tests/emulator/mutation.py: kernels of tests/emulator/pipelines with one thing "
        "wrong, run under completion policies until one of them notices",
        "date": str(date.today()),
        "policies": [f"{name}, seed {seed}" for name, seed in POLICIES],
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
                **dict(zip(("kind", "reason"), reason(o) or ("", ""), strict=True)),
            }
            for o in outcomes
            if o.by is None
        ],
        "every": [f"{o.kernel}:{o.line} {o.rule} | {o.by} | {o.how}" for o in outcomes],
    }


def main() -> None:
    with ProcessPoolExecutor(2) as pool:
        outcomes = list(pool.map(trial, mutants(), chunksize=4))
    result = summary(outcomes)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    for survivor in result["survivors"]:
        print(*survivor.values(), sep=" | ")
    print(result["caught"], "of", result["mutants"])


if __name__ == "__main__":
    main()
