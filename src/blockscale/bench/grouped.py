"""What ``bench grouped`` measures: products of groups of rows beside others', as data."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ..gemm import gemm, grouped_gemm
from ..quantize import quantize
from . import peers_grouped
from .contest import BASELINE, OURS, Call, Contest, Where
from .gemm import FORMATS

__all__ = ["FORMATS", "SHAPES", "SIZES", "contests", "equal", "skewed"]

Sizes = Callable[[int, int], tuple[int, ...]]
Prepare = Callable[[Tensor, Tensor, tuple[int, ...]], Call]
Shape = tuple[int, int, int, int]  # groups, M, N, K

SHAPES: tuple[Shape, ...] = tuple(
    (groups, 32768, n, k) for groups in (8, 32, 256) for n, k in ((4096, 7168), (7168, 2048))
)
_UNIT = 128  # rows that sizes are multiples of, where there are enough


def equal(groups: int, rows: int) -> tuple[int, ...]:
    """As many rows in each group, and one more in the first ones."""
    each, more = divmod(rows, groups)
    return tuple(each + (i < more) for i in range(groups))


def skewed(groups: int, rows: int) -> tuple[int, ...]:
    """Log-normal multiples of 128 rows, where these are enough to give each group some."""
    rng, unit = random.Random(groups), _UNIT if rows >= _UNIT * groups else 1
    weights = [math.exp(rng.gauss(0, 1)) for _ in range(groups)]
    units = [round(sum(weights[:i]) / sum(weights) * (rows // unit)) for i in range(groups + 1)]
    sizes = [unit * (end - start) for start, end in pairwise(units)]
    sizes[0] += rows % unit
    return tuple(sizes)


SIZES: Mapping[str, Sizes] = {"equal": equal, "skewed": skewed}


def _ours(name: str, x: Tensor, w: Tensor, sizes: tuple[int, ...]) -> Call:
    """Both quantized beforehand."""
    operands, ends = FORMATS[name], peers_grouped.ends_of(sizes, x.device)
    a, b = operands.quantize(x), quantize(w, operands.weights, backend="kernel").mT
    return lambda: grouped_gemm(a, b, ends, backend="kernel")


def _one(name: str, x: Tensor, w: Tensor, sizes: tuple[int, ...]) -> Call:
    """All rows by one matrix: what groups cost."""
    operands = FORMATS[name]
    a, b = operands.quantize(x), operands.weight(w[0])
    return lambda: gemm(a, b, backend="kernel")


_PEERS: dict[str, Prepare] = {
    "DeepGEMM": peers_grouped.deep_gemm,
    "torch, FP8 row-wise": peers_grouped.row_wise,
}


def contests(
    formats: Sequence[str] = tuple(FORMATS),
    shapes: Sequence[Shape] = SHAPES,
    *,
    peers: bool = False,
    device: str = "cuda",
) -> Iterator[Contest]:
    """Each of ``formats`` at each shape, with equal groups and with skewed ones, on random normal
    numbers; beside one product of as many rows and torch's bf16, and beside the peers."""
    for groups, m, n, k in shapes:
        for kind, sizes in SIZES.items():
            x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
            w = torch.randn(groups, n, k, device=device, dtype=torch.bfloat16)
            given = x, w, sizes(groups, m)
            for name in formats:
                every: dict[str, Prepare] = {
                    OURS: partial(_ours, name),
                    "blockscale, one product": partial(_one, name),
                    BASELINE: peers_grouped.bf16,
                    **(_PEERS if peers and name == "fp8_block" else {}),
                }
                where = Where(f"{groups} groups, {kind}", name, m, n, k)
                yield Contest(where, {who: partial(each, *given) for who, each in every.items()})
