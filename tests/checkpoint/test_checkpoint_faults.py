"""Folders that are odd: what they hold is read as it is meant, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import folders
import pytest
import torch
from folders import FILES, LAYER, QUANTIZED, weights
from safetensors.torch import load_file as their_load
from safetensors.torch import save_file
from torch import Tensor

import blockscale as bs
from blockscale import checkpoint
from conftest import Ran

Cli = Callable[..., Ran]
Q, K = QUANTIZED[:2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folders.make(tmp_path / "in")


def stored(folder: Path) -> dict[str, Tensor]:
    return {n: x for path in folder.glob("*.safetensors") for n, x in their_load(path).items()}


def change(folder: Path, of: Callable[[str, Tensor], Tensor | None]) -> None:
    """Each stored tensor made into another one; None takes it away."""
    for path in folder.glob("*.safetensors"):
        content = {name: of(name, x) for name, x in their_load(path).items()}
        save_file({name: x for name, x in content.items() if x is not None}, path)
        path.with_name(path.name + ".manifest.json").unlink(missing_ok=True)


def configure(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def own(folder: Path, state: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir()
    checkpoint.save_file(state, folder / "model.safetensors")
    quantization = {"quant_method": "blockscale"}
    (folder / "config.json").write_text(
        json.dumps({"dtype": "float32", "quantization_config": quantization, **config})
    )
    return folder


def test_each_matrix_with_its_global_scale(tmp_path: Path):
    """All were multiplied by the first one's."""
    x = torch.randn(3, 32, 64) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    scales = torch.stack([bs.quantize(each, "nvfp4").global_scale for each in x])
    q = bs.quantize(x, "nvfp4", global_scale=scales)
    source = own(tmp_path / "in", {"experts.weight": q})
    checkpoint.convert_folder(source, tmp_path / "out", "bf16")
    out = checkpoint.load_folder(tmp_path / "out")["experts.weight"]
    assert torch.equal(out, q.dequantize(torch.float32))
    checkpoint.save_file({"experts.weight": x}, tmp_path / "x.safetensors")
    path = source / "model.safetensors"
    (report,) = checkpoint.inspect_file(path, tmp_path / "x.safetensors").tensors
    assert report.error.sqnr_db > 15
    assert report.error.elements == x.numel()
    checkpoint.convert_folder(source, tmp_path / "mx", "blockscale", "mxfp8")
    out = checkpoint.load_folder(tmp_path / "mx")["experts.weight"]
    assert torch.equal(out, bs.quantize(q.dequantize(torch.float32), "mxfp8"))
