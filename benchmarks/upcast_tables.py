"""Show what ``gpu_upcast.py`` measured on an H200: tables of docs/lab/products-h200.md.

Needs no GPU.
"""

from __future__ import annotations

import json
from typing import Any

from exact_tables import LAB, RESULTS, table
from gpu_quantize import rewrite

MARKS = "<!-- {}: made by benchmarks/upcast_tables.py -->", "<!-- {}: end -->"
BF16, FP8, OURS = "torch bf16", "fp8_128x128", "mxfp4"
WIDE, WIDENED, NVFP4, BY_BF16 = "mxfp4, wide", "mxfp4, widened", "nvfp4", "bf16 x mxfp4"


def ratio(tera: dict[str, int], name: str) -> str:
    return f"{tera[name] / tera[BF16]:.2f}"


def products(cases: list[dict[str, Any]]) -> str:
    """One product: TFLOP/s, and those of MXFP4 over bf16's."""
    lines = []
    for case in cases:
        tera = case["tflops"]
        line = [" x ".join(map(str, case["shape"]))]
        line += [str(tera[name]) for name in (BF16, FP8, OURS)]
        line += [ratio(tera, name) for name in (OURS, WIDE, WIDENED, NVFP4, BY_BF16)]
        lines.append(line)
    heads = "of bf16", "two passes", "widened", f"`{NVFP4}`", f"bf16 by `{OURS}`"
    return table(["M x N x K", BF16, f"`{FP8}`", f"`{OURS}`", *heads], lines)


def groups(cases: list[dict[str, Any]]) -> str:
    """Groups of rows: TFLOP/s, and those of MXFP4 over bf16's."""
    lines = []
    for case in cases:
        count, _, n, k = case["shape"]
        tera = case["tflops"]
        line = [f"{count}, {n}, {k}", case["sizes"]]
        lines.append([*line, *(str(tera[name]) for name in (BF16, FP8, OURS))])
        lines[-1] += [ratio(tera, OURS), ratio(tera, NVFP4)]
    heads = BF16, f"`{FP8}`", f"`{OURS}`", "of bf16", f"`{NVFP4}`"
    return table(["groups, N, K", "sizes", *heads], lines)


def main() -> None:
    cases = json.loads((RESULTS / "upcast_h200.json").read_text())["products"]
    page = LAB / "products-h200.md"
    for name, text in (
        ("upcast", products([case for case in cases if "sizes" not in case])),
        ("upcast groups", groups([case for case in cases if "sizes" in case])),
    ):
        rewrite(page, text, *(mark.format(name) for mark in MARKS))


if __name__ == "__main__":
    main()
