"""Show the ladder's steps, and what ``python -m examples.ladder --json`` measured on an H200.

Writes the steps of docs/ladder.md from their definition; and from
benchmarks/results/ladder_h200.json, if it is there, the table of results and
docs/assets/ladder_h200.png. Needs no GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockscale.bench.contest import Row

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
from examples.ladder.bench import PEERS, draw  # noqa: E402
from examples.ladder.steps import STEPS, Step  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "ladder_h200.json"
PICTURE = ROOT / "docs" / "assets" / "ladder_h200.png"
PAGE = ROOT / "docs" / "ladder.md"

_SIZES = (2048, 4096)


def steps() -> str:
    """Each step's idea and prediction."""
    return "\n\n".join(_step(each) for each in STEPS)


def _step(step: Step) -> str:
    before = f", after *{step.after}*" if step.after else ""
    small, large = step.predicted
    return (
        f"**{step.name}** ({step.source}{before}). {step.idea}\n"
        f"Predicted {small} and {large} TFLOP/s. {step.prediction}"
    )


def results(found: dict[str, Any], rows: Sequence[Row]) -> str:
    """The machine, a table of what was predicted and what came, what could not run, the picture."""
    measured = {(row.who, row.m): row.tflops for row in rows}
    others = {row.who for row in rows}
    names = [*(step.name for step in STEPS), *(who for who in PEERS if who in others)]
    known = {step.name: step for step in STEPS}
    head = ["step"]
    head += [f"{size}^3, {what}" for size in _SIZES for what in ("predicted", "TFLOP/s", "gain")]
    lines = [_line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
    for name in names:
        step, cells = known.get(name), [name]
        for i, size in enumerate(_SIZES):
            came = measured.get((name, size))
            before = measured.get((step.after, size)) if step else None
            cells += [
                str(step.predicted[i]) if step else "",
                f"{came:.0f}" if came else "",
                f"{came / before - 1:+.1%}" if came and before else "",
            ]
        lines.append(_line(cells))
    machine = ", ".join([found["gpu"], f"torch {found['torch']}", f"CUDA {found['cuda']}"])
    absent = [f"{each['who']}, {each['m']}^3: {each['why']}" for each in found["absent"]]
    parts = [f"{machine}.", "\n".join(lines)]
    parts += [f"Could not run: {'; '.join(absent)}."] if absent else []
    return "\n\n".join([*parts, f"![TFLOP/s of each step](assets/{PICTURE.name})"])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rewrite(page: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of a part of a page."""
    begin, end = f"<!-- {name}: made by benchmarks/gpu_ladder.py -->", f"<!-- {name}: end -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def main() -> None:
    rewrite(PAGE, "ladder steps", steps())
    if RESULT.exists():
        found = json.loads(RESULT.read_text(encoding="utf-8"))
        rows = [Row(**row) for row in found["rows"]]
        rewrite(PAGE, "ladder results", results(found, rows))
        draw(rows).savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
