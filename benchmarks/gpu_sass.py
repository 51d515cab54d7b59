"""What the quantizers' kernels are as machine code: registers, local memory, instructions.

    python3 benchmarks/gpu_sass.py FILE.json

No GPU is needed, but CuTe DSL and cuobjdump (of the CUDA toolkit, or Triton's). A kernel's loops
over its tile are unrolled, so that its instructions divided by the elements of a thread are what
one element takes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from cutlass import cute

from blockscale.formats import get_format
from blockscale.kernels.gpu import kernel
from blockscale.kernels.gpu.config import ARCHITECTURES, Config, choose_config

ROWS, COLUMNS, BOTH = (-1,), (-2,), (-1, -2)
SHAPE = 16384, 16384
KERNELS: list[tuple[str, tuple[int, ...], str, str, bool]] = [
    ("mxfp8", ROWS, "tcgen05", "load", False),
    ("mxfp8", COLUMNS, "tcgen05", "load", False),
    ("mxfp8", BOTH, "tcgen05", "load", False),
    ("mxfp8", ROWS, "tcgen05", "load", True),
    ("mxfp8", BOTH, "tcgen05", "swiglu", False),
    ("mxfp8", BOTH, "tcgen05", "swiglu_backward", False),
    ("nvfp4", ROWS, "tcgen05", "load", False),
    ("nvfp4", COLUMNS, "tcgen05", "load", False),
    ("mxfp4", ROWS, "tcgen05", "load", False),
    ("fp8_1x128", ROWS, "sm90", "load", False),
    ("fp8_1x128", BOTH, "sm90", "load", False),
]


def machine_code(config: Config) -> tuple[str, str]:
    """SASS and resource usage of a kernel."""
    compile_kernel = cute.compile
    with tempfile.TemporaryDirectory() as folder:

        def kept(*args: Any, **kwargs: Any) -> Any:
            kwargs["options"] += f" --keep-cubin --dump-dir {folder}"
            return compile_kernel(*args, **kwargs)

        kernel.cute.compile = kept
        try:
            cubin = config.compile().__cubin__
        finally:
            kernel.cute.compile = compile_kernel
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin if isinstance(cubin, bytes) else Path(cubin).read_bytes())
        found = []
        for option in ("-sass", "-res-usage"):
            done = subprocess.run(
                ["cuobjdump", option, str(path)], capture_output=True, text=True, check=True
            )
            found.append(done.stdout + done.stderr)
    return found[0], found[1]


def describe(config: Config) -> dict[str, Any]:
    sass, usage = machine_code(config)
    lines = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", sass)
    names = Counter(name.split(".")[0] for name, _ in lines)
    stores = Counter(name for name, _ in lines if name.startswith("STG"))
    elements = config.tile_rows * config.tile_columns / config.threads
    each = len(lines) / elements
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        "stack and local bytes": sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        "instructions per element": round(each, 2),
        "million warp instructions at 16384 x 16384": round(each * SHAPE[0] * SHAPE[1] / 32e6, 1),
        "loads": {n: names[n] for n in ("UTMALDG", "UBLKCP", "LDG", "LDL") if names[n]},
        "stores": dict(stores) | ({"STL": names["STL"]} if names["STL"] else {}),
    }


def main(target: Path) -> None:
    if shutil.which("cuobjdump") is None:
        sys.exit("cuobjdump is not on the PATH: install the CUDA toolkit, or use Triton's")
    found: dict[str, Any] = {}
    for arch in ARCHITECTURES:
        for name, axes, layout, producer, grouped in KERNELS:
            config = choose_config(
                SHAPE,
                [(0, 2 * SHAPE[1])],
                torch.bfloat16,
                get_format(name),
                axes=axes,
                layouts=(layout,) * (1 if axes != BOTH else 2),
                arch=arch,
                producer=producer,
                grouped=grouped,
            )
            along = {ROWS: "rows", COLUMNS: "columns", BOTH: "both"}[axes]
            made = "" if producer == "load" else f" of {producer}"
            what = f"{arch} {name} {along}, {layout}{made}{', grouped' * grouped}"
            found[what] = describe(config)
            print(what, found[what], flush=True)
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
