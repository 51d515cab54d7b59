"""Compile Blackwell's products as they are chosen; note their registers and shared memory.

Writes benchmarks/results/sm100_registers.json and a table of docs/lab/blackwell.md. ``--part 2/6``
compiles the second of six parts and keeps the rest of the file, ``--table`` only makes the table.
Needs CuTe DSL, whose ptxas it is, and no GPU.

All configurations that ``choose_config`` can return are too many. These are, at a size for each
tile that it takes: every pair of formats in every layout; of MXFP8 and of NVFP4 each output by
itself, everything else as before.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from importlib.metadata import version
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from gpu_quantize import ROOT, head, line, rewrite

from blockscale.dtypes import BFLOAT16, FLOAT16, FLOAT32, UINT8, to_torch
from blockscale.emulator import Device, Report, cutedsl
from blockscale.emulator.host.hostcode import settings
from blockscale.formats import get_format
from blockscale.kernels.common.builders import build_kernel
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import GPUS, Gpu
from blockscale.kernels.common.machine_code import usage
from blockscale.kernels.sm100.config import ARCHES, EIGHT_BIT, Config, choose_config
from blockscale.kernels.sm100.kinds import find_kind
from blockscale.kernels.sm100.quantizing_config import FORMATS, Quantizing

RESULT = ROOT / "benchmarks" / "results" / "sm100_registers.json"
PAGE = ROOT / "docs" / "lab" / "blackwell.md"
BEGIN = "<!-- sm100_registers: made by benchmarks/sm100_registers.py -->"
END = "<!-- sm100_registers: end -->"

#: (M, N), one for each tile that is chosen.
SIZES = ((8192, 8192), (1024, 1024), (128, 32768), (128, 8192))
PAIRS = [pair for pair in product((*EIGHT_BIT, "mxfp4", "nvfp4"), repeat=2) if find_kind(*pair)]
#: What is multiplied with every output.
MAIN = (("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"))
_ROUNDINGS = [each for each in get_format("mxfp8").scale.roundings if each != "rceil"]
#: By name, what is not as choose_config has it by itself.
OUTPUTS: dict[str, dict[str, Any]] = {
    "fp16 out": {"out_dtype": FLOAT16},
    "fp32 out": {"out_dtype": FLOAT32},
    "added to bf16": {"accumulate": True},
    "added to fp16": {"accumulate": True, "out_dtype": FLOAT16},
    "added to fp32": {"accumulate": True, "out_dtype": FLOAT32},
    "rows that TMA cannot store": {"tma_store": False},
    "rows that TMA cannot store, fp32": {"tma_store": False, "out_dtype": FLOAT32},
    "rows that TMA cannot store, added to": {"tma_store": False, "accumulate": True},
    "bias in bf16": {"bias": BFLOAT16},
    "bias in fp16": {"bias": FLOAT16},
    "bias in fp32": {"bias": FLOAT32},
    "alpha": {"alpha": (0, 0)},
    "alpha, bias, added to fp32": {
        **{"alpha": (0, 0), "bias": BFLOAT16, "accumulate": True, "out_dtype": FLOAT32}
    },
    "for sm_103a": {"gpu": GPUS[ARCHES[1]]},
    **{
        f"{'SwiGLU, ' * swiglu}quantized to {format}": {
            **{"out_dtype": UINT8, "alpha": (0, 0), "quantizing": Quantizing(format, swiglu)}
        }
        for swiglu, format in product((False, True), FORMATS)
    },
    **{
        f"SwiGLU, quantized to {format}, {what}": {
            **{"out_dtype": UINT8, "alpha": (0, 0)},
            "quantizing": Quantizing(format, True, **given),
        }
        for format, what, given in (
            *(("mxfp8", f"scales by {each}", {"scale_rounding": each}) for each in _ROUNDINGS),
            *((each, "NaN as te has it", {"nonfinite": "te"}) for each in ("mxfp8", "nvfp4")),
        )
    },
}


def configurations() -> dict[Config, str]:
    """What is compiled, and its line in the table."""
    found: dict[Config, str] = {}
    for pair, size in product(PAIRS, SIZES):
        name = " x ".join(format.removesuffix("_e5m2") for format in pair)
        for majors in layouts(pair):
            found.setdefault(choose(pair, size, majors=majors), name)
    for (name, given), pair, size in product(OUTPUTS.items(), MAIN, SIZES):
        found.setdefault(choose(pair, size, **given), name)
    return found


def layouts(pair: tuple[str, str]) -> list[tuple[str, str]]:
    """Of A and B, that tensor cores take."""
    return list(product(*(("k", "mn") if format in EIGHT_BIT else ("k",) for format in pair)))


def choose(
    pair: tuple[str, str],
    size: tuple[int, int],
    majors: tuple[str, str] = ("k", "k"),
    quantizing: Quantizing | None = None,
    gpu: Gpu = GPUS[ARCHES[0]],
    **epilogue: Any,
) -> Config:
    how = {"majors": majors, "quantizing": quantizing, "gpu": gpu}
    return choose_config((*size, 4096), pair, Epilogue(**epilogue), **how)


# --- what they take -------------------------------------------------------------------------------


class _Noting(Device):
    """A device that runs nothing: it notes the shared memory that launches ask for."""

    shared = -1

    def launch(self, *_: Any, shared: int = 0, **__: Any) -> Report:
        self.shared = shared
        return Report({})


def examine(config: Config) -> tuple[bytes, dict[str, int]]:
    """Machine code; and what it takes: a launch tells what the host code asks for."""
    device = _Noting(config.arch)
    with cutedsl(device), patch.object(settings(), "keep_cubin", True):
        kernel = build_kernel(config)
        kernel(*_arguments(config))
    found = usage(kernel.__cubin__)
    return kernel.__cubin__, {
        "threads": config.threads,
        "registers": found.registers,
        "local_bytes": found.frame_bytes,
        "static_shared_bytes": found.static_bytes,
        "dynamic_shared_bytes": device.shared,
        "barriers": found.barriers,
    }


def _arguments(config: Config) -> list[Any]:
    """Zeros, for a product of 256 x 256 x 256."""
    size, bytes_of, given = 256, torch.uint8, []
    for name, major in zip((config.a_format, config.b_format), config.majors, strict=True):
        format = get_format(name)
        columns = size * format.element.bits // 8
        given.append(torch.zeros((size, columns) if major == "k" else (columns, size)).byte())
        tiles = size // format.block_size // 4
        given.append(torch.zeros(size // 128, tiles * 64, dtype=torch.int64))
    if config.quantizing is None:
        out: Any = torch.zeros(size, size, dtype=to_torch(config.out_dtype))
    else:
        format = config.quantizing.stored
        columns = size // config.quantizing.b_halves
        scales = size * columns // format.block_size
        out = (
            torch.zeros(size, columns * format.element.bits // 8, dtype=bytes_of),
            torch.zeros(scales, dtype=bytes_of),
            torch.ones(()) if config.quantizing.has_table else None,
        )
    bias = None if config.bias is None else torch.zeros(size, dtype=to_torch(config.bias))
    alpha = (torch.ones(()),) * 2 if config.alpha else None
    return [*given, out, bias, alpha, None, None]


def named(config: Config) -> dict[str, str | int | None]:
    """The configuration, as the file has it."""
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    return {
        name: value if isinstance(value, int | None) else str(value)
        for name, value in values.items()
    }


# --- the table ------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """A line for each thing that is compiled, a column for each tile."""
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for each in result["kernels"]:
        cells.setdefault(each["what"], {}).setdefault(_tile(each), []).append(each)
    tiles = list(dict.fromkeys(tile for columns in cells.values() for tile in columns))
    lines = head(tiles)
    for name, columns in cells.items():
        lines.append(line(name, [_cell(columns.get(tile, [])) for tile in tiles]))
    kernels = result["kernels"]
    local = sum(each["local_bytes"] for each in kernels)
    barriers = max(each["barriers"] for each in kernels)
    lines += [
        "",
        f"{len(kernels)} kernels of {kernels[0]['threads']} threads, compiled by the ptxas of CuTe "
        f"DSL {result['nvidia-cutlass-dsl']}: {local} bytes of local memory, so no register is "
        f"spilled; at most {barriers} barriers of a block.",
    ]
    return "\n".join(lines)


def _tile(each: dict[str, Any]) -> str:
    config = each["config"]
    return f"{128 * config['ctas']} x {config['mma_n']}" + ", a pair" * (config["ctas"] == 2)


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    registers = sorted({each["registers"] for each in rows})
    shared = sorted({each["static_shared_bytes"] + each["dynamic_shared_bytes"] for each in rows})
    return f"{_range(registers)}; {_range([f'{each / 1024:.0f}' for each in shared])} KB"


def _range(values: list[Any]) -> str:
    return f"{values[0]}" if values[0] == values[-1] else f"{values[0]}-{values[-1]}"


def _lines(rows: list[dict[str, Any]]) -> str:
    """JSON with a kernel a line."""
    about = json.dumps({"nvidia-cutlass-dsl": version("nvidia-cutlass-dsl")})[1:-1]
    kernels = ",\n".join(map(json.dumps, rows))
    return f'{{{about}, "kernels": [\n{kernels}\n]}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="1/1", help="such as 2/6; the others stay as they are")
    parser.add_argument("--table", action="store_true", help="only rewrite the table")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    wanted = configurations()
    if not given.table:
        before = json.loads(RESULT.read_text())["kernels"] if RESULT.exists() else []
        rows = []
        for i, (config, name) in enumerate(wanted.items()):
            about = named(config)
            if i % parts == part - 1:
                rows.append({"what": name, "config": about, **examine(config)[1]})
            else:
                rows += [each for each in before if each["config"] == about]
        RESULT.write_text(_lines(rows))
    rewrite(PAGE, table(json.loads(RESULT.read_text())), BEGIN, END)


if __name__ == "__main__":
    main()
