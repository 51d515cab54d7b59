"""What to compile for a product of operands that are widened to bf16, and how it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...formats import Format, formats, get_format
from ..gpu.config import SHARED
from .config import OUT_DTYPES
from .stored import MULTIPROCESSORS, ROWS, Stored

__all__ = ["BF16", "BLOCK_K", "Config", "choose_config", "why_not"]

BLOCK_K = 128  # columns of a stage
BF16 = "bf16"  # where the name of a format is expected: an operand without scales
_RIGHT_ROWS = (8, 16, 32, 64, 128)
_IN_FOURS = 120  # multiprocessors that clusters of four surely get
_ELEMENTS = ("E4M3", "E5M2", "E2M1")
_FEW = 128  # rows of A that are few: B is read once, and that is what takes the time
_STAGES = 12  # at most


@dataclass(frozen=True, slots=True)
class Config(Stored):
    """A kernel: all that its code depends on.

    The rows of the left operand are those of a wgmma: it is widened in registers. The rows of the
    right one are the columns of a wgmma: it is widened into shared memory.

    Attributes:
        left, right: names of the formats; of the right one also "bf16".
        swap: the left operand is B: the sums are those of the output transposed.
        accumulate: add to the output.
        bias: the type of a vector that is added to each row, if there is one.
        alpha: the sums are multiplied by a scalar.
        tile: rows of the left and of the right operand that a block of threads takes at once.
        split: blocks that have a part of K each and bring their sums together.
        stages: tiles of both operands in flight.
        wide: widened tiles of the right operand.
        warpgroups: that multiply, each some of the tile's rows.
        ahead: wgmmas of a unit of work, of four, that start before the next unit is widened.
        c_buffers: boxes of 64 rows x 128 bytes in which a warpgroup puts its output together.
        group: tiles along M that are taken before the next ones along N.
        tma_store: the output is stored by TMA; else an element at a time.
        async_scales: rows of scales lie so that those of a stage can be copied at once.
    """

    left: str
    right: str
    out_dtype: torch.dtype
    swap: bool = False
    accumulate: bool = False
    bias: torch.dtype | None = None
    alpha: bool = False
    tile: tuple[int, int] = (256, 128)
    split: int = 1
    stages: int = 3
    wide: int = 2
    warpgroups: int = 2
    ahead: int = 4
    c_buffers: int = 1
    group: int = 8
    tma_store: bool = True
    async_scales: bool = True
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        wrong = {
            "tile": self.tile[0] % (ROWS * self.warpgroups) or self.tile[1] not in _RIGHT_ROWS,
            "warpgroups": self.warpgroups not in (1, 2, 4),
            "ahead": self.ahead not in (1, 2, 3, 4),
            "split": self.split not in (1, 2, 4, 8),
            "stages": self.shared_bytes > SHARED,
            "c_buffers": self.tma_store and (self.boxes == 0 or self.boxes % self.c_buffers),
            "tma_store": self.tma_store
            and self.swap
            and (self.out_dtype.itemsize > 2 or self.accumulate or self.tile[1] < 64),
        }
        for name, bad in wrong.items():
            if bad:
                raise ValueError(f"{name}: got {getattr(self, name)}; no kernel is made so: {self}")

    @property
    def threads(self) -> int:
        """A warpgroup that loads, one that widens, and those that multiply."""
        return 128 * (2 + self.warpgroups)

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a thread that loads, of one that widens, and of one that multiplies."""
        few = (24, 56, 216) if self.right != BF16 else (32, 48, 216)
        return {1: (40, 96, 240), 2: few, 4: (48, 48, 96)}[self.warpgroups]

    @property
    def format(self) -> Format:
        return get_format(self.left)

    @property
    def elements(self) -> tuple[str, str]:
        right = BF16 if self.right == BF16 else get_format(self.right).element.name
        return self.format.element.name, right

    @property
    def nibbles(self) -> bool:
        """Whether columns of K are taken in the order that suits operands of four bits."""
        return "E2M1" in self.elements

    @property
    def scale_row(self) -> int:
        """Bytes of scales of a row, in a stage."""
        return BLOCK_K // self.format.block_size

    @property
    def scale_bytes(self) -> tuple[int, int]:
        """Of both operands in a stage."""
        right = 0 if self.right == BF16 else self.tile[1] * self.scale_row
        return self.tile[0] * self.scale_row, right

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Of both operands in a stage."""
        left, right = ({BF16: 256, "E2M1": 64}.get(each, 128) for each in self.elements)
        return left, right

    @property
    def gain(self) -> float:
        """What the sums lack: a block scale of NVFP4 is widened to 2^-7 of itself, so that one
        multiplication by it widens an element."""
        if self.format.scale.name != "UE4M3":
            return 1.0
        return 2.0**7 if self.right == BF16 else 2.0**14

    @property
    def out_tile(self) -> tuple[int, int]:
        """Rows and columns of the output."""
        return (self.tile[1], self.tile[0]) if self.swap else self.tile

    @property
    def batch(self) -> int:
        """Columns of one wgmma."""
        return self.tile[1]

    @property
    def column_steps(self) -> int:
        return 1

    @property
    def exchange_bytes(self) -> int:
        """Room for the sums of one warpgroup of another block."""
        return 4 * self.tile[0] * self.tile[1] // self.warpgroups

    @property
    def shared_groups(self) -> int:
        """Warpgroups of a block, at most, that bring sums together."""
        return -(-self.warpgroups // self.split)

    @property
    def stage_bytes(self) -> int:
        """With two barriers."""
        both = zip(self.tile, self.row_bytes, strict=True)
        return sum(rows * nbytes for rows, nbytes in both) + sum(self.scale_bytes) + 16

    @property
    def shared_bytes(self) -> int:
        """At most."""
        wide = self.wide * (self.tile[1] * 256 + 16)
        exchange = (self.split - 1) * self.shared_groups * self.exchange_bytes
        return self.stages * self.stage_bytes + wide + self.output_bytes + exchange + 1024

    def compile(self) -> Any:
        """The kernel's host function; takes about a second and the CuTe DSL."""
        from .widened import compile_config

        return compile_config(self)


