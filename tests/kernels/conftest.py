"""Help for the tests of kernels."""

from __future__ import annotations

from kernel_code import keep_code

__all__ = ["keep_code"]
