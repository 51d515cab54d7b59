"""The bf16 product for Hopper, run in the emulator, against fp64 products of its operands."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from factors import alpha_of
from sm90_inputs import BF16, FP32, assert_no_spills, launched

from blockscale import emulator as em
from blockscale.dtypes import BFLOAT16, FLOAT16, FLOAT32, to_torch
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.calls import Alpha, Operand, describe_call
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.sm90.bf16_config import (
    BLOCK_K,
    TILINGS,
    Bf16Config,
    candidates,
    choose_config,
)
from blockscale.kernels.sm90.bf16_plan import plan_bf16
from blockscale.kernels.sm90.product_config import fit
from stand_in import chip

pytestmark = pytest.mark.usefixtures("keep_code")

SQUARE = Bf16Config(BFLOAT16, tile=(128, 128), cluster=(1, 1), mma_n=128)
MAJORS = tuple(product(("k", "mn"), repeat=2))


def operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    a, b = (torch.randn(rows, k, generator=generator).to(BF16) for rows in (m, n))
    return a, b


def held(x: Tensor, major: str) -> Tensor:
    """As a kernel takes it: rows, or columns, that start at multiples of 16 bytes."""
    x = x if major == "k" else x.T
    room = torch.full((x.shape[0], -(-x.shape[1] // 8) * 8), float("nan"), dtype=x.dtype)
    return room[:, : x.shape[1]].copy_(x)


def emulated(
    config: Bf16Config,
    given: tuple[Tensor, Tensor],
    start: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    alpha: Alpha = None,
    completion: str = "late",
    multiprocessors: int = 2,
) -> Tensor:
    """What the kernel leaves in poisoned memory, or in a copy of ``start``."""
    a, b = given
    data = held(a, config.a_major), held(b, config.b_major)
    shape, rest = (a.shape[0], b.shape[0]), (bias, alpha, None, None, multiprocessors)
    return launched(config, shape, data, start, rest, completion)


def assert_close(
    got: Tensor, given: tuple[Tensor, Tensor], factor: float = 1.0, *added: Tensor
) -> None:
    """Each element: what fp32 sums may lose, a unit in the last place of all magnitudes for 16
    products and for each further step, and one rounding to the output's type."""
    a, b = (x.double() for x in given)
    want, size = factor * (a @ b.T), abs(factor) * (a.abs() @ b.abs().T)
    for each in added:
        want, size = want + each.double(), size + each.double().abs()
    lost = (a.shape[1] / 16 + 3) * torch.finfo(FP32).eps * size
    rounding = torch.finfo(got.dtype).eps / 2 * (want.abs() + lost)
    assert bool(((got.double() - want).abs() <= lost + rounding).all())


# Ways to cut the work that give the same bits: all add K step after K step.
VARIANTS = {
    "wide": Bf16Config(BFLOAT16),
    "wide, no cluster, B by columns": Bf16Config(BFLOAT16, cluster=(1, 1), b_major="mn"),
    "wide, both by columns": Bf16Config(BFLOAT16, a_major="mn", b_major="mn", skew=300),
    "tall, A by columns": Bf16Config(
        BFLOAT16, tile=(256, 128), cluster=(1, 2), mma_n=128, epilogue_stages=1, a_major="mn"
    ),
    "two batches, both by columns": Bf16Config(
        BFLOAT16, tile=(128, 256), cluster=(2, 1), mma_n=128, a_major="mn", b_major="mn"
    ),
    "three warpgroups": Bf16Config(
        BFLOAT16,
        tile=(192, 128),
        cluster=(1, 2),
        stages=5,
        warpgroups=3,
        mma_n=128,
        epilogue_stages=1,
    ),
}


@cache
def _square(shape: tuple[int, int, int]) -> Tensor:
    given = operands(*shape)
    got = emulated(SQUARE, given, completion="eager")
    assert_close(got, given)
    return got


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    """Tails in M, N and K, more tiles than blocks, then one K block after another; the same bits as
    with the simplest, whenever copies and products finish. A test for each kernel, so that it is
    compiled once."""
    config = VARIANTS[name]
    for shape, completion in (((136, 264, 139), "late"), ((72, 136, 6 * 64), "random")):
        assert torch.equal(
            emulated(config, operands(*shape), completion=completion), _square(shape)
        )
    assert_no_spills(config)


