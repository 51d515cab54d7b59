"""Count the instructions that the compiled quantizers issue for each element; no GPU needed.

Compiles them for both architectures, counts in SASS, and compares with what can be issued while
memory moves the bytes of an element: on an H200 as fast as it copied when
benchmarks/results/quantize_h200.json was measured, on a B200 at its data sheet's 8 TB/s. Writes
benchmarks/results/quantize_sass.json and two tables of docs/lab; ``--table`` only
makes the tables from the JSON that is there. Needs CuTe DSL and nvdisasm.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpu_quantize import rewrite

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RESULT = RESULTS / "quantize_sass.json"
LAB = ROOT / "docs" / "lab"
SHAPES = ((16384, 16384), (16384, 7168), (32768, 2048))
_OF_ONE_WARP = 32  # elements that an instruction of a warp works for


@dataclass(frozen=True)
class Chip:
    """What an architecture's GPU can issue: a warp instruction a cycle from each of four slots."""

    name: str
    processors: int
    gigahertz: float

    @property
    def issued(self) -> float:
        """Instructions of threads in a second."""
        return self.processors * 4 * self.gigahertz * 1e9 * _OF_ONE_WARP


CHIPS = {"sm_90a": Chip("H200", 132, 1.75), "sm_100a": Chip("B200", 148, 1.9)}
B200_BYTES = 8e12


def cases() -> list[Any]:
    from blockscale.bench.cases import Case

    rows, columns, both = (-1,), (-2,), (-1, -2)
    return [
        *(Case("mxfp8", axes, "tcgen05") for axes in (rows, columns, both)),
        Case("mxfp8", both, "compact"),
        *(Case("nvfp4", axes, "tcgen05") for axes in (rows, columns, both)),
        *(Case("mxfp4", axes, "tcgen05") for axes in (rows, columns, both)),
        *(Case("fp8_1x128", axes, "sm90") for axes in (rows, columns, both)),
        Case("mxfp8", both, "tcgen05", producer="swiglu"),
        Case("mxfp8", both, "tcgen05", producer="swiglu_backward"),
    ]


def examine(case: Any, arch: str) -> dict[str, Any]:
    """Compile ``case`` and look at its code."""
    from blockscale.dtypes import from_torch
    from blockscale.emulator import Device, cutedsl
    from blockscale.emulator.host.hostcode import settings
    from blockscale.kernels.common.builders import build_kernel
    from blockscale.kernels.common.gpu import GPUS
    from blockscale.kernels.common.machine_code import disassemble, usage
    from blockscale.kernels.quantizers.config import PRODUCERS, Request, choose_config

    rows, columns = SHAPES[0]
    producer = PRODUCERS[case.producer]
    config = choose_config(
        (rows, columns // producer.parts),
        [(0, columns * case.dtype.itemsize)] * producer.sources,
        from_torch(case.dtype),
        Request(case.format, case.axes, (case.layout,) * len(case.axes), producer=case.producer),
        GPUS[arch],
    )
    with cutedsl(Device(arch)), patch.object(settings(), "keep_cubin", True):
        cubin = build_kernel(config).__cubin__
    sass, found = disassemble(cubin), usage(cubin)
    code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)", sass, re.M)
    # what follows the last EXIT are rare ways of a division, and padding
    issued = len(code) - code[::-1].index("EXIT")
    elements = config.tile_rows * config.tile_columns * producer.parts
    return {
        "arch": arch,
        "case": case.name,
        "bytes": case.nbytes(rows, columns) / rows / columns,
        "instructions": issued * config.threads / elements,
        "threads": config.threads,
        "registers": found.registers,
        "local_bytes": found.frame_bytes,
        "tma": any(each.startswith(("UTMALDG", "UBLKCP")) for each in code),
        "store_128": any(re.match(r"STG\.E\.(\w+\.)*128", each) for each in code),
    }


def measure() -> dict[str, Any]:
    found = [examine(case, arch) for case in cases() for arch in CHIPS]
    return {"nvidia-cutlass-dsl": version("nvidia-cutlass-dsl"), "kernels": found}


def budget_table(result: dict[str, Any]) -> str:
    """Instructions that an H200 issues, beside those it has time for."""
    measured = json.loads((RESULTS / "quantize_h200.json").read_text())
    large = [r for r in measured["rows"] if (r["rows"], r["columns"]) == SHAPES[0]]
    copied = [r["gigabytes_per_second"] / r["of_copy"] for r in large]
    speed, chip = sorted(copied)[len(copied) // 2] * 1e9, CHIPS["sm_90a"]
    lines = [
        f"A copy moves {speed / 1e12:.2f} TB/s there (median of those at "
        f"{SHAPES[0][0]} x {SHAPES[0][1]}), and an H200 issues {chip.processors} x 4 instructions "
        f"a cycle of 32 threads each, at {chip.gigahertz} GHz.",
        "",
        "| | bytes an element | instructions there is time for | issued (SASS) | of the slots |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for each in _of("sm_90a", result):
        room = chip.issued / speed * each["bytes"]
        used = each["instructions"]
        lines.append(
            f"| {_name(each['case'])} | {each['bytes']:.3f} | {room:.1f} | {used:.1f} "
            f"| {used / room:.0%} |"
        )
    return "\n".join(lines)


def blackwell_table(result: dict[str, Any]) -> str:
    """Least times of a B200, and how many of its issue slots they need."""
    chip = CHIPS["sm_100a"]
    head = "".join(f" {rows} x {columns}, us |" for rows, columns in SHAPES)
    lines = [
        f"| | bytes an element |{head} instructions there is time for | issued (SASS) "
        "| of the slots | registers |",
        "| --- | ---: |" + " ---: |" * (len(SHAPES) + 4),
    ]
    for each in _of("sm_100a", result):
        room = chip.issued / B200_BYTES * each["bytes"]
        used = each["instructions"]
        times = "".join(
            f" {rows * columns * each['bytes'] / B200_BYTES * 1e6:.1f} |"
            for rows, columns in SHAPES
        )
        lines.append(
            f"| {_name(each['case'])} | {each['bytes']:.3f} |{times} {room:.1f} | {used:.1f} "
            f"| {used / room:.0%} | {each['registers']} |"
        )
    kernels = list(_of("sm_100a", result))
    rows, columns = SHAPES[0]
    warps = kernels[0]["instructions"] * rows * columns / _OF_ONE_WARP / 1e6
    assert all(each["tma"] and each["store_128"] for each in kernels)
    local = sum(each["local_bytes"] for each in kernels)
    lines += [
        "",
        f"{_name(kernels[0]['case'])}: {warps:.1f} M warp instructions at {rows} x {columns}. All "
        f"of these kernels load by TMA (`UTMALDG`) and have 128-bit stores; {local} bytes of "
        "local memory.",
    ]
    return "\n".join(lines)


def _of(arch: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in result["kernels"] if each["arch"] == arch]


def _name(case: str) -> str:
    return case.removesuffix(", bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="only rewrite the tables")
    if not parser.parse_args().table:
        RESULT.write_text(json.dumps(measure(), indent=1) + "\n")
    result = json.loads(RESULT.read_text())
    tables = (
        ("h200", LAB / "quantize-h200.md", budget_table(result)),
        ("b200", LAB / "blackwell.md", blackwell_table(result)),
    )
    for name, page, text in tables:
        begin = f"<!-- gpu_instructions {name}: made by benchmarks/gpu_instructions.py -->"
        end = f"<!-- gpu_instructions {name}: end -->"
        rewrite(page, text, begin, end)
        print(text)


if __name__ == "__main__":
    main()
