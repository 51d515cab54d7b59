"""Files to work on, and the command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor


def tensors() -> dict[str, Tensor]:
    """A little of everything."""
    g = torch.Generator().manual_seed(0)
    return {
        "embed_tokens.weight": torch.randn(96, 128, generator=g),
        "layers.0.attn.weight": torch.randn(260, 256, generator=g),
        "layers.0.attn.bias": torch.cat([torch.randn(256, generator=g), torch.ones(4)]),
        "layers.0.experts.weight": torch.randn(3, 130, 128, generator=g).bfloat16(),
        "layers.0.mlp.weight": torch.randn(64, 384, generator=g).half(),
        "layers.0.odd.weight": torch.randn(32, 100, generator=g),
        "norm.weight": torch.randn(2, 128, generator=g),
        "position_ids": torch.arange(512).reshape(4, 128),
        "mask": torch.ones(3, dtype=torch.bool),
        "nothing": torch.empty(0, 128),
    }


QUANTIZED = ("layers.0.attn.weight", "layers.0.experts.weight", "layers.0.mlp.weight")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    save_file(tensors(), path, {"format": "pt", "made by": "a test"})
    return path


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


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
