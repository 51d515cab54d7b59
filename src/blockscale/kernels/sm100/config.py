"""What to compile for a block-scaled product on Blackwell, and how it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...dtypes import FLOAT32, UINT8
from ..common.epilogue import OUT_DTYPES, Epilogue
from ..common.gpu import GPUS, SHARED, Gpu, no_kernels
from ..common.refuse import refuse
from .kinds import Kind, find_kind
from .quantizing_config import BOX_COLUMNS, FORMATS, STEP, Quantizing

__all__ = ["ARCHES", "WHOLE", "Config", "choose_config", "why_not"]

ARCHES = ("sm_100a", "sm_103a")
WHOLE = ("mxfp8", "mxfp8_e5m2")  # formats whose elements are bytes
ROWS = 128  # of a block's tile: one for each lane of Tensor Memory
ROW = 128  # bytes of a row of a tile in shared memory
BOX = 128  # bytes of a row of the output that one instruction stores
WARPS = 4  # that store, each 32 rows
COLUMNS = 512  # of Tensor Memory
SCALE_COLUMNS = 4  # of Tensor Memory, for a tile of scales
TILE_BYTES = 512  # of such a tile
TURNS = 3  # tiles that are asked for ahead
ANSWER = 16  # bytes, of where the next tile is
TABLE = 512  # bytes, of a word for each UE4M3 code


@dataclass(frozen=True, slots=True)
class Config:
    """A kernel: all that its code depends on.

    Attributes:
        a_format, b_format: names of formats.
        majors: which dimension of A (M, K) and of B (N, K) lies together in memory: "k", or "mn",
            which the tensor cores take of elements of 8 bits.
        accumulate: add to the output.
        columns: of the output's tile that a block of threads takes at once; it has 128 rows.
        ctas: blocks whose tensor cores work together: each of two, one below the other, loads half
            of the columns for both.
        cluster: blocks that share tiles of B (along M) and of A (along N).
        stages: K blocks in flight.
        c_buffers: boxes of 32 rows x 128 bytes in which a warp puts its output together.
        group: clusters along M that are taken before the next ones along N.
        tma_store: the output is stored by TMA; else an element at a time.
        bias: the type of a vector that is added to each row, if there is one.
        alpha: how many scalars the sums are multiplied by, two at most.
        quantizing: what the output is instead of numbers of ``out_dtype``, which is uint8 then.
    """

    a_format: str
    b_format: str
    out_dtype: np.dtype
    majors: tuple[str, str] = ("k", "k")
    accumulate: bool = False
    columns: int = 128
    ctas: int = 1
    cluster: tuple[int, int] = (1, 1)
    stages: int = 5
    c_buffers: int = 2
    group: int = 8
    tma_store: bool = True
    bias: np.dtype | None = None
    alpha: int = 0
    arch: str = "sm_100a"
    quantizing: Quantizing | None = None

    def __post_init__(self) -> None:
        plain = self.quantizing is None
        wrong = {
            "a_format": find_kind(self.a_format, self.b_format) is None,
            "majors": any(each not in ("k", "mn") for each in self.majors)
            or (self.majors[0] == "mn" and self.a_format not in WHOLE)
            or (self.majors[1] == "mn" and (self.b_format not in WHOLE or self.b_rows < ROW)),
            "out_dtype": self.out_dtype not in (OUT_DTYPES if plain else (UINT8,)),
            "quantizing": self.quantizing is not None
            and (self.quantizing.format not in FORMATS or self.accumulate or not self.tma_store),
            "columns": self.columns not in (128, 256) or self.tile[1] < BOX_COLUMNS,
            "ctas": self.ctas not in (1, 2),
            "cluster": self.cluster not in ((1, 1), (2, 1), (2, 2), (4, 1))
            or self.cluster[0] % self.ctas,
            "stages": self.stages < 2 or self.shared_bytes > SHARED,
            "c_buffers": self.stores % self.c_buffers,
            "arch": self.arch not in ARCHES,
        }
        refuse(self, wrong)

    @property
    def kind(self) -> Kind:
        kind = find_kind(self.a_format, self.b_format)
        assert kind is not None
        return kind

    @property
    def unpacked(self) -> tuple[bool, bool]:
        """Whether TMA spreads 4-bit elements of A, of B, a byte each."""
        formats = self.a_format, self.b_format
        return tuple(not self.kind.packed and each == "mxfp4" for each in formats)  # type: ignore[return-value]

    @property
    def alignments(self) -> tuple[int, int]:
        """Bytes that rows of A, of B start at multiples of."""
        return tuple(32 if each else 16 for each in self.unpacked)  # type: ignore[return-value]

    @property
    def parts_of_columns(self) -> int:
        """Of the tile's columns, each half of it from another half of B with SwiGLU."""
        return 1 if self.quantizing is None else self.quantizing.parts

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the output that a block makes."""
        return ROWS, self.columns // self.parts_of_columns

    @property
    def threads(self) -> int:
        """Of warps that store, and one each that multiplies, loads, and asks for tiles."""
        return 32 * (WARPS + 3)

    @property
    def blocks(self) -> int:
        """Of threads, in a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def b_rows(self) -> int:
        """Rows of B that are in a block's shared memory."""
        return self.columns // self.ctas

    @property
    def parts(self) -> tuple[int, int]:
        """Blocks that load a tile of A, of B together."""
        return self.cluster[1], self.cluster[0] // self.ctas

    @property
    def box_rows(self) -> tuple[int, int]:
        """Rows of A, of B that one instruction loads, where K is contiguous."""
        part = self.b_rows // self.parts[1]
        return ROWS // self.parts[0], min(part, self.columns // self.parts_of_columns)

    @property
    def writers(self) -> int:
        """Tensor cores that read what a block loads: those of its own row, and of its column."""
        return sum(self.parts) - 1

    @property
    def readers(self) -> int:
        """That take an answer, in a cluster: those who store and load, and those who multiply."""
        return self.blocks * (WARPS + 1) + self.blocks // self.ctas

    @property
    def reduces(self) -> bool:
        """Whether what the output holds is added where it is, by TMA, which does so in its type."""
        return self.accumulate and self.tma_store and self.out_dtype == FLOAT32

    @property
    def instruction(self) -> int:
        """Descriptor of the instructions, but for where a row's scales start."""
        codes = self.kind.codes
        return (
            codes[self.a_format] << 7
            | codes[self.b_format] << 10
            | (self.majors[0] == "mn") << 15
            | (self.majors[1] == "mn") << 16
            | self.columns // 8 << 17
            | self.kind.scale << 23
            | self.ctas * ROWS // 128 << 27
        )

    # --- Tensor Memory ---

    @property
    def scale_rows(self) -> tuple[int, int]:
        """Tiles of scales down A and down B."""
        return 1, self.columns // ROWS

    @property
    def apart(self) -> int:
        """Columns from the first sums to the second ones. They overlap where there is no room: the
        warps that store take those columns first."""
        tiles = sum(self.scale_rows) * self.kind.scale_tiles
        room = (COLUMNS - SCALE_COLUMNS * tiles - self.columns) // 32 * 32
        return min(self.columns, room)

    @property
    def sums(self) -> int:
        """Sets of sums that are free of each other."""
        return 2 if self.apart == self.columns else 1

    @property
    def early_boxes(self) -> int:
        """After so many boxes the next tile's sums may be begun."""
        overlap = self.columns - self.apart
        return -(-overlap // self.box_columns) if overlap else self.boxes

    @property
    def scale_columns(self) -> tuple[int, int]:
        """Where scales of A and of B start."""
        first = self.apart + self.columns
        return first, first + SCALE_COLUMNS * self.kind.scale_tiles

    # --- shared memory ---

    @property
    def box_columns(self) -> int:
        """That a warp takes from Tensor Memory at once, of each part of the columns."""
        return BOX // self.out_dtype.itemsize if self.quantizing is None else STEP

    @property
    def boxes(self) -> int:
        """Of a warp's output."""
        return self.tile[1] // self.box_columns

    @property
    def stores(self) -> int:
        """By which a warp stores a tile."""
        return self.boxes if self.quantizing is None else self.tile[1] // BOX_COLUMNS

    @property
    def store_bytes(self) -> int:
        """Of a row in such a store."""
        return BOX if self.quantizing is None else self.quantizing.box_bytes

    @property
    def output_bytes(self) -> int:
        return self.c_buffers * ROWS * self.store_bytes if self.tma_store else 0

    @property
    def table_bytes(self) -> int:
        """Of reciprocals of scales, one for each code."""
        return TABLE if self.quantizing is not None and self.quantizing.has_table else 0

    @property
    def scale_words(self) -> int:
        """Of 8 bytes, of scales of 128 rows in a stage."""
        return self.kind.scale_tiles * TILE_BYTES // 8

    @property
    def stage_bytes(self) -> int:
        scales = sum(self.scale_rows) * self.scale_words * 8
        return (ROWS + self.b_rows) * ROW + scales

    @property
    def loaded_bytes(self) -> int:
        """That TMA counts for a stage: of 4-bit elements those that it reads."""
        rows = zip((ROWS, self.b_rows), self.unpacked, strict=True)
        return self.stage_bytes - sum(count * ROW // 2 for count, spread in rows if spread)

    @property
    def shared_bytes(self) -> int:
        """With two barriers a stage, some more, and answers."""
        each = self.stage_bytes + 16
        return self.stages * each + self.output_bytes + self.table_bytes + 1024


def fit(config: Config) -> Config:
    """The configuration with as many stages as there is room for."""
    least = replace(config, stages=2)
    stages = (SHARED - least.shared_bytes) // (least.stage_bytes + 16) + 2
    return replace(config, stages=min(stages, 8))


def choose_config(
    shape: tuple[int, int, int],
    formats: tuple[str, str],
    epilogue: Epilogue,
    *,
    majors: tuple[str, str] = ("k", "k"),
    quantizing: Quantizing | None = None,
    gpu: Gpu = GPUS["sm_100a"],
    ctas: int | None = None,
) -> Config:
    """The kernel for a product of ``shape`` (M, N, K); with ``ctas`` as they are given.

    Pairs of blocks with tiles of 256 x 256 where these keep all multiprocessors busy, since each
    then loads the least for its sums; smaller ones below that. Not measured: there was no such GPU.
    """
    m, n, _ = shape
    fields: dict[str, Any] = {"columns": 256, "c_buffers": 1}
    small = -(-m // 256) * -(-n // 256) * 2 < gpu.multiprocessors
    if small and not (quantizing is not None and quantizing.swiglu):
        fields["columns"] = 128
    narrow = fields["columns"] < 256 and majors[1] == "mn"  # a half of B is no whole panel
    if ctas is None:
        ctas = 1 if m <= 128 or narrow else 2
    elif narrow and ctas == 2:
        fields["columns"] = 256
    return fit(
        Config(
            *formats,
            majors=majors,
            **epilogue._asdict(),
            arch=gpu.arch,
            quantizing=quantizing,
            ctas=ctas,
            cluster=(ctas, 1),
            stages=2,
            **fields,
        )
    )


def why_not(a_format: str, b_format: str, out_dtype: np.dtype, arch: str) -> str:
    """Why there is no kernel for such a product; empty where there is one."""
    if arch not in ARCHES:
        return f"architecture {arch}: {no_kernels(arch, ARCHES)}"
    if find_kind(a_format, b_format) is None:
        return (
            f"formats {a_format} and {b_format}: no instruction multiplies these; there are mxfp8, "
            "mxfp8_e5m2 and mxfp4 in any pair, and nvfp4 with nvfp4"
        )
    if out_dtype not in OUT_DTYPES:
        return f"out_dtype {out_dtype}: there are kernels for {', '.join(map(str, OUT_DTYPES))}"
    return ""
