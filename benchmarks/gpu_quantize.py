"""Show what ``blockscale bench quantize --peers all --json`` measured on an H200.

From benchmarks/results/quantize_h200.json it writes the short table of docs/performance.md and
the tables of docs/lab/quantize-h200.md, and draws docs/assets/quantize_h200.png. Needs no GPU.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "quantize_h200.json"
PICTURE = ROOT / "docs" / "assets" / "quantize_h200.png"
BEGIN = "<!-- gpu_quantize: made by benchmarks/gpu_quantize.py -->"
END = "<!-- gpu_quantize: end -->"

_OURS = "blockscale"
_SHOWN = 16384, 7168  # the shape of the short table
_WANTED = 0.95  # of copy
_FEW = 128  # rows of a small input
# Okabe-Ito: told apart by colour-blind readers
_COLOURS = {_OURS: "#0072B2", "Triton": "#E69F00", "torch.compile": "#CC79A7"}

Row = dict[str, Any]


# --- tables ---------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> str:
    """What the lab shows: a table a group, what the host pays, what could not run."""
    parts = [machine(result)]
    for group, rows in _groups(result["rows"]):
        parts.append(f"**{group}**")
        if any(", 8 experts" in row["case"] for row in rows):
            parts.append(_experts(rows))
        elif all(row["rows"] <= _FEW for row in rows):
            parts.append(_small(rows))
        else:
            parts.append(_large(rows))
    slow = "; ".join(_below(result["rows"])) or "none"
    parts.append(f"Below {_WANTED} of copy at one shape or more, the least: {slow}.")
    if result["host"]:
        lines = ["| a call, 128 x 7168 | host, us |", "| --- | ---: |"]
        lines += [f"| {call['what']} | {call['microseconds']:.1f} |" for call in result["host"]]
        parts.append("\n".join(lines))
    absent = dict.fromkeys(
        f"{_short(each['case'])} ({each['who']}): {_first_line(each['why'])}"
        for each in result["absent"]
    )
    if absent:
        parts.append("Could not run: " + "; ".join(absent) + ".")
    return "\n\n".join(parts)


def _large(rows: Sequence[Row]) -> str:
    """Share of copy for each shape."""
    shapes = _shapes(rows)
    found = _by_case(rows)
    lines = head([f"{m} x {k}" for m, k in shapes])
    for name, measured in found.items():
        cells = [f"{measured[s]['of_copy']:.2f}" if s in measured else "" for s in shapes]
        lines.append(line(name, cells))
    return "\n".join(lines)


def _small(rows: Sequence[Row]) -> str:
    """Microseconds, and those as a part of a copy kernel's."""
    shapes = _shapes(rows)
    lines = head([part for m, k in shapes for part in (f"{m} x {k}, us", "of a copy kernel's")])
    for name, measured in _by_case(rows).items():
        cells = []
        for shape in shapes:
            row = measured.get(shape)
            cells += (
                [f"{row['microseconds']:.1f}", f"{1 / row['of_copy']:.2f}"] if row else ["", ""]
            )
        lines.append(line(name, cells))
    return "\n".join(lines)


def _experts(rows: Sequence[Row]) -> str:
    """Microseconds, and how much longer than without experts, the first case."""
    shapes = _shapes(rows)
    lines = head([part for m, k in shapes for part in (f"{m} x {k}, us", "longer than without")])
    found = _by_case(rows)
    alone = next(iter(found.values()))
    for name, measured in found.items():
        cells = []
        for shape in shapes:
            row = measured.get(shape)
            if row is None or shape not in alone:
                cells += ["", ""]
                continue
            more = row["microseconds"] / alone[shape]["microseconds"] - 1
            cells += [f"{row['microseconds']:.1f}", "" if measured is alone else f"{more:+.1%}"]
        lines.append(line(name, cells))
    return "\n".join(lines)


def _below(rows: Sequence[Row]) -> list[str]:
    """Large cases of ours that are slower than wanted."""
    ours = [row for row in rows if row["who"] == _OURS and row["rows"] > _FEW]
    least = {
        name: min(row["of_copy"] for row in measured.values())
        for name, measured in _by_case(ours).items()
    }
    return [f"{name}: {share:.3f}" for name, share in least.items() if share < _WANTED]