_TURNS = {"cluster": (1, 1), "warpgroup_split_k": True, "epilogue_stages": 1}
ALTERNATE = {
    "64 rows": Bf16Config(BFLOAT16, tile=(64, 128), mma_n=128, **{**_TURNS, "cluster": (1, 2)}),
    "64 columns, added, both by columns": Bf16Config(
        FLOAT32,
        tile=(128, 64),
        stages=6,
        mma_n=64,
        accumulate=True,
        a_major="mn",
        b_major="mn",
        **_TURNS,
    ),
    "one by one": Bf16Config(
        BFLOAT16, tile=(64, 64), stages=7, mma_n=64, tma_store=False, **_TURNS
    ),
}


@pytest.mark.parametrize("shape", [(130, 72, 590), (16, 72, 8)])
@pytest.mark.parametrize("name", ALTERNATE)
def test_alternate(name, shape):
    """Warpgroups have every other K block, or none; several tiles one after another."""
    config, given = ALTERNATE[name], operands(*shape)
    start = torch.randn(shape[:2]) if config.accumulate else None
    got = emulated(config, given, start, completion="random", multiprocessors=4)
    assert_close(got, given, 1.0, *([] if start is None else [start]))


ALL = {"accumulate": True, "alpha": (0,)}
EPILOGUES = {
    "fp32": Bf16Config(FLOAT32, cluster=(1, 2)),
    "fp32, all": Bf16Config(FLOAT32, bias=FLOAT16, a_major="mn", **ALL),
    "fp16, all": replace(SQUARE, out_dtype=FLOAT16, bias=FLOAT32, accumulate=True, alpha=(0, 0)),
    "bf16, all": Bf16Config(BFLOAT16, bias=BFLOAT16, b_major="mn", **ALL),
    "one by one, bf16, all": replace(SQUARE, tma_store=False, bias=BFLOAT16, **ALL),
    "one by one, fp32": replace(SQUARE, tma_store=False, out_dtype=FLOAT32, b_major="mn"),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name):
    """Everything is added in fp32 and rounded once."""
    config = EPILOGUES[name]
    m, n, k = 140, (141 if "one by one" in name else 208), 72
    given = operands(m, n, k)
    bias = torch.randn(n).mul(20).to(to_torch(config.bias)) if config.bias else None
    start = torch.randn(m, n).mul(20).to(to_torch(config.out_dtype)) if config.accumulate else None
    alpha = alpha_of(config.alpha, -1.7)
    got = emulated(config, given, start, bias=bias, alpha=alpha, completion="eager")
    added = [each for each in (bias, start) if each is not None]
    assert_close(got, given, -1.7 if config.alpha else 1.0, *added)
    assert_no_spills(config)


def test_not_numbers():
    """NaN and infinities reach their row or column and nothing else; nor do the NaNs that lie
    beside each operand."""
    a, b = operands(130, 72, 100)
    a[3], a[129, 99] = 0.0, float("inf")
    b[70, 0] = float("nan")
    for majors in MAJORS[1:3]:
        got = emulated(replace(SQUARE, a_major=majors[0], b_major=majors[1]), (a, b))
        want = a.double() @ b.double().T
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())
        assert bool((got[3, :70] == 0).all())
        assert_close(got[:129, :70], (a[:129], b[:70]))


@pytest.mark.parametrize("majors", MAJORS)
def test_cuts(majors):
    """Whatever may be chosen is a kernel; without spills where it is fast."""
    known = [t.config for t in TILINGS if majors[1] == "k" or t.config.tile[1] % BLOCK_K == 0]
    assert candidates((4096, 4096, 64), Epilogue(FLOAT32), majors=majors)
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")):
        for index, each in enumerate(known):
            config = fit(each, out_dtype=FLOAT32, a_major=majors[0], b_major=majors[1])
            if index % len(MAJORS) == MAJORS.index(majors):  # each of them once
                compile_cache.build(config)
                assert_no_spills(config)


@pytest.mark.parametrize("shape", [(1, 320, 64), (65, 136, 136)])
def test_shapes(shape):
    given = operands(*shape)
    got = emulated(
        choose_config(shape, Epilogue(BFLOAT16)),
        given,
        completion="random",
        multiprocessors=132,
    )
    assert_close(got, given)


def test_choice():
    """Large products take the largest tiles, small ones many; columns that lie together are taken
    in whole panels."""
    assert choose_config((4096, 4096, 4096), Epilogue(BFLOAT16)).tile == (128, 256)
    assert choose_config((256, 512, 4096), Epilogue(BFLOAT16)).warpgroup_split_k
    assert choose_config((256, 8640, 6784), Epilogue(BFLOAT16)).tile[1] % BLOCK_K
    for shape in ((256, 8640, 6784), (64, 4096, 14336), (8192, 8192, 8192)):
        for each in candidates(shape, Epilogue(BFLOAT16), majors=("k", "mn")):
            assert each.tile[1] % BLOCK_K == 0
    for shape in ((8192, 8192, 8192), (300, 520, 1024), (1, 1, 8)):
        assert choose_config(shape, Epilogue(FLOAT32)) == candidates(shape, Epilogue(FLOAT32))[0]


