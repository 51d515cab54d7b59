"""Where the rows lie that a GPU's kernel writes of forms, and who may look at forms at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from blockscale.debug import form_kernels, form_rows
from blockscale.debug.form_rows import FormRows
from blockscale.debug.watch import _Seen

PARTS: Any = None


class Writes:
    """A plan that keeps the rows that it is to write."""

    def __init__(self) -> None:
        self.places, self.picks = torch.zeros(2, dtype=torch.int32), 2
        self.rows: list[tuple[Tensor, int]] = []

    def __call__(self, x: Tensor | None, parts: Any, row: tuple[Tensor, int]) -> None:
        time.sleep(0.001)  # a launch lets other threads go on
        self.rows.append(row)


def test_streams_share_no_rows(monkeypatch):
    """One stream makes rows zeros, and does not wait for what another one has written."""
    plan, rows = Writes(), FormRows()
    way: Any = SimpleNamespace(plan=plan)
    for i, stream in enumerate([7, 8, 7]):
        monkeypatch.setattr(form_rows, "_stream", lambda device, stream=stream: stream)
        rows.add(i, way, None, PARTS)
    (first, zero), (other, none), (again, one) = plan.rows
    assert first is again
    assert first is not other
    assert (zero, none, one) == (0, 0, 1)


def test_threads_share_no_row():
    plan, rows = Writes(), FormRows()
    way: Any = SimpleNamespace(plan=plan)

    def add(number: int, x: Tensor | None, form: Any) -> bool:
        rows.add(number, way, x, form)
        return True

    kernels: Any = SimpleNamespace(add=add)
    seen = _Seen(kernels)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: seen.add(str(i), "weights", None, {"fprop": PARTS}), range(64)))
    assert sorted(which for _, which in plan.rows) == list(range(64))


def test_few_ways_are_remembered(monkeypatch):
    """Each keeps a launch, and lengths of sequences may be new in each step."""
    monkeypatch.setattr(form_kernels, "_LIMIT", 3)
    monkeypatch.setattr(form_kernels, "_find_way", lambda x, form, parts: None)
    kernels = form_kernels.FormKernels()
    for _ in range(10):
        made: Any = form_kernels.Made(object(), PARTS, -1)
        assert not kernels.add(0, None, made)
    assert len(kernels._ways) <= 3
