"""The machine code of a compiled kernel: as text, and what it takes of a multiprocessor."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["Usage", "disassemble", "disassembler", "usage"]

_TOOL = "nvdisasm"
_REMEDY = f"pip install nvidia-cuda-{_TOOL}, or put the bin folder of a CUDA toolkit on the PATH"

# Attributes of .nv.info: EIATTR_REGCOUNT, _FRAME_SIZE and _NUM_BARRIERS.
_REGISTERS, _FRAME, _BARRIERS = 0x2F, 0x11, 0x4C
_IN_HEADER, _BEHIND = 2, 4  # where the value of an attribute is, by its kind


@dataclass(frozen=True, slots=True)
class Usage:
    """Of the kernel in a cubin.

    Attributes:
        registers: of a thread.
        frame_bytes: of a thread's local memory, in the function that has most: arrays, and
            registers that were spilled.
        static_bytes: of shared memory, without what a launch asks for.
        barriers: that bar.sync and its relatives use.
    """

    registers: int
    frame_bytes: int
    static_bytes: int
    barriers: int


def usage(cubin: bytes) -> Usage:
    """What ptxas noted. Needs no tool."""
    registers, frames, barriers, static = [0], [0], [0], 0
    for name, start, length in _sections(cubin):
        if name.startswith(".nv.shared.") and not name.startswith(".nv.shared.reserved"):
            static += length
        if name != ".nv.info" and not name.startswith(".nv.info."):
            continue
        for attribute, value in _attributes(cubin[start : start + length]):
            if attribute == _REGISTERS:
                registers.append(value)
            elif attribute == _FRAME:
                frames.append(value)
            elif attribute == _BARRIERS:
                barriers.append(value)
    return Usage(max(registers), max(frames), static, max(barriers))


def _sections(elf: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and size of each."""
    table, size, count, names = struct.unpack_from("<40xQ10x3H", elf)
    headers = [struct.unpack_from("<2I4Q", elf, table + i * size) for i in range(count)]
    text = headers[names][4]
    for name, _, _, _, start, length in headers:
        yield elf[text + name : elf.index(b"\0", text + name)].decode(), start, length


def _attributes(section: bytes) -> Iterator[tuple[int, int]]:
    """Number of an attribute and, where it has one, its value, of each function that it is for."""
    where = 0
    while where < len(section):
        kind, attribute, extent = struct.unpack_from("<BBH", section, where)
        where += 4
        if kind == _BEHIND:
            if extent == 8:  # symbol of a function, value
                yield attribute, struct.unpack_from("<I", section, where + 4)[0]
            where += extent
        elif kind == _IN_HEADER:
            yield attribute, extent


def disassemble(cubin: bytes) -> str:
    """SASS, as nvdisasm writes it; ValueError as of ``disassembler``."""
    tool = disassembler()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{_TOOL}: {done.stderr.strip()} ({tool}; a newer one: {_REMEDY})")
    return done.stdout


def disassembler() -> str:
    """Path of nvdisasm; ValueError where there is none, with the remedy."""
    tool = _find_tool()
    if tool is None:
        raise ValueError(f"{_TOOL}: not found, and machine code needs it to be read: {_REMEDY}")
    return tool


def _find_tool() -> str | None:
    """On the PATH, or among the packages installed here: NVIDIA's own, or Triton."""
    on_path = shutil.which(_TOOL)
    if on_path is not None:
        return on_path
    folders = []
    for package, pattern in (("nvidia", "*/bin"), ("triton", "backends/nvidia/bin")):
        found = find_spec(package)
        for place in (found.submodule_search_locations or ()) if found else ():
            folders += sorted(Path(place).glob(pattern), reverse=True)
    tools = (folder / _TOOL for folder in folders)
    return next((str(tool) for tool in tools if tool.is_file()), None)
