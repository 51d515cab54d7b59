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
from blockscale.cli import kept_code
from blockscale.cli.emulate import emulate
from blockscale.cli.emulate_products import PRODUCTS
from blockscale.kernels.common import compile_cache, machine_code

# not imported: it would teach numpy the name "bfloat16", which other tests rely on being unknown
needs_dsl = pytest.mark.skipif(
    not (find_spec("cutlass") and find_spec("tvm_ffi")), reason="CuTe DSL is not installed"
)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    code = "from blockscale.cli import main; main()"
    line = [sys.executable, "-c", code, "emulate", "gemm", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@needs_dsl
@pytest.mark.parametrize(
    ("arch", "format", "transpose", "launches", "opcode"),
    [
        ("sm_90a", "fp8_block", "TN", 1, "wgmma"),
        ("sm_90a", "nvfp4", "NT", 2, "wgmma"),  # A is widened before it
        ("sm_90a", "mxfp8", "NN", 3, "wgmma"),  # both are
        ("sm_100a", "mxfp8", "NT", 1, "tcgen05.mma"),
        ("sm_100a", "nvfp4", "TN", 1, "tcgen05.mma"),
    ],
)
def test_error_is_at_the_floor(arch, format, transpose, launches, opcode):
    found = command(
        *("--arch", arch, "--format", format, "--transpose", transpose, "--shape", "48x80x288"),
        *("--completion", "random", "--seed", "3", "--json"),
    )
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


@needs_dsl
@pytest.mark.parametrize(
    ("arch", "format", "groups", "launches"),
    [
        ("sm_90a", "fp8_block", "0,1,33", 1),
        ("sm_90a", "fp8_block", "0,0", 1),
        ("sm_90a", "mxfp8", "48", 2),
        ("sm_90a", "nvfp4", "3,4", 2),
        ("sm_100a", "mxfp8_mxfp4", "0,1,33", 1),
        ("sm_103a", "nvfp4", "3,4", 1),
    ],
)
def test_groups(arch, format, groups, launches):
    given = "--arch", arch, "--format", format, "--groups", groups, "--shape", "48x80x288"
    found = command(*given, "--completion", "random", "--json")
    assert found.returncode == 0, found.stderr
    product = json.loads(found.stdout)
    assert product["groups"] == [int(each) for each in groups.split(",")]
    assert product["launches"] == launches
    assert product["error"] <= product["allowed"]


class Compiled:
    """What the DSL makes of a kernel."""

    __cubin__ = b"machine code"
    __ptx__ = ".version 8.8"


@pytest.fixture
def kernel(monkeypatch):
    """Puts a function in the place of a kernel, and no emulator below it."""

    @contextmanager
    def cutedsl(device, profile):
        yield []

    def put(name, run, arch="sm_90a"):
        monkeypatch.setattr(emulator, "cutedsl", cutedsl)
        monkeypatch.setattr(compile_cache, "_built", [Compiled()])
        kernels = PRODUCTS[arch]
        monkeypatch.setitem(kernels, name, replace(kernels[name], run=run))

    return put


def product(a, b, arch, ctas):
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

    def run(a, b, gpu, ctas):
        assert (tuple(a.shape), tuple(b.shape), gpu.arch) == ((64, 96), (96, 32), "sm_90a")
        assert a.qdata.stride(-1) == b.qdata.stride(-2) == 1
        return product(a, b, gpu, ctas)

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
        (("--transpose", "XN"), "transpose: got 'XN'"),
        (("--transpose", "TT"), "k_major=True"),
        (("--ctas", "2"), "ctas: got 2 for sm_90a; tensor cores work for one CTA each"),
        (("--arch", "sm_100a", "--ctas", "4"), "ctas: got 4; choose 1 or 2"),
        (("--arch", "sm_100a", "--format", "nvfp4", "--transpose", "NN"), "k_major=True"),
        (("--arch", "sm_100a", "--format", "fp8_block"), "format: got 'fp8_block'"),
        (("--epilogue", "swiglu-mxfp8"), "epilogue: got 'swiglu-mxfp8' for sm_90a"),
        (("--arch", "sm_100a", "--epilogue", "gelu"), "choose one of 'none', 'mxfp8'"),
        (
            ("--arch", "sm_100a", "--shape", "8x96x64", "--epilogue", "swiglu-mxfp8"),
            "shape: N = 96; to be quantized so it has to be a multiple of 64",
        ),
        (("--arch", "sm_120a"), "neither tcgen05 nor Tensor Memory"),
        (
            ("--ptx", "nowhere/kernel.ptx"),
            "ptx: the directory nowhere does not exist; make it first",
        ),
        (("--cubin", "."), "cubin: . is a directory"),
        (("--transpose", "NN"), "k_major=True"),
        (("--transpose", "NT", "--format", "fp8_block"), "k_major=True"),
        (("--completion", "soon"), "completion"),
        (("--groups", "1,-2"), "groups: got '1,-2'; expected rows of each group, as in 0,1,129"),
        (("--groups", "1,192"), "193 rows, and shape has M = 192"),
        (("--groups", "1", "--transpose", "NN", "--format", "mxfp8"), "leave transpose and"),
    ],
)
def test_bad_input(arguments, message):
    error = invoke(*arguments).exception
    assert isinstance(error, ValueError | OSError)
    assert message in str(error)


