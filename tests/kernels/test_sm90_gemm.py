"""The FP8 product for Hopper, run in the emulator, against fp64 products of its operands."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from kernel_code import built
from sm90_inputs import (
    BF16,
    FP32,
    SQUARE,
    assert_close,
    assert_no_spills,
    emulated,
    operands,
    product,
)

from blockscale import emulator as em
from blockscale import quantize
from blockscale.dtypes import BFLOAT16, FLOAT16, FLOAT32, to_torch
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.calls import Operand
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.common.machine_code import disassemble
from blockscale.kernels.common.rounds import rounds
from blockscale.kernels.sm90 import calls as sm90
from blockscale.kernels.sm90 import plan
from blockscale.kernels.sm90.config import TILINGS, Config, choose_config
from blockscale.kernels.sm90.estimate import Costs, Tiling
from blockscale.kernels.sm90.product_config import fit
from stand_in import chip

pytestmark = pytest.mark.usefixtures("keep_code")

# Ways to cut the work that give the same bits: all add K block after K block.
VARIANTS = {
    "wide": Config(BFLOAT16),
    "wide, skewed, no cluster": Config(BFLOAT16, cluster=(1, 1), skew=300, unroll=1),
    "tall": Config(BFLOAT16, tile=(256, 128), cluster=(1, 2), stages=4, epilogue_stages=1),
    "192 columns": Config(BFLOAT16, tile=(128, 192), stages=4, mma_n=192, epilogue_stages=3),
    # boxes of 64 and 32 bytes; the tile reaches into two and three blocks of B's scales
    "112 columns": Config(
        BFLOAT16, tile=(128, 112), cluster=(1, 2), stages=7, mma_n=112, epilogue_stages=1
    ),
    "176 columns": Config(BFLOAT16, tile=(128, 176), stages=5, mma_n=176, epilogue_stages=1),
    "square": SQUARE,
}


@cache
def _square(shape: tuple[int, int, int]) -> Tensor:
    return emulated(SQUARE, operands(*shape))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    """Tails in M, N and K, more tiles than blocks, then K blocks that fill the body of the loop and
    more; the same bits as with the simplest. A test for each kernel, so that it is compiled once.
    """
    config = VARIANTS[name]
    for shape, completion in (((136, 264, 336), "late"), ((72, 136, 9 * 128), "random")):
        given = operands(*shape)
        got = emulated(config, given, completion=completion)
        assert_close(got, product(*given, config.b_block), to_torch(config.out_dtype))
        assert torch.equal(got, _square(shape))
    assert_no_spills(config)


@pytest.mark.parametrize("each", TILINGS[128, 128], ids=lambda each: " ".join(
    map(str, (each.config.tile, each.config.cluster, each.config.warpgroups, each.config.split_k))
))  # fmt: skip
def test_tilings(each):
    """All that may be chosen for many rows. The last tiles reach up: what two CTAs store is the
    same, or the check of global memory would say so."""
    config, shape, ctas = fit(each.config), (198, 264, 336), 2
    if config.split_k > 1:  # all of them run at once
        shape, ctas = (70, 40, 784), 132
    given = operands(*shape)
    got = emulated(config, given, completion="random", multiprocessors=ctas)
    assert_close(got, product(*given, config.b_block), to_torch(config.out_dtype))
    if not config.warpgroup_split_k:
        assert torch.equal(got, _square(shape))
    assert_no_spills(config)


_TURNS = {"cluster": (1, 1), "warpgroup_split_k": True, "epilogue_stages": 1}
ALTERNATE = {
    "64 rows": Config(BFLOAT16, tile=(64, 128), stages=5, **{**_TURNS, "cluster": (1, 2)}),
    "64 columns, added": Config(
        FLOAT32,
        tile=(128, 64),
        stages=6,
        mma_n=64,
        b_block=(1, 128),
        accumulate=True,
        **_TURNS,
    ),
    "48 columns, fp32": Config(FLOAT32, tile=(128, 48), stages=6, mma_n=48, **_TURNS),
    "one by one": Config(BFLOAT16, tile=(64, 64), stages=7, mma_n=64, tma_store=False, **_TURNS),
}


@pytest.mark.parametrize("shape", [(130, 264, 1168), (16, 72, 272), (72, 8, 128)])
@pytest.mark.parametrize("name", ALTERNATE)
def test_alternate(name, shape):
    """Warpgroups have every other K block, or none; several tiles one after another."""
    config = ALTERNATE[name]
    given = operands(*shape, config.b_block)
    want, start = product(*given, config.b_block), None
    if config.accumulate:
        start = torch.randn(shape[:2])
        want = want + start.double()
    got = emulated(config, given, start, completion="random", multiprocessors=4)
    assert_close(got, want, to_torch(config.out_dtype))


@pytest.mark.parametrize("stages", [3, 4])
def test_rounds_of_a_stage(stages):
    """A warpgroup that sees every other round of a stage waits for the right one: with an odd
    number of stages, where a load is late, it took a round for the one before the last (seed 6)."""
    config = Config(BFLOAT16, tile=(64, 64), stages=stages, mma_n=64, **_TURNS)
    given = operands(64, 64, 24 * 128)
    want = product(*given, config.b_block)
    for seed in (4, 5, 6, 7):
        assert_close(emulated(config, given, completion="random", seed=seed), want, BF16)
    assert rounds(stages, config.k_turns) == stages % 2 + 1


@pytest.mark.parametrize("rows", [1, 4, 24])
def test_few_rows_loaded(rows):
    """The others of a tile are zeros, and not stored; 1 x 128 scales of B; fewer rows than are
    loaded; stages that are used again."""
    b_block = (1, 128) if rows == 4 else (128, 128)
    config = Config(
        BFLOAT16,
        tile=(64, 64),
        stages=3,
        mma_n=64,
        loaded_rows=rows,
        b_block=b_block,
        **_TURNS,
    )
    for m in {rows, max(rows - 5, 1)}:
        given = operands(m, 136, 9 * 128 + 16, b_block)
        got = emulated(config, given, completion="random", multiprocessors=2)
        assert_close(got, product(*given, b_block), BF16)
        assert torch.equal(got, emulated(replace(config, loaded_rows=0), given))


_SPLIT = {**_TURNS, "mma_n": 64, "stages": 3}
SPLIT = {  # configuration, shape, multiprocessors, completion
    "a tile for each of two clusters, and two more": (
        Config(BFLOAT16, tile=(64, 64), split_k=2, **_SPLIT),
        (72, 72, 656),
        4,
        "late",
    ),
    "a part without K blocks, pairs added to": (
        Config(FLOAT32, tile=(64, 128), split_k=4, b_block=(1, 128), accumulate=True, **_SPLIT),
        (4, 132, 384),
        4,
        "random",
    ),
    "one by one, a tile after another": (
        Config(
            FLOAT16,
            tile=(128, 64),
            split_k=8,
            tma_store=False,
            bias=BFLOAT16,
            alpha=(0,),
            **_SPLIT,
        ),
        (12, 75, 1168),
        8,
        "eager",
    ),
    "few rows loaded, stages used again": (
        Config(BFLOAT16, tile=(64, 64), split_k=4, loaded_rows=8, **_SPLIT),
        (5, 136, 26 * 128),
        8,
        "random",
    ),
}


@pytest.mark.parametrize("name", SPLIT)
def test_split(name):
    """Blocks of a cluster have a part of K each; tails in M, N and K; warps that have no rows; sums
    where those of the tile before were."""
    config, shape, multiprocessors, completion = SPLIT[name]
    given = operands(*shape, config.b_block, spread=0.5)
    given = (given[0], given[1] * 1e-4, *given[2:])  # within the range of fp16
    want, start = product(*given, config.b_block), None
    more = {}
    if config.alpha:
        more = {"alpha": torch.tensor(0.7), "bias": torch.randn(shape[1]).to(to_torch(config.bias))}
        want = want * more["alpha"].double() + more["bias"].double()
    if config.accumulate:
        start = torch.randn(shape[:2])
        want = want + start.double()
    got = emulated(
        config, given, start, completion=completion, multiprocessors=multiprocessors, **more
    )
    assert_close(got, want, to_torch(config.out_dtype))
    assert_no_spills(config)


def test_split_has_the_same_bits():
    """Whichever block is first, and however they are stored."""
    config = Config(FLOAT32, tile=(64, 64), split_k=4, **_SPLIT)
    given = operands(5, 72, 1152)
    late, random, eager = (
        emulated(each, given, completion=completion, multiprocessors=4)
        for each, completion in (
            (config, "late"),
            (config, "random"),
            (replace(config, tma_store=False), "eager"),
        )
    )
    assert torch.equal(late, random)
    assert torch.equal(late, eager)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("split_k", {"split_k": 3}),
        ("split_k", {"cluster": (2, 1)}),
        ("split_k", {"warpgroup_split_k": False}),
        ("split_k", {"tile": (128, 16), "split_k": 4}),
        ("stages", {"stages": 10, "tile": (128, 128)}),
    ],
)
def test_no_such_split(name, wrong):
    config = Config(BFLOAT16, **{**_SPLIT, "mma_n": 16}, tile=(128, 64), split_k=2)
    with pytest.raises(ValueError, match=f"^{name}: "):
        replace(config, **wrong)


def test_time_of_split():
    """30 clusters of four CTAs run at once, and each CTA has a fourth of K."""
    config = Config(BFLOAT16, tile=(64, 64), split_k=4, **_SPLIT)
    free = Costs(a=0, l2_rate=math.inf, start_ns=0, split_ns=5)
    tiling = Tiling(config, k_block_ns=100, tile_ns=10, costs=free)
    fast = replace(chip("sm_90a"), dram_rate=math.inf)
    assert tiling.nanoseconds((8, 30 * 64, 9 * 128), 128, fast) == 330
    assert tiling.nanoseconds((8, 31 * 64, 8 * 128), 128, fast) == 440
    assert tiling.is_legal(8, 30 * 64, fast)
    assert not tiling.is_legal(8, 31 * 64, fast)
    fewer = replace(chip("sm_90a", 114), dram_rate=math.inf)  # of an H100 on PCIe
    assert tiling.nanoseconds((8, 26 * 64, 8 * 128), 128, fewer) == 440


def test_choice_for_few_rows():
    """As many rows as there are, or a few more: TMA fills none with zeros that it need not."""
    for m in range(1, 300):
        for n, k in ((7168, 16384), (2112, 7168), (576, 7168), (24576, 1536)):
            config = choose_config((m, n, k), Epilogue(BFLOAT16))
            rows, tiles = config.tile[0], -(-m // config.tile[0])
            assert not config.loaded_rows or m <= config.loaded_rows < min(m + 8, rows)
            assert config.loaded_rows or tiles > 1 or m > rows - 8
    assert choose_config((1, 7168, 16384), Epilogue(BFLOAT16)).loaded_rows == 1


@pytest.mark.parametrize(
    ("shape", "tile", "split"),
    [
        ((1, 576, 16384), (64, 64), 8),
        ((1, 576, 7168), (64, 64), 4),
        ((16, 1536, 7168), (64, 64), 4),
        ((128, 576, 7168), (64, 64), 4),
        ((1, 2112, 7168), (64, 96), 3),
        ((8, 4096, 7168), (64, 32), 1),
        ((8, 8192, 7168), (64, 64), 1),
    ],
)
def test_choice_for_few_tiles(shape, tile, split):
    """K is split among more CTAs, the fewer tiles there are and the longer it is, and only among as
    many as run at once."""
    config = choose_config(shape, Epilogue(BFLOAT16))
    assert (config.tile, config.split_k) == (tile, split)
    assert split == 1 or config.runs_at_once(*shape[:2], chip("sm_90a"))


@pytest.mark.parametrize("wrong", [{"loaded_rows": 64}, {"loaded_rows": -8}])
def test_no_such_rows(wrong):
    config = Config(BFLOAT16, tile=(64, 64), stages=3, mma_n=64, **_TURNS)
    with pytest.raises(ValueError, match="loaded_rows"):
        replace(config, **wrong)
    with pytest.raises(ValueError, match="loaded_rows"):
        replace(config, loaded_rows=8, cluster=(2, 1))


EPILOGUES = {
    "fp32": Config(FLOAT32, epilogue_stages=2),
    "fp32 added": Config(FLOAT32, epilogue_stages=2, accumulate=True),
    "fp32 added, 1x128": replace(SQUARE, out_dtype=FLOAT32, accumulate=True, b_block=(1, 128)),
    "bf16, 1x128": Config(BFLOAT16, b_block=(1, 128)),
    "bf16, 1x128, 192 columns": replace(VARIANTS["192 columns"], b_block=(1, 128)),
    "fp16": replace(SQUARE, out_dtype=FLOAT16),
    "bf16, tall": VARIANTS["tall"],
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name):
    config, (m, n, k) = EPILOGUES[name], (140, 272, 272)
    given = operands(m, n, k, config.b_block, spread=0.5)
    given = (given[0], given[1] * 1e-4, *given[2:])  # within the range of fp16
    want, start = product(*given, config.b_block), None
    if config.accumulate:
        start = torch.randn(m, n)
        want = want + start.double()
    assert_close(
        emulated(config, given, start, completion="eager"), want, to_torch(config.out_dtype)
    )
    assert_no_spills(config)


@pytest.mark.parametrize("b_block", [(128, 128), (1, 128)])
def test_groups_of_wgmmas(b_block):
    """Between the four wgmmas of a K block, nothing is loaded, nor is there what waits for it."""
    code = disassemble(built(Config(BFLOAT16, b_block=b_block)).__cubin__)
    opcodes = re.findall(r"/\*[0-9a-f]+\*/ +(?:@!?U?P\d+ +)?([\w.]+)", code)
    products = [i for i, each in enumerate(opcodes) if each.startswith("QGMMA")]
    assert len(products) % 4 == 0
    for first, fourth in zip(products[::4], products[3::4], strict=True):
        between = opcodes[first:fourth]
        assert not [each for each in between if each.startswith(("LDS", "FMUL", "FFMA"))]


# A thread has 128 rows: it reads the scales of its columns once for both halves.
KEPT = Config(
    FLOAT32,
    accumulate=True,
    tile=(256, 128),
    cluster=(1, 2),
    stages=4,
    epilogue_stages=1,
    b_block=(1, 128),
    unroll=1,
)
KEEPING = {
    "fp32, added": KEPT,
    "bf16, bias, alpha": replace(
        KEPT, out_dtype=BFLOAT16, accumulate=False, bias=BFLOAT16, alpha=(0,)
    ),
    "bf16, added, no cluster": replace(KEPT, out_dtype=BFLOAT16, cluster=(1, 1), stages=3),
    "fp32, one by one": replace(KEPT, tma_store=False),
    "96 columns, unrolled": replace(KEPT, tile=(256, 96), mma_n=96, cluster=(2, 1), unroll=4),
}


@pytest.mark.parametrize("name", KEEPING)
def test_scales_kept(name):
    """The same bits as with scales that are read when they are needed, with tails, more tiles than
    blocks, and K blocks that fill the loop's body and more; and all of them fit in registers."""
    config = KEEPING[name]
    m, n, k = 264, 136, 128 * (config.unroll + 1) + 16
    given, start = (
        operands(m, n, k, config.b_block),
        torch.randn(m, n).to(to_torch(config.out_dtype)),
    )
    more = {
        "bias": torch.randn(n).to(to_torch(config.bias)) if config.bias else None,
        "alpha": torch.tensor(0.7) if config.alpha else None,
    }
    simple = replace(config, tile=(128, 128), mma_n=128, cluster=(1, 1))
    want, got = (
        emulated(each, given, start if config.accumulate else None, completion="random", **more)
        for each in (simple, config)
    )
    assert torch.equal(got, want)
    if config.accumulate:
        assert_close(
            want, product(*given, config.b_block) + start.double(), to_torch(config.out_dtype)
        )
    assert_no_spills(config)
    bodies = 1 if config.unroll == 1 else config.unroll + 1  # of a K block, in the code
    reads = built(config).__ptx__.count("ld.shared.v2.f32")
    assert reads == bodies * config.tile[1] // 8


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 141, 160), (130, 7, 1040)])
def test_odd_rows(shape, accumulate):
    """Rows that TMA cannot store."""
    config = Config(FLOAT32, tma_store=False, accumulate=accumulate)
    given = operands(*shape)
    start = torch.randn(shape[:2])
    want = product(*given, config.b_block) + start.double() * accumulate
    assert_close(emulated(config, given, start), want, FP32)


