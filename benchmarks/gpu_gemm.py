"""Show what ``blockscale bench gemm`` and ``bench linear`` measured on an H200.

From these files of benchmarks/results, as far as they are there, it writes the tables of
docs/performance.md and docs/lab/chooser.md, and draws docs/assets/gemm_h200.png and
linear_h200.png. Needs no GPU.

    gemm_h200.json       blockscale bench gemm --peers all --json
    chooser_h200.json    blockscale bench gemm --chooser --json
    linear_h200.json     blockscale bench linear --peers all --json
    layer_host_h200.json what layers keep the host busy with
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from gpu_quantize import ROOT, head, line, machine, rewrite

from blockscale.bench.contest import OURS, Row, speedups
from blockscale.bench.gemm import DECODE
from blockscale.bench.pictures import draw

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
LAB = ROOT / "docs" / "lab"

DECODING = "Decoding: bf16 activations, quantized weights"
_PASSES = {"forward": "forward", "step": "forward and backward"}
_SMALL = {m for m, _, _ in DECODE}


def contests(result: dict[str, Any], few: bool = False) -> str:
    """A table for each group: ours, and how many times as fast as each of the others.

    ``few``: the groups of few rows, which is decoding, or all others.
    """
    rows = [row for row in (Row(**row) for row in result["rows"]) if (row.group == DECODING) == few]
    parts = [] if few else [machine(result)]
    for group in dict.fromkeys(row.group for row in rows):
        parts += [
            *([] if few else [f"**{group}**"]),
            _group([row for row in rows if row.group == group]),
        ]
    absent = dict.fromkeys(
        f"{each['case']} ({each['who']}): {each['why'].splitlines()[0][:160].rstrip('.')}"
        for each in result["absent"]
    )
    if absent and not few:
        parts.append("Could not run: " + "; ".join(absent) + ".")
    return "\n\n".join(parts)


def host(result: dict[str, Any]) -> str:
    """What a call keeps the host busy with."""
    lines = ["| a call | host, us |", "| --- | ---: |"]
    for call in result["host"]:
        took = call["microseconds"]
        lines.append(line(call["what"], ["" if took is None else f"{took:.1f}"]))
    return "\n".join(lines)


def layer_host(result: dict[str, Any]) -> str:
    """The same for layers: a row a layer, a column a pass and a number of rows."""
    lines = head([f"{rows}, {each}, us" for each in _PASSES.values() for rows in result["new"]])
    calls = result["calls"]
    for name in ("nn.Linear", "fp8_block", "mxfp8", "nvfp4"):
        runs = (calls[f"{name} {each}"][rows]["new"] for each in _PASSES for rows in result["new"])
        lines.append(line(name, [f"{min(each):.0f} to {max(each):.0f}" for each in runs]))
    return "\n".join(lines)


def _group(rows: Sequence[Row]) -> str:
    shapes = list(dict.fromkeys(row.shape for row in rows))
    found = {(row.case, row.who, row.shape): row for row in rows}
    means = {(s.case, s.who): f"{s.mean:.2f}" for s in speedups(rows)}
    lines = head([*(shape.replace("x", " x ") for shape in shapes), "geometric mean"])
    for case, who in dict.fromkeys((row.case, row.who) for row in rows):
        mine = [found.get((case, OURS, shape)) for shape in shapes]
        its = [found.get((case, who, shape)) for shape in shapes]
        if who.startswith(OURS):
            unit = "us" if rows[0].m in _SMALL else "TFLOP/s"
            speeds = ["" if row is None else _speed(row) for row in its]
            lines.append(line(f"{case}{who.removeprefix(OURS)}, {unit}", [*speeds, ""]))
        else:
            ratios = [
                f"{b.microseconds / a.microseconds:.2f}" if a and b else ""
                for a, b in zip(mine, its, strict=True)
            ]
            lines.append(line(f"times as fast as {who}", [*ratios, means.get((case, who), "")]))
    return "\n".join(lines)


def _speed(row: Row) -> str:
    return f"{row.microseconds:.1f}" if row.m in _SMALL else f"{row.tflops:.0f}"


def chooser(result: dict[str, Any]) -> str:
    """What was chosen for each shape, and how far from the best."""
    choices = result["choices"]
    lines = [
        "| model | layer | M x N x K | TFLOP/s | best's time / its | best instead |",
        "| --- | --- | --- | ---: | ---: | --- |",
    ]
    for c in choices:
        best = "" if c["chosen"] == c["best"] else c["best"]
        shape = f"{c['m']} x {c['n']} x {c['k']}"
        cells = [c["layer"], shape, f"{c['tflops']:.0f}", f"{c['of_best']:.3f}", best]
        lines.append(line(c["model"], cells))
    least = min(c["of_best"] for c in choices)
    parts = [machine(result), "\n".join(lines), f"The least of {len(choices)}: {least:.3f}."]
    return "\n\n".join(parts)


#: A table: its name, the file it is made from, its page, and what makes it.
_PARTS = (
    ("gemm", "gemm", PAGE, contests),
    ("decode", "gemm", PAGE, partial(contests, few=True)),
    ("host", "gemm", PAGE, host),
    ("linear", "linear", PAGE, contests),
    ("layer_host", "layer_host", PAGE, layer_host),
    ("chooser", "chooser", LAB / "chooser.md", chooser),
)


def main() -> None:
    for name, source, page, tell in _PARTS:
        path = RESULTS / f"{source}_h200.json"
        if not path.exists():
            print(f"{path}: not there; what the page says of it stays")
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        text = tell(result)
        begin = f"<!-- gpu_gemm {name}: made by benchmarks/gpu_gemm.py -->"
        rewrite(page, text, begin, f"<!-- gpu_gemm {name}: end -->")
        if tell is contests:
            rows = [Row(**row) for row in result["rows"]]
            draw(rows).savefig(ROOT / "docs" / "assets" / f"{name}_h200.png", dpi=150)
        print(text)


if __name__ == "__main__":
    main()
