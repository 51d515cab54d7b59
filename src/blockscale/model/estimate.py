"""The time of a launch: the highest of its walls, and a little of the next ones.

Walls are times that a launch would take if nothing else did: its tensor cores, its shared memory,
the L2 cache, memory, the latency of loads that too few stages hide, and launching it at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cache import Traffic, walk
from .counts import Launch
from .machine import Machine

__all__ = ["Estimate", "estimate"]

_STEPS = 30  # until clock and load agree


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of a launch on a machine that has nothing of it in its L2 cache.

    Attributes:
        microseconds: from launch to end.
        wall: the highest of ``walls``.
        walls: microseconds, by name.
        tflops: 10^12 operations a second.
        clock: GHz that the limit of power allows.
        tensor_share: of the cycles of all tensor cores in which they work.
        filled: share of the multiprocessors that have a tile, over all turns.
        traffic: bytes.
    """

    microseconds: float
    wall: str
    walls: dict[str, float]
    tflops: float
    clock: float
    tensor_share: float
    filled: float
    traffic: Traffic


def estimate(launch: Launch, machine: Machine, traffic: Traffic | None = None) -> Estimate:
    """An estimate of the time of ``launch`` on ``machine``. ``traffic``: where it is known.

    Raises ValueError where the machine does not multiply such numbers.
    """
    if launch.unit not in machine.flops:
        known = ", ".join(machine.flops)
        raise ValueError(f"unit: got {launch.unit!r}; the tensor cores of {machine.name}: {known}")
    traffic = traffic or walk(launch, machine)
    down, across = launch.clusters
    at_once = machine.multiprocessors // launch.blocks
    turns = -(-down * across // at_once)
    filled = down * across * launch.blocks / (turns * machine.multiprocessors)

    rows, columns = launch.tile
    tensor = launch.k_blocks * 2 * rows * columns * launch.block_k / machine.flops[launch.unit]
    storing = rows * columns * launch.out_bytes * (1 + launch.accumulate) / machine.store_rate
    loop = {
        "tensor cores": tensor,
        "shared memory": _shared_cycles(launch, machine),
    }
    hidden = (1 - launch.exposed) * storing
    cycles = {
        name: turns * (max(each, hidden) + launch.exposed * storing) for name, each in loop.items()
    }
    fixed = {
        "L2 cache": 1e6 * traffic.l2 / machine.l2_rate,
        "memory": 1e6 * traffic.memory / machine.memory_rate,
        "latency": turns * launch.k_blocks * _latency(traffic, machine) / launch.stages,
    }
    work = filled * turns * tensor
    clock = machine.clock
    for _ in range(_STEPS):
        own = {name: 1e6 * each / clock for name, each in cycles.items()}
        took = _blended([max(own.values()), *fixed.values()], machine.blend)
        load = 1e6 * work / clock / took
        allowed = machine.loaded_clock * load ** (-1 / 3)
        clock = (clock + min(machine.clock, allowed)) / 2
    walls = own | fixed | {"launch": machine.launch}
    took += machine.launch
    return Estimate(
        microseconds=took,
        wall=max(walls, key=lambda name: walls[name]),
        walls=walls,
        tflops=launch.flops / took / 1e6,
        clock=clock / 1e9,
        tensor_share=1e6 * work / clock / took,
        filled=filled,
        traffic=traffic,
    )


def _shared_cycles(launch: Launch, machine: Machine) -> float:
    """Of a tile. Storing that is hidden takes its share: what is stored passes twice."""
    rows, columns = launch.tile
    stored = (1 - launch.exposed) * 2 * rows * columns * launch.out_bytes
    return (launch.k_blocks * launch.shared_bytes + stored) / machine.shared_rate


def _latency(traffic: Traffic, machine: Machine) -> float:
    """Microseconds of a load, on average."""
    near, far = machine.latency
    return near + (far - near) * min(1.0, traffic.missed / traffic.read)


def _blended(walls: list[float], power: float) -> float:
    top = max(walls)
    total: float = sum((each / top) ** power for each in walls) ** (1 / power)
    return top * total