@pytest.mark.parametrize(
    ("arch", "own", "feature"),
    [
        ("sm_100", "sm_100a", "Feature '.cta_group::1' not supported on .target 'sm_100'"),
        ("sm_100f", "sm_100a", "Feature '.scale_vec::4X' not supported on .target 'sm_100f'"),
        ("sm_103f", "sm_103a", "Feature '.scale_vec::4X' not supported on .target 'sm_103f'"),
        ("sm_90", "sm_90a", "Instruction 'wgmma.fence' not supported on .target 'sm_90'"),
    ],
)
def test_the_letter_is_explained(arch, own, feature):
    error = invoke("--arch", arch).exception
    assert isinstance(error, ValueError)
    assert str(error).startswith(f"arch: got '{arch}'; kernels are compiled for sm_90a, sm_100a")
    assert "letter a unlocks" in str(error)
    assert feature in str(error)
    assert str(error).endswith(f"Choose {own}")


# --- what was compiled ----------------------------------------------------------------------------


@needs_dsl
def test_code_is_kept(tmp_path):
    """That of the product, for the chip that was asked for; pairs of blocks are what ctas says."""
    files = {name: tmp_path / f"kernel.{name}" for name in ("ptx", "cubin", "sass")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    found = command(
        *("--arch", "sm_103a", "--format", "mxfp8", "--transpose", "TT", "--ctas", "2"),
        *("--shape", "48x128x64", "--epilogue", "swiglu-nvfp4", "--json", *options),
    )
    assert found.returncode == 0, found.stderr
    product = json.loads(found.stdout)
    assert (product["epilogue"], product["dtype"]) == ("swiglu-nvfp4", "nvfp4")
    # rounding to 4 bits, of which one is for the fraction, with a scale for each 16
    assert 0.05 < product["floor"] < 0.12
    assert product["error"] <= product["allowed"] < 1.01 * product["floor"]
    ptx = files["ptx"].read_text()
    assert ".target sm_103a" in ptx
    assert "tcgen05.mma.cta_group::2.kind::mxf8f6f4" in ptx
    assert machine_code.usage(files["cubin"].read_bytes()).frame_bytes == 0
    assert "UTCQMMA.2CTA" in files["sass"].read_text()


def test_files_are_written_over(kernel, tmp_path, monkeypatch):
    kernel("mxfp8", product, "sm_100a")
    monkeypatch.setattr(machine_code, "disassembler", lambda: "nvdisasm")
    monkeypatch.setattr(machine_code, "disassemble", lambda cubin: f"text of {cubin.decode()}")
    wanted = {"cubin": "machine code", "ptx": ".version 8.8", "sass": "text of machine code"}
    options = []
    for name in wanted:
        (tmp_path / name).write_text("before")
        options += [f"--{name}", str(tmp_path / name)]
    found = invoke("--arch", "sm_100a", "--shape", "16x8x128", *options)
    assert found.exit_code == 0, found.output
    assert {name: (tmp_path / name).read_text() for name in wanted} == wanted


def test_without_a_disassembler(kernel, tmp_path, monkeypatch):
    """Said before anything is compiled; the rest needs none."""
    monkeypatch.setattr(machine_code, "_find_tool", lambda: None)
    with pytest.raises(ValueError, match=r"nvdisasm: not found.*pip install nvidia-cuda-nvdisasm"):
        kept_code.KeptCode(None, tmp_path / "a.sass", None)
    kernel("fp8_block", product)
    found = invoke("--shape", "16x8x128", "--ptx", str(tmp_path / "a.ptx"))
    assert found.exit_code == 0, found.output
    assert [path.name for path in tmp_path.iterdir()] == ["a.ptx"]
