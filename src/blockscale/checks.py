"""Checks of arguments that several calls take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["check_axis", "check_flag", "check_saved", "check_target", "choose", "reading"]

_AXES = {-1: -1, -2: -2}

T = TypeVar("T")


def check_flag(name: str, value: object) -> None:
    """TypeError unless it is True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{name}: got {value!r}; expected True or False")


def check_saved(values: object, known: Iterable[str]) -> None:
    """TypeError unless these are values by name, as ``to_dict()`` gives them; ValueError for names
    that are not ``known``."""
    if not isinstance(values, Mapping):
        raise TypeError(f"values: got {type(values).__name__}; expected what to_dict() gives")
    names = dict.fromkeys(known)
    for name in values:
        choose("values", name, names)


def choose(what: str, given: object, known: Mapping[Any, T]) -> T:
    """``known[given]``, or a ValueError that names the argument and lists what it may be."""
    try:
        return known[given]
    except (KeyError, TypeError):
        names = ", ".join(repr(k) for k in known)
        guess = f" (did you mean {close!r}?)" if (close := _closest(given, known)) else ""
        raise ValueError(f"{what}: got {given!r}; choose one of {names}{guess}") from None


def _closest(given: object, known: Iterable[object]) -> str | None:
    """The name that was meant, if one is nearly what was given."""
    if not isinstance(given, str):
        return None
    names = [name for name in known if isinstance(name, str)]
    return next(iter(get_close_matches(given.lower(), names, 1)), None)


def check_axis(axis: int) -> int:
    """-1 or -2; anything else is a ValueError."""
    return choose("axis (of the contraction, counted from the end)", axis, _AXES)


def check_target(name: str, path: Path) -> None:
    """OSError where no file can be made at ``path``, so that nothing is computed in vain."""
    if path.is_dir():
        raise IsADirectoryError(f"{name}: {path} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{name}: the directory {path.parent} does not exist; make it first"
        )


@contextmanager
def reading(name: str, path: Path) -> Iterator[None]:
    """Turn the errors of a file that cannot be read, or is no text, into a ValueError with the
    remedy."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{name}: cannot read {path} ({error.strerror}); name a readable file"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}: {path} is no text in UTF-8 ({error.reason}); name a file of plain text"
        ) from None
