"""What choosers take the GPUs to be that kernels are compiled for."""

from __future__ import annotations

__all__ = ["MULTIPROCESSORS"]

#: Of an H100 SXM and of an H200; of a B200.
MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}
