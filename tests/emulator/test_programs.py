"""A program that nvcc compiled, with its own main(), against the runtime of benchmarks/foreign."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from blockscale import emulator as em

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SOURCE = Path(__file__).with_name("program.cu")
OPTIONS = "-std=c++17 -shared -Xcompiler -fPIC -cudart none -gencode"
VIRTUAL = "arch=compute_90a,code=compute_90a"

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("nvcc", "gcc", "nm"))), reason="nvcc, gcc and nm are not on PATH"
)


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    """benchmarks/foreign/program.py, whose folder has a name that a package has, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        from foreign import program

        yield program


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("program") / "library.so", "--no-compress")


def compiled(out: Path, *options: str) -> Path:
    command = ["nvcc", *OPTIONS.split(), VIRTUAL, *options, str(SOURCE), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return out


def launches(program: ModuleType, library: Path) -> object:
    (ptx,) = program.modules(library.read_bytes())
    return program.Launch(em.Device("sm_90a"), ptx, "", library.parent)


def test_its_own_main(program: ModuleType, library: Path) -> None:
    launch = launches(program, library)
    code, said = program.run_program(library, ["", "more"], launch)
    first, raw, last = said.splitlines()
    assert (code, first, last) == (3, "9.0, 132 SMs", "right")
    assert [sum(report.instructions.values()) > 0 for report in launch.reports] == [True, True]
    found = em.TensorMap.decode(bytes.fromhex(raw))
    wanted = em.TensorMap(
        found.address, "f32_ftz", (64, 4), (256,), (32, 8),
        swizzle="128B", l2_promotion="256B", oob_fill="nan",
    )  # fmt: skip
    assert found == wanted


@pytest.mark.parametrize(
    ("way", "error", "said"),
    [
        ("wild", em.MemoryFault, "is out of bounds"),
        ("copy", em.MemoryFault, "1025 bytes at .* are not all in device memory"),
        ("managed", em.PtxError, "cudaMallocManaged: the program calls it"),
    ],
)
def test_faults_reach_the_caller(
    program: ModuleType, library: Path, way: str, error: type[Exception], said: str
) -> None:
    """Also where the program exits, as it does after the launch that fails."""
    with pytest.raises(error, match=said):
        program.run_program(library, [way], launches(program, library))


def test_compressed_modules_are_refused(program: ModuleType, tmp_path: Path) -> None:
    library = compiled(tmp_path / "library.so", "--compress-mode=size")
    with pytest.raises(ValueError, match="--no-compress"):
        program.modules(library.read_bytes())