def why_not(a_format: str, b_format: str, out_dtype: torch.dtype, arch: str) -> str:
    """Why there is no kernel for such a product; empty where there is one."""
    if arch != "sm_90a":
        return f"architecture {arch}: these kernels are for sm_90a"
    if out_dtype not in OUT_DTYPES:
        return f"out_dtype {out_dtype}: there are kernels for {', '.join(map(str, OUT_DTYPES))}"
    known = [f.name for f in formats.values() if f.element.name in _ELEMENTS and f.block_size <= 32]
    for name in (b_format,) if a_format == BF16 else (a_format, b_format):
        if name not in known:
            return f"format {name}: there are kernels for {', '.join(known)}"
    if a_format != BF16 and not get_format(a_format).multiplies(get_format(b_format)):
        return f"formats {a_format} and {b_format} cannot be multiplied: their scales differ"
    return ""


def _cut(columns: int, n: int, blocks: int, tall: bool) -> tuple[bool, int]:
    """Whether tiles have 256 rows of B or 128, and among how many blocks of threads each is split
    along K: the most that run at once. Clusters of four leave some multiprocessors alone.
    """
    options = ((True, 4, _IN_FOURS), (False, 2, MULTIPROCESSORS), (True, 2, MULTIPROCESSORS))
    for high, split, most in options:
        tiles = -(-n // (256 if high else 128)) * columns
        if (tall or not high) and split <= blocks and tiles * split <= most:
            return high, split
    return tall, 1


def choose_config(
    shape: tuple[int, int, int],
    a_format: str,
    b_format: str,
    out_dtype: torch.dtype,
    *,
    accumulate: bool = False,
    bias: torch.dtype | None = None,
    alpha: bool = False,
    aligned: bool = True,
    async_scales: bool = True,
) -> Config:
    """The kernel for a product of ``shape`` (M, N, K).

    ``aligned``: the output starts, and each of its rows does, at a multiple of 16 bytes.
    ``async_scales``: so do scales of each row, and stages of them are whole.
    """
    m, n, k = shape
    few = m <= _FEW
    swap = few or a_format == BF16
    left, right = (b_format, a_format) if swap else (a_format, b_format)
    rows = next((each for each in _RIGHT_ROWS if each >= m), 128) if few else 128
    tall, split = not few or rows <= 64, 1
    if few:
        tall, split = _cut(-(-m // rows), n, -(-k // BLOCK_K), tall)
    tile, warpgroups = (256 if tall else 128, rows), 4 if few and tall else 2
    transposed = out_dtype.itemsize > 2 or accumulate or rows < 64
    smallest = Config(
        left,
        right,
        out_dtype,
        swap=swap,
        accumulate=accumulate,
        bias=bias,
        alpha=alpha,
        tile=tile,
        split=split,
        stages=1,
        wide=4 if rows <= 32 else 2,
        warpgroups=warpgroups,
        tma_store=aligned and not (swap and transposed),
        async_scales=async_scales,
    )
    room = SHARED - smallest.shared_bytes
    return replace(smallest, stages=min(_STAGES, 1 + room // smallest.stage_bytes))
