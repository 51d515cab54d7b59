"""What a watch tells of layers that launch plans: by the emulator's kernel, as on a CPU."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import blockscale as bs
from blockscale.kernels.watch.config import WatchConfig
from blockscale.nn import layer_plan
from stand_in import emulated

RECIPES = {
    "mxfp8": bs.Recipe("mxfp8"),
    "fp8_block": bs.Recipe("fp8_block"),
    "nvidia": bs.Recipe.nvfp4(),
}


def step(recipe: bs.Recipe, folder: Path, value: float = 1.0) -> list[dict[str, Any]]:
    """Lines of one watched step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64)).to(torch.bfloat16)
    bs.convert(model, recipe)
    x = torch.randn(80, 128).to(torch.bfloat16) * torch.logspace(-3, 1, 128).to(torch.bfloat16)
    x[40:50, :30] = 0
    x[70, 67] = value
    x.requires_grad_()
    with bs.debug.watch(model, out=folder) as files:
        model(x).float().square().mean().backward()
    return [json.loads(line) for line in files.jsonl.read_text().splitlines()]


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("name", "arch"),
    [("mxfp8", "sm_100a"), ("fp8_block", "sm_90a"), ("nvidia", "sm_100a")],
)
def test_as_on_a_cpu(name, arch, tmp_path, monkeypatch):
    """Lines differ in the last digit of one number at most, as sums of squares have other orders;
    those of gradients in more, as products have, too."""
    plans = []
    made = layer_plan.LayerPlan.__init__

    def counted(self, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        plans.append(self)

    monkeypatch.setattr(layer_plan.LayerPlan, "__init__", counted)
    with emulated(arch, quantizes=True) as launched:
        found = step(RECIPES[name], tmp_path / "gpu")
    assert len(plans) == 1
    watched = [config for config in launched if isinstance(config, WatchConfig)]
    assert len(watched) == len(found) == 6
    wanted = step(RECIPES[name], tmp_path / "cpu")
    for got, want in zip(found, wanted, strict=True):
        if got["tensor"] != "gradients":
            if want["sqnr_db"] is not None:  # else nobody has the values
                assert got.pop("sqnr_db") == pytest.approx(want.pop("sqnr_db"), rel=1e-12)
            assert got == want
        else:
            assert got.keys() == want.keys()
            assert got["compared"] == want["compared"]
            assert got["sqnr_db"] == pytest.approx(want["sqnr_db"], abs=0.3)


@pytest.mark.kernels
def test_nonfinite(tmp_path):
    """Is named as on a CPU."""
    with emulated("sm_90a", quantizes=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = step(RECIPES["mxfp8"], tmp_path, -math.inf)
    first = found[0]
    assert (first["module"], first["tensor"], first["product"]) == ("0", "activations", "fprop")
    assert first["first_nonfinite"] == [70, 67]
    assert first["first_nonfinite_value"] == "-inf"
    assert first["amax"] is None
    texts = [str(w.message) for w in caught if w.category is bs.debug.NonfiniteWarning]
    assert len(texts) == 1
    assert texts[0].startswith("step 0: activations of 0 for fprop have NaN or infinities in 1 of")
