"""What calls alike have in common, found once: plans, and what checks have settled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["UNKNOWN", "attempt", "find", "keep", "planned"]

_LIMIT = 4096  # plans that are remembered
UNKNOWN = object()  # what was not looked for yet
_plans: dict[Any, Any] = {}  # None: there is none

P = TypeVar("P")


def find(key: Any) -> Any:
    """What is kept by this key, if it is known by now."""
    return _plans.get(key)


def planned(key: Any, make: Callable[[], P]) -> P | None:
    """What ``make`` makes, once for each key; None where kernels do not do all of it."""
    found: Any = _plans.get(key, UNKNOWN)  # once: another thread may clear them
    return keep(key, attempt(make)) if found is UNKNOWN else found


def attempt(make: Callable[..., P], *args: Any) -> P | None:
    """What ``make`` makes of ``args``; None where kernels do not do all of it."""
    try:
        return make(*args)
    except (TypeError, ValueError):  # of what has to be rewritten first, or has no kernel
        return None


def keep(key: Any, plan: P) -> P:
    """``plan``, by the key from now on."""
    if len(_plans) >= _LIMIT:
        _plans.clear()
    _plans[key] = plan
    return plan
