"""Measure ``checkpoint.quantize_file`` on files of bf16 weights, with and without statistics.

Beside it the time of copying the file. ``--before SRC`` measures another version of the package,
too: the folder that holds its ``blockscale``. Writes benchmarks/results/checkpoint_quantize.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "checkpoint_quantize.json"
LAYERS = {"0.36 GB": 3, "1.2 GB": 10}
HIDDEN, WIDE = 2048, 8192

# A run of its own, so that none finds what another left in memory; compiled code is cached on disk.
RUN = """
import sys, time, torch
import blockscale as bs
from blockscale import checkpoint
source, target, format, *more = sys.argv[1:]
bs.quantize(torch.ones(64, 64, dtype=torch.bfloat16), format).dequantize()
start = time.perf_counter()
checkpoint.quantize_file(source, target, format, **eval(more[0]))
print(time.perf_counter() - start)
"""


def make(path: Path, layers: int) -> int:
    """A file with the weights of so many layers of a transformer; its bytes."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 4, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDE),
    }  # fmt: skip
    state = {
        f"model.layers.{i}.{name}.weight": torch.randn(shape, generator=generator).bfloat16() / 50
        for i in range(layers)
        for name, shape in shapes.items()
    }
    save_file(state, path)
    return path.stat().st_size


def seconds(source: Path, package: Path, format: str, options: dict[str, Any]) -> float:
    target = source.with_name("out")
    command = [sys.executable, "-c", RUN, str(source), str(target), format, repr(options)]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for path in source.parent.glob("out*"):
        path.unlink()
    return float(done.stdout)


def copying(source: Path) -> float:
    start = time.perf_counter()
    shutil.copyfile(source, source.with_name("copy"))
    took = time.perf_counter() - start
    source.with_name("copy").unlink()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="folder of another version of the package")
    args = parser.parse_args()
    ways: dict[str, tuple[Path, dict[str, Any]]] = {
        "with statistics": (ROOT / "src", {}),
        "without": (ROOT / "src", {"statistics": False}),
    }
    if args.before:
        ways = {"before": (args.before, {}), **ways}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for label, layers in LAYERS.items():
            source = Path(folder) / "in.safetensors"
            nbytes = make(source, layers)
            times: dict[tuple[str, str], list[float]] = {}
            for _ in range(args.rounds):
                times.setdefault(("copy", ""), []).append(copying(source))
                for format in ("mxfp8", "nvfp4"):
                    for way, (package, options) in ways.items():
                        took = seconds(source, package, format, options)
                        times.setdefault((format, way), []).append(took)
            rows += [
                {"file": label, "bytes": nbytes, "format": format, "way": way,
                 "median_s": round(statistics.median(t), 2), "best_s": round(min(t), 2)}
                for (format, way), t in times.items()
            ]  # fmt: skip
            source.unlink()
    machine = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    RESULT.write_text(json.dumps({**machine, "rounds": args.rounds, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
