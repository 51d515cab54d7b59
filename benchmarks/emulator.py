"""Time the emulator on kernels of tests/emulator/pipelines, and on our product for Blackwell, with
all its checks.

    python benchmarks/emulator.py        # writes benchmarks/results/emulator_speed.json

Each launch is made once to warm up, then so often that the median means something; the large
products are made once.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from blockscale import emulator as em

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "emulator"), str(ROOT / "tests" / "kernels")]
from pipelines import PIPELINES, Case, mxfp8, quantize  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "emulator_speed.json"
REPEATS = 5


def timed(entry: str, case: Case, grid: tuple[int, ...], **settings: Any) -> dict[str, Any]:
    """Seconds of one launch; the outputs must be right."""
    pipeline = PIPELINES[entry]
    device = em.Device(pipeline.target, **settings)

    def launch(profile: bool = False) -> em.Report:
        return device.launch(
            pipeline.ptx, entry, grid, pipeline.block, case.args,
            shared=pipeline.shared, profile=profile,
        )  # fmt: skip

    seconds = []
    report = launch(profile=True)
    for _ in range(REPEATS):
        start = time.perf_counter()
        launch()
        seconds.append(time.perf_counter() - start)
    for output, expected in zip(case.outputs, case.expected, strict=True):
        assert output.tobytes() == expected.tobytes()
    return {
        "seconds": round(statistics.median(seconds), 3),
        "fastest": round(min(seconds), 3),
        "warp instructions": report.warp_instructions,
        "threads": pipeline.block * int(np.prod(grid)),
    }


def eight(workers: int) -> dict[str, Any]:
    return timed("quantize", quantize(8, 16), (1, 8), workers=workers)


def product(size: int) -> dict[str, Any]:
    """Seconds of our MXFP8 product of matrices of ``size`` x ``size``, compiled before."""
    import torch
    from sm100_inputs import emulated, operand, product, rounded

    from blockscale.dtypes import BFLOAT16
    from blockscale.kernels.common.epilogue import Epilogue
    from blockscale.kernels.sm100.config import choose_config

    config = choose_config((size, size, size), ("mxfp8", "mxfp8"), Epilogue(BFLOAT16))
    emulated(config, *(operand("mxfp8", 128, 128, seed) for seed in (1, 2)), completion="eager")
    a, b = (operand("mxfp8", size, size, seed) for seed in (1, 2))
    start = time.perf_counter()
    got = emulated(config, a, b, completion="eager")
    seconds = time.perf_counter() - start
    assert torch.equal(got, rounded(product(a, b), torch.bfloat16))
    return {"seconds": round(seconds, 3)}


MEASURED: dict[str, Callable[[], dict[str, Any]]] = {
    "MXFP8 tile, 128x128x256, 192 threads": lambda: timed("gemm_mxfp8", mxfp8(2, 2), (1,)),
    "the same, late": lambda: timed("gemm_mxfp8", mxfp8(2, 2), (1,), completion="late"),
    "the same, no checks": lambda: timed("gemm_mxfp8", mxfp8(2, 2), (1,), check="none"),
    "quantizer, 256x1024": lambda: timed("quantize", quantize(2, 8), (1, 2)),
    "quantizer, 8 CTAs, 1 process": lambda: eight(1),
    "quantizer, 8 CTAs, 2 processes": lambda: eight(2),
    "MXFP8 product, 1024^3": lambda: product(1024),
    "MXFP8 product, 2048^3": lambda: product(2048),
}


def main() -> None:
    results = {}
    for name, run in MEASURED.items():
        results[name] = run()
        print(f"{name}: {results[name]}", flush=True)
    one, two = (results[f"quantizer, 8 CTAs, {n}"]["seconds"] for n in ("1 process", "2 processes"))
    found = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, numpy {np.__version__}",
        "measured": results,
        "two processes against one": round(one / two, 2),
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
