"""Show what ``gpu_exact.py`` and ``gpu_mixed_tiles.py`` measured on an H200.

Writes tables of docs/lab/products-h200.md and docs/lab/few-rows.md from
benchmarks/results/exact_h200.json and mixed_tiles_h200.json. Of the latter, a time of ours is that
of the kernel that is chosen today. Needs no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from statistics import geometric_mean
from typing import Any

from gpu_mixed_tiles import EPILOGUE, name
from gpu_quantize import ROOT, rewrite

from blockscale.kernels.sm90.mixed_config import choose_config

RESULTS = ROOT / "benchmarks" / "results"
LAB = ROOT / "docs" / "lab"
MARKS = "<!-- {}: made by benchmarks/exact_tables.py -->", "<!-- {}: end -->"
FORMATS = ("mxfp8", "nvfp4")
KINDS = ("both quantized", "bf16 activations")
_STREAM = "stream"


def table(head: list[str], lines: list[list[str]]) -> str:
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, marks, *lines))


def ratios(exact: list[dict[str, Any]]) -> str:
    """The time of torch's bf16 over ours, by rows of activations: mean and least."""
    counts = list(dict.fromkeys(row["shape"][0] for row in exact if row["group"].startswith(KINDS)))
    lines = []
    for rows in counts:
        line = [str(rows)]
        for kind in KINDS:
            for format in FORMATS:
                group = f"{kind}, {rows} rows"
                here = [r for r in exact if (r["group"], r["format"]) == (group, format)]
                found = [row["bf16"] / row["ours"] for row in here]
                line.append(f"{geometric_mean(found):.2f}, {min(found):.2f}" if found else "")
        lines.append(line)
    head = ["rows", *(f"{kind}: {format.upper()}" for kind in KINDS for format in FORMATS)]
    return table(head, lines)


def odd_scales(exact: list[dict[str, Any]]) -> str:
    """Microseconds of weights whose rows of scales TMA cannot load, and of the next K."""
    lines = []
    for row, after in pairwise([*exact, exact[0]]):
        if row["group"].startswith("rows of scales") and after["group"].startswith("the next K"):
            m, n, k = row["shape"]
            lines.append(
                [
                    f"{m} x {n} x {k}, {row['format'].upper()}",
                    f"{row['ours']:.1f}",
                    f"{after['ours']:.1f} ({after['shape'][2]})",
                    f"{row['bf16']:.1f}",
                    f"{row['bf16'] / row['ours']:.2f}",
                ]
            )
    return table(["M x N x K", "us", "the next K", "torch, bf16", "ratio"], lines)


def of_best(products: list[dict[str, Any]]) -> Iterator[tuple[int, float, float, bool]]:
    """Of each product: rows, the time of the best kernel over that of the chosen one, bf16's over
    it, and whether stream-K is best."""
    for product in products:
        shape = product["m"], product["n"], product["k"]
        chosen = _way(name(choose_config(shape, product["format"], EPILOGUE)))
        *ours, (_, bf16) = product["us"].items()
        took = min(us for label, us in ours if _way(label) == chosen)
        label, best = min(ours, key=lambda each: each[1])
        yield product["m"], best / took, bf16 / took, _STREAM in label


def _way(label: str) -> str:
    """A kernel's name without its stages, of which there are as many as fit."""
    return label.rsplit(", ", 1)[0]


def choice(products: list[dict[str, Any]]) -> str:
    found = list(of_best(products))
    lines = []
    for low, high in ((0, 64), (65, 256), (257, 2048)):
        here = [each for each in found if low < each[0] <= high]
        best, bf16 = ([each[i] for each in here] for i in (1, 2))
        lines.append(
            [
                f"{min(each[0] for each in here)} to {max(each[0] for each in here)}",
                str(len(here)),
                f"{geometric_mean(best):.3f}, {min(best):.3f}",
                f"{sum(each[3] for each in here)}",
                f"{geometric_mean(bf16):.2f}, {min(bf16):.2f}",
            ]
        )
    return table(
        ["rows", "products", "of the best", "stream-K is best", "bf16's time / ours"], lines
    )


def main() -> None:
    exact = json.loads((RESULTS / "exact_h200.json").read_text())["rows"]
    mixed = json.loads((RESULTS / "mixed_tiles_h200.json").read_text())["products"]
    for page, what, text in (
        ("products-h200.md", "exact", ratios(exact)),
        ("products-h200.md", "mixed", choice(mixed)),
        ("few-rows.md", "odd scales", odd_scales(exact)),
    ):
        rewrite(LAB / page, text, *(mark.format(what) for mark in MARKS))


if __name__ == "__main__":
    main()
