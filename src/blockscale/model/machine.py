"""What the model knows of a GPU: data sheets, measurements, and constants fitted to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..kernels.common.gpu import GPUS

__all__ = ["B200", "FITTED", "H200", "MACHINES", "Machine"]

_GHZ = 1e9
_KEPT = 0.6  # of the L2 cache: fits the hit rates that ncu saw at five products on an H200


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU. Rates of a multiprocessor are a cycle's; times are in microseconds.

    Attributes:
        flops: of a multiprocessor's tensor cores, by what they multiply.
        shared_rate: bytes that shared memory reads or writes.
        l2_bytes: of A and B that stay in the cache, in ``l2_parts`` that each keep what their
            multiprocessors read: less than it has, as what both read is there twice.
        load_sharers: multiprocessors of a TPC whose loads of the same bytes become one, where
            their CTAs are alone in their clusters; 1 where that has not been measured.
        memory_rate: bytes a second that a copy reaches.
        latency: until a stage that is asked for is there, from the L2 cache and from memory.
        clock: cycles a second, where power does not limit it.
        loaded_clock: what the limit of power leaves if the tensor cores work in every cycle. Power
            goes with work times the cube of the clock.
        l2_rate: bytes a second that the L2 cache gives all multiprocessors; bytes that go to
            several at once count once.
        store_rate: bytes of the output that leave registers in a cycle, if nothing is multiplied.
        launch: launch, first loads and last stores.
        blend: walls w of similar height add up to (sum of w^blend)^(1 / blend).
    """

    name: str
    multiprocessors: int
    flops: Mapping[str, int]
    shared_rate: int
    l2_bytes: int
    l2_parts: int
    load_sharers: int
    memory_rate: float
    latency: tuple[float, float]
    clock: float
    loaded_clock: float
    l2_rate: float
    store_rate: float
    launch: float
    blend: float


#: Fitted to the times of kernels, by benchmarks/model_error.py.
FITTED = ("clock", "loaded_clock", "l2_rate", "store_rate", "launch", "blend")

#: NVIDIA's data sheet of the H200 SXM (1979 TFLOP/s of dense FP8, which is 8192 a cycle and
#: multiprocessor at 1.83 GHz; 4.8 TB/s). Copies reach 4.26 TB/s.
#: Latencies are those that docs/ladder.md and the chooser of the mixed kernels work with.
H200 = Machine(
    name="H200",
    multiprocessors=GPUS["sm_90a"].multiprocessors,
    flops=MappingProxyType({"bf16": 4096, "fp8": 8192}),
    shared_rate=128,
    l2_bytes=int(_KEPT * (50 << 20)),
    l2_parts=2,
    load_sharers=2,
    memory_rate=4.26e12,
    latency=(0.5, 1.5),
    clock=1.865 * _GHZ,
    loaded_clock=1.604 * _GHZ,
    l2_rate=10.5e12,
    store_rate=32.3,
    launch=5.2,
    blend=4.6,
)

#: NVIDIA's data sheet of the HGX B200 (4.5 and 9 PFLOP/s of dense FP8 and FP4, which are 16384 and
#: 32768 a cycle and multiprocessor at 1.86 GHz; 8 TB/s). Assumed, for want of measurements: memory
#: reaches the share that it does on an H200; a multiprocessor gets as much of the L2 cache, and
#: shares loads within its cluster alone; clocks are to the data sheet's as on an H200; the other
#: constants are the H200's.
B200 = Machine(
    name="B200",
    multiprocessors=GPUS["sm_100a"].multiprocessors,
    flops=MappingProxyType({"fp8": 16384, "fp4": 32768}),
    shared_rate=128,
    l2_bytes=int(_KEPT * 126_000_000),
    l2_parts=2,
    load_sharers=1,
    memory_rate=8e12 * H200.memory_rate / 4.8e12,
    latency=H200.latency,
    clock=1.86 / 1.83 * H200.clock,
    loaded_clock=1.86 / 1.83 * H200.loaded_clock,
    l2_rate=H200.l2_rate * GPUS["sm_100a"].multiprocessors / H200.multiprocessors,
    store_rate=H200.store_rate,
    launch=H200.launch,
    blend=H200.blend,
)

#: By the architecture that kernels are compiled for.
MACHINES = MappingProxyType({"sm_90a": H200, "sm_100a": B200})
