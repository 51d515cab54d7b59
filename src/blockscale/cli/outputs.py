"""Files that a command will write."""

from __future__ import annotations

import os
from pathlib import Path

from ..checks import check_target

__all__ = ["check_output"]


def check_output(argument: str, path: Path | None, suffix: str = "") -> None:
    """Raise, before anything is computed, where ``path`` cannot be written; None: none is wanted.

    ValueError where it does not end in ``suffix``, which says what is written.
    """
    if path is None:
        return
    if suffix and path.suffix.lower() != suffix:
        raise ValueError(f"{argument}: {path} does not end in {suffix}; name it so")
    check_target(argument, path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{argument}: {path} must not be written; choose another place")
