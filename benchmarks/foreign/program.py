"""Programs that nvcc compiled, with their own main() against the emulated runtime of ``cudart``.

A program is a shared library, made with ``nvcc -shared -cudart none --no-compress`` for a virtual
architecture: it holds its PTX as text, and leaves the functions of the CUDA runtime to others. Here
the assembler makes a library that has them, each a jump through a table of Python's functions. A
program may call exit(), and has variables of its own: it runs in a process of its own.

For x86-64 Linux, with gcc and nm.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from blockscale import emulator as em

from .cudart import Runtime
from .kernel import Foreign, Launch

__all__ = ["Program", "modules", "run_program"]

# A fat binary: magic, version, bytes of this header, bytes that follow. An entry: kind, version,
# bytes of its header, of what follows, and if it is compressed.
_BINARY, _MAGIC = struct.Struct("<IHHQ"), b"\x50\xed\x55\xba"
_ENTRY, _PTX = struct.Struct("<HHIQI"), 1


@dataclass(frozen=True)
class Program(Foreign):
    """A kernel inside a program, ``<folder>/<project>/<name>.so``; ``run`` calls run_program."""

    def ptx(self, folder: Path) -> str:
        path = folder / self.project / f"{self.name}.so"
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there; to make it: {self.made}")
        found = modules(path.read_bytes())
        if len(found) != 1:
            raise ValueError(f"{path} holds {len(found)} modules of PTX; it must be one")
        return found[0]


def modules(library: bytes) -> list[str]:
    """The texts of PTX in the fat binaries of a library; ValueError for compressed ones."""
    found, at = [], library.find(_MAGIC)
    while at >= 0:
        _, _, header, size = _BINARY.unpack_from(library, at)
        at, end = at + header, at + header + size
        while at < end:
            kind, _, header, size, compressed = _ENTRY.unpack_from(library, at)
            if compressed:
                raise ValueError("library: its PTX is compressed; compile with --no-compress")
            if kind == _PTX:
                found.append(library[at + header : at + header + size].rstrip(b"\0").decode())
            at += header + size
        at = library.find(_MAGIC, end)
    return found


def run_program(library: Path, arguments: Sequence[str], launch: Launch) -> tuple[int, str]:
    """Call its main(): the exit status and what it printed. Reports of launches go to ``launch``.

    Raises what the runtime raised, whatever the program made of that.
    """
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        stub, names = _stub(library, Path(folder))
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)

        def main() -> None:
            runtime = Runtime(launch.device, launch.ptx, there.send)
            with printed.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            functions = ctypes.CDLL(str(stub), ctypes.RTLD_GLOBAL)
            table = (ctypes.c_void_p * len(names)).in_dll(functions, _TABLE)
            table[:] = [runtime.address(name) for name in names]
            words = [str(library), *arguments]
            argv = (ctypes.c_char_p * (len(words) + 1))(*map(str.encode, words))
            code = ctypes.CDLL(str(library)).main(len(words), argv)
            ctypes.CDLL(None).fflush(None)
            os._exit(code & 0xFF)

        process = context.Process(target=main)
        process.start()
        there.close()
        failures = _received(here, launch.reports)
        process.join()
        if failures:
            raise failures[0]
        return process.exitcode or 0, printed.read_text()


def _received(pipe: Connection, reports: list[em.Report]) -> list[BaseException]:
    """What the process sends until it ends."""
    failures = []
    while True:
        try:
            value = pipe.recv()
        except EOFError:
            return failures
        if isinstance(value, BaseException):
            failures.append(value)
        else:
            reports.append(value)


_TABLE = "emulated_runtime"


def _stub(library: Path, folder: Path) -> tuple[Path, list[str]]:
    """A library with the functions that ``library`` lacks, and their names as in its table."""
    lacking = ["nm", "--dynamic", "--undefined-only", "--just-symbols", str(library)]
    found = subprocess.run(lacking, check=True, capture_output=True, text=True).stdout.split()
    names = [name for name in found if re.match(r"(__)?cu(da)?[A-Z]", name)]
    jumps = [
        f".globl {name}\n.type {name}, @function\n{name}: jmp *.Ltable+{8 * i}(%rip)\n"
        for i, name in enumerate(names)
    ]
    table = f".bss\n.balign 8\n.globl {_TABLE}\n{_TABLE}:\n.Ltable: .zero {8 * len(names)}\n"
    text = "".join([table, ".text\n", *jumps, '.section .note.GNU-stack, ""\n'])
    made = folder / "runtime.so"
    command = ["gcc", "-shared", "-nostdlib", "-x", "assembler", "-", "-o", str(made)]
    subprocess.run(command, check=True, input=text, text=True)
    return made, names
