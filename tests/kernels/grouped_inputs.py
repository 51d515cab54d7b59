"""Help for tests of products of grouped rows: operands, their product, a kernel in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from sm90_inputs import launched
from torch import Tensor

from blockscale import emulator as em
from blockscale.kernels.common import compile_cache
from blockscale.kernels.sm90.config import Config
from blockscale.layouts import get_layout

__all__ = [
    "Grouped",
    "assert_counted",
    "assert_groups_close",
    "caught",
    "emulated_groups",
    "grouped",
]


@dataclass(frozen=True)
class Grouped:
    """Rows (M, K) of fp8_1x128, weights (groups, N, K) of fp8_128x128, and the ends of groups."""

    a: Tensor
    a_scale: Tensor  # (M, K / 128)
    b: Tensor
    b_scale: Tensor
    offsets: Tensor

    @property
    def bounds(self) -> list[int]:
        return [0, *self.offsets.tolist()]

    def product(self) -> Tensor:
        """In fp64; zeros after the last group."""
        k, n = self.a.shape[1], self.b.shape[1]
        a = self.a.double() * self.a_scale.double().repeat_interleave(128, 1)[:, :k]
        wide = self.b_scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        b = self.b.double() * wide[:, :n, :k]
        out = torch.zeros(self.a.shape[0], n, dtype=torch.float64)
        for w, (start, end) in zip(b, pairwise(self.bounds), strict=True):
            out[start:end] = a[start:end] @ w.T
        return out

    def with_offsets(self, *offsets: int) -> Grouped:
        return replace(self, offsets=torch.tensor(offsets, dtype=torch.int32))


def grouped(sizes: Sequence[int], n: int, k: int, rest: int = 0, spread: float = 2.0) -> Grouped:
    """Random; exponents of scales have deviation ``spread``."""
    generator = torch.Generator().manual_seed(sum(sizes) + n + k)
    groups, m, blocks = len(sizes), sum(sizes) + rest, -(-k // 128)

    def elements(*shape: int) -> Tensor:
        values = 100 * torch.randn(*shape, generator=generator)
        return values.clamp(-448, 448).to(torch.float8_e4m3fn)

    def scales(*shape: int) -> Tensor:
        return torch.exp2(torch.randn(*shape, generator=generator) * spread)

    return Grouped(
        elements(m, k),
        scales(m, blocks),
        elements(groups, n, k),
        scales(groups, -(-n // 128), blocks),
        torch.tensor(sizes).cumsum(0).int(),
    )


def emulated_groups(
    config: Config,
    given: Grouped,
    *,
    completion: str = "late",
    seed: int = 0,
    multiprocessors: int = 3,
    supergroup: int = 4,
    start: Tensor | None = None,
) -> Tensor:
    """What the kernel leaves in poisoned memory, or in that of ``start``; nothing around it may
    change."""
    m, n = given.a.shape[0], given.b.shape[1]
    operands = (
        given.a.view(torch.uint8),
        get_layout("sm90").swizzle(given.a_scale),
        given.b.view(torch.uint8).flatten(0, 1),
        given.b_scale,
    )
    rest = None, None, given.offsets, supergroup, multiprocessors
    return launched(config, (m, n), operands, start, rest, completion, seed)


def caught(check: Callable[[], None]) -> bool:
    """Whether a check finds fault with kernels that are compiled anew."""
    compile_cache.build.cache_clear()
    try:
        check()
    except (AssertionError, em.PtxError):
        return True
    finally:
        compile_cache.build.cache_clear()
    return False


def assert_groups_close(got: Tensor, given: Grouped) -> None:
    """Each group's error is that of rounding to bf16, and of sums of FP8; the rest is zero."""
    want = given.product()
    assert bool((got[given.bounds[-1] :] == 0).all())
    for start, end in pairwise(given.bounds):
        _assert_rows_close(got, want, slice(start, end))


def assert_counted(got: Tensor, given: Grouped, counts: Sequence[int], untouched: float) -> None:
    """The same of the first rows of equal groups, as ``counts`` has them; others are untouched."""
    capacity = given.a.shape[0] // len(counts)
    ends = [capacity * (i + 1) for i in range(len(counts))]
    want = given.with_offsets(*ends).product()
    for i, count in enumerate(counts):
        rows = slice(i * capacity, i * capacity + count)
        assert bool((got[rows.stop : ends[i]] == untouched).all()), i
        _assert_rows_close(got, want, rows)


def _assert_rows_close(got: Tensor, want: Tensor, rows: slice) -> None:
    if rows.start < rows.stop:
        error = (got[rows].double() - want[rows]).norm() / want[rows].norm()
        assert error <= (2**-8 / 3**0.5) * 1.1 + 3e-4, (rows, error)
