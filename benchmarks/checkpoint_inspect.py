"""Measure ``blockscale inspect`` of ten gigabytes: of bf16 weights, and of what they become.

``python benchmarks/checkpoint_inspect.py [--place DIR] [--files N]`` makes N files of two layers of
Llama 3 8B each, and MXFP8 of them. Every checksum is computed. Writes
benchmarks/results/checkpoint_inspect.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import checkpoint_quantize
import torch

from blockscale import checkpoint

RESULT = Path(__file__).resolve().parent / "results" / "checkpoint_inspect.json"
COMMAND = sys.executable, "-c", "from blockscale.cli import main; main()", "inspect"


def inspecting(folder: Path) -> dict[str, Any]:
    """Bytes of its weights, and seconds of the command."""
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    start = time.perf_counter()
    subprocess.run([*COMMAND, str(folder)], check=True, stdout=subprocess.DEVNULL)
    return {"bytes": nbytes, "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", type=Path)
    parser.add_argument("--files", type=int, default=12)
    args = parser.parse_args()
    checkpoint_quantize.FILES = args.files
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        source, target = Path(place) / "in", Path(place) / "out"
        checkpoint_quantize.make(source)
        checkpoint.quantize_folder(source, target, "mxfp8", "modelopt")
        found = {"bf16": inspecting(source), "mxfp8": inspecting(target)}
    about = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    print(json.dumps(found))
    RESULT.write_text(json.dumps({**about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
