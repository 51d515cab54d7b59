"""Speed and memory of the steps of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Meter"]


class Meter:
    """Times laps of training steps. What happens while it is paused does not count.

    Of a GPU it also sees the most memory that tensors held at once, in bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._speeds: list[float] = []
        self._peak = 0
        self._spent = self._since = 0.0
        self._go()

    def lap(self, tokens: int) -> None:
        """``tokens`` were learnt from since the last lap, and the device is done with them."""
        now = time.perf_counter()
        self._speeds.append(tokens / (self._spent + now - self._since))
        self._spent, self._since = 0.0, now

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._see()
        self._spent += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._go()

    @property
    def tokens_per_second(self) -> float:
        """Median of the laps: the first ones may include what is compiled then."""
        return statistics.median(self._speeds)

    @property
    def peak_memory(self) -> int | None:
        self._see()
        return None if self._gpu is None else self._peak

    def state(self) -> dict[str, Any]:
        """What was measured, for ``restore``."""
        self._see()
        return {"speeds": list(self._speeds), "peak": self._peak}

    def restore(self, found: dict[str, Any]) -> None:
        self._speeds, self._peak = found["speeds"], found["peak"]

    def _go(self) -> None:
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
            torch.cuda.reset_peak_memory_stats(self._gpu)
        self._since = time.perf_counter()

    def _see(self) -> None:
        """Wait for the device and remember its peak, before something else raises it."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self._gpu))