# --- calls ----------------------------------------------------------------------------------------


def call(
    a: Tensor,
    b: Tensor,
    *,
    alpha: Alpha = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = BF16,
    out: Tensor | None = None,
    accumulate: bool = False,
    arch: str = "sm_90a",
) -> Tensor:
    given = {"out": out, "bias": bias, "alpha": alpha, "out_dtype": out_dtype}
    described = describe_call(
        Operand(a), Operand(b), accumulate=accumulate, gpu=chip(arch), **given
    )
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")):
        plan = plan_bf16(described)
        if plan.config is not None:
            a = a if plan.config.a_major == "k" else a.T
            b = b if plan.config.b_major == "k" else b.T
        return plan((a, b), out, bias, alpha, accumulate)


@pytest.mark.parametrize("majors", MAJORS)
def test_transposed_views(majors):
    a, b = given = operands(40, 48, 72)
    a = a if majors[0] == "k" else a.T.contiguous().T
    b = b if majors[1] == "k" else b.T.contiguous().T
    got = call(a, b)
    assert got.shape == (40, 48)
    assert got.dtype == BF16
    assert got.is_contiguous()
    assert_close(got, given)


def test_bias_alpha_and_sum():
    given = operands(33, 48, 72)
    bias, alpha, c = torch.randn(48).to(BF16), torch.tensor(0.5), torch.randn(33, 48).to(BF16)
    start = c.clone()
    assert call(*given, out=c, accumulate=True, bias=bias, alpha=alpha) is c
    assert_close(c, given, 0.5, bias, start)


def test_outputs_between_others():
    """Rows that TMA cannot take, and groups of 16 bytes that it would write beyond a row's end."""
    given = operands(33, 44, 72)
    wide = torch.full((33, 51), 2.0)
    got = call(*given, out=wide[:, 1:45], out_dtype=FP32, accumulate=True)
    assert_close(got, given, 1.0, torch.full((33, 44), 2.0))
    narrow = torch.full((33, 64), 2.0, dtype=BF16)
    assert_close(call(*given, out=narrow[:, :44]), given)
    assert bool((wide[:, [0, *range(45, 51)]] == 2).all())
    assert bool((narrow[:, 44:] == 2).all())


@pytest.mark.parametrize("shape", [(0, 16, 64), (16, 0, 64), (16, 16, 0)])
def test_nothing_to_multiply(shape):
    given, bias = operands(*shape), torch.randn(shape[1])
    assert torch.equal(call(*given, bias=bias), bias.to(BF16).expand(shape[:2]))
    start = torch.randn(shape[:2])
    assert torch.equal(call(*given, out=start.clone(), out_dtype=FP32, accumulate=True), start)


def test_bad_input():
    a, b = operands(32, 48, 64)
    bad = {
        "a, b: got": (a, b[:, :32]),
        "a: has shape": (a[None], b),
        "b: has strides": (a, torch.zeros(96, 128, dtype=BF16)[::2, ::2]),
    }
    for message, given in bad.items():
        with pytest.raises(ValueError, match=message):
            call(*given)
    with pytest.raises(TypeError, match="b: got"):
        call(a, b.half())
    with pytest.raises(ValueError, match="accumulate: needs out"):
        call(a, b, accumulate=True)
    with pytest.raises(ValueError, match="out: has shape"):
        call(a, b, out=torch.zeros(48, 32, dtype=BF16))
    with pytest.raises(ValueError, match="bias: has shape"):
        call(a, b, bias=torch.zeros(47))
    with pytest.raises(Unsupported, match="a: TMA"):
        call(a[:, 1:57], b[:, :56])
    with pytest.raises(Unsupported, match="b: TMA"):
        call(a, b.T[:, :47].contiguous().T)
    with pytest.raises(Unsupported, match="out_dtype"):
        call(a, b, out_dtype=torch.float64)
    with pytest.raises(Unsupported, match="sm_100a"):
        call(a, b, arch="sm_100a")
    for fields in ({"a_major": "m"}, {"b_major": "mn", "mma_n": 32}, {"stages": 9}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            Bf16Config(BFLOAT16, **fields)
