"""Measure ``checkpoint.quantize_folder`` beside ``cp`` of the same folder, in turn.

``python benchmarks/checkpoint_quantize.py [--place DIR] [--rounds N]`` makes four files of a
Llama-like model of 8 billion parameters (two of its layers each) in DIR, which says what disk is
measured. ``cp`` is timed without and with ``sync``; what is converted is on the disk when the
command ends. Writes benchmarks/results/checkpoint_quantize.json.
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

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "checkpoint_quantize.json"
FILES, HIDDEN, WIDE = 4, 4096, 14336
FORMATS = ("mxfp8", "nvfp4")

# A run of its own, so that none finds what another left in memory; compiled code is cached on disk.
RUN = """
import re, sys, time, torch
import blockscale as bs
from blockscale import checkpoint
source, target, format = sys.argv[1:]
bs.quantize(torch.ones(64, 64, dtype=torch.bfloat16), format).dequantize()
start = time.perf_counter()
checkpoint.quantize_folder(source, target, format, "modelopt")
seconds = time.perf_counter() - start
most = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())
print(seconds, int(most[1]) * 1024)
"""


def make(folder: Path) -> int:
    """The folder, and its bytes of weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 4, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDE),
    }  # fmt: skip
    folder.mkdir()
    places = {}
    for i in range(FILES):
        state = {
            f"model.layers.{2 * i + j}.{n}.weight": torch.randn(shape, generator=generator)
            .mul_(0.02)
            .bfloat16()
            for j in range(2)
            for n, shape in shapes.items()
        }
        file = f"model-{i + 1:05d}-of-{FILES:05d}.safetensors"
        save_file(state, folder / file, {"format": "pt"})
        places |= dict.fromkeys(state, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def copying(source: Path, target: Path) -> tuple[float, float]:
    """Seconds of ``cp``, and of ``cp`` and ``sync``."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    copied = time.perf_counter() - start
    os.sync()
    return copied, time.perf_counter() - start


def quantizing(source: Path, target: Path, format: str) -> tuple[float, float]:
    """Seconds, and the most memory in bytes."""
    ran = subprocess.run(
        [sys.executable, "-c", RUN, source, target, format],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    seconds, memory = map(float, ran.stdout.split())
    return seconds, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--place", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        source, target = Path(place) / "in", Path(place) / "out"
        nbytes = make(source)
        for _ in range(args.rounds + 1):  # the first warms files and compiled code
            copied, synced = copying(source, target)
            row = {"cp_s": copied, "cp_sync_s": synced}
            shutil.rmtree(target)
            for format in FORMATS:
                os.sync()
                row[f"{format}_s"], row[f"{format}_memory"] = quantizing(source, target, format)
                shutil.rmtree(target)
            rows.append({key: round(value, 3) for key, value in row.items()})
            print(rows[-1], flush=True)
            os.sync()
    rows = rows[1:]
    ratios = {
        f"cp_over_{format}": round(statistics.median(r["cp_s"] / r[f"{format}_s"] for r in rows), 3)
        for format in FORMATS
    }
    about = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "bytes": nbytes,
    }
    RESULT.write_text(json.dumps({**about, **ratios, "rounds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
