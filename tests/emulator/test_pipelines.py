"""Whole kernels under every completion policy, against float64."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from pipelines import PIPELINES, compile

SEEDS = range(20)
KERNELS = pytest.mark.parametrize("name", PIPELINES)


@KERNELS
@pytest.mark.parametrize("completion", ["eager", "late"])
def test_right_in_fixed_order(name: str, completion: str) -> None:
    """Neither takes anything from a seed: one run is all that there is."""
    assert PIPELINES[name].run(completion)


@KERNELS
@pytest.mark.parametrize("seed", SEEDS)
def test_right_in_any_order(name: str, seed: int) -> None:
    assert PIPELINES[name].run("random", seed)


@KERNELS
def test_ptx_is_what_nvcc_makes_of_the_source(name: str) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    if "release 13.0" not in subprocess.check_output(["nvcc", "--version"], text=True):
        pytest.skip("the PTX was made by nvcc 13.0")
    assert compile(PIPELINES[name]) == PIPELINES[name].ptx
