"""What to compile for a block-scaled product on Blackwell, and how it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...dtypes import FLOAT32, UINT8
from ..common.epilogue import OUT_DTYPES, Epilogue
from ..common.gpu import GPUS, SHARED, Gpu, no_kernels
from ..common.groupings import GROUPINGS, square
from ..common.refuse import refuse
from .kinds import Kind, find_kind
from .quantizing_config import FORMATS, STORE_COLUMNS, SUBTILE_N, Quantizing

__all__ = [
    "ARCHES",
    "EIGHT_BIT",
    "Config",
    "choose_config",
    "choose_grouped",
    "supergroup",
    "why_not",
]

ARCHES = ("sm_100a", "sm_103a")
EIGHT_BIT = ("mxfp8", "mxfp8_e5m2")  # formats whose elements are bytes
TILE_M = 128  # rows of a CTA's tile: one for each lane of Tensor Memory
ROW_BYTES = 128  # bytes of a row of A or B in shared memory
STORE_ROW_BYTES = 128  # bytes of a row of the output that one TMA store writes
EPILOGUE_WARPS = 4  # warps that run the epilogue, on 32 rows each
TMEM_COLUMNS = 512  # columns of Tensor Memory
SCALE_COLUMNS = 4  # columns of Tensor Memory that a tile of scales takes
SCALE_TILE_BYTES = 512  # bytes of a tile of scales
CLC_STAGES = 3  # tiles that the scheduler asks for ahead
CLC_RESPONSE_BYTES = 16  # bytes of a response of cluster launch control
MOST_GROUPS = (1 << 16) - 1  # a tile's group has 16 bits
TABLE_BYTES = 512  # bytes of the table of reciprocals, a word for each UE4M3 code


@dataclass(frozen=True, slots=True)
class Config:
    """A kernel: all that its code depends on.

    Attributes:
        a_format, b_format: names of formats.
        majors: which dimension of A (M, K) and of B (N, K) is contiguous in memory: "k", or "mn",
            which the tensor cores take of elements of 8 bits.
        accumulate: add to the output.
        mma_n: columns of an MMA's accumulator, which has 128 rows in each CTA.
        ctas: CTAs of an MMA, 1 or 2 (``cta_group``). Each CTA of a pair has 128 of its rows and
            loads half of its columns for both.
        cluster: CTAs that share tiles of B (along M) and of A (along N).
        stages: K blocks in flight.
        epilogue_stages: buffers of 32 rows x 128 bytes through which a warp stores its output.
        group: clusters along M that are taken before the next ones along N.
        tma_store: TMA stores the output; else threads store one element at a time.
        bias: the dtype of a vector that is added to each row, if there is one.
        alpha: as of ``common.epilogue.Epilogue``.
        quantizing: how the output is quantized, if it is; ``out_dtype`` is uint8 then.
        grouping: of ``calls.Groups``, if there are groups.
    """

    a_format: str
    b_format: str
    out_dtype: np.dtype
    majors: tuple[str, str] = ("k", "k")
    accumulate: bool = False
    mma_n: int = 128
    ctas: int = 1
    cluster: tuple[int, int] = (1, 1)
    stages: int = 5
    epilogue_stages: int = 2
    group: int = 8
    tma_store: bool = True
    bias: np.dtype | None = None
    alpha: tuple[int, ...] = ()
    arch: str = "sm_100a"
    quantizing: Quantizing | None = None
    grouping: str = ""

    def __post_init__(self) -> None:
        plain = self.quantizing is None
        wrong = {
            "a_format": find_kind(self.a_format, self.b_format) is None,
            "majors": any(each not in ("k", "mn") for each in self.majors)
            or (self.majors[0] == "mn" and self.a_format not in EIGHT_BIT)
            or (
                self.majors[1] == "mn"
                and (self.b_format not in EIGHT_BIT or self.b_rows < ROW_BYTES)
            ),
            "out_dtype": self.out_dtype not in (OUT_DTYPES if plain else (UINT8,)),
            "quantizing": self.quantizing is not None
            and (self.quantizing.format not in FORMATS or self.accumulate or not self.tma_store),
            "mma_n": self.mma_n not in (128, 256) or self.tile[1] < STORE_COLUMNS,
            "ctas": self.ctas not in (1, 2),
            "cluster": self.cluster not in ((1, 1), (2, 1), (2, 2), (4, 1))
            or self.cluster[0] % self.ctas,
            "stages": self.stages < 2 or self.shared_bytes > SHARED,
            "epilogue_stages": self.store_tiles % self.epilogue_stages,
            "arch": self.arch not in ARCHES,
            "grouping": self.grouping not in GROUPINGS
            or (self.grouping and self.majors != ("k", "k"))
            or (self.grouping not in ("", "m") and not plain)
            or (self.accumulate and self.grouping not in ("", "k")),
        }
        refuse(self, wrong)

    @property
    def kind(self) -> Kind:
        """The kind of tcgen05.mma that multiplies the two formats."""
        kind = find_kind(self.a_format, self.b_format)
        assert kind is not None
        return kind

    @property
    def unpacked(self) -> tuple[bool, bool]:
        """Whether TMA unpacks the 4-bit elements of A, of B to a byte each."""
        formats = self.a_format, self.b_format
        return tuple(not self.kind.packed and each == "mxfp4" for each in formats)  # type: ignore[return-value]

    @property
    def alignments(self) -> tuple[int, int]:
        """The alignment of rows of A, of B in global memory, in bytes."""
        return tuple(32 if each else 16 for each in self.unpacked)  # type: ignore[return-value]

    @property
    def b_halves(self) -> int:
        """The number of places in B that a tile comes from: 2 with SwiGLU (gate and up), else 1."""
        return 1 if self.quantizing is None else self.quantizing.b_halves

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns of the output that a CTA computes at once."""
        return TILE_M, self.mma_n // self.b_halves

    @property
    def threads(self) -> int:
        """The threads of a CTA: the epilogue's warps, and one warp each for the MMA, for TMA loads,
        for the scheduler, and to find tiles of groups."""
        return 32 * (EPILOGUE_WARPS + 3 + self.is_grouped)

    @property
    def is_grouped(self) -> bool:
        """Whether there are groups."""
        return bool(self.grouping)

    @property
    def cluster_size(self) -> int:
        """The number of CTAs in a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def b_rows(self) -> int:
        """The rows of B in a stage of a CTA's shared memory."""
        return self.mma_n // self.ctas

    @property
    def multicast_ctas(self) -> tuple[int, int]:
        """The number of CTAs that load a tile of A, of B together."""
        return self.cluster[1], self.cluster[0] // self.ctas

    @property
    def box_rows(self) -> tuple[int, int]:
        """The rows of a TMA box of A, of B, where K is contiguous."""
        part = self.b_rows // self.multicast_ctas[1]
        return TILE_M // self.multicast_ctas[0], min(part, self.tile[1])

    @property
    def empty_arrivals(self) -> int:
        """The arrivals that free a stage: of all MMAs that read what a CTA loads, in its row and in
        its column of the cluster."""
        return sum(self.multicast_ctas) - 1

    @property
    def clc_arrivals(self) -> int:
        """The arrivals that free a response of the scheduler: of a cluster's epilogue warps,
        loaders and MMA warps, or of the warps that find tiles for them."""
        if self.is_grouped:
            return self.cluster_size
        return self.cluster_size * (EPILOGUE_WARPS + 1) + self.cluster_size // self.ctas

    @property
    def reduces(self) -> bool:
        """Whether TMA adds to the output where it is, which it does in the output's dtype."""
        return self.accumulate and self.tma_store and self.out_dtype == FLOAT32

    @property
    def instruction_descriptor(self) -> int:
        """The descriptor of the MMAs, without the bytes at which a row's scales start."""
        codes = self.kind.codes
        return (
            codes[self.a_format] << 7
            | codes[self.b_format] << 10
            | (self.majors[0] == "mn") << 15
            | (self.majors[1] == "mn") << 16
            | self.mma_n // 8 << 17
            | self.kind.scale << 23
            | self.ctas * TILE_M // 128 << 27
        )

    # --- Tensor Memory ---

    @property
    def scale_rows(self) -> tuple[int, int]:
        """The tiles of scales down A, down B."""
        return 1, self.mma_n // TILE_M

    @property
    def acc_stride(self) -> int:
        """The columns from the first accumulator to the second one. Where there is no room for both
        they overlap: the epilogue reads the shared columns first."""
        tiles = sum(self.scale_rows) * self.kind.scale_tiles
        room = (TMEM_COLUMNS - SCALE_COLUMNS * tiles - self.mma_n) // 32 * 32
        return min(self.mma_n, room)

    @property
    def acc_stages(self) -> int:
        """The number of accumulators that do not overlap."""
        return 2 if self.acc_stride == self.mma_n else 1

    @property
    def early_release(self) -> int:
        """The number of subtiles that the epilogue reads before the next tile's MMAs may start."""
        overlap = self.mma_n - self.acc_stride
        return -(-overlap // self.subtile_n) if overlap else self.subtiles

    @property
    def scale_columns(self) -> tuple[int, int]:
        """The first column of the scales of A, of B."""
        first = self.acc_stride + self.mma_n
        return first, first + SCALE_COLUMNS * self.kind.scale_tiles

    # --- shared memory ---

    @property
    def subtile_n(self) -> int:
        """The columns of the output that a warp reads from Tensor Memory at once."""
        if self.quantizing is not None:
            return SUBTILE_N
        return STORE_ROW_BYTES // self.out_dtype.itemsize

    @property
    def subtiles(self) -> int:
        """The number of subtiles across a tile."""
        return self.tile[1] // self.subtile_n

    @property
    def store_tiles(self) -> int:
        """The number of TMA stores by which a warp stores a tile."""
        return self.subtiles if self.quantizing is None else self.tile[1] // STORE_COLUMNS

    @property
    def store_row_bytes(self) -> int:
        """The bytes of a row in such a store."""
        return STORE_ROW_BYTES if self.quantizing is None else self.quantizing.store_row_bytes

    @property
    def output_bytes(self) -> int:
        """The bytes of all epilogue stages."""
        return self.epilogue_stages * TILE_M * self.store_row_bytes if self.tma_store else 0

    @property
    def table_bytes(self) -> int:
        """The bytes of the table of reciprocals of block scales, if the encoder needs it."""
        return TABLE_BYTES if self.quantizing is not None and self.quantizing.has_table else 0

    @property
    def scale_words(self) -> int:
        """The words of 8 bytes that hold a K block's scales of 128 rows."""
        return self.kind.scale_tiles * SCALE_TILE_BYTES // 8

    @property
    def stage_bytes(self) -> int:
        """The bytes of a stage: tiles of A and B, and their scales."""
        scales = sum(self.scale_rows) * self.scale_words * 8
        return (TILE_M + self.b_rows) * ROW_BYTES + scales

    @property
    def loaded_bytes(self) -> int:
        """The bytes that TMA counts for a stage: it counts 4-bit elements before it unpacks
        them."""
        rows = zip((TILE_M, self.b_rows), self.unpacked, strict=True)
        return self.stage_bytes - sum(count * ROW_BYTES // 2 for count, each in rows if each)

    @property
    def shared_bytes(self) -> int:
        """The shared memory that a CTA needs: stages with two mbarriers each, epilogue stages, the
        table, and 1024 bytes for tiles, the scheduler's responses and other mbarriers."""
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

    It takes pairs of CTAs with tiles of 256 x 256 where these keep all multiprocessors busy, since
    each then loads the fewest bytes for its accumulators; smaller ones below that. Not measured:
    there was no such GPU.
    """
    m, n, _ = shape
    fields: dict[str, Any] = {"mma_n": 256, "epilogue_stages": 1}
    small = -(-m // 256) * -(-n // 256) * 2 < gpu.multiprocessors
    if small and not (quantizing is not None and quantizing.swiglu):
        fields["mma_n"] = 128
    narrow = fields["mma_n"] < 256 and majors[1] == "mn"  # half of B is narrower than a row
    if ctas is None:
        ctas = 1 if m <= 128 or narrow else 2
    elif narrow and ctas == 2:
        fields["mma_n"] = 256
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


def choose_grouped(
    shape: tuple[int, int, int],
    groups: int,
    formats: tuple[str, str],
    epilogue: Epilogue,
    *,
    grouping: str = "m",
    quantizing: Quantizing | None = None,
    gpu: Gpu = GPUS["sm_100a"],
    ctas: int | None = None,
) -> Config:
    """The kernel for products of ``groups``, each of ``shape`` (M, N, K) as if all were alike:
    that of one product of as many tiles across."""
    m, n, k = shape
    columns = groups * -(-n // 256) * 256
    how: dict[str, Any] = {"quantizing": quantizing, "gpu": gpu, "ctas": ctas}
    alike = choose_config((m, columns, k), formats, epilogue, **how)
    return replace(alike, grouping=grouping)


def supergroup(config: Config, gpu: Gpu) -> int:
    """Clusters down a group that are taken before the next ones across, if it has so many: those of
    a square of the output, for which what is in flight loads the fewest rows of A and B."""
    tile = config.tile[0] * config.cluster[0], config.tile[1] * config.cluster[1]
    return square(tile, gpu.multiprocessors // config.cluster_size)


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
