"""Times of calls: on the GPU by events, with the L2 cache evicted before each; and on the host.
Each is the median of many."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Timer", "host_microseconds"]

_EVICTED = 256 << 20  # bytes read between calls: several times the largest L2
_CLOCK = 2.0e9  # cycles a second, at most


class Timer:
    """Times calls on the current CUDA device. Keeps 256 MiB there, to evict the cache with."""

    device = "cuda"

    def __init__(self) -> None:
        self._memory = torch.zeros(_EVICTED // 4, device=self.device)

    def evict(self) -> None:
        """Read so much that the L2 cache has nothing else, and nothing to be written back."""
        self._memory.sum()

    def microseconds(
        self,
        call: Callable[[], object],
        repeats: int = 30,
        ready: Callable[[], object] = lambda: None,
    ) -> float:
        """Median time of ``call``. The device waits until all calls are queued, so that only its
        own time counts. ``ready`` is called before each: what lets ranks begin together.
        """
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        self.evict()
        queued = time.perf_counter() - start
        torch.cuda.synchronize()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda._sleep(int(min(2 * repeats * queued + 1e-3, 0.5) * _CLOCK))
        for before, after in events:
            self.evict()
            ready()
            before.record()
            call()
            after.record()
        torch.cuda.synchronize()
        return 1e3 * statistics.median(before.elapsed_time(after) for before, after in events)

    def copy(self, nbytes: float, *, kernel: bool = False) -> float:
        """Time in which the device copies, reading and writing ``nbytes`` in all.

        ``kernel``: by torch's kernel for one operation an element, not by the driver's copy; of a
        few bytes the latter may take longer.
        """
        half: Tensor = torch.empty(int(nbytes) // 4, dtype=torch.int16, device=self.device)
        target = torch.empty_like(half)
        if kernel:
            return self.microseconds(lambda: torch.bitwise_not(half, out=target))
        return self.microseconds(lambda: target.copy_(half))


def host_microseconds(call: Callable[[], object], repeats: int = 2000, at_once: int = 100) -> float:
    """Median time until ``call`` returns to Python. The host waits for the device after each
    ``at_once`` of them, few enough that a stream takes them without making the host wait."""
    took = []
    for i in range(repeats):
        if i % at_once == 0:
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        took.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize()
    return statistics.median(took) / 1e3
