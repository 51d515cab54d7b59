"""What to compile for a product: a pure function of shapes, types and target, and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..gpu.config import SHARED

__all__ = ["BLOCK_K", "OUT_DTYPES", "Config", "choose_config", "why_not"]

BLOCK_K = 128  # columns of a scale, and of a stage
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
B_BLOCKS = ((128, 128), (1, 128))
_ROWS = 64  # of one wgmma
_MULTIPROCESSORS = 132  # of an H100 SXM and of an H200
_LONG = 2048  # elements along K that are worth splitting
_BOX = 128  # bytes of a row of the output that one instruction stores


@dataclass(frozen=True, slots=True)
class Config:
    """A kernel: all that its code depends on.

    Attributes:
        b_block: of a scale of B: 128 x 128, or 1 x 128.
        accumulate: add to the output, which is fp32.
        tile: rows and columns of the output that a block of threads takes at once.
        cluster: blocks that share tiles of B (along M) and of A (along N); two at most.
        split: blocks that have a part of K each, and bring their sums together; two at most, of no
            fewer K blocks.
        stages: tiles of A and B in flight.
        warpgroups: that multiply, each some of the tile's rows.
        batch: columns of one wgmma. Four of them, one K block, are a partial sum.
        partials: partial sums of a warpgroup. With two, the tensor cores work on one while the
            other is scaled and added.
        a_registers: A goes through registers, read once for all batches.
        unroll: K blocks in the body of the loop, between which wgmmas stay in flight.
        c_buffers: boxes of 64 rows x 128 bytes in which a warpgroup puts its output together.
        skew: nanoseconds by which a warpgroup starts after the one before it, so that one works
            while another stores.
        group: tiles along M that are taken before the next ones along N.
        tma_store: the output is stored by TMA; else an element at a time.
    """

    out_dtype: torch.dtype
    b_block: tuple[int, int] = (128, 128)
    accumulate: bool = False
    tile: tuple[int, int] = (128, 256)
    cluster: tuple[int, int] = (2, 1)
    split: int = 1
    stages: int = 3
    warpgroups: int = 2
    batch: int = 128
    partials: int = 1
    a_registers: bool = False
    unroll: int = 4
    c_buffers: int = 4
    skew: int = 0
    group: int = 8
    tma_store: bool = True
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        rows, columns = self.tile
        wrong = {
            "tile": rows % (_ROWS * self.warpgroups) or columns % self.batch,
            "batch": self.batch % 16 or self.batch > 256,
            "cluster": self.cluster not in ((1, 1), (2, 1), (1, 2)),
            "split": self.split not in (1, 2),
            "stages": self.shared_bytes > SHARED,
            "c_buffers": self.boxes % self.c_buffers or columns * self.out_dtype.itemsize % _BOX,
        }
        for name, bad in wrong.items():
            if bad:
                raise ValueError(f"{name}: got {getattr(self, name)}; no kernel is made so: {self}")

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that loads, and of one that multiplies."""
        return {1: (56, 240), 2: (24, 240), 3: (32, 160)}[self.warpgroups]

    @property
    def sharing(self) -> int:
        """Blocks of a cluster that share tiles of A or B."""
        return self.cluster[0] * self.cluster[1]

    @property
    def blocks(self) -> int:
        """Of threads, in a cluster."""
        return self.sharing * self.split

    @property
    def exchange_bytes(self) -> int:
        """Room for another block's sums."""
        return 4 * self.tile[0] * self.tile[1] if self.split > 1 else 0

    @property
    def row_steps(self) -> int:
        """wgmmas that a warpgroup needs to go down its rows."""
        return self.tile[0] // (_ROWS * self.warpgroups)

    @property
    def column_steps(self) -> int:
        return self.tile[1] // self.batch

    @property
    def carries(self) -> bool:
        """Whether the last of a loop's partial sums is added in the next one."""
        even = self.row_steps * self.column_steps % 2 == 0
        return self.partials == 2 and even and self.b_block[0] > 1

    @property
    def segment(self) -> int:
        """Columns of a tile that have a 128 x 128 scale in common, whichever tile it is."""
        return math.gcd(self.tile[1], 128)

    @property
    def b_scales(self) -> int:
        """Scales of B in a stage."""
        return self.tile[1] if self.b_block[0] == 1 else self.tile[1] // self.segment

    @property
    def box_columns(self) -> int:
        return _BOX // self.out_dtype.itemsize

    @property
    def boxes(self) -> int:
        """Of a warpgroup's output."""
        return self.row_steps * self.tile[1] // self.box_columns

    @property
    def scale_bytes(self) -> tuple[int, int]:
        """Of A and of B in a stage."""
        return 4 * self.tile[0], -(-4 * self.b_scales // 128) * 128

    @property
    def shared_bytes(self) -> int:
        stage = sum(self.tile) * BLOCK_K + sum(self.scale_bytes)  # and two barriers
        output = self.warpgroups * self.c_buffers * _ROWS * _BOX if self.tma_store else 0
        return self.stages * (stage + 16) + output + self.exchange_bytes + 256

    def compile(self) -> Any:
        """The kernel's host function; takes about a second and the CuTe DSL."""
        from .kernel import compile_config

        return compile_config(self)


def why_not(
    k: int, out_dtype: torch.dtype, accumulate: bool, b_block: tuple[int, int], arch: str
) -> str:
    """Why there is no kernel for such a product; empty where there is one."""
    if arch != "sm_90a":
        return f"architecture {arch}: these kernels are for sm_90a"
    if out_dtype not in OUT_DTYPES:
        return f"out_dtype {out_dtype}: there are kernels for {', '.join(map(str, OUT_DTYPES))}"
    if accumulate and out_dtype != torch.float32:
        return f"accumulate: adds in fp32, the output is {out_dtype}"
    if b_block not in B_BLOCKS:
        return f"b_block {b_block}: there are kernels for {' and '.join(map(str, B_BLOCKS))}"
    if k % 16:
        return f"K = {k}: TMA wants rows of a multiple of 16 bytes"
    return ""


def choose_config(
    shape: tuple[int, int, int],
    out_dtype: torch.dtype,
    *,
    b_block: tuple[int, int] = (128, 128),
    accumulate: bool = False,
    aligned: bool = True,
) -> Config:
    """The kernel for a product of ``shape`` (M, N, K).

    ``aligned``: the output starts, and each of its rows does, at a multiple of 16 bytes.
    """
    (m, n, k), tile = shape, (128, 128)
    given = {"b_block": b_block, "accumulate": accumulate, "tma_store": aligned}
    tiles = -(-m // tile[0]) * -(-n // tile[1])
    if tiles <= _MULTIPROCESSORS // 2:
        cluster = (1, 2) if n > tile[1] else (2, 1) if m > tile[0] else (1, 1)
        if k >= _LONG:
            few = {"split": 2, "stages": 4, "c_buffers": 1}
        else:
            few = {"stages": 5, "c_buffers": 2}
        return Config(out_dtype, tile=tile, cluster=cluster, **few, **given)
    return Config(out_dtype, c_buffers=4 if out_dtype.itemsize == 2 else 2, **given)
