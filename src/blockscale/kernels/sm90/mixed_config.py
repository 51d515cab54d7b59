"""What to compile for a product of bf16 by a matrix that is widened in registers, and how it is
chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter

import numpy as np

from ...formats import Format, formats, get_format
from ..common.epilogue import Epilogue
from ..common.gpu import CLUSTERS, GPUS, SHARED, Gpu
from ..common.loadable import rows_to_load
from ..common.refuse import refuse
from . import product_config
from .product_config import BOX, ROWS

__all__ = [
    "BF16",
    "BLOCK_K",
    "B_ROWS",
    "COUNTERS",
    "SUPERGROUP",
    "WARPGROUPS",
    "Config",
    "choose_config",
    "choose_grouped",
    "gain",
    "promotes",
    "why_not",
]

BLOCK_K = 128  # columns of a K block
BF16 = "bf16"  # where the name of a format is expected: an operand without scales
B_ROWS = 128  # of a tile
WARPGROUPS = 2  # that share these
SUPERGROUP = 8  # tiles of B that are taken before the next rows of A
COUNTERS = 1024  # of stream-K: words, one for each share of a CTA's tile
_A_ROWS = (8, 16, 32, 64, 128, 192, 256)  # of a tile
_WHOLE_ROWS = 128  # with more, a stage is half of a K block
_SPLIT_ROWS = 64  # with more, warpgroups that split K have no registers for them
_ONE_TILE_ROWS = 64  # with more, smaller tiles may be better than one
_ELEMENTS = ("E4M3", "E5M2", "E2M1")
_PARTS = (1, 2)
_STAGES = 3, 12  # at least, at most
# As measured: warpgroup split-K pays with so many bytes in flight and K blocks of a CTA, at least.
_TWO_PARTS = 120 << 10, 8
# Fitted to benchmarks/results/mixed_tiles_h200.json: nanoseconds of a K block of a tile, by its
# rows of A, of which fewer take no less; of a tile; of a row of the accumulators of each CTA that
# splits K; and of the sums of stream-K, whose CTAs seldom load the same at the same time.
_K_BLOCK_NS = {64: 480, 128: 540, 192: 770, 256: 1010}
_TILE_NS, _SUM_NS, _STREAM_NS, _STREAM_TIMES = 2900, 6.9, 8300, 1.05
_STREAM_BYTES = 28 << 20  # of A, at most, as measured: more does not stay in the L2 cache
_LEAST_SHARE = 2  # K blocks of a CTA with stream-K
_MOST_ODD = 5  # stages that parts take in turn: one more, which is odd, pays where they are so few


@dataclass(frozen=True, slots=True)
class Config:
    """A kernel: all that its code depends on.

    The rows of B are those of a wgmma: it is widened in registers. The rows of A
    are the columns of a wgmma: they are bf16. The accumulators are those of the
    output transposed.

    Attributes:
        b_format: its name.
        rows: of A, in a tile.
        split_k: CTAs that have a part of K each and add their accumulators up.
        warpgroup_split_k: warpgroups of a CTA that take stages in turn, and add their accumulators
            up, too: K has as many stages for each CTA at least.
        stages: tiles of both operands in flight.
        accumulate: add to the output.
        bias: the type of a vector that is added to each row, if there is one.
        alpha: as of ``common.epilogue.Epilogue``.
        tma_store: the output is stored by TMA; else an element at a time.
        async_scales: rows of B's scales lie so that those of a stage can be copied at once.
        loaded_rows: of A; 0 for all of a tile's. Fewer where there are no more, and that pays.
        stream_k: CTAs have equal shares of all K blocks, and add up accumulators of tiles that
            they share in global memory.
        grouping: as of ``ProductConfig``, of rows of A, if there are groups.
        promotes: A has a scale for each row and K block, by which sums of a K block are multiplied
            before they are added to others.
    """

    b_format: str
    out_dtype: np.dtype
    rows: int
    split_k: int = 1
    warpgroup_split_k: int = 1
    stages: int = _STAGES[0]
    accumulate: bool = False
    bias: np.dtype | None = None
    alpha: tuple[int, ...] = ()
    tma_store: bool = False
    async_scales: bool = True
    loaded_rows: int = 0
    stream_k: bool = False
    grouping: str = ""
    promotes: bool = False
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        wrong = {
            "rows": self.rows not in _A_ROWS,
            "split_k": self.split_k not in CLUSTERS,
            "warpgroup_split_k": self.warpgroup_split_k not in _PARTS
            # these have half of the registers
            or (self.warpgroup_split_k > 1 and self.rows > _SPLIT_ROWS),
            # a warpgroup may keep a K block's until it has the next one
            "stages": self.stages < 1 + self.stages_per_k_block or self.shared_bytes > SHARED,
            "tma_store": self.tma_store
            and (self.out_dtype.itemsize > 2 or self.accumulate or self.rows < ROWS),
            "loaded_rows": self.loaded_rows not in range(self.rows),
            # a stage has a K block, and a thread registers for its sums
            "promotes": self.promotes and (self.rows > _WHOLE_ROWS or self.warpgroup_split_k > 1),
            "stream_k": self.stream_k and self.sources > 1,
            # sums of what is stored twice have one order
            "grouping": self.grouped
            and (self.sources > 1 or self.stream_k or self.accumulate or self.loaded_rows),
        }
        refuse(self, wrong)

    @property
    def grouped(self) -> bool:
        return self.grouping != ""

    @property
    def scale_threads(self) -> int:
        """That load scales of B; a warp finds tiles instead, where rows are grouped."""
        return 64 if self.grouped else 96

    @property
    def format(self) -> Format:
        return get_format(self.b_format)

    @property
    def block_k(self) -> int:
        """Columns of a stage."""
        return BLOCK_K if self.rows <= _WHOLE_ROWS else BLOCK_K // 2

    @property
    def stages_per_k_block(self) -> int:
        """Stages of a K block."""
        return BLOCK_K // self.block_k

    @property
    def row_bytes(self) -> int:
        """Of B in a stage."""
        return self.block_k * self.format.element.bits // 8

    @property
    def scale_row(self) -> int:
        """Bytes of scales of a row of B in a stage: four at least, which may be those of the next
        stage, too, as no fewer are copied at once."""
        return max(self.block_k // self.format.block_size, 4)

    @property
    def stages_per_scale_row(self) -> int:
        """Stages whose scales are in the same bytes of a row, of which each has a copy."""
        return self.scale_row * self.format.block_size // self.block_k

    @property
    def scale_bytes(self) -> int:
        """Of B in a stage."""
        return B_ROWS * self.scale_row

    @property
    def a_scale_bytes(self) -> int:
        """Of A in a stage."""
        return 4 * self.rows if self.promotes else 0

    @property
    def gain(self) -> float:
        """What the accumulators lack."""
        return gain(self.format)

    @property
    def sources(self) -> int:
        """Of a share's partial accumulators: warpgroups of all CTAs that split K."""
        return self.split_k * self.warpgroup_split_k

    @property
    def own_shares(self) -> int:
        """Of one CTA, at most: 64 rows of B each, which CTAs that split K add up in turn, each
        by a warpgroup that stores it from a box of its own."""
        return -(-WARPGROUPS // self.split_k)

    @property
    def share_bytes(self) -> int:
        """Room for another warpgroup's accumulators."""
        return 4 * ROWS * self.rows

    def partials(self, ctas: int) -> int:
        """Words that CTAs which share tiles take for their sums."""
        return COUNTERS + ctas * WARPGROUPS * self.share_bytes // 4 if self.stream_k else 0

    def reduce_bytes(self, split: int, parts: int) -> int:
        """For the accumulators of others, if so many CTAs, and warpgroups of each, split K."""
        return (split * parts - 1) * -(-WARPGROUPS // split) * self.share_bytes

    @property
    def stage_bytes(self) -> int:
        """With barriers, at most."""
        return (
            self.rows * 2 * self.block_k
            + B_ROWS * self.row_bytes
            + self.scale_bytes
            + self.a_scale_bytes
            + 8 * (1 + max(_PARTS))
        )

    @property
    def shared_bytes(self) -> int:
        """At most."""
        output = self.own_shares * ROWS * BOX if self.tma_store else 0
        exchange = self.reduce_bytes(self.split_k, self.warpgroup_split_k)
        return self.stages * self.stage_bytes + output + exchange + 1024


def gain(format: Format) -> float:
    """What accumulators lack where one operand was dequantized: a block scale of NVFP4 is widened
    to 2^-7 of itself, so that one multiplication by it widens an element."""
    return 2.0**7 if format.scale.name == "UE4M3" else 1.0


def promotes(a_format: str) -> bool:
    """Whether A has scales of whole K blocks, by which sums are multiplied: bf16 does not hold an
    element times one."""
    return a_format != BF16 and get_format(a_format).block_size == BLOCK_K


def why_not(a_format: str, b_format: str, out_dtype: np.dtype, arch: str) -> str:
    """Why there is no kernel for such a product; empty where there is one."""
    reason = product_config.why_not(out_dtype, arch)
    if reason:
        return reason
    known = [f.name for f in formats.values() if f.element.name in _ELEMENTS and f.block_size <= 32]
    for name in (b_format,) if a_format == BF16 or promotes(a_format) else (a_format, b_format):
        if name not in known:
            return f"format {name}: there are kernels for {', '.join(known)}"
    if a_format != BF16 and not get_format(a_format).multiplies(get_format(b_format)):
        return f"formats {a_format} and {b_format} cannot be multiplied: their scales differ"
    return ""


def _ways(config: Config, shape: tuple[int, int, int], gpu: Gpu) -> Iterator[tuple[float, Config]]:
    """The kernel with each way to split K, and an estimate of nanoseconds."""
    m, n, k = shape
    tiles, blocks = -(-m // config.rows) * -(-n // B_ROWS), -(-k // BLOCK_K)
    block_ns = _K_BLOCK_NS[max(config.rows, min(_K_BLOCK_NS))]
    for split in CLUSTERS:
        at_once = gpu.max_active_clusters(split)
        room = SHARED - config.shared_bytes
        if split > 1 and (tiles > at_once or config.reduce_bytes(split, 1) > room):
            continue
        if split > blocks:  # a CTA waits for its first K block
            break
        sums_ns = _SUM_NS * config.rows * split if split > 1 else 0
        tile_ns = -(-blocks // split) * block_ns + _TILE_NS
        yield -(-tiles // at_once) * tile_ns + sums_ns, replace(config, split_k=split)
    if _streams(tiles, blocks, m, gpu):
        share = tiles / gpu.multiprocessors
        ns = share * blocks * block_ns * _STREAM_TIMES + max(share, 1) * _TILE_NS + _STREAM_NS
        yield ns, replace(config, stream_k=True)


def _streams(tiles: int, blocks: int, m: int, gpu: Gpu) -> bool:
    """Whether stream-K may pay: CTAs have something to do, A, which they read at different times,
    stays in the L2 cache, and there are counters, and 32 bits for what CTAs count."""
    ctas, k = gpu.multiprocessors, blocks * BLOCK_K
    pays = tiles * blocks >= _LEAST_SHARE * ctas and m * k * 2 <= _STREAM_BYTES
    return pays and ctas * WARPGROUPS <= COUNTERS and 2 * ctas * ctas * blocks < 1 << 31


def _most_stages(config: Config, parts: int) -> int:
    """That there is room for, if so many warpgroups take them in turn."""
    sums = [config.reduce_bytes(config.split_k, each) for each in (config.warpgroup_split_k, parts)]
    room = SHARED - config.shared_bytes + sums[0] - sums[1]
    most = min(_STAGES[1], config.stages + room // config.stage_bytes)
    return most - most % parts if most > _MOST_ODD else most


def _fitted(
    m: int, rows: int, b_format: str, epilogue: Epilogue, async_scales: bool, promotes: bool
) -> Config:
    """With tiles of ``rows``, not split."""
    stored = epilogue.tma_store and rows >= ROWS and epilogue.out_dtype.itemsize == 2
    return Config(
        b_format,
        rows=rows,
        **epilogue._replace(tma_store=stored and not epilogue.accumulate)._asdict(),
        async_scales=async_scales,
        stages=_STAGES[0] if rows <= _WHOLE_ROWS else _STAGES[0] + 1,  # of half a K block each
        loaded_rows=rows_to_load(m, rows) if rows >= ROWS and m < rows else 0,
        promotes=promotes,
    )


def _sizes(promotes: bool) -> list[int]:
    """Rows of tiles."""
    return [each for each in _A_ROWS if each <= _WHOLE_ROWS or not promotes]


def choose_grouped(
    shape: tuple[int, int, int],
    groups: int,
    b_format: str,
    epilogue: Epilogue,
    *,
    grouping: str = "m",
    async_scales: bool = True,
    promotes: bool = False,
    gpu: Gpu = GPUS["sm_90a"],
) -> Config:
    """The kernel for a product of ``shape`` (M, N, K) whose rows are in ``groups``; of "masked"
    ones, none has more than an equal share."""
    m, n, k = shape
    each, at_once, blocks = m / groups, gpu.max_active_clusters(1), -(-k // BLOCK_K)

    def nanoseconds(rows: int) -> float:
        # in the mean half a tile of a group is missing, unless no group has more; and half a wave
        down = math.ceil(each / rows) if grouping == "masked" else max(1, each / rows + 0.5)
        tiles = groups * down * -(-n // B_ROWS)
        tile_ns = blocks * _K_BLOCK_NS[max(rows, min(_K_BLOCK_NS))] + _TILE_NS
        return max(1, tiles / at_once + 0.5) * tile_ns

    # where they may, some groups have twice as many rows; and fewer than 64 take no less time
    most = each if grouping == "masked" else 2 * each
    sizes = _sizes(promotes)
    least = next((rows for rows in sizes if rows >= most), ROWS)
    options = [least] if least < ROWS else [rows for rows in sizes if rows >= ROWS]
    config = replace(
        _fitted(m, min(options, key=nanoseconds), b_format, epilogue, async_scales, promotes),
        loaded_rows=0,
        grouping=grouping,
    )
    return replace(config, stages=_most_stages(config, 1))


def choose_config(
    shape: tuple[int, int, int],
    b_format: str,
    epilogue: Epilogue,
    *,
    async_scales: bool = True,
    promotes: bool = False,
    gpu: Gpu = GPUS["sm_90a"],
) -> Config:
    """The kernel for a product of ``shape`` (M, N, K).

    ``async_scales``: rows of B's scales start at multiples of a K block's bytes, and all are whole.
    """
    m, _, k = shape
    sizes = _sizes(promotes)
    least = next((each for each in sizes if each >= m), sizes[-1])
    # with fewer, where tiles are few, or where the last one of them lacks most rows
    options = [least] if m <= _ONE_TILE_ROWS else [each for each in sizes if ROWS <= each <= least]
    fitted = (_fitted(m, each, b_format, epilogue, async_scales, promotes) for each in options)
    ways = chain.from_iterable(_ways(each, shape, gpu) for each in fitted)
    _, config = min(ways, key=itemgetter(0))
    stages = {parts: _most_stages(config, parts) for parts in _PARTS}
    nbytes, blocks = _TWO_PARTS
    pays = stages[2] * config.stage_bytes >= nbytes and k > BLOCK_K * (blocks * config.split_k - 1)
    # adding to the output wants registers for addresses
    one = epilogue.accumulate or config.stream_k or config.rows > _SPLIT_ROWS or promotes
    parts = 2 if pays and not one else 1
    return replace(config, warpgroup_split_k=parts, stages=stages[parts])
