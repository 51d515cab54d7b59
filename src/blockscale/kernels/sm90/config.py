"""What to compile for a product: a pure function of shapes, types and target, and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..gpu.config import SHARED
from .stored import BOX, MULTIPROCESSORS, ROWS, Stored

__all__ = ["BLOCK_K", "OUT_DTYPES", "Config", "candidates", "choose_config", "why_not"]

BLOCK_K = 128  # columns of a scale, and of a stage
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
B_BLOCKS = ((128, 128), (1, 128))


@dataclass(frozen=True, slots=True)
class Config(Stored):
    """A kernel: all that its code depends on.

    Attributes:
        b_block: of a scale of B: 128 x 128, or 1 x 128.
        accumulate: add to the output.
        bias: the type of a vector that is added to each row, if there is one.
        alpha: the sums are multiplied by a scalar.
        tile: rows and columns of the output that a block of threads takes at once.
        cluster: blocks that share tiles of B (along M) and of A (along N); two at most.
        stages: tiles of A and B in flight.
        warpgroups: that multiply, each some of the tile's rows.
        alternate: two warpgroups take all rows instead, and every other K block each: where the
            tiles are few and small, one waits for memory while the other works.
        batch: columns of one wgmma. Four of them, one K block, are a partial sum.
        unroll: K blocks in the body of the loop.
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
    stages: int = 3
    warpgroups: int = 2
    alternate: bool = False
    batch: int = 128
    unroll: int = 4
    c_buffers: int = 4
    skew: int = 0
    group: int = 8
    tma_store: bool = True
    bias: torch.dtype | None = None
    alpha: bool = False
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        rows, columns = self.tile
        wrong = {
            "tile": rows % (ROWS * self.row_warpgroups) or columns % self.batch,
            "alternate": self.alternate and self.warpgroups != 2,
            "batch": self.batch % 16 or self.batch > 256,
            "cluster": self.cluster not in ((1, 1), (2, 1), (1, 2)),
            "stages": self.shared_bytes > SHARED,
            "c_buffers": self.boxes % self.c_buffers or columns * self.out_dtype.itemsize % BOX,
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
    def blocks(self) -> int:
        """Of threads, in a cluster; they share tiles of A or B."""
        return self.cluster[0] * self.cluster[1]

    @property
    def exchange_bytes(self) -> int:
        """Room for the sums of the other warpgroup."""
        return 4 * self.tile[0] * self.tile[1] if self.alternate else 0

    @property
    def row_warpgroups(self) -> int:
        """That share the rows of a tile, and store them."""
        return 1 if self.alternate else self.warpgroups

    @property
    def column_steps(self) -> int:
        return self.tile[1] // self.batch

    @property
    def segment(self) -> int:
        """Columns of a tile that have a 128 x 128 scale in common, whichever tile it is."""
        return math.gcd(self.tile[1], 128)

    @property
    def b_scales(self) -> int:
        """Scales of B in a stage."""
        return self.tile[1] if self.b_block[0] == 1 else self.tile[1] // self.segment

    @property
    def scale_bytes(self) -> tuple[int, int]:
        """Of A and of B in a stage."""
        return 4 * self.tile[0], -(-4 * self.b_scales // 128) * 128

    @property
    def shared_bytes(self) -> int:
        stage = sum(self.tile) * BLOCK_K + sum(self.scale_bytes)  # and two barriers
        return self.stages * (stage + 16) + self.output_bytes + self.exchange_bytes + 256

    def compile(self) -> Any:
        """The kernel's host function; takes about a second and the CuTe DSL."""
        from .kernel import compile_config

        return compile_config(self)


def why_not(k: int, out_dtype: torch.dtype, b_block: tuple[int, int], arch: str) -> str:
    """Why there is no kernel for such a product; empty where there is one."""
    if arch != "sm_90a":
        return f"architecture {arch}: these kernels are for sm_90a"
    if out_dtype not in OUT_DTYPES:
        return f"out_dtype {out_dtype}: there are kernels for {', '.join(map(str, OUT_DTYPES))}"
    if b_block not in B_BLOCKS:
        return f"b_block {b_block}: there are kernels for {' and '.join(map(str, B_BLOCKS))}"
    if k % 16:
        return f"K = {k}: TMA wants rows of a multiple of 16 bytes"
    return ""


@dataclass(frozen=True, slots=True)
class Shape:
    """A way to cut a product into tiles, and what it costs: in nanoseconds, fitted to the times of
    all of them at 40 shapes of LLMs on an H200.

    Attributes:
        fields: of a :class:`Config`.
        loop: of a K block.
        fixed: of a tile, beside its K blocks.
    """

    fields: dict[str, Any]
    loop: int
    fixed: int

    def nanoseconds(self, shape: tuple[int, int, int]) -> int:
        """An estimate for a product."""
        config = Config(torch.bfloat16, **self.fields, c_buffers=1)
        (m, n, k), (rows, columns) = shape, config.tile
        down, across = config.cluster
        clusters = -(-m // (rows * down)) * -(-n // (columns * across))
        turns = -(-clusters // (MULTIPROCESSORS // config.blocks))
        return turns * (-(-k // BLOCK_K) * self.loop + self.fixed)


_WIDE = {"tile": (128, 256), "stages": 4}
_SQUARE = {"tile": (128, 128), "stages": 5}
_FEW = {"cluster": (1, 1), "alternate": True, "stages": 7}

SHAPES = (
    Shape(_WIDE, 750, 1037),
    Shape({**_WIDE, "cluster": (1, 1)}, 792, 462),
    Shape({"tile": (192, 128), "cluster": (1, 2), "stages": 4, "warpgroups": 3}, 567, 421),
    Shape(_SQUARE, 440, 200),
    Shape({**_SQUARE, "cluster": (1, 1)}, 440, 210),
    Shape({**_FEW, "tile": (128, 64), "batch": 64}, 246, 1705),
    Shape({**_FEW, "tile": (64, 128)}, 313, 1935),
    Shape({**_FEW, "tile": (64, 64), "batch": 64}, 170, 3992),
)


def _ordered(shape: tuple[int, int, int]) -> list[Shape]:
    """The one of least estimated time first."""
    return sorted(SHAPES, key=lambda each: each.nanoseconds(shape))


def candidates(shape: tuple[int, int, int], out_dtype: torch.dtype) -> list[Config]:
    """Configurations for a product of ``shape`` (M, N, K), the one that is chosen first."""
    return [_fit(out_dtype, **each.fields) for each in _ordered(shape)]


def _fit(out_dtype: torch.dtype, **fields: Any) -> Config:
    """A configuration with as much room for its output as there is."""
    least = Config(out_dtype, **fields, c_buffers=1)
    room = SHARED - least.shared_bytes + least.output_bytes
    fitting = (n for n in (4, 3, 2) if least.boxes % n == 0 and n * least.output_bytes <= room)
    return replace(least, c_buffers=next(fitting, 1))


def choose_config(
    shape: tuple[int, int, int],
    out_dtype: torch.dtype,
    *,
    b_block: tuple[int, int] = (128, 128),
    accumulate: bool = False,
    aligned: bool = True,
    bias: torch.dtype | None = None,
    alpha: bool = False,
) -> Config:
    """The kernel for a product of ``shape`` (M, N, K).

    ``aligned``: the output starts, and each of its rows starts and ends, at a multiple of 16 bytes.
    ``bias``: its type.
    """
    added = {"accumulate": accumulate, "bias": bias, "alpha": alpha}
    fields = _ordered(shape)[0].fields
    return _fit(out_dtype, **fields, b_block=b_block, tma_store=aligned, **added)
