"""What choosers and launches know of a GPU, and what is said of those without kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = [
    "CLUSTERS",
    "GPUS",
    "SHARED",
    "Gpu",
    "Unsupported",
    "arch_of",
    "dram_rate",
    "no_kernels",
]


class Unsupported(ValueError):
    """There is no kernel for a call, and why."""


#: Bytes of shared memory that a CTA may have, or several of a multiprocessor together.
SHARED = 227 << 10

#: By their CTAs, clusters that run at once on an H200, if a CTA fills a multiprocessor: a cluster
#: lies in one part of the chip.
_H200 = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 8: 15}

#: CTAs that a cluster may have.
CLUSTERS = tuple(_H200)


def _build(config: Any) -> Callable[..., Any]:
    from .compile_cache import build  # what it imports takes time, and a CPU needs none of it

    return build(config)


@dataclass(frozen=True, slots=True, eq=False)  # the same one is the same value: quick to look up
class Gpu:
    """A GPU, as choosers see it.

    >>> GPUS["sm_90a"].max_active_clusters(2)
    66

    Attributes:
        arch: the target that kernels are compiled for.
        multiprocessors: that it has.
        dram_rate: bytes that its memory moves in a nanosecond, at most.
        load: makes of a configuration a kernel that runs on it; for the emulator where it is left
            out.
    """

    arch: str
    multiprocessors: int
    dram_rate: float
    load: Callable[[Any], Callable[..., Any]] = _build

    def max_active_clusters(self, ctas: int) -> int:
        """Clusters of so many CTAs, each of which fills a multiprocessor, that run at once: of an
        H200 as measured, of a smaller chip in proportion."""
        return _H200[ctas] * self.multiprocessors // _H200[1]


#: By target, what kernels are chosen for where there is no such GPU: an H200, a B200, a B300.
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "sm_90a": Gpu("sm_90a", 132, 4814),
        "sm_100a": Gpu("sm_100a", 148, 8000),
        "sm_103a": Gpu("sm_103a", 148, 8000),
    }
)


def arch_of(major: int, minor: int) -> str:
    """The target for a compute capability, with the letter that unlocks its own features."""
    return f"sm_{major}{minor}" + "a" * (major in (9, 10))


def dram_rate(ordinal: int) -> float:
    """Bytes that the memory of CUDA's device of this number moves in a nanosecond: two bits of each
    line of the bus in a cycle."""
    from cuda.bindings import driver  # CuTe DSL needs it, too

    def answer(error: Any, *values: Any) -> Any:
        if error:
            raise RuntimeError(f"CUDA's driver says {error.name} of device {ordinal}")
        return values[0] if values else None

    asked = driver.CUdevice_attribute
    answer(*driver.cuInit(0))  # which JAX or torch has done, as a rule
    device = answer(*driver.cuDeviceGet(ordinal))
    kilohertz, bits = (
        answer(*driver.cuDeviceGetAttribute(what, device))
        for what in (
            asked.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
            asked.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
        )
    )
    return float(2 * kilohertz * 1e-6 * bits / 8)


# What products need of an architecture's own features, and what ptxas of CUDA 13.0 says of their
# PTX, by target.
_WGMMA = "FP8 products (wgmma)"
_TCGEN05 = "block-scaled products (tcgen05.mma of kind::mxf4nvf4 with scale_vec::4X, and its like)"
_LOCKED = {
    r"sm_90": (_WGMMA, "Instruction 'wgmma.fence'"),
    r"sm_10[03]": (_TCGEN05, "Feature '.cta_group::1'"),
    r"sm_10[03]f": (_TCGEN05, "Feature '.scale_vec::4X'"),
}
_LETTER = (
    "{what} are features of the architecture-specific target, {own}. The chip has them, and the "
    'letter a unlocks them: without it ptxas stops with "{missing} not supported on .target '
    "'{arch}'\". Choose {own}"
)


def no_kernels(arch: str, known: Iterable[str], what: str = "kernels are compiled for") -> str:
    """Why there is nothing for ``arch``, though there is for those ``known``, and what to do."""
    *most, last = known
    text = f"{what} {', '.join(most)} and {last}"
    own = f"{arch.rstrip('af')}a"
    for pattern, (needed, missing) in _LOCKED.items():
        if re.fullmatch(pattern, arch) and own in (*most, last):
            return f"{text}; {_LETTER.format(what=needed, missing=missing, arch=arch, own=own)}"
    if re.fullmatch(r"sm_12\d[af]?", arch):
        return f"{text}; a GPU of this name has neither tcgen05 nor Tensor Memory"
    return text
