"""Checks of arguments that several calls take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

__all__ = ["check_axis", "check_flag", "choose"]

_AXES = {"-1": -1, "-2": -2}

T = TypeVar("T")


def check_flag(name: str, value: object) -> None:
    """TypeError unless it is True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{name}: got {value!r}; expected True or False")


def choose(what: str, given: object, known: Mapping[str, T]) -> T:
    """``known[given]``, or a ValueError that names the argument and lists what it may be."""
    try:
        return known[given]  # type: ignore[index]
    except (KeyError, TypeError):
        names = ", ".join(repr(k) for k in known)
        raise ValueError(f"{what}: got {given!r}; choose one of {names}") from None


def check_axis(axis: int) -> int:
    """-1 or -2; anything else is a ValueError."""
    return choose("axis (of the contraction, counted from the end)", str(axis), _AXES)
