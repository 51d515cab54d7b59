"""``OUT.manifest.json``: how a file was made, checksums of what it holds, and what was lost."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .header import parse_json
from .reader import Reader

__all__ = ["VERSION", "manifest_path", "read_manifest", "stale_tensors", "write_manifest"]

VERSION = 2


def manifest_path(path: Path) -> Path:
    """Where the manifest of a file lies: ``OUT.manifest.json``."""
    return path.with_name(path.name + ".manifest.json")


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Whole, or not at all: it is on the disk before it has its name."""
    made = manifest_path(path)
    temporary = made.with_name(made.name + ".partial")
    with open(temporary, "wb") as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, made)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a file; None where there is none that can be read."""
    try:
        content = parse_json(manifest_path(path).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("manifest") != VERSION:
        return None
    tensors = content.get("tensors")
    if not isinstance(tensors, dict) or not all(isinstance(t, dict) for t in tensors.values()):
        return None
    return content


def stale_tensors(file: Reader, manifest: Mapping[str, Any]) -> list[str]:
    """Names of stored tensors whose bytes are not those that the manifest sums up.

    A header that is not the one it was made with makes all of them stale.
    """
    made = manifest.get("file")
    if not isinstance(made, dict) or made.get("header") != file.header_checksum():
        return list(file.header.tensors)
    sums = {
        name: digest
        for tensor in manifest["tensors"].values()
        if isinstance(tensor.get("checksums"), dict)
        for name, digest in tensor["checksums"].items()
    }
    return [name for name in file.header.tensors if sums.get(name) != file.checksum(name)]
