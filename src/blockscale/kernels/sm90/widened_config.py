"""What to compile for a product of few rows of bf16, and how it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...formats import Format, formats, get_format
from ..common.loadable import rows_to_load
from ..common.refuse import refuse
from ..gpu.config import SHARED
from ..gpu.plan import Unsupported
from . import product_config
from .product_config import AT_ONCE, BOX, ROWS

__all__ = ["BF16", "BLOCK_K", "FEW", "WARPGROUPS", "Config", "choose_config", "gain", "why_not"]

BLOCK_K = 128  # columns of a stage
BF16 = "bf16"  # where the name of a format is expected: an operand without scales
FEW = 128  # rows of A with which B is read once, and widened once
WARPGROUPS = 2  # that share a tile's rows of B
_A_ROWS = (8, 16, 32, 64, 128)  # of a tile
_B_ROWS = 128
_ELEMENTS = ("E4M3", "E5M2", "E2M1")
_PARTS = (1, 2)
_TWO_PARTS = (32, 64), 5, 12  # rows of A with which they pay; stages and K blocks of each, at least
_STAGES = 2, 12  # at least, at most


@dataclass(frozen=True, slots=True)
class Config:
    """A kernel: all that its code depends on.

    The rows of B are those of a wgmma: it is widened in registers. The rows of A, which are one
    tile's, are the columns of a wgmma: they are bf16. The sums are those of the output transposed.

    Attributes:
        b_format: its name.
        tile: rows of A and of B that a block of threads takes at once.
        split: blocks that have a part of K each and bring their sums together.
        parts: warpgroups of a block that take stages in turn, and bring their sums together, too:
            K has as many stages for each block at least.
        stages: tiles of both operands in flight.
        accumulate: add to the output.
        bias: the type of a vector that is added to each row, if there is one.
        alpha: the sums are multiplied by a scalar.
        tma_store: the output is stored by TMA; else an element at a time.
        async_scales: rows of B's scales lie so that those of a stage can be copied at once.
        loaded_rows: of A; 0 for all of a tile's. Fewer where there are no more, and that pays.
    """

    b_format: str
    out_dtype: torch.dtype
    tile: tuple[int, int]
    split: int = 1
    parts: int = 1
    stages: int = _STAGES[0]
    accumulate: bool = False
    bias: torch.dtype | None = None
    alpha: bool = False
    tma_store: bool = False
    async_scales: bool = True
    loaded_rows: int = 0
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        a_rows, b_rows = self.tile
        wrong = {
            "tile": a_rows not in _A_ROWS
            or b_rows not in (_B_ROWS, 2 * _B_ROWS)
            or a_rows * b_rows > FEW * _B_ROWS,  # a thread has registers for two K blocks
            "split": self.split not in AT_ONCE,
            "parts": self.parts not in _PARTS
            or self.parts * a_rows * b_rows > FEW * _B_ROWS,  # these have half of the registers
            # A warpgroup keeps a stage until it has its next one. Those that take turns have the
            # same stages in each round: an mbarrier does not tell a round from the one after next.
            "stages": self.stages <= self.parts
            or self.stages % self.parts
            or self.shared_bytes > SHARED,
            "tma_store": self.tma_store
            and (self.out_dtype.itemsize > 2 or self.accumulate or a_rows < ROWS),
            "loaded_rows": self.loaded_rows not in range(a_rows),
        }
        refuse(self, wrong)

    @property
    def row_steps(self) -> int:
        """wgmmas that a warpgroup needs to go down its rows of B."""
        return self.tile[1] // (ROWS * WARPGROUPS)

    @property
    def format(self) -> Format:
        return get_format(self.b_format)

    @property
    def row_bytes(self) -> int:
        """Of B in a stage."""
        return BLOCK_K * self.format.element.bits // 8

    @property
    def scale_row(self) -> int:
        """Bytes of scales of a row of B in a stage."""
        return BLOCK_K // self.format.block_size

    @property
    def scale_bytes(self) -> int:
        """Of B in a stage."""
        return self.tile[1] * self.scale_row

    @property
    def gain(self) -> float:
        """What the sums lack."""
        return gain(self.format)

    @property
    def shares(self) -> int:
        """Of a tile, 64 rows of B each, which blocks that split K add up in turn."""
        return WARPGROUPS * self.row_steps

    @property
    def sources(self) -> int:
        """Of a share's sums: warpgroups of all blocks that split K."""
        return self.split * self.parts

    @property
    def own_shares(self) -> int:
        """Of one block, at most."""
        return -(-self.shares // self.split)

    @property
    def share_bytes(self) -> int:
        """Room for another warpgroup's sums."""
        return 4 * ROWS * self.tile[0]

    def exchange_bytes(self, split: int, parts: int) -> int:
        """For the sums of others, if there were so many blocks, and parts of each."""
        return (split * parts - 1) * -(-self.shares // split) * self.share_bytes

    @property
    def stage_bytes(self) -> int:
        """With two barriers."""
        a_rows, b_rows = self.tile
        return a_rows * 2 * BLOCK_K + b_rows * self.row_bytes + self.scale_bytes + 16

    @property
    def boxes(self) -> int:
        """Of the output, that are stored from at once: by warpgroups that add up a share."""
        return min(WARPGROUPS, self.own_shares)

    @property
    def shared_bytes(self) -> int:
        """At most."""
        output = self.boxes * ROWS * BOX if self.tma_store else 0
        exchange = self.exchange_bytes(self.split, self.parts)
        return self.stages * self.stage_bytes + output + exchange + 1024

    def compile(self) -> Any:
        """The kernel's host function; takes about a second and the CuTe DSL."""
        from .widened import compile_config

        return compile_config(self)


def gain(format: Format) -> float:
    """What sums of products lack whose one operand was widened: a block scale of NVFP4 is widened
    to 2^-7 of itself, so that one multiplication by it widens an element."""
    return 2.0**7 if format.scale.name == "UE4M3" else 1.0


def why_not(a_format: str, b_format: str, out_dtype: torch.dtype, arch: str) -> str:
    """Why there is no kernel for such a product; empty where there is one."""
    reason = product_config.why_not(out_dtype, arch)
    if reason:
        return reason
    known = [f.name for f in formats.values() if f.element.name in _ELEMENTS and f.block_size <= 32]
    for name in (b_format,) if a_format == BF16 else (a_format, b_format):
        if name not in known:
            return f"format {name}: there are kernels for {', '.join(known)}"
    if a_format != BF16 and not get_format(a_format).multiplies(get_format(b_format)):
        return f"formats {a_format} and {b_format} cannot be multiplied: their scales differ"
    return ""


def _cut(a_rows: int, n: int, blocks: int, b_bits: int, splits: Sequence[int]) -> tuple[int, int]:
    """Rows of B in a tile, and blocks of threads that split its ``blocks`` of K, so many as one of
    ``splits``."""
    tiles = -(-n // _B_ROWS)

    def loops(split: int) -> int:
        """K blocks that one block of threads takes time for; sums from each of ``split`` blocks
        take as long to add up as another one."""
        return -(-tiles // AT_ONCE[split]) * (-(-blocks // split) + split)

    split = min(splits, key=loops)
    # A's rows are twice as many bytes as B's there: two tiles share them, where all run at once
    if (split, a_rows, b_bits) == (2, 64, 4) and -(-tiles // 2) <= AT_ONCE[4]:
        return 2 * _B_ROWS, 4
    return _B_ROWS, split


def _most_stages(config: Config, parts: int) -> int:
    """That there is room for, if so many warpgroups take them in turn: as many each."""
    sums = [config.exchange_bytes(config.split, each) for each in (config.parts, parts)]
    room = SHARED - config.shared_bytes + sums[0] - sums[1]
    most = min(_STAGES[1], config.stages + room // config.stage_bytes)
    return most - most % parts


def choose_config(
    shape: tuple[int, int, int],
    b_format: str,
    out_dtype: torch.dtype,
    *,
    accumulate: bool = False,
    bias: torch.dtype | None = None,
    alpha: bool = False,
    aligned: bool = True,
    async_scales: bool = True,
) -> Config:
    """The kernel for a product of ``shape`` (M, N, K); Unsupported where M is more than ``FEW``.

    ``aligned``: the output starts, and each of its rows does, at a multiple of 16 bytes.
    ``async_scales``: rows of B's scales start at multiples of a stage's bytes, and all are whole.
    """
    m, n, k = shape
    if m > FEW:
        raise Unsupported(
            f"a_data: has {m} rows; there are kernels for {FEW} at most: call dequantized_gemm"
        )
    a_rows = next(each for each in _A_ROWS if each >= m)
    config = Config(
        b_format,
        out_dtype,
        tile=(a_rows, _B_ROWS),
        accumulate=accumulate,
        bias=bias,
        alpha=alpha,
        tma_store=aligned and a_rows >= ROWS and out_dtype.itemsize == 2 and not accumulate,
        async_scales=async_scales,
        loaded_rows=rows_to_load(m, a_rows) if a_rows >= 64 else 0,
    )
    room = SHARED - config.shared_bytes
    splits = [each for each in AT_ONCE if config.exchange_bytes(each, 1) <= room]
    bits = config.format.element.bits
    blocks = -(-k // BLOCK_K)
    b_rows, split = _cut(a_rows, n, blocks, bits, splits)
    config = replace(config, tile=(a_rows, b_rows), split=split)
    stages = {parts: _most_stages(config, parts) for parts in _PARTS}
    rows, least, loops = _TWO_PARTS
    two = b_rows == _B_ROWS and a_rows in rows and stages[2] >= least and blocks >= loops * split
    parts = 2 if two and not accumulate else 1  # which wants registers for addresses
    return replace(config, parts=parts, stages=stages[parts])