@pytest.mark.parametrize("shape", [(1, 576, 128), (128, 128, 16), (64, 136, 2064), (257, 8, 128)])
def test_shapes(shape):
    config = choose_config(shape, Epilogue(BFLOAT16))
    given = operands(*shape)
    got = emulated(config, given, completion="random", multiprocessors=132)
    assert_close(got, product(*given, config.b_block), BF16)


@pytest.mark.parametrize(
    "each", TILINGS[1, 128], ids=lambda each: f"{each.config.tile}, {each.config.cluster}"
)
def test_one_for_each_row(each):
    """Of what is chosen among where B has 1 x 128 scales, nothing is spilled. A whole tile and a
    tail of rows, and of columns where a tile has 64."""
    config = fit(each.config, out_dtype=FLOAT32, b_block=(1, 128), accumulate=True)
    m = min(config.tile[0], 128) + 8
    given, start = operands(m, 72, 400, config.b_block), torch.randn(m, 72)
    want = product(*given, config.b_block) + start.double()
    multiprocessors = max(2, config.cluster_size)
    got = emulated(config, given, start, completion="random", multiprocessors=multiprocessors)
    assert_close(got, want, FP32)
    assert_no_spills(config)


@pytest.mark.parametrize("b_block", [(128, 128), (1, 128)])
def test_scales_of_any_size(b_block):
    """Scales from 2^-60 to 2^60, each block's product exact in fp32: so is the sum of two."""
    m, n, k = 128, 128, 256
    a, b = torch.ones(m, k), torch.ones(n, k)
    a[:, 128:] = 0
    a[:, 128] = 1
    a, b = (x.to(torch.float8_e4m3fn) for x in (a, b))
    generator = torch.Generator().manual_seed(0)
    _, a_scale, _, b_scale = operands(m, n, k, b_block)
    for scale in (a_scale, b_scale):
        scale[:] = torch.exp2(torch.randint(-60, 61, scale.shape, generator=generator).float())
    config = replace(SQUARE, out_dtype=FLOAT32, b_block=b_block)
    got = emulated(config, (a, a_scale, b, b_scale))
    # each term is a power of two, their sum is rounded once
    assert torch.equal(got, product(a, a_scale, b, b_scale, b_block).float())


