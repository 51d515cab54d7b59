"""Show what ``gpu_grouped.py``, ``gpu_grouped_l2.py`` and ``gpu_wgrad.py`` measured on an H200.

Writes tables of docs/lab/grouped.md, and its picture. Needs no GPU.
"""

from __future__ import annotations

import json
from typing import Any

from exact_tables import LAB, RESULTS, table
from gpu_quantize import ROOT, rewrite
from matplotlib.figure import Figure

MARKS = "<!-- {}: made by benchmarks/grouped_tables.py -->", "<!-- {}: end -->"
PICTURE = ROOT / "docs" / "assets" / "grouped_l2_h200.png"
PEERS = "one product", "DeepGEMM", "torch FP8 row-wise", "torch bf16"


def speeds(cases: list[dict[str, Any]]) -> str:
    """TFLOP/s of the chosen kernel, and the time of others over its own."""
    lines = []
    for case in cases:
        groups, _, n, k = case["shape"]
        us = case["microseconds"]
        ours = us[case["chosen"]]
        lines.append(
            [
                f"{groups} groups, {case['name']}, {n} x {k}",
                str(case["teraflops"][case["chosen"]]),
                *(f"{us[peer] / ours:.2f}" if peer in us else "" for peer in PEERS),
            ]
        )
    return table(["", "TFLOP/s", *PEERS], lines)


def gradients(cases: list[dict[str, Any]]) -> str:
    """TFLOP/s of products along K, and the time of others over theirs."""
    lines = []
    for case in cases:
        us, m, n = case["microseconds"], *case["shape"][:2]
        tera = case["teraflops"]
        line = [f"{case['groups']} groups, {case['kind']}, {m} x {n}"]
        for ours, dense, peer in (
            ("bf16", "dense", "torch FP8 row-wise"),
            ("+=", "dense +=", "DeepGEMM +="),
        ):
            line += [str(tera[ours]), f"{tera[ours] / tera[dense]:.2f}"]
            line.append(f"{us[peer] / us[ours]:.2f}" if peer in us else "")
        lines.append(line)
    heads = "to bf16", "one product", "torch FP8 row-wise", "added to fp32", "one", "DeepGEMM"
    return table(["", *heads], lines)


def draw(launches: list[dict[str, Any]]) -> Figure:
    """Bytes that DRAM is read for, over operands, by tiles down a group; a line a case."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for part, k in zip(axes, (7168, 2048), strict=True):
        for groups, name in dict.fromkeys((row["shape"][0], row["name"]) for row in launches):
            here = sorted(
                (row["supergroup"], row)
                for row in launches
                if (row["shape"][0], row["name"], row["shape"][3]) == (groups, name, k)
            )
            heights = [height for height, _ in here]
            times = [row["dram_read_bytes"] / operands(*row["shape"]) for _, row in here]
            dashes = "--" if name == "skewed" else "-"
            part.plot(heights, times, dashes, marker=".", label=f"{groups} groups, {name}")
        part.set_xscale("log", base=2)
        part.set_xticks(heights, map(str, heights))
        part.set_title(f"N x K = {here[0][1]['shape'][2]} x {k}", fontsize=10)
        part.set_xlabel("tiles of 128 x 256 down a group, then across")
        part.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("DRAM reads over bytes of the operands")
    axes[0].set_ylim(0)
    axes[1].legend(frameon=False)
    return figure


def operands(groups: int, m: int, n: int, k: int) -> int:
    """Their bytes."""
    return (m + groups * n) * k


def main() -> None:
    measured = json.loads((RESULTS / "grouped_h200.json").read_text())
    page = LAB / "grouped.md"
    rewrite(page, speeds(measured["cases"]), *(each.format("speeds") for each in MARKS))
    gradient = json.loads((RESULTS / "wgrad_h200.json").read_text())["cases"]
    rewrite(page, gradients(gradient), *(each.format("gradients") for each in MARKS))
    launches = json.loads((RESULTS / "grouped_l2_h200.json").read_text())["launches"]
    draw(launches).savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
