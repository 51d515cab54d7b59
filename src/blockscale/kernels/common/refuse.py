"""What a configuration says when no kernel is made so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["refuse"]


def refuse(config: Any, wrong: Mapping[str, Any]) -> None:
    """Raise ValueError for the first field of ``config`` of which ``wrong`` is true."""
    for name, bad in wrong.items():
        if bad:
            given = getattr(config, name)
            raise ValueError(f"{name}: got {given}; no kernel is made so: {config}")
