"""The index of a checkpoint that lies in several files: which tensor is in which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .header import parse_json

__all__ = ["INDEX", "find_index", "read_index"]

#: Names of indices.
INDEX = "*.safetensors.index.json"


def read_index(index: Path, argument: str) -> dict[str, Any]:
    """All that an index says; its ``weight_map`` is tensor -> file.

    Raises ValueError where it is damaged, or names files elsewhere.
    """
    try:
        content = parse_json(index.read_bytes())
    except ValueError as error:
        raise ValueError(f"{argument}: its index {index}: {error}; fetch it again") from None
    places = content.get("weight_map") if isinstance(content, dict) else None
    if (
        not places
        or not isinstance(places, dict)
        or not all(isinstance(file, str) and Path(file).name == file for file in places.values())
    ):
        raise ValueError(f"{argument}: its index {index} has no weight_map; fetch it again")
    assert isinstance(content, dict)
    return content


def find_index(file: Path, argument: str) -> dict[str, str] | None:
    """Tensor -> file, of the checkpoint that a file is one of; None where nothing says that."""
    for index in sorted(file.parent.glob(INDEX)):
        places: dict[str, str] = read_index(index, argument)["weight_map"]
        if file.name in places.values():
            return places
    return None
