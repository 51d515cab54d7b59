"""The quantizers as machine code: what benchmarks/gpu_instructions.py counts in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", [1, 7, 14])
def test_instructions_are_those_of_the_table(monkeypatch, arch, case):
    """A kernel that issues more than the committed table says makes the table's times false."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import gpu_instructions

    committed = json.loads(gpu_instructions.RESULT.read_text())["kernels"]
    kernel = gpu_instructions.cases()[case]
    (row,) = [row for row in committed if (row["arch"], row["case"]) == (arch, kernel.name)]
    assert gpu_instructions.examine(kernel, arch) == row