def test_not_numbers():
    """NaN and infinite scales reach what they scale and nothing else; rows of zeros are zero."""
    given = operands(128, 256, 256)
    a, a_scale, _, b_scale = given
    a[3] = 0.0
    a.view(torch.uint8)[5, 7] = 0x7F  # NaN
    a_scale[1, 9] = float("inf")
    b_scale[1, 1] = float("nan")
    got = emulated(replace(SQUARE, stages=3), given)
    want = product(*given, (128, 128))
    finite = (
        want.isfinite()
    )  # sums of infinities of both signs: here a block is summed, then scaled
    assert torch.equal(got.isfinite(), finite)
    assert bool(got[5].isnan().all())
    assert bool(got[:, 128:].isnan().all())
    assert_close(got[finite], want[finite], BF16)
    assert bool((got[3, :128] == 0).all())


# --- calls ----------------------------------------------------------------------------------------


def call(
    given: tuple[Tensor, ...], b_format: str = "fp8_128x128", arch: str = "sm_90a", **kwargs
) -> Tensor:
    a, b = Operand(*given[:2], "fp8_1x128"), Operand(*given[2:], b_format)
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")):
        return sm90.gemm(a, b, gpu=chip(arch), **kwargs)


def test_beside_collectives():
    """Of several ranks more CTAs are launched than run at once, for the same bits."""
    given, launched = operands(200, 2048, 128), []
    one = chip("sm_90a", 1)

    def load(config):
        kernel = compile_cache.build(config)

        def run(*args):
            launched.append(args[-1])
            kernel(*args)

        return run

    found = []
    for ranks in (False, True):
        a, b = Operand(*given[:2], "fp8_1x128"), Operand(*given[2:], "fp8_128x128")
        with (
            patch.object(plan, "beside_collectives", lambda ranks=ranks: ranks),
            em.cutedsl(em.Device("sm_90a", check="all,exit_stores")),
        ):
            found.append(sm90.gemm(a, b, gpu=replace(one, load=load)))
    assert launched == [1, 4]
    assert torch.equal(*found)
    assert_close(found[0], product(*given, (128, 128)), BF16)


