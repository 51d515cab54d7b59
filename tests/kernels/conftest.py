"""Help for the tests of kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockscale.emulator.hostcode import settings


@pytest.fixture
def keep_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled functions have their machine code, too; and their PTX, wherever they are compiled:
    who compiles a kernel first does it for all tests."""
    for name, value in {"keep_cubin": True, "keep_ptx": True, "dump_dir": str(tmp_path)}.items():
        monkeypatch.setattr(settings(), name, value)
