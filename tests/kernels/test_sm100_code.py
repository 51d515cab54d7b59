"""Blackwell's products as machine code: what ptxas makes of those that are chosen, and the cache on
disk that keeps them."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from blockscale.dtypes import BFLOAT16
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import SHARED
from blockscale.kernels.common.machine_code import Usage, disassemble, usage
from blockscale.kernels.sm100.config import Config, choose_config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def registers():
    """benchmarks/sm100_registers.py, which compiles all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        import sm100_registers

        yield sm100_registers


@pytest.fixture(scope="module")
def examined(registers):
    """Machine code of a configuration, and what it takes."""
    return cache(registers.examine)


@pytest.fixture(scope="module")
def rows(registers):
    return json.loads(registers.RESULT.read_text())["kernels"]


# --- the table ------------------------------------------------------------------------------------

SAMPLE = (
    "mxfp8 x mxfp8",
    "nvfp4 x nvfp4",
    "alpha, bias, added to fp32",
    "SwiGLU, quantized to nvfp4",
)


def test_table_has_all(registers, rows):
    """benchmarks/sm100_registers.py makes it anew."""
    wanted = [
        (name, registers.named(config)) for config, name in registers.configurations().items()
    ]
    assert [(row["what"], row["config"]) for row in rows] == wanted


def test_nothing_is_spilled(rows):
    for row in rows:
        assert row["local_bytes"] == 0
        # warps of all roles start with as many registers; those of a multiprocessor are 65536
        assert row["threads"] * row["registers"] <= 65536
        assert row["registers"] <= 255
        assert row["static_shared_bytes"] + row["dynamic_shared_bytes"] <= SHARED


MATRICES = [(m, n) for m, n in product((1, 128, 129, 1000, 8192), (8, 136, 4096, 20000, 65536))]


def test_what_is_chosen_is_in_the_table(registers):
    """At any size, of every pair and layout; and with every output."""
    known = set(registers.configurations())
    for size, pair in product(MATRICES, registers.PAIRS):
        for majors in registers.layouts(pair):
            assert registers.choose(pair, size, majors=majors) in known
    for size, pair, given in product(MATRICES, registers.MAIN, registers.OUTPUTS.values()):
        assert registers.choose(pair, size, **given) in known


@pytest.mark.parametrize("name", SAMPLE)
def test_table_is_of_this_code(registers, rows, examined, name):
    """The rest of it is not compiled again: the kernels are made of the same parts."""
    config = _sample(registers, name)
    (row,) = (row for row in rows if row["config"] == registers.named(config))
    _, found = examined(config)
    assert found == {key: row[key] for key in found}


def _sample(registers, name: str) -> Config:
    """The largest tile, of MXFP8 or else of NVFP4."""
    pair = ("mxfp8", "mxfp8") if name.startswith("mxfp8") else ("nvfp4", "nvfp4")
    return registers.choose(pair, registers.SIZES[0], **registers.OUTPUTS.get(name, {}))


def test_what_a_cubin_says():
    """ELF and .nv.info, put together by hand: of a kernel, and of a function that spills."""
    attributes = [
        struct.pack("<BBHII", 4, 0x2F, 8, 1, 107),  # registers of symbol 1
        struct.pack("<BBHII", 4, 0x11, 8, 1, 0),  # bytes of a frame
        struct.pack("<BBHII", 4, 0x11, 8, 2, 32),
        struct.pack("<BBH", 2, 0x4C, 3),  # barriers
        struct.pack("<BBHI", 4, 0x1E, 4, 9),  # another one, without a symbol
    ]
    sections = {".nv.info": b"".join(attributes), ".nv.shared.kernel": bytes(48), ".text": b""}
    sections[".nv.shared.reserved.0"] = bytes(84)
    names = b"\0" + b"\0".join(name.encode() for name in [*sections, ".shstrtab"]) + b"\0"
    header, content, table = 64, b"", b""
    for name, data in {**sections, ".shstrtab": names}.items():
        place = names.index(b"\0" + name.encode() + b"\0") + 1
        table += struct.pack(
            "<2I4Q2I2Q", place, 1, 0, 0, header + len(content), len(data), *(0,) * 4
        )
        content += data
    count, start = len(sections) + 1, header + len(content)
    elf = struct.pack("<40xQ10x3H", start, 64, count, count - 1) + content + table
    assert usage(elf) == Usage(registers=107, frame_bytes=32, static_bytes=48, barriers=3)


