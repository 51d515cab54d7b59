"""Help for the tests of kernels."""

from __future__ import annotations

import pytest

from blockscale.emulator.hostcode import settings


@pytest.fixture
def keep_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled functions have their machine code, too."""
    monkeypatch.setattr(settings(), "keep_cubin", True)
