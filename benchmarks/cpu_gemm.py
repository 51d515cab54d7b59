"""Measure products on a CPU: this library beside torch in bfloat16 and the reference.

Every call runs once a round, so that whatever else the machine does hits all alike; ratios are
medians of those of each round. Writes benchmarks/results/cpu_gemm.json and the tables of
docs/performance.md (short) and docs/lab/products-cpu.md; ``--table`` only makes them from the
JSON that is there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
from cpu_quantize import PAGE, ROOT, machine
from gpu_quantize import rewrite

from blockscale.bench.cpu import products

RESULT = ROOT / "benchmarks" / "results" / "cpu_gemm.json"
LAB = ROOT / "docs" / "lab" / "products-cpu.md"
ROWS, N, K = (1, 8, 16, 128), 4096, 4096
SHORT = 1, 16, 128  # rows that the short table shows
FORMATS = ("mxfp8", "nvfp4", "fp8_128x128")


def measure(m: int, format: str, count: int) -> dict[str, dict[str, float]]:
    """Milliseconds, and how many times as long as ours each call takes."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, K, generator=g).bfloat16() for rows in (m, N))
    todo = products(x, w, format)
    times: dict[str, list[float]] = {name: [] for name in todo}
    for call in todo.values():
        call()
    names = list(todo)
    for i in range(count):
        for name in names[i % len(names) :] + names[: i % len(names)]:  # each comes first at times
            start = time.perf_counter()
            todo[name]()
            times[name].append(time.perf_counter() - start)
    return {
        name: {
            "median_ms": round(statistics.median(took) * 1e3, 2),
            "best_ms": round(min(took) * 1e3, 2),
            "times_ours": round(
                statistics.median(a / b for a, b in zip(took, times[format], strict=True)), 2
            ),
        }
        for name, took in times.items()
    }


def table(result: dict[str, Any]) -> str:
    m = result["machine"]
    lines = [
        f"{m['cpu']}, {m['cores']} cores, load {m['load_before']:.1f} before, torch {m['torch']}, "
        f"numba {m['numba']}, {m['date']}; M x {K} in bfloat16 by a weight of {N} x {K}, median "
        f"(and best) of {result['rounds']} rounds; how many times as long others take, median of "
        "the rounds.",
        "",
        "| threads | M | format | ms (best) | quantized `a` too | reference | torch, bfloat16 |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for run in result["runs"]:
        name, took = run["format"], run["calls"]
        others = (f"{name} by {name}", "reference", "torch, bfloat16")
        cells = " | ".join(f"{took[each]['times_ours']:.2f}" for each in others)
        ours = f"{took[name]['median_ms']:.1f} ({took[name]['best_ms']:.1f})"
        lines.append(f"| {run['threads']} | {run['rows']} | {name} | {ours} | {cells} |")
    return "\n".join(lines)


def short(result: dict[str, Any]) -> str:
    """A row a product: one thread and two, beside the reference and torch."""
    m = result["machine"]
    threads = sorted({run["threads"] for run in result["runs"]})
    cells = [
        f"{count} thread{'s' * (count > 1)}: {what}"
        for count in threads
        for what in ("ms (best)", "reference takes", "torch, bfloat16, takes")
    ]
    lines = [
        f"{m['cpu']}, torch {m['torch']}, {m['date']}; M x {K} in bfloat16 by a weight of "
        f"{N} x {K}, median of {result['rounds']} rounds; how many times as long others take.",
        "",
        f"| M | format | {' | '.join(cells)} |",
        "| ---: | --- |" + " ---: |" * len(cells),
    ]
    found = {(run["rows"], run["format"], run["threads"]): run["calls"] for run in result["runs"]}
    for rows, name in dict.fromkeys((rows, name) for rows, name, _ in found if rows in SHORT):
        cells = []
        for count in threads:
            took = found[rows, name, count]
            cells += [f"{took[name]['median_ms']:.1f} ({took[name]['best_ms']:.1f})"]
            cells += [
                f"{took[each]['times_ours']:.2f}" for each in ("reference", "torch, bfloat16")
            ]
        lines.append(f"| {rows} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--table", action="store_true", help="only rewrite the table")
    args = parser.parse_args()
    if not args.table:
        result: dict[str, Any] = {"machine": machine(), "rounds": args.rounds, "runs": []}
        for threads in sorted({1, os.cpu_count() or 1}):
            torch.set_num_threads(threads)
            for m in ROWS:
                for format in FORMATS:
                    calls = measure(m, format, args.rounds)
                    run = {"threads": threads, "rows": m, "format": format, "calls": calls}
                    result["runs"].append(run)
        result["load_after"] = os.getloadavg()[0]
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    result = json.loads(RESULT.read_text())
    tables = (("cpu_gemm", LAB, table(result)), ("cpu_gemm short", PAGE, short(result)))
    for name, page, text in tables:
        begin = f"<!-- {name}: made by benchmarks/cpu_gemm.py -->"
        rewrite(page, text, begin, f"<!-- {name}: end -->")
        print(text)


if __name__ == "__main__":
    main()
