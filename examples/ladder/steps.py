"""The ladder: kernels for FP8 with fp32 scales per 128 along K, each one idea past another.

The first steps and the variants follow the Croqtile worklog on a block-scaled FP8 GEMM (measured
there on an H800 PCIe, with sums in fp16; here they are in fp32). The others lead to the kernel that
``blockscale.gemm`` uses. docs/ladder.md shows what each one brings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from blockscale.dtypes import BFLOAT16
from blockscale.kernels.common.gpu import GPUS
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.sm90.config import BLOCK_K, Config

from .config import LadderConfig

__all__ = ["STEPS", "Step"]

_ALL = 1 << 20  # multiprocessors: enough that each cluster of tiles has CTAs of its own


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel of the ladder.

    Attributes:
        name: short, for a table and a picture.
        after: the step that it is one idea past; empty for the first.
        idea: what is new, a sentence.
        source: where the idea is taken from.
        predicted: TFLOP/s at 2048^3 and 4096^3 on an H200, from arithmetic, before it was measured.
        prediction: why.
        config: the kernel.
        persistent: CTAs stay until all tiles are done; else each has one. The ladder's own kernels
            never stay, those of kernels/sm90 may.
    """

    name: str
    after: str
    idea: str
    source: str
    predicted: tuple[int, int]
    prediction: str
    config: LadderConfig | Config
    persistent: bool = False

    @property
    def by_rows(self) -> bool:
        """Whether the kernel reads scales of A as (M, K / 128), and not in layout "sm90"."""
        return isinstance(self.config, LadderConfig) and not self.config.transposed

    def prepare(self, a_scale: Tensor, m: int) -> Tensor:
        """Scales of A as ``launch`` wants them, from layout "sm90": (K / 128, M padded to 4)."""
        return a_scale.T[:m].contiguous() if self.by_rows else a_scale

    def launch(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        d: Tensor,
        multiprocessors: int,
    ) -> None:
        """Write ``A @ B.mT`` to ``d``.

        Args:
            a: (M, K), the bytes of E4M3.
            a_scale: what ``prepare`` returned.
            b: (N, K), the bytes of E4M3.
            b_scale: fp32 (ceil(N / 128), ceil(K / 128)).
            d: (M, N) bfloat16; N a multiple of 8.
            multiprocessors: those of the device, for persistent kernels.

        Raises ValueError where shapes do not belong together.
        """
        (m, k), n = a.shape, b.shape[0]
        blocks = -(-k // BLOCK_K)
        wanted = {
            "a_scale": (a_scale, (m, blocks) if self.by_rows else (blocks, -(-m // 4) * 4)),
            "b": (b, (n, k)),
            "b_scale": (b_scale, (-(-n // 128), blocks)),
            "d": (d, (m, n)),
        }
        for name, (given, shape) in wanted.items():
            if given.shape != shape:
                raise ValueError(f"{name}: has shape {tuple(given.shape)}; {self.name}: {shape}")
        if n % 8:
            raise ValueError(f"b: has {n} rows; TMA stores multiples of 8 columns of d: pad b")
        run = (gpu_of(d.device) or GPUS["sm_90a"]).load(self.config)
        if isinstance(self.config, LadderConfig):
            run(a, a_scale, b, b_scale, d)
        else:
            run(
                *(a, a_scale, b, b_scale, d, None, None, None, None),
                multiprocessors if self.persistent else _ALL,
            )


_WORKLOG = "Croqtile worklog"
_OURS = "blockscale"

_TURN = LadderConfig()
_EARLY = replace(_TURN, ahead=1)
_WIDE = replace(_EARLY, columns=256)
_PROMOTED = replace(_WIDE, promotion=256)
_PREFETCHED = replace(_PROMOTED, prefetch=True)
_ALONE = Config(
    BFLOAT16,
    tile=(64, 256),
    cluster=(1, 1),
    stages=4,
    warpgroups=1,
    unroll=1,
    epilogue_stages=1,
)
_PAIR = replace(_ALONE, tile=(128, 256), warpgroups=2)
_SHARED = replace(_PAIR, cluster=(2, 1))
_UNROLLED = replace(_SHARED, unroll=4)
_WHOLE = replace(_UNROLLED, stages=3, epilogue_stages=4)
_SKEWED = replace(_WHOLE, skew=500)
_TALL = replace(_WHOLE, tile=(256, 128), cluster=(1, 2), stages=4, epilogue_stages=1)

STEPS: tuple[Step, ...] = (
    Step(
        "baseline",
        "",
        "Tiles of 64 x 128 and 128 of K by m64n128k32: a K block is loaded, multiplied, scaled and "
        "added before the next one is asked for.",
        f"{_WORKLOG}, baseline",
        (390, 500),
        "The L2 cache: 24 KB for 2.1 MFLOP are 85 FLOP a byte. At 2048 a second wave, with 0.9 "
        "blocks a multiprocessor instead of 3, waits for 1500 cycles a K block.",
        _TURN,
    ),
    Step(
        "overlap",
        "baseline",
        "The next K block is asked for as soon as the wgmmas are done with the last one, and comes "
        "while that is scaled and added.",
        f"{_WORKLOG}, step 1",
        (410, 510),
        "Reading scales and adding, 200 of 1500 cycles, are hidden where a block is alone; where "
        "three share a multiprocessor they hide it already, and L2 is the limit.",
        _EARLY,
    ),
    Step(
        "N256",
        "overlap",
        "Tiles of 64 x 256, two wgmmas of 128 columns: sums and one partial sum of 256 columns "
        "would need all 256 registers.",
        f"{_WORKLOG}, step 2",
        (540, 650),
        "A is read half as often: 102 FLOP a byte of L2. At 2048 the 256 tiles are one wave, two "
        "to a multiprocessor.",
        _WIDE,
    ),
    Step(
        "L2 256 B",
        "N256",
        "The tensor map of B has the L2 cache fetch 256 bytes at once; CuTe DSL's own asks for "
        "128.",
        f"{_WORKLOG}, step 3",
        (545, 650),
        "Only misses are fewer, and A and B are read from memory once, 4 to 16 of 30 to 210 us, "
        "most of it hidden.",
        _PROMOTED,
    ),
    Step(
        "prefetch",
        "L2 256 B",
        "Scales of A are read into registers before the wgmmas of their K block start.",
        f"{_WORKLOG}, step 4",
        (550, 655),
        "About 40 cycles (seven of eight reads hit L1) of 1800 are hidden, beside another block "
        "that hides them, and the compiler had begun to.",
        _PREFETCHED,
    ),
    Step(
        "B scales by TMA",
        "prefetch",
        "TMA brings scales of B to shared memory with the tile.",
        f"{_WORKLOG}, variant",
        (545, 650),
        "One load a warp, early enough before, becomes two copies of 128 bytes: nothing to gain.",
        replace(_PREFETCHED, staged=("b",)),
    ),
    Step(
        "transposed scales",
        "prefetch",
        "Scales of A lie as (K / 128, M): a K block's are together.",
        f"{_WORKLOG}, variant",
        (555, 660),
        "8 sectors of 32 bytes a tile and K block instead of 64, of which L1 kept 7 in 8: 0.5% of "
        "what is read of A and B.",
        replace(_PREFETCHED, transposed=True),
    ),
    Step(
        "all scales by TMA",
        "B scales by TMA",
        "TMA brings scales of A, too, transposed: the wgmmas wait for one barrier and no register.",
        f"{_WORKLOG}, variant",
        (550, 655),
        "Scales come with the tile, whose latency is the limit where L2 is not.",
        replace(_PREFETCHED, prefetch=False, transposed=True, staged=("a", "b")),
    ),
    Step(
        "tiles along N",
        "prefetch",
        "The 256 columns are two tiles side by side, a warpgroup each.",
        f"{_WORKLOG}, variant",
        (470, 550),
        "148 registers of 256 threads: one block to a multiprocessor instead of two, which has "
        "nothing to do for 1100 of 1600 cycles a K block.",
        replace(_PREFETCHED, across=2),
    ),
    Step(
        "two ahead",
        "prefetch",
        "Two K blocks are on their way while one is added.",
        _OURS,
        (550, 660),
        "Loads have 900 more cycles to come, but L2 is the limit.",
        replace(_PREFETCHED, ahead=2),
    ),
    Step(
        "warp specialization",
        "all scales by TMA",
        "One warp only loads, four K blocks ahead; a warpgroup only multiplies and adds.",
        _OURS,
        (500, 600),
        "No barrier for all threads: 512 cycles of wgmma and 300 of draining and adding a K block, "
        "if L2 lets it: 102 FLOP a byte. One block to a multiprocessor, which starts and ends "
        "with nothing beside it.",
        _ALONE,
    ),
    Step(
        "persistent",
        "warp specialization",
        "A block of threads stays and takes tile after tile; loads go on while it stores.",
        f"{_WORKLOG}, variant (one producer, one consumer)",
        (540, 645),
        "Starting and storing, 2 us of 27 a tile at 4096, are hidden but for the first and last.",
        _ALONE,
        persistent=True,
    ),
    Step(
        "two warpgroups",
        "persistent",
        "Tiles of 128 x 256: two warpgroups share B, and one multiplies while the other adds.",
        _OURS,
        (790, 1050),
        "171 FLOP a byte of L2, the limit still; at 2048 128 tiles are one wave on 132 "
        "multiprocessors, 15.5 us and 6 of starting, filling and storing.",
        _PAIR,
        persistent=True,
    ),
    Step(
        "multicast",
        "two warpgroups",
        "Two blocks of a cluster, one above the other, load half of B each for both.",
        _OURS,
        (900, 1300),
        "256 FLOP a byte of L2, which is no longer the limit: tensor cores are, at 0.89 of what "
        "they do without scales (1005 and 1470 in cuBLASLt), as the 180 cycles in 1024 of adding "
        "are hidden by the other warpgroup only in part.",
        _SHARED,
        persistent=True,
    ),
    Step(
        "unrolled",
        "multicast",
        "Four K blocks in the body of the loop.",
        _OURS,
        (910, 1330),
        "About 25 cycles of counting and branching a K block, of 1150.",
        _UNROLLED,
        persistent=True,
    ),
    Step(
        "whole output",
        "unrolled",
        "A tile's whole output has room in shared memory, one of four stages less: a warpgroup "
        "stores without waiting for TMA.",
        _OURS,
        (940, 1350),
        "Three waits of 0.3 us a tile, of 19 us at 2048 and of 26 at 4096; three stages of 1100 "
        "cycles are still more than a load takes.",
        _WHOLE,
        persistent=True,
    ),
    Step(
        "skew",
        "whole output",
        "The second warpgroup starts half a microsecond after the first: they add, and store, in "
        "turn.",
        _OURS,
        (930, 1370),
        "At 4096 stores of one are hidden behind wgmmas of the other, 0.5 us of 26 a tile; at "
        "2048, one tile a block, the start is lost.",
        _SKEWED,
        persistent=True,
    ),
    Step(
        "tall tiles",
        "whole output",
        "Tiles of 256 x 128, which share A along N: a warpgroup has 128 x 128, with one scale "
        "of B.",
        _OURS,
        (930, 1350),
        "As many bytes and wgmmas; one multiplication of scales less in 64 additions, four stages, "
        "but the output goes through one box at a time.",
        _TALL,
        persistent=True,
    ),
)
