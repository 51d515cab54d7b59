"""Why mutants of foreign kernels survive, as in ``tests/emulator/mutation.py``."""

from __future__ import annotations

REASONS: dict[tuple[str, str], tuple[str, str]] = {}
