"""Show what ``gpu_grouped.py``, ``gpu_grouped_l2.py``, ``gpu_grouped_raster.py`` and
``gpu_wgrad.py`` measured on an H200, and what the model says of a B200.

Writes tables of docs/lab/grouped.md, and its pictures. Needs no GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from exact_tables import LAB, RESULTS, table
from gpu_quantize import ROOT, rewrite
from matplotlib.figure import Figure

from blockscale.model import B200, H200, Launch, estimate, launch

MARKS = "<!-- {}: made by benchmarks/grouped_tables.py -->", "<!-- {}: end -->"
PICTURE = ROOT / "docs" / "assets" / "grouped_l2_h200.png"
ORDERS = ROOT / "docs" / "assets" / "grouped_orders_model.png"
#: Orders of tiles: fields of a launch that differ from what is chosen, and the line's looks.
RASTERS: dict[str, tuple[dict[str, Any], str]] = {
    "supergroups in each group": ({}, "-o"),
    "none: the next tile is the one across": ({"group": 1}, "--s"),
    "one raster over all groups": ({"across_groups": True}, ":^"),
}
ROWS, COUNTS = 32768, (8, 16, 32, 64, 128, 256)
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


def rasters(launches: list[dict[str, Any]]) -> str:
    """Of three orders of tiles: DRAM reads over operands, hits of L2, and time over the first's."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in launches:
        found.setdefault((row["name"], *row["shape"]), []).append(row)
    lines = []
    for (name, groups, m, n, k), rows in found.items():
        line = [f"{groups} groups, {name}, {n} x {k}"]
        for row in rows:
            reads = row["dram_read_bytes"] / operands(groups, m, n, k)
            line.append(f"{reads:.2f}, {row['l2_hits_percent']:.0f} %")
        first = rows[0]["nanoseconds"]
        lines.append([*line, *(f"{row['nanoseconds'] / first:.2f}" for row in rows[1:])])
    orders = "in each group", "none", "one over all"
    return table(["", *orders, "time of none", "of one over all"], lines)


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


def estimates() -> str:
    """The model's TFLOP/s of a B200, by format and how many CTAs multiply together."""
    lines = []
    for groups in (8, 32, 256):
        for n, k in ((4096, 7168), (7168, 2048)):
            line = [f"{groups} groups, {n} x {k}"]
            for name in ("mxfp8", "mxfp8_mxfp4", "nvfp4"):
                for ctas in (1, 2):
                    found = estimate(_launch("sm_100a", name, (ROWS, n, k), groups, ctas), B200)
                    line.append(f"{found.tflops:.0f}")
            lines.append(line)
    heads = [f"{name}, {ctas}" for name in ("MXFP8", "by MXFP4", "NVFP4") for ctas in (1, 2)]
    return table(["", *heads], lines)


def draw_orders() -> Figure:
    """What the model says of three orders of tiles: bytes read, hits and time."""
    figure = Figure(figsize=(9.5, 5.2), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True)
    for line, (arch, name, machine) in zip(
        axes, (("sm_90a", "fp8_block", H200), ("sm_100a", "mxfp8", B200)), strict=True
    ):
        usual: list[float] = []
        for label, (fields, style) in RASTERS.items():
            found = []
            for groups in COUNTS:
                launch = _launch(arch, name, (ROWS, 4096, 7168), groups)
                found.append((launch, estimate(replace(launch, **fields), machine)))
            usual = usual or [one.microseconds for _, one in found]
            values = (
                [one.traffic.missed / launch.compulsory_bytes for launch, one in found],
                [100 * one.traffic.hit_rate for _, one in found],
                [one.microseconds / us for (_, one), us in zip(found, usual, strict=True)],
            )
            for part, each in zip(line, values, strict=True):
                part.plot(COUNTS, each, style, label=label, markersize=4)
        heads = "DRAM reads over operands", "L2 hits, %", "time over the first one's"
        for part, head in zip(line, heads, strict=True):
            part.set_title(f"{machine.name}: {head}", fontsize=9)
            part.set_xscale("log", base=2)
            part.set_xticks(COUNTS, map(str, COUNTS))
            part.spines[["top", "right"]].set_visible(False)
        line[0].set_ylim(0)
    for part in axes[1]:
        part.set_xlabel("groups")
    axes[0][0].legend(frameon=False, fontsize=7)
    return figure


def _launch(
    arch: str, name: str, shape: tuple[int, int, int], groups: int, ctas: int | None = None
) -> Launch:
    """Of groups of as many rows."""
    sizes = (shape[0] // groups,) * groups
    return launch(arch, name, shape, groups=sizes, ctas=ctas)


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
    rewrite(page, estimates(), *(each.format("estimates") for each in MARKS))
    orders = json.loads((RESULTS / "grouped_raster_h200.json").read_text())
    rewrite(page, rasters(orders["launches"]), *(each.format("rasters") for each in MARKS))
    draw_orders().savefig(ORDERS, dpi=150)


if __name__ == "__main__":
    main()