def test_quantized():
    """From values to a product, with the scales that the quantizers write."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 256, generator=generator) for rows in (72, 136))
    a = quantize(x, "fp8_1x128", layout="sm90")
    b = quantize(w, "fp8_128x128")
    got = call((a.qdata, a.scale, b.qdata, b.scale), out_dtype=BF16)
    assert got.shape == (72, 136)
    assert got.dtype == BF16
    assert_close(got, a.dequantize(torch.float64) @ b.dequantize(torch.float64).T, BF16)
    c = quantize(w, "fp8_1x128", layout="sm90")
    got = call((a.qdata, a.scale, c.qdata, c.scale), out_dtype=FP32, b_format="fp8_1x128")
    assert_close(got, a.dequantize(torch.float64) @ c.dequantize(torch.float64).T, FP32)


def test_outputs():
    given = operands(33, 48, 128)
    want = product(*given, (128, 128))
    c = torch.zeros(33, 48, dtype=BF16)
    assert call(given, out=c) is c
    assert_close(c, want, BF16)
    wide = torch.full((33, 51), 2.0)  # rows that TMA cannot take
    got = call(given, out=wide[:, 1:-2], out_dtype=FP32, accumulate=True)
    assert_close(got, want + 2, FP32)
    assert bool((wide[:, [0, -1, -2]] == 2).all())


@pytest.mark.parametrize("shape", [(0, 16, 128), (16, 0, 128), (16, 16, 0)])
def test_empty(shape):
    given = operands(*shape)
    got = call(given)
    assert got.shape == shape[:2]
    assert not got.any()
    start = torch.ones(shape[:2])
    assert bool((call(given, out=start, out_dtype=FP32, accumulate=True) == 1).all())


def test_bad_input():
    a, a_scale, b, b_scale = given = operands(32, 48, 256)
    bad = {
        "a_data, b_data": (a, a_scale, b[:, :128].contiguous(), b_scale),
        "a_data: has shape": (a[None], a_scale, b, b_scale),
        "b_data: has strides": (a, a_scale, b.T.contiguous().T, b_scale),
        "a_scale: has shape": (a, a_scale.T.contiguous(), b, b_scale),
        "a_scale: has strides": (a, a_scale.T.contiguous().T, b, b_scale),
        "b_scale: has shape": (a, a_scale, b, b_scale[:, :1]),
    }
    for message, tensors in bad.items():
        with pytest.raises(ValueError, match=message):
            call(tensors)
    with pytest.raises(TypeError, match="a_data: got"):
        call((a.float(), a_scale, b, b_scale))
    with pytest.raises(TypeError, match="a_scale: got"):
        call((a, a_scale.double(), b, b_scale))
    with pytest.raises(ValueError, match="accumulate: needs out"):
        call(given, accumulate=True, out_dtype=FP32)
    with pytest.raises(ValueError, match="out: has shape"):
        call(given, out=torch.zeros(48, 32, dtype=BF16))
    with pytest.raises(TypeError, match="out: got"):
        call(given, out=torch.zeros(32, 48))
    with pytest.raises(TypeError, match="bias: got"):
        call(given, bias=torch.zeros(48, dtype=torch.float64))
    for bias in (torch.zeros(47), torch.zeros(96)[::2]):
        with pytest.raises(ValueError, match="bias: has shape"):
            call(given, bias=bias)
    with pytest.raises(ValueError, match="alpha: has shape"):
        call(given, alpha=torch.ones(1))
    with pytest.raises(TypeError, match=r"alpha: got torch\.float64"):
        call(given, alpha=(torch.tensor(1.0), torch.tensor(1.0).double()))
    with pytest.raises(Unsupported, match="K = 40"):
        call(operands(32, 48, 40))
    with pytest.raises(Unsupported, match="16 bytes"):
        call((a[:, 1:241], a_scale, b[:, :240], b_scale))
    with pytest.raises(Unsupported, match="sm_100a"):
        call(given, arch="sm_100a")
    with pytest.raises(Unsupported, match="b_format"):
        call(given, b_format="mxfp8")


def test_cached_by_its_code(monkeypatch):
    config = choose_config((128, 128, 128), Epilogue(BFLOAT16))
    before = compile_cache._key(config)
    assert compile_cache._key(replace(config, stages=4)) != before
    monkeypatch.setattr(compile_cache, "_sources", lambda module: module.encode())
    assert compile_cache._key(config) != before


@pytest.mark.parametrize(
    "config", [SQUARE, replace(SQUARE, b_block=(1, 128))], ids=["blocks", "columns"]
)
def test_stages_are_released_when_reads_have_results(config):
    """An arrival alone does not wait for reads before it: on an H200 TMA overtook them."""
    emulated(config, operands(8, 8, 128, config.b_block))
    sass = disassemble(built(config).__cubin__).splitlines()
    found = [re.search(r"MEMBAR|LDS|SYNCS\.ARRIVE\S+A1T0", line) for line in sass]
    order = [each.group() for each in found if each]
    before = [x for x, y in pairwise(order) if y.startswith("SYNCS")]
    assert before.count("MEMBAR") == config.unroll + 1
    assert "LDS" not in before
