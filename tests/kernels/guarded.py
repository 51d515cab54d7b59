"""An output that shows what a kernel wrote, and where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["guarded"]


@contextmanager
def guarded(shape: tuple[int, int], dtype: torch.dtype, start: Tensor | None) -> Iterator[Tensor]:
    """Poisoned memory, or a copy of ``start``, its rows apart; nothing between them may change."""
    (m, n), pad = shape, 16 // dtype.itemsize
    whole = torch.empty(m + 2, n + 2 * pad, dtype=dtype)
    whole.view(torch.uint8).fill_(0xA5)
    before = whole.clone()
    out = whole[1:-1, pad:-pad]
    if start is not None:
        out.copy_(start)
    yield out
    out.copy_(before[1:-1, pad:-pad])
    assert torch.equal(whole.view(torch.uint8), before.view(torch.uint8)), "written beside it"