def summary(result: dict[str, Any]) -> str:
    """The short table of docs/performance.md."""
    lines = [
        "| | blockscale, GB/s | of copy | with torchao, GB/s | of copy |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, case in _BARS.items():
        found = _large_rows(result, case)
        rows = {who: by_shape[_SHOWN] for who, by_shape in found.items() if _SHOWN in by_shape}
        ours = rows.pop(_OURS, None)
        best = min(rows.values(), key=lambda row: row["microseconds"], default=None)
        if ours is not None:
            cells = [*_speed(ours), *(_speed(best) if best else ("", ""))]
            lines.append(line(name, cells))
    size = f"{_SHOWN[0]} x {_SHOWN[1]}"
    return "\n".join([*lines, "", f"Results of {size}, from bfloat16: {machine(result)}"])


def _speed(row: Row) -> tuple[str, str]:
    return f"{row['gigabytes_per_second']:.0f}", f"{row['of_copy']:.2f}"


# --- the picture ----------------------------------------------------------------------------------

# what a bar is called, and the case it shows
_BARS = {
    "MXFP8 rows": "mxfp8 rows, compact",
    "MXFP8 columns": "mxfp8 columns, compact",
    "MXFP8 rows and columns": "mxfp8 both, compact",
    "FP8 1x128 rows": "fp8_1x128 rows, sm90",
    "MXFP8 rows, tcgen05 scales": "mxfp8 rows, tcgen05",
    "MXFP8 columns, tcgen05 scales": "mxfp8 columns, tcgen05",
    "MXFP8 rows and columns, tcgen05 scales": "mxfp8 both, tcgen05",
    "FP8 1x128 rows and columns": "fp8_1x128 both, sm90",
    "NVFP4 rows": "nvfp4 rows, tcgen05",
    "NVFP4 rows and columns": "nvfp4 both, tcgen05",
    "SwiGLU + MXFP8 rows and columns": "SwiGLU, mxfp8 both, tcgen05",
    "RMSNorm + MXFP8 rows": "RMSNorm, mxfp8 rows, tcgen05",
}


def draw(result: dict[str, Any]) -> Figure:
    """Speed as a share of copy: a bar reaches the median of the shapes, dots are the shapes."""
    bars = [
        (name, who, [row["of_copy"] for row in by_shape.values()])
        for name, case in _BARS.items()
        for who, by_shape in _large_rows(result, case).items()
    ]
    figure = Figure(figsize=(9, 0.9 + 0.27 * len(bars)), layout="constrained")
    axes = figure.subplots()
    at, ticks = 0.0, {}
    shown = set()
    for name, group in groupby(bars, key=lambda bar: bar[0]):
        several = list(group)
        ticks[name] = at + (len(several) - 1) / 2
        for _, who, shares in several:
            kind = next((k for k in _COLOURS if k in who), who)
            label = kind if kind == _OURS or "torchao" in kind else f"torchao, {kind}"
            middle = statistics.median(shares)
            axes.barh(
                at,
                middle,
                0.9,
                color=_COLOURS.get(kind, "#999999"),
                label=None if label in shown else label,
            )
            axes.plot(shares, [at] * len(shares), ".", color="black", markersize=3)
            axes.text(0.01, at, f"{middle:.2f}", color="white", va="center", fontsize=8)
            shown.add(label)
            at += 1
        at += 0.7
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12)
    axes.spines[["top", "right"]].set_visible(False)
    shapes = ", ".join(f"{m} x {k}" for m, k in _shapes(next(_groups(result["rows"]))[1]))
    axes.set_xlabel(
        f"speed on an {result['gpu'].removeprefix('NVIDIA ')}; 1 = the device's own copy of as "
        f"many bytes (line)\nbars: median of the shapes, dots: {shapes}"
    )
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


# --- what both need -------------------------------------------------------------------------------


def _large_rows(result: dict[str, Any], case: str) -> dict[str, dict[tuple[int, int], Row]]:
    """Who -> shape -> measurement of a case; shapes are those of the first table."""
    shapes = _shapes(next(_groups(result["rows"]))[1])
    found: dict[str, dict[tuple[int, int], Row]] = {}
    for row in result["rows"]:
        shape = row["rows"], row["columns"]
        if _short(row["case"]) == case and shape in shapes:
            found.setdefault(row["who"], {}).setdefault(shape, row)
    return found


def machine(result: dict[str, Any]) -> str:
    names = {"nvidia-cutlass-dsl": "CuTe DSL", "torchao": "torchao", "triton": "Triton"}
    parts = [result["gpu"], f"torch {result['torch']}"]
    parts += [f"{names[key]} {result[key]}" for key in names if result.get(key)]
    return ", ".join(parts) + "."


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for name in dict.fromkeys(row["group"] for row in rows):
        yield name, [row for row in rows if row["group"] == name]


def _shapes(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return list(dict.fromkeys((row["rows"], row["columns"]) for row in rows))


def _by_case(rows: Sequence[Row]) -> dict[str, dict[tuple[int, int], Row]]:
    """Name of a line -> shape -> measurement, in the order of ``rows``."""
    found: dict[str, dict[tuple[int, int], Row]] = {}
    for row in rows:
        who = "" if row["who"] == _OURS else f"{row['who']}: "
        name = f"{who}{_short(row['case'])}"
        found.setdefault(name, {})[row["rows"], row["columns"]] = row
    return found


def _short(case: str) -> str:
    return case.removesuffix(", bfloat16").replace(", float32", ", fp32 input")


def _first_line(text: str) -> str:
    return text.splitlines()[0][:160].rstrip(".")


def head(columns: Sequence[str]) -> list[str]:
    return [line("", columns), "| --- |" + " ---: |" * len(columns)]


def line(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def rewrite(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Put ``text`` between the marks of a page."""
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}")


def main() -> None:
    result = json.loads(RESULT.read_text())
    rewrite(ROOT / "docs" / "performance.md", summary(result))
    rewrite(ROOT / "docs" / "lab" / "quantize-h200.md", tables(result))
    draw(result).savefig(PICTURE, dpi=150)
    print(tables(result))


if __name__ == "__main__":
    main()
