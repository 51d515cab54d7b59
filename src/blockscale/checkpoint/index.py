"""The index of a checkpoint that lies in several files: which tensor is in which."""

from __future__ import annotations

from pathlib import Path

from .header import parse_json

__all__ = ["read_index"]


def read_index(path: Path) -> dict[str, str] | None:
    """Tensor -> file, of the checkpoint that a file is one of; None where nothing says that."""
    for index in sorted(path.parent.glob("*.safetensors.index.json")):
        try:
            content = parse_json(index.read_bytes())
        except ValueError as error:
            raise ValueError(f"source: its index {index}: {error}; fetch it again") from None
        places = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(places, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in places.values()
        ):
            raise ValueError(f"source: its index {index} has no weight_map; fetch it again")
        if path.name in places.values():
            return places
    return None
