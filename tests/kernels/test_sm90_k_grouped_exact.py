"""Products of groups along K of MXFP8, MXFP4 and NVFP4 on Hopper: both operands are written in
bf16, whose product has a kernel that groups may be given to; in the emulator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from grouped_inputs import caught
from sm90_inputs import BF16, FP32, assert_no_spills, launched

import blockscale as bs
from blockscale.dtypes import BFLOAT16, FLOAT16, FLOAT32, to_torch
from blockscale.formats import padded_groups
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.sm90.bf16_config import Bf16Config, k_grouped_candidates
from blockscale.kernels.sm90.k_grouped_tiles import KGroupedTiles
from stand_in import emulated, matrix

pytestmark = pytest.mark.usefixtures("keep_code")

SMALL = Bf16Config(
    BFLOAT16, tile=(64, 64), cluster=(1, 1), stages=3, warpgroups=1, mma_n=64, epilogue_stages=1,
    grouping="k",
)  # fmt: skip
ADDING = replace(SMALL, out_dtype=FLOAT32, accumulate=True)
EDGES = 5, 0, 130, 64, 1, 0, 31, 33, 127, 129, 300
ALL = k_grouped_candidates((7168, 4096, 32768), 8, Epilogue())


def apart(parts: Sequence[Tensor], rest: int) -> Tensor:
    """Columns of groups, moved apart, with zeros between them."""
    ends = list(accumulate(x.shape[1] for x in parts))
    out = torch.zeros(len(parts[0]), padded_groups(ends[-1] + rest, len(parts)), dtype=BF16)
    for i, (x, begin) in enumerate(zip(parts, [0, *ends[:-1]], strict=True)):
        out[:, (begin // 128 + i) * 128 :][:, : x.shape[1]] = x
    return out


def check(
    config: Bf16Config,
    sizes: Sequence[int],
    m: int,
    n: int,
    rest: int = 0,
    completion: str = "late",
    seed: int = 0,
) -> None:
    """Each group's product is as exact as fp32 sums and one rounding are."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        [torch.randn(rows, size, generator=generator).to(BF16) for size in sizes] for rows in (m, n)
    )
    dtype, groups = to_torch(config.out_dtype), len(sizes)
    start = torch.randn(groups * m, n, generator=generator).to(dtype) if config.accumulate else None
    ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
    operands = apart(a, rest), apart(b, rest)
    given = None, None, ends, 3, 2
    shape = groups * m, n
    got = launched(config, shape, operands, start, given, completion, seed).view(groups, m, n)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        want = x.double() @ y.double().T
        if start is not None:
            want += start.view(groups, m, n)[i].double()
        lost = 2.0**-20 * (x.double().abs() @ y.double().abs().T) + 1e-6
        lost += torch.finfo(dtype).eps * want.abs()
        assert bool(((got[i].double() - want).abs() <= lost).all()), i


@pytest.mark.parametrize("config", [SMALL, ADDING], ids=["bf16", "added to fp32"])
@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_completions(completion, config):
    check(config, EDGES, 72, 136, 20, completion)
    assert_no_spills(config)


@pytest.mark.parametrize("i", range(len(ALL)))
def test_candidates(i):
    check(ALL[i], (70, 0, 200), 136, 72)
    assert_no_spills(ALL[i])


@pytest.mark.parametrize(("fields", "n"), [
    ({"out_dtype": FLOAT32}, 72), ({"out_dtype": FLOAT16}, 72), ({"tma_store": False}, 67),
    ({"accumulate": True}, 72), ({"a_major": "k", "b_major": "k", "cluster": (2, 1)}, 72),
])  # fmt: skip
def test_epilogues(fields, n):
    check(replace(SMALL, **fields), (5, 129, 0, 64), 150, n)


@pytest.mark.parametrize("seed", range(10))
def test_random_groupings(seed):
    rng = random.Random(seed)
    for i in range(2):
        count = rng.choice([1, 2, 5, 34])
        sizes = [
            rng.choice([0, rng.randrange(8), rng.randrange(400 // count)]) for _ in range(count)
        ]
        m, n = rng.randrange(1, 140), 8 * rng.randrange(1, 20)
        check(rng.choice([SMALL, ADDING]), sizes, m, n, rng.randrange(200), "random", i)


def _found(begin: int, end: int):
    def found(tiles, *given):
        place, group, k_begin, k_end = FOUND(tiles, *given)
        return place, group, k_begin + begin, k_end + end

    return found


FOUND = KGroupedTiles.found


@pytest.mark.parametrize("by", [(0, -1), (-1, 0), (0, 1)])
def test_mutants_are_caught(by, monkeypatch):
    """A part of K is left out, or another group's is added."""
    sizes = 128, 64, 256, 5
    assert not caught(lambda: check(SMALL, sizes, 72, 40))
    monkeypatch.setattr(KGroupedTiles, "found", _found(*by))
    assert caught(lambda: check(SMALL, sizes, 72, 40))


# --- bs.grouped_gemm ------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", [
    ("mxfp8", "mxfp8"), ("mxfp8_e5m2", "mxfp4"), ("nvfp4", "nvfp4"),
])  # fmt: skip
@pytest.mark.parametrize("layout", ["compact", "tcgen05"])
def test_dispatch(formats, layout):
    ends = torch.tensor([40, 40, 173], dtype=torch.int32)
    how = {"axis": -2, "offsets": ends, "layout": layout, "k_major": True}
    sizes = zip(formats, (90, 136), strict=True)
    a, b = (bs.quantize(matrix(200, n, seed=n), name, **how) for name, n in sizes)
    with emulated("sm_90a") as launches:
        got = bs.grouped_gemm(a.mT, b, ends, FP32, backend="kernel")
        assert [getattr(each, "grouping", "") for each in launches] == ["", "", "k"]
        out = got.clone()
        bs.grouped_gemm(a.mT, b, ends, out=out, accumulate=True, backend="kernel")
    x, y = a.dequantize(torch.float64), b.dequantize(torch.float64)
    for i, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        want = x[start:end].T @ y[start:end]
        assert (got[i].double() - want).norm() <= 1e-6 * want.norm()
        assert (out[i].double() - 2 * want).norm() <= 2e-6 * want.norm()
