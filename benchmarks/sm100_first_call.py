"""Measure how long a process takes to get its first kernel of a Blackwell product, without a GPU.

Every line is a fresh process with torch and blockscale imported before: one that compiles, with an
empty cache folder, and one that finds the kernel there. Times are those of the process (user and
system) and of a clock; the import of CuTe DSL is part of the first. Writes
benchmarks/results/sm100_first_call.json and a table of docs/lab/blackwell.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

from gpu_quantize import ROOT, head, line, rewrite

from blockscale.dtypes import UINT8
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.sm100.config import Config, choose_config
from blockscale.kernels.sm100.quantizing_config import Quantizing

RESULT = ROOT / "benchmarks" / "results" / "sm100_first_call.json"
PAGE = ROOT / "docs" / "lab" / "blackwell.md"
BEGIN = "<!-- sm100_first_call: made by benchmarks/sm100_first_call.py -->"
END = "<!-- sm100_first_call: end -->"
RUNS = 3

CASES: dict[str, dict[str, Any]] = {
    "mxfp8": {"formats": ("mxfp8", "mxfp8")},
    "nvfp4": {"formats": ("nvfp4", "nvfp4"), "epilogue": Epilogue(alpha=(0, 0))},
    "nvfp4, SwiGLU, quantized to nvfp4": {
        "formats": ("nvfp4", "nvfp4"),
        "epilogue": Epilogue(UINT8, alpha=(0, 0)),
        "quantizing": Quantizing("nvfp4", swiglu=True),
    },
}


def configuration(name: str) -> Config:
    return choose_config((8192, 8192, 8192), **{"epilogue": Epilogue()} | CASES[name])


def child(name: str) -> None:
    config = configuration(name)
    begun, used = time.perf_counter(), time.process_time()
    compile_cache.load(config)
    print(json.dumps([time.process_time() - used, time.perf_counter() - begun]))


def run(name: str, folder: str) -> list[float]:
    environment = os.environ | {"BLOCKSCALE_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def measure() -> dict[str, Any]:
    rows = []
    for name in CASES:
        found = []
        for _ in range(RUNS):
            with tempfile.TemporaryDirectory() as folder:
                found.append((run(name, folder), run(name, folder)))
        first, second = (min(each[i] for each in found) for i in range(2))
        rows.append({"what": name, "compiled": first, "from_disk": second})
    return {"nvidia-cutlass-dsl": version("nvidia-cutlass-dsl"), "runs": RUNS, "rows": rows}


def table(result: dict[str, Any]) -> str:
    lines = head(["compiled: CPU, s", "clock, s", "from the disk cache: CPU, s", "clock, s"])
    for row in result["rows"]:
        numbers = [*row["compiled"], *row["from_disk"]]
        lines.append(line(row["what"], [f"{each:.2f}" for each in numbers]))
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:]:
        child(sys.argv[1])
        return
    result = measure()
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    rewrite(PAGE, table(result), BEGIN, END)
    print(table(result))


if __name__ == "__main__":
    main()
