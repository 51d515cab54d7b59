"""Examples are found from the repository's root, and the help for tests of kernels beside them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests" / "kernels")]

from kernel_code import keep_code  # noqa: E402

__all__ = ["keep_code"]
