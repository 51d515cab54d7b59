"""Kernels with their machine code and PTX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blockscale.emulator.host.hostcode import settings
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.builders import build_kernel

__all__ = ["built", "keep_code"]


@pytest.fixture
def keep_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled functions have their machine code, too; and their PTX, wherever they are compiled:
    who compiles a kernel first does it for all tests."""
    for name, value in {"keep_cubin": True, "keep_ptx": True, "dump_dir": str(tmp_path)}.items():
        monkeypatch.setattr(settings(), name, value)


def built(config: Any) -> Any:
    """The kernel; compiled again if the test that did it first keeps no code."""
    kernel = compile_cache.build(config)
    return kernel if kernel.__cubin__ else build_kernel(config)
