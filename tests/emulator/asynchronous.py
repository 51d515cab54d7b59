"""Run a kernel under every order of completion: all must give the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from blockscale import emulator as em

ORDERS = (("eager", 0), ("late", 0), *(("random", seed) for seed in range(4)))
FEW_ORDERS = ORDERS[:4]


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 128 bytes."""
    room = np.zeros(array.nbytes + 128, np.uint8)
    out = room[-room.ctypes.data % 128 :][: array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def devices(target: str, orders: Sequence[tuple[str, int]] = ORDERS) -> Iterator[em.Device]:
    for completion, seed in orders:
        yield em.Device(target, completion=completion, seed=seed, check="all,exit_stores")


def outcome(
    source: str,
    args: Sequence[Any],
    *,
    target: str = "sm_90a",
    grid: Any = 1,
    block: Any = 32,
    cluster: Any = None,
    shared: int = 0,
    orders: Sequence[tuple[str, int]] = ORDERS,
) -> list[np.ndarray]:
    """The arrays among ``args`` after kernel ``k``, in whatever order work completes.

    A function among ``args`` gets the arrays before it and gives an argument: a tensor map.
    """
    first: list[np.ndarray] | None = None
    for device in devices(target, orders):
        given: list[Any] = []
        for arg in args:
            arg = aligned(arg) if isinstance(arg, np.ndarray) else arg
            given.append(arg(*given) if callable(arg) else arg)
        device.launch(source, "k", grid, block, given, cluster=cluster, shared=shared)
        arrays = [arg for arg in given if isinstance(arg, np.ndarray)]
        if first is None:
            first = arrays
        for one, other in zip(first, arrays, strict=True):
            assert one.tobytes() == other.tobytes(), "the order of completion changes the result"
    assert first is not None
    return first


def refusal(
    source: str,
    args: Sequence[Any],
    error: Any = em.PtxError,
    *,
    target: str = "sm_90a",
    orders: Sequence[tuple[str, int]] = ORDERS,
    **more: Any,
) -> list[em.PtxError]:
    """What kernel ``k`` is refused with, in each order of completion."""
    found = []
    for device in devices(target, orders):
        given: list[Any] = []
        for arg in args:
            arg = aligned(arg) if isinstance(arg, np.ndarray) else arg
            given.append(arg(*given) if callable(arg) else arg)
        with pytest.raises(error) as caught:
            device.launch(source, "k", more.get("grid", 1), more.get("block", 32), given,
                          cluster=more.get("cluster"), shared=more.get("shared", 0))  # fmt: skip
        found.append(caught.value)
    return found
