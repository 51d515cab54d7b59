"""Help for tests of Blackwell's products of groups: operands, their products in the tensor cores'
own arithmetic, a kernel in the emulator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from sm100_inputs import Operand, launched, operand, product, rounded, tiles
from torch import Tensor

from blockscale.dtypes import BFLOAT16, to_torch
from blockscale.formats import get_format, padded_groups
from blockscale.kernels.sm100.config import Config
from blockscale.layouts import Grouped, get_layout

__all__ = [
    "PAIR",
    "Columns",
    "Rows",
    "check_columns",
    "check_random",
    "check_rows",
    "columns",
    "config",
    "rows",
    "same",
    "with_offsets",
]

PAIR = {"ctas": 2, "cluster": (2, 1)}

_TCGEN05 = get_layout("tcgen05")


@dataclass(frozen=True)
class Rows:
    """Rows of A in groups of some ``sizes``, or the first rows of equal shares, and a matrix B of
    each. ``offsets``: what the kernel is given; what the sizes make, by default."""

    a: Operand
    bs: list[Operand]
    sizes: tuple[int, ...]
    masked: bool = False
    offsets: Tensor | None = None

    @property
    def ends(self) -> Tensor:
        return torch.tensor(list(accumulate(self.sizes)), dtype=torch.int32)

    @property
    def capacity(self) -> int:
        return len(self.a.codes) // len(self.sizes)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        if self.masked:
            return [(i * self.capacity, i * self.capacity + n) for i, n in enumerate(self.sizes)]
        return list(pairwise([0, *self.ends.tolist()]))

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """Each group's begin with a tile."""
        groups, capacity = len(self.sizes), self.capacity
        if self.masked:
            parts = [_TCGEN05.swizzle(part) for part in self.a.scales.split(capacity)]
            a = tiles(torch.cat(parts), groups * (-(-capacity // 128) * 128))
        else:
            layout = Grouped(_TCGEN05)
            a = layout.swizzle(self.a.scales, self.ends)
            a = tiles(a, layout.padded_rows(len(self.a.codes), groups))
        n = -(-len(self.bs[0].codes) // 128) * 128
        return a, tiles(torch.cat([b.scale for b in self.bs]), n * groups)

    def product(self, dtype: torch.dtype, untouched: Tensor | None = None) -> Tensor:
        """Zeros after the last group; or what is ``untouched``, of masked groups."""
        out = torch.zeros(len(self.a.codes), len(self.bs[0].codes), dtype=dtype)
        out = out if untouched is None else untouched.clone()
        for (start, end), b in zip(self.bounds, self.bs, strict=True):
            if start < end:
                rows = slice(start, end)
                a = Operand(self.a.format, self.a.codes[rows], self.a.scales[rows])
                out[rows] = rounded(product(a, b), dtype)
        return out

    def emulated(self, config: Config, *start: Tensor, supergroup: int = 2, **how) -> Tensor:
        """What the kernel leaves; arguments of ``launched``."""
        given = torch.tensor(self.sizes, dtype=torch.int32) if self.masked else self.ends
        groups = given if self.offsets is None else self.offsets, supergroup
        shape = len(self.a.codes), len(self.bs[0].codes)
        data = self.a.data, torch.cat([b.data for b in self.bs])
        return launched(config, shape, data, self.scales, *start, groups=groups, **how)


@dataclass(frozen=True)
class Columns:
    """Groups of columns of A (M, K) and B (N, K), and ``rest`` columns that belong to none."""

    a: list[Operand]
    b: list[Operand]
    rest: int = 0
    offsets: Tensor | None = None

    @property
    def ends(self) -> Tensor:
        sizes = [x.codes.shape[1] for x in self.a]
        return torch.tensor(list(accumulate(sizes)), dtype=torch.int32)

    def product(self, dtype: torch.dtype, start: Tensor | None = None) -> Tensor:
        """Of all groups, one below the other, added to ``start``."""
        m, n = len(self.a[0].codes), len(self.b[0].codes)
        none = torch.zeros(m, n, dtype=dtype)
        starts = [None] * len(self.a) if start is None else list(start.split(m))
        return torch.cat(
            [
                rounded(product(a, b), dtype, start=held)
                if a.codes.shape[1]
                else none
                if held is None
                else held
                for a, b, held in zip(self.a, self.b, starts, strict=True)
            ]
        )

    def emulated(self, config: Config, *start: Tensor, supergroup: int = 2, **how) -> Tensor:
        """What the kernel leaves; arguments of ``launched``."""
        ends = self.ends
        shape = len(self.a) * len(self.a[0].codes), len(self.b[0].codes)
        both = [self._apart(each) for each in (self.a, self.b)]
        groups = ends if self.offsets is None else self.offsets, supergroup
        data = [x.data for x in both]
        scales = [tiles(x.scale, len(x.codes)) for x in both]
        return launched(config, shape, data, scales, *start, groups=groups, **how)

    def _apart(self, parts: list[Operand]) -> Operand:
        """Moved apart, with zeros between them."""
        name, ends = parts[0].format, self.ends.tolist()
        block = get_format(name).block_size
        length = padded_groups(ends[-1] + self.rest, len(parts))
        codes = torch.zeros(len(parts[0].codes), length, dtype=torch.uint8)
        scales = torch.zeros(len(codes), length // block, dtype=torch.uint8)
        for i, (part, begin) in enumerate(zip(parts, [0, *ends[:-1]], strict=True)):
            first = (begin // 128 + i) * 128
            codes[:, first : first + part.codes.shape[1]] = part.codes
            scales[:, first // block :][:, : part.scales.shape[1]] = part.scales
        return Operand(name, codes, scales)


def rows(
    formats: tuple[str, str],
    sizes: Sequence[int],
    n: int,
    k: int,
    rest: int = 0,
    capacity: int = 0,
) -> Rows:
    """Any codes; with ``capacity`` groups are masked."""
    m = capacity * len(sizes) if capacity else sum(sizes) + rest
    bs = [operand(formats[1], n, k, 2 + i) for i in range(len(sizes))]
    return Rows(operand(formats[0], m, k, 1), bs, tuple(sizes), bool(capacity))


def columns(
    formats: tuple[str, str], sizes: Sequence[int], m: int, n: int, rest: int = 0
) -> Columns:
    """Any codes."""
    each = [
        [operand(name, high, size, 10 * i + seed) for i, size in enumerate(sizes)]
        for seed, (name, high) in enumerate(zip(formats, (m, n), strict=True))
    ]
    return Columns(*each, rest)


def with_offsets(given: Rows | Columns, *offsets: int) -> Rows | Columns:
    """The same, of which the kernel is told something else."""
    return replace(given, offsets=torch.tensor(offsets, dtype=torch.int32))


def config(formats: tuple[str, str], grouping: str, dtype=BFLOAT16, **fields) -> Config:
    return Config(*formats, dtype, grouping=grouping, **{"stages": 3, **fields})


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To the bit, but for NaNs, which are all alike."""
    return torch.equal(got.nan_to_num(nan=3e38), want.nan_to_num(nan=3e38))


def check_rows(config: Config, given: Rows, **how) -> None:
    dtype = to_torch(config.out_dtype)
    start = ()
    if given.masked:  # rows that are not there keep what they had
        shape = len(given.a.codes), len(given.bs[0].codes)
        start = (torch.full(shape, 7.0, dtype=dtype),)
    assert same(given.emulated(config, *start, **how), given.product(dtype, *start))


def check_columns(config: Config, given: Columns, **how) -> None:
    dtype = to_torch(config.out_dtype)
    start = (start_of(given, dtype),) if config.accumulate else ()
    assert same(given.emulated(config, *start, **how), given.product(dtype, *start))


def start_of(given: Columns, dtype: torch.dtype) -> torch.Tensor:
    shape = len(given.a) * len(given.a[0].codes), len(given.b[0].codes)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def check_random(rng: random.Random, seed: int) -> bool:
    """Whether a kernel of random groups leaves the right bits, in some order of completion."""
    count = rng.choice([1, 2, 5, 34])
    sizes = [rng.choice([0, rng.randrange(8), rng.randrange(300 // count)]) for _ in range(count)]
    formats = rng.choice([("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4")])
    n, k = 8 * rng.randrange(1, 40), 32 * rng.randrange(1, 12)
    how = {
        "completion": rng.choice(["eager", "late", "random"]),
        "seed": seed,
        "supergroup": rng.choice([1, 2, 7]),
    }
    grouping, fields = rng.choice(["m", "masked", "k"]), rng.choice([{}, PAIR])
    found = config(formats, grouping, **fields)
    if grouping == "k":
        even = [size // 2 * 2 for size in sizes]  # of 4 bits, two are a byte
        check_columns(found, columns(formats, even, rng.randrange(1, 200), n, 5), **how)
    elif grouping == "masked":
        check_rows(found, rows(formats, sizes, n, k, capacity=max(*sizes, 1, 1)), **how)
    else:
        check_rows(found, rows(formats, sizes, n, k, rng.randrange(9)), **how)
    return True