# --- the main loop --------------------------------------------------------------------------------

# Beside instructions for the tensor cores: moves and sums of integers, votes, jumps, barriers.
PLAIN = (
    r"U?(MOV|IMAD|IADD3?|VIADD|LEA|SHF|LOP3|PLOP3|SEL|ISETP|P2R|R2P)|R2UR|VOTE|BRA|NOP|SYNCS|YIELD"
)
LOOPS = {"mxfp8 x mxfp8": "UTCQMMA", "nvfp4 x nvfp4": "UTCOMMA"}


@pytest.mark.parametrize("name", LOOPS)
def test_the_thread_that_multiplies_only_waits_and_issues(registers, examined, name):
    """From one K block's end (UTCBAR) to the next: four instructions, after its scales."""
    config, multiply = _sample(registers, name), LOOPS[name]
    code = _opcodes(disassemble(examined(config)[0]))
    ends = [i for i, each in enumerate(code) if each.startswith("UTCBAR")]
    blocks = [code[first + 1 : last] for first, last in pairwise(ends)]
    found = [any(each.startswith(multiply) for each in block) for block in blocks]
    loop = [
        block
        for block, (before, here) in zip(blocks[1:], pairwise(found), strict=True)
        if before and here
    ]
    assert loop
    for block in loop:
        kinds = [each.split(".")[0] for each in block]
        assert kinds.count(multiply) == 4
        assert kinds.count("UTCCP") == sum(config.scale_rows) * config.kind.scale_tiles
        assert kinds.count("SYNCS") >= 1
        rest = [each for each in kinds if each not in (multiply, "UTCCP")]
        assert [each for each in rest if not re.fullmatch(PLAIN, each.removesuffix("U"))] == []
        assert len(block) < 100
        # one thread issues: there is no loop over those of its warp
        assert not [each for each in block if each.startswith("BRA.U.ANY") or each == "ELECT"]


@pytest.mark.parametrize("name", LOOPS)
def test_operands_and_scales_are_loaded_by_tma(registers, examined, name):
    """And sums come from Tensor Memory to be stored by TMA."""
    code = _opcodes(disassemble(examined(_sample(registers, name))[0]))
    kinds = [each.split(".")[0] for each in code]
    assert kinds.count("UTMALDG") % 4 == 0 < kinds.count("UTMALDG")
    assert "LDTM" in kinds
    assert "UTMASTG" in kinds
    assert not {"LDG", "LDGSTS", "STG", "LDL", "STL"} & set(kinds)


def _opcodes(sass: str) -> list[str]:
    """With their modifiers, in the order of the code."""
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass)


# --- the cache on disk ----------------------------------------------------------------------------

SECOND = """
import sys
from blockscale.dtypes import BFLOAT16
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.sm100.config import choose_config

def build(config):
    raise AssertionError("compiled again")

compile_cache.build = build
config = choose_config((128, 8192, 4096), ("nvfp4", "nvfp4"), Epilogue(BFLOAT16, alpha=(0,)))
assert callable(compile_cache.load(config))
assert "cutlass" not in sys.modules
"""


def test_a_second_process_does_not_compile(tmp_path, monkeypatch):
    """Nor does it import CuTe DSL, which takes a second."""
    monkeypatch.setenv("BLOCKSCALE_CACHE_DIR", str(tmp_path))
    config = choose_config((128, 8192, 4096), ("nvfp4", "nvfp4"), Epilogue(BFLOAT16, alpha=(0,)))
    compile_cache.load.cache_clear()
    compile_cache.load(config)
    compile_cache.load.cache_clear()
    entries = [path for path in (tmp_path / "kernels").iterdir() if path.suffix != ".lock"]
    assert [path.suffix for path in entries] == [".so"]
    subprocess.run([sys.executable, "-c", SECOND], check=True)
