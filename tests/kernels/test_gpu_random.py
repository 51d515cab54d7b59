"""The GPU quantizers over two hundred random inputs, in the emulator: the reference's bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import check, nasty

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Family:
    """Inputs that one kernel takes, or two: rows alone have another one for few of them.

    ``columns`` are those to choose from; ``apart`` elements may lie between two rows.
    """

    inputs: int
    arch: str
    axes: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    scale_rounding: str
    nonfinite: str
    columns: Sequence[int]
    apart: int


BOTH = (-1, -2)
# The columns of a family agree in what decides on a kernel: whether TMA can load them, how wide
# stores of them are, and, compact, of their scales. Odd ones take many more instructions.
FAMILIES = {
    "both-tcgen05": Family(
        16, "sm_90a", BOTH, "tcgen05", BF16, "rceil", "propagate", range(16, 201, 16), 8
    ),
    "both-packed": Family(10, "sm_100a", BOTH, "packed", FP16, "even", "te", range(16, 129, 16), 8),
    "both-compact": Family(
        6, "sm_100a", BOTH, "compact", FP32, "floor", "te", (*range(17, 32, 2), 65, 83, 95), 2
    ),
    "rows-tcgen05": Family(
        30, "sm_100a", (-1,), "tcgen05", BF16, "rceil", "propagate", range(16, 201, 16), 8
    ),
    "rows-packed": Family(46, "sm_90a", (-1,), "packed", FP32, "even", "te", range(16, 201, 16), 4),
    "rows-compact": Family(
        70, "sm_90a", (-1,), "compact", FP16, "ceil", "propagate", (16, 32, 80, 96), 8
    ),
    "columns-compact": Family(
        12, "sm_90a", (-2,), "compact", FP32, "rceil", "te", range(16, 201, 16), 4
    ),
    "columns-tcgen05": Family(
        10, "sm_100a", (-2,), "tcgen05", FP16, "floor", "propagate", range(18, 201, 4), 4
    ),
}


def test_two_hundred():
    assert sum(family.inputs for family in FAMILIES.values()) == 200


def _input(family: Family, random: Random, rows: int, columns: int) -> Tensor:
    wide = columns + random.choice((0, family.apart))
    return nasty(rows, wide, family.dtype, seed=random.randrange(1 << 30))[:, :columns]


@pytest.mark.parametrize("name", FAMILIES)
def test_small(name):
    family, random = FAMILIES[name], Random(name)
    for _ in range(family.inputs):
        rows = random.randint(1, random.choice((16, 70)))
        x = _input(family, random, rows, random.choice(family.columns))
        _check(family, x, random.choice(("late", "eager", "random")))


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("both-tcgen05", 397, 400), ("rows-tcgen05", 257, 696), ("columns-tcgen05", 400, 306)],
)
def test_larger(name, rows, columns):
    family = FAMILIES[name]
    _check(family, _input(family, Random(rows), rows, columns), "random")


def _check(family: Family, x: Tensor, completion: str) -> None:
    check(
        x,
        "mxfp8",
        family.arch,
        family.axes,
        layout=family.layout,
        completion=completion,
        scale_rounding=family.scale_rounding,
        nonfinite=family.nonfinite,
    )
