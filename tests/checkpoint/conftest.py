"""Files to work on, and the command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file
from small_file import Ran, tensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    save_file(tensors(), path, {"format": "pt", "made by": "a test"})
    return path


@pytest.fixture
def blockscale(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """``blockscale ARGUMENTS``, in this process."""
    from blockscale.cli import main

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["blockscale", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code
        return Ran(code if isinstance(code, int) else 1, captured.out, captured.err)

    return run
