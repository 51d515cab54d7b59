"""A watch on a GPU: its kernel's numbers are those of torch operations on the same tensors."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_inputs import DEVICE, only_on
from torch import nn

import blockscale as bs
from blockscale.debug.form_kernels import FormKernels

only_on("sm_90a")

RECIPES = {
    "mxfp8": bs.Recipe("mxfp8"),
    "fp8_block": bs.Recipe("fp8_block"),
    "nvfp4": bs.Recipe("nvfp4"),
    "nvidia": bs.Recipe.nvfp4(),
    "ms_eden": bs.Recipe.nvfp4("ms_eden"),
}


def steps(recipe: bs.Recipe, folder: Path, spoilt: bool) -> list[dict[str, Any]]:
    """Lines of two watched steps."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
        x = torch.randn(2048, 1024) * torch.logspace(-3, 1, 1024)
    bs.convert(model, recipe)
    x = x.to(torch.bfloat16).requires_grad_()
    with torch.no_grad():
        x[:700, :300] = 0
        if spoilt:
            x[1234, 567] = math.inf
    with bs.debug.watch(model, out=folder) as files:
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                model(x).float().square().mean().backward()
    return [json.loads(line) for line in files.jsonl.read_text().splitlines()]


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_as_by_torch_operations(name, spoilt, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bs.debug.NonfiniteWarning)
        found = steps(RECIPES[name], tmp_path / "kernel", spoilt)
        monkeypatch.setattr(FormKernels, "add", lambda *args: False)
        wanted = steps(RECIPES[name], tmp_path / "torch", spoilt)
    assert len(found) == len(wanted) == 24
    for got, want in zip(found, wanted, strict=True):
        if want["sqnr_db"] is not None:  # sums of squares may be added up in another order
            assert got.pop("sqnr_db") == pytest.approx(want.pop("sqnr_db"), rel=1e-9)
        assert got == want
    assert any("first_nonfinite" in line for line in found) == spoilt
