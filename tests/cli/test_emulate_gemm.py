"""``blockscale emulate gemm`` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from typer.testing import CliRunner

from blockscale import emulator
from blockscale.cli import emulate_gemm
from blockscale.cli.emulate import emulate


# not imported: it would teach numpy the name "bfloat16", which other tests rely on being unknown
@pytest.mark.skipif(
    not (find_spec("cutlass") and find_spec("tvm_ffi")), reason="CuTe DSL is not installed"
)
@pytest.mark.parametrize(
    ("arch", "format", "transpose", "launches", "opcode"),
    [
        ("sm_90a", "fp8_block", "TN", 1, "wgmma"),
        ("sm_90a", "nvfp4", "NT", 1, "wgmma"),
        ("sm_90a", "mxfp8", "NN", 3, "wgmma"),  # widened in memory first
        ("sm_100a", "mxfp8", "NT", 1, "tcgen05.mma"),
        ("sm_100a", "nvfp4", "TN", 1, "tcgen05.mma"),
    ],
)
def test_error_is_at_the_floor(arch, format, transpose, launches, opcode):
    code = "from blockscale.cli import main; main()"
    arguments = ["--arch", arch, "--format", format, "--transpose", transpose]
    arguments += ["--shape", "48x80x288"]
    arguments += ["--completion", "random", "--seed", "3", "--json"]
    command = [sys.executable, "-c", code, "emulate", "gemm", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    product = json.loads(found.stdout)
    assert (product["format"], product["transpose"]) == (format, transpose)
    assert product["shape"] == [48, 80, 288]
    assert product["launches"] == launches
    # rounding to 8 bits: at most 2^-9 of each value, on average less
    assert 1e-3 < product["floor"] < 2**-9
    assert product["error"] <= product["allowed"] < 1.02 * product["floor"]
    used = [p for p in product["report"]["products"] if p["opcode"].startswith(opcode)]
    assert sum(p["flops"] for p in used) >= 2 * 48 * 80 * 288


@pytest.fixture
def kernel(monkeypatch):
    """Puts a function in the place of a kernel, and no emulator below it."""

    @contextmanager
    def cutedsl(device, profile):
        yield []

    def put(name, run):
        monkeypatch.setattr(emulator, "cutedsl", cutedsl)
        kernels = emulate_gemm._KERNELS
        monkeypatch.setitem(kernels, name, replace(kernels[name], run=run))

    return put


def product(a, b, arch):
    wide = [q.dequantize(torch.float64) for q in (a, b)]
    return (wide[0] @ wide[1]).to(torch.bfloat16)


def invoke(*arguments):
    return CliRunner().invoke(emulate, ["gemm", *arguments])


@pytest.mark.parametrize(
    ("format", "transpose"),
    [("fp8_block", "TN"), ("mxfp8", "TN"), ("nvfp4", "TN"), ("nvfp4", "NN"), ("nvfp4", "NT")],
)
def test_operands(kernel, format, transpose):
    """A (M, K) and B (K, N), both with their data along K."""

    def run(a, b, arch):
        assert (tuple(a.shape), tuple(b.shape), arch) == ((64, 96), (96, 32), "sm_90a")
        assert a.qdata.stride(-1) == b.qdata.stride(-2) == 1
        return product(a, b, arch)

    kernel(format, run)
    found = invoke("--format", format, "--transpose", transpose, "--shape", "64x32x96")
    assert found.exit_code == 0, found.output
    assert "as small as it can be" in found.output


def test_wrong_numbers_are_told(kernel):
    kernel("fp8_block", lambda *given: product(*given) * 1.01)
    found = invoke("--shape", "16x8x128")
    assert found.exit_code == 1
    assert "too large" in found.output


def test_nan_is_told(kernel):
    kernel("fp8_block", lambda *given: product(*given) * float("nan"))
    assert invoke("--shape", "16x8x128").exit_code == 1


def test_faults_are_told(kernel):
    def run(*_):
        raise emulator.PtxError("a race: two warps write the same bytes")

    kernel("fp8_block", run)
    found = invoke("--shape", "16x8x128")
    assert found.exit_code == 1
    assert found.stderr == "blockscale: a race: two warps write the same bytes\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "192x320"), "shape: got '192x320'; expected M, N and K like 192x320x384"),
        (("--format", "mxfp9"), "format: got 'mxfp9'"),
        (("--transpose", "TT"), "transpose: got 'TT'"),
        (("--transpose", "NN"), "k_major=True"),
        (("--transpose", "NT", "--format", "fp8_block"), "k_major=True"),
        (("--completion", "soon"), "completion"),
    ],
)
def test_bad_input(arguments, message):
    error = invoke(*arguments).exception
    assert isinstance(error, ValueError)
    assert message in str(error)


def test_another_architecture(kernel):
    kernel("fp8_block", emulate_gemm._fp8_block)
    error = invoke("--arch", "sm_120a", "--shape", "16x8x128").exception
    assert isinstance(error, ValueError)
    assert "sm_120a" in str(error)
    error = invoke("--arch", "sm_100a", "--shape", "16x8x128").exception
    assert isinstance(error, ValueError)
    assert "format: got 'fp8_block'" in str(error)
