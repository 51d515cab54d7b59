"""Python sources as text: what the machine's site-packages hold, split by package."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from .data import Text, read_text

__all__ = ["SITE_PACKAGES", "choose_text", "python_sources"]

#: In the place of a file's name: the sources of what is installed here.
SITE_PACKAGES = "site-packages"

#: At least a twentieth of the text is held out, in packages that are no larger than that.
_HELD_OUT = 20

_FOLDERS = ("site-packages", "dist-packages")


def choose_text(data: str | None, device: str) -> Text:
    """The file that ``data`` names, or ``"site-packages"``; None: what suits the device.

    Raises ValueError as :func:`read_text` and :func:`python_sources`.
    """
    if data is None and device != "cpu":
        data = SITE_PACKAGES
    if data == SITE_PACKAGES:
        return python_sources(_site_packages())
    return read_text(None if data is None else Path(data))


def python_sources(folders: Sequence[Path]) -> Text:
    """Every ``.py`` file below ``folders``, a zero byte between files, split by package.

    A package is what lies directly in one of the folders. In the order of a hash of their names
    packages are held out, so that the same packages are split alike everywhere. A file of a package
    to learn from that has the bytes of one held out (a copy that came along) is left out.

    Raises ValueError where there are not two packages to tell apart.
    """
    packages = _read(folders)
    sizes = {name: sum(map(len, files)) for name, files in packages.items()}
    wanted = sum(sizes.values()) / _HELD_OUT
    held_out: set[str] = set()
    for name in sorted(packages, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if sum(sizes[n] for n in held_out) >= wanted:
            break
        if sizes[name] <= wanted:
            held_out.add(name)
    if not held_out:
        where = ", ".join(map(str, folders))
        raise ValueError(
            f"data: {where} holds {len(packages)} Python package(s), none of them small enough to "
            "be held out; name a text file"
        )
    tested = {file for name in held_out for file in packages[name]}
    train = [f for name in packages if name not in held_out for f in packages[name]]
    return Text(
        f"Python sources of {len(packages)} packages",
        b"\0".join(file for file in train if file not in tested),
        b"\0".join(file for name in packages if name in held_out for file in packages[name]),
        f"packages {', '.join(sorted(held_out))}",
    )


def _read(folders: Iterable[Path]) -> dict[str, list[bytes]]:
    """The files of each package, in the order of their names."""
    found: dict[str, list[bytes]] = {}
    for folder in folders:
        for path in sorted(p for p in folder.rglob("*.py") if p.is_file()):
            name = path.relative_to(folder).parts[0].removesuffix(".py")
            found.setdefault(name, []).append(path.read_bytes())
    return dict(sorted(found.items()))


def _site_packages() -> list[Path]:
    """The folders of installed packages that Python looks in; that of torch is always one."""
    found = [path for path in map(Path, sys.path) if path.name in _FOLDERS]
    found.append(Path(torch.__file__).parents[1])
    return list(dict.fromkeys(path.resolve() for path in found))
