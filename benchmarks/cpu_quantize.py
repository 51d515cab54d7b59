"""Measure quantization on a CPU: this library beside torchao, a copy and the reference.

Every operation runs once a round, so that whatever else the machine does hits all of them alike.
Writes benchmarks/results/cpu_quantize.json and the tables of docs/performance.md (short) and
docs/lab/quantize-cpu.md; ``--table`` only makes them from the JSON that is there. Needs torchao.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numba
import torch
from gpu_quantize import rewrite

import blockscale as bs
from blockscale import reference
from blockscale.bench.cpu import SHAPE, Operation, operations, peers, rounds
from blockscale.formats import formats

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "cpu_quantize.json"
PAGE = ROOT / "docs" / "performance.md"
LAB = ROOT / "docs" / "lab" / "quantize-cpu.md"
#: What the short table shows.
SHORT = (
    "copy into a new tensor",
    *("blockscale mxfp8, rows", "blockscale mxfp8, columns", "blockscale nvfp4, rows"),
    *("blockscale fp8_1x128, rows", "blockscale fp8_128x128, rows", "blockscale dequantize mxfp8"),
    *("torchao mxfp8, rows, torch.compile", "torchao mxfp8, rows, eager"),
    "torchao nvfp4, rows, torch.compile",
)

FIRST_CALL = """
import time, torch
import blockscale as bs
x = torch.ones(64, 64, dtype=torch.{dtype})
start = time.perf_counter()
bs.quantize(x)
print(time.perf_counter() - start)
"""


def measure(count: int, threads: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(threads)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    part, size = x[: SHAPE[0] // 16], 2 + formats["mxfp8"].bits_per_element / 8

    def slow() -> object:
        return reference.quantize(part, formats["mxfp8"])

    todo = [*operations(x), *peers(x)]
    todo.append(Operation("mxfp8, rows, a 16th of them", "reference, eager", size / 16, slow))
    n = x.numel()
    return {
        each.name.removesuffix(", eager") if each.call is slow else each.name: {
            "median_ms": round(statistics.median(t) * 1e3, 3),
            "best_ms": round(min(t) * 1e3, 3),
            "bytes_per_element": round(each.bytes_per_element, 5),
            "median_GB/s": round(each.bytes_per_element * n / statistics.median(t) / 1e9, 2),
            "best_GB/s": round(each.bytes_per_element * n / min(t) / 1e9, 2),
        }
        for each, t in zip(todo, rounds(todo, count), strict=True)
    }


def first_calls() -> dict[str, float]:
    """Seconds of the first ``bs.quantize`` of a process, numba's cache empty and then filled."""
    out = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
        for cached in ("compiling", "cached"):
            for dtype in ("bfloat16", "float32"):
                command = [sys.executable, "-c", FIRST_CALL.format(dtype=dtype)]
                done = subprocess.run(command, env=environment, capture_output=True, check=True)
                out[f"{dtype}, {cached}"] = round(float(done.stdout), 2)
    return out


def small_call() -> float:
    """Microseconds of ``bs.quantize`` of a 32 x 64 tensor."""
    x, times = torch.randn(32, 64).bfloat16(), []
    for _ in range(300):
        start = time.perf_counter()
        bs.quantize(x)
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 1)


def machine() -> dict[str, Any]:
    import torchao

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [s for s in info.read_text().splitlines() if s.startswith("model name")]
        model = lines[0].split(":")[1].strip() if lines else model
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "huge_pages": pages.read_text().strip() if pages.exists() else None,
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchao": torchao.__version__,
        "numba": numba.__version__,
        "blockscale": bs.__version__,
        "date": datetime.date.today().isoformat(),
    }


def table(result: dict[str, Any], names: Sequence[str] = ()) -> str:
    """The operations called ``names``, or all of them."""
    m, runs = result["machine"], result["threads"]
    head = "".join(f" {n} thread{'s' if n != '1' else ''}: ms | GB/s | best GB/s |" for n in runs)
    lines = [
        f"{m['cpu']}, {m['cores']} cores, torch {m['torch']}, torchao {m['torchao']}, numba "
        f"{m['numba']}, {m['date']}; a bfloat16 tensor of {' x '.join(map(str, result['shape']))}, "
        f"median (and best) of {result['rounds']} rounds.",
        "",
        f"| |{head}",
        "| --- |" + " ---: | ---: | ---: |" * len(runs),
    ]
    for name in names or next(iter(runs.values())):
        keys = ("median_ms", "median_GB/s", "best_GB/s")
        cells = "".join(f" {r[name][key]:.2f} |" for r in runs.values() for key in keys)
        lines.append(f"| {name} |{cells}")
    if names:
        return "\n".join(lines)
    first = ", ".join(f"{name} {seconds} s" for name, seconds in result["first_call_s"].items())
    lines += [
        "",
        f"First call of a process: {first}. A 32 x 64 tensor: {result['small_call_us']} µs a call.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--table", action="store_true", help="only rewrite the table")
    args = parser.parse_args()
    if not args.table:
        result: dict[str, Any] = {
            "machine": machine(),
            "shape": SHAPE,
            "rounds": args.rounds,
            "small_call_us": small_call(),
            "first_call_s": first_calls(),
            "threads": {},
        }
        for threads in sorted({1, torch.get_num_threads()}):
            result["threads"][str(threads)] = measure(args.rounds, threads)
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    result = json.loads(RESULT.read_text())
    tables = (
        ("cpu_quantize", LAB, table(result)),
        ("cpu_quantize short", PAGE, table(result, SHORT)),
    )
    for name, page, text in tables:
        begin = f"<!-- {name}: made by benchmarks/cpu_quantize.py -->"
        rewrite(page, text, begin, f"<!-- {name}: end -->")
        print(text)


if __name__ == "__main__":
    main()
