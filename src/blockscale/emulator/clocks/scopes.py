"""How strong an access is, and for whom: PTX ISA 8.4 to 8.7.

How an access is made stands in one byte, its *code*: its scope (0: it is weak), whether it goes
through the asynchronous proxy, and how wide it is if it is strong. Two strong accesses to one byte
are morally strong (8.7) if the scope of each includes the thread of the other, they go through the
same proxy, and they overlap completely, which those of one width do, for they are aligned.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "ASYNC",
    "CLUSTER",
    "CTA",
    "GPU",
    "SCOPE",
    "SYS",
    "WEAK",
    "Place",
    "Strength",
    "alike",
    "morally_strong",
    "needed",
    "scope_between",
    "scope_of",
    "strength",
    "width_of",
    "width_of_code",
]

#: Scopes of accesses; a wider one includes a narrower one.
WEAK, CTA, CLUSTER, GPU, SYS = range(5)
SCOPE, ASYNC = 7, 8  # of a code: the bits of its scope, and that of the proxy
_SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "gl": GPU, "sys": SYS}


class Place(NamedTuple):
    """Where a thread runs: the numbers of its CTA, cluster and device."""

    cta: int
    cluster: int
    device: int


@dataclass(frozen=True, slots=True)
class Strength:
    """Of a strong access.

    Attributes:
        scope: of the threads that it may synchronize with.
        width: bytes of each of its scalars: a vector is several operations (8.2.4).
        acquires, releases: whether it does so itself.
        updates: whether it is a read-modify-write, which hands on what was released before.
        returns: whether its read can be part of an acquire pattern: not that of red (8.11.1).
    """

    scope: int
    width: int
    acquires: bool = False
    releases: bool = False
    updates: bool = False
    returns: bool = True

    @property
    def code(self) -> int:
        """See above; without the proxy."""
        return self.scope | self.width.bit_length() << 4


def scope_of(parts: tuple[str, ...] | set[str], default: int) -> int:
    """The scope that is among the parts of an opcode."""
    return next((_SCOPES[part] for part in parts if part in _SCOPES), default)


def width_of(type: str) -> int:
    """Bytes of the scalars of a type: of .f16x2 these are two halves (8.2.5)."""
    return int(re.findall(r"\d+", type)[0]) // 8


def width_of_code(code: int) -> int:
    """Bytes of the scalars of a strong access."""
    return 1 << (code >> 4) - 1


def alike(code: Any, other: Any) -> Any:
    """Whether accesses with these codes differ at most in their scopes: one proxy, and one width,
    which weak ones do not have; numbers or arrays."""
    return (code ^ other) >> 3 == 0


def strength(parts: tuple[str, ...]) -> Strength | None:
    """Of a load, store or atomic; None if it is weak."""
    names = set(parts)
    updates = parts[0] in ("atom", "red")
    volatile = "volatile" in names  # relaxed at the scope of the system (8.4.2)
    if not (updates or volatile) and names.isdisjoint(("relaxed", "acquire", "release")):
        return None
    width = width_of(parts[-1])
    if volatile:
        return Strength(SYS, width)
    both = "acq_rel" in names
    acquires, releases = both or "acquire" in names, both or "release" in names
    return Strength(
        scope_of(parts, GPU), width, acquires, releases, updates, parts[0] != "red"
    )  # fmt: skip


def scope_between(one: Place, other: Place) -> int:
    """The narrowest scope of one thread that includes the other."""
    if one.cluster == other.cluster:
        return CTA if one.cta == other.cta else CLUSTER
    return GPU if one.device == other.device else SYS


def needed(same_cta: np.ndarray, same_cluster: np.ndarray, same_device: np.ndarray) -> np.ndarray:
    """The same of several."""
    return np.where(same_cluster, np.where(same_cta, CTA, CLUSTER), np.where(same_device, GPU, SYS))


def morally_strong(code: Any, other: Any, between: Any) -> Any:
    """Whether accesses with these codes to one byte are, by threads that such scopes are between;
    numbers or arrays."""
    return alike(code, other) & (np.minimum(code & SCOPE, other & SCOPE) >= between)
