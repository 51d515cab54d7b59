"""How strong an access is, and whom it reaches: PTX ISA 8.4 and 8.5."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["CLUSTER", "CTA", "GPU", "SYS", "WEAK", "Strength", "needed", "reach", "strength"]

#: How far an access reaches; a wider scope includes a narrower one.
WEAK, CTA, CLUSTER, GPU, SYS = range(5)
_SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "gl": GPU, "sys": SYS}


@dataclass(frozen=True, slots=True)
class Strength:
    """Of a strong access.

    Attributes:
        reach: its scope.
        acquires, releases: whether it does so itself.
        updates: whether it is a read-modify-write, which hands on what was released before.
        returns: whether its read can be part of an acquire pattern: not that of red (8.11.1).
    """

    reach: int
    acquires: bool = False
    releases: bool = False
    updates: bool = False
    returns: bool = True


def reach(parts: tuple[str, ...] | set[str], default: int) -> int:
    """The scope that is among the parts of an opcode."""
    return next((_SCOPES[part] for part in parts if part in _SCOPES), default)


def strength(parts: tuple[str, ...]) -> Strength | None:
    """Of a load, store or atomic; None if it is weak."""
    names = set(parts)
    updates = parts[0] in ("atom", "red")
    if "volatile" in names:  # relaxed at the scope of the system (8.4.2)
        return Strength(SYS)
    if not updates and names.isdisjoint(("relaxed", "acquire", "release")):
        return None
    both = "acq_rel" in names
    return Strength(
        reach(parts, GPU), both or "acquire" in names, both or "release" in names, updates,
        parts[0] != "red",
    )  # fmt: skip


def needed(same_cta: np.ndarray, same_cluster: np.ndarray, same_device: np.ndarray) -> np.ndarray:
    """The scope that two accesses must have to include each other's threads."""
    return np.where(same_cluster, np.where(same_cta, CTA, CLUSTER), np.where(same_device, GPU, SYS))
