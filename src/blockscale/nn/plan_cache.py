"""What layers launch, found once for calls alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["find", "planned"]

_LIMIT = 4096  # plans that are remembered
_plans: dict[Any, Any] = {}  # None: there is none

P = TypeVar("P")


def find(key: Any) -> Any:
    """The plan of this key, if it is known by now."""
    return _plans.get(key)


def planned(key: Any, make: Callable[[], P]) -> P | None:
    """What ``make`` makes, once for each key; None where kernels do not do all of it."""
    if key in _plans:
        return _plans.get(key)  # another thread may clear them
    try:
        plan = make()
    except (TypeError, ValueError):  # of what has to be rewritten first, or has no kernel
        plan = None
    if len(_plans) >= _LIMIT:
        _plans.clear()
    _plans[key] = plan
    return plan
