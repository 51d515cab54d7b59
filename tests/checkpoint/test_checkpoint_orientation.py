"""Weights that are stored (in, out) are not quantized along the wrong dimension."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_file import Ran
from torch import Tensor, nn

import blockscale as bs
from blockscale import checkpoint

Cli = Callable[..., Ran]


def gpt2() -> dict[str, Tensor]:
    """One layer, as transformers saves it."""
    return {
        "h.0.attn.c_attn.weight": torch.randn(64, 192),
        "h.0.attn.c_attn.bias": torch.randn(192),
        "h.0.attn.c_proj.weight": torch.randn(64, 64),
        "h.0.attn.c_proj.bias": torch.randn(64),
        "h.0.mlp.c_fc.weight": torch.randn(64, 256),
        "h.0.mlp.c_fc.bias": torch.randn(256),
        "h.0.mlp.c_proj.weight": torch.randn(256, 64),
        "h.0.mlp.c_proj.bias": torch.randn(64),
        "wte.weight": torch.randn(96, 64),
    }


GPT_OSS = {
    "experts.gate_up_proj": torch.randn(4, 64, 128),
    "experts.gate_up_proj_bias": torch.randn(4, 128),
    "experts.down_proj": torch.randn(4, 64, 64),
    "experts.down_proj_bias": torch.randn(4, 64),
}

LINEAR = {
    "q_proj.weight": torch.randn(64, 64), "q_proj.bias": torch.randn(64),
    "k_proj.weight": torch.randn(32, 64), "k_proj.bias": torch.randn(32),
    "experts.up": torch.randn(3, 96, 64), "experts.up_bias": torch.randn(3, 96),
    "o_proj.weight": torch.randn(64, 96), "down_proj.weight": torch.randn(64, 128),
}  # fmt: skip


def copied(state: dict[str, Tensor], tmp_path: Path, **options) -> dict[str, str]:
    """Matrices that are copied -> the reason."""
    save_file(state, tmp_path / "in")
    tensors = checkpoint.quantize_file(tmp_path / "in", tmp_path / "out", **options)["tensors"]
    return {n: t["copied"] for n, t in tensors.items() if "copied" in t and len(t["shape"]) > 1}


def test_conv1d(tmp_path: Path):
    why = copied({**gpt2(), **LINEAR}, tmp_path)
    layers = {name for name in gpt2() if name.endswith("weight")}
    assert set(why) == layers | {"experts.up_bias"}
    for name in layers - {"wte.weight"}:
        assert why[name].startswith("stored (in, out), as its bias or a like weight tells")
        assert "blockscale.quantize_ on the model, then checkpoint.save_file" in why[name]


def test_experts(tmp_path: Path):
    why = copied({**GPT_OSS, **LINEAR}, tmp_path)
    assert set(why) == {*GPT_OSS, "experts.up_bias"}
    for name in "experts.gate_up_proj", "experts.down_proj":
        assert why[name].startswith("stored (in, out)")
        assert "blockscale.quantize(weight, format, axis=-2)" in why[name]


def test_linear_layers_are_quantized(tmp_path: Path):
    """Square or not, with a bias or without; beside (in, out) ones of other names, too."""
    assert set(copied(LINEAR, tmp_path)) == {"experts.up_bias"}


def test_a_linear_layer_of_the_same_name(tmp_path: Path):
    """Its own bias tells; only what does not tell follows."""
    linear = {"x.c_proj.weight": torch.randn(32, 64), "x.c_proj.bias": torch.randn(32)}
    assert "x.c_proj.weight" not in copied({**gpt2(), **linear}, tmp_path)


@pytest.mark.parametrize("name", ["h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight"])
def test_named_by_include_they_are_refused(name: str, tmp_path: Path):
    with pytest.raises(ValueError, match=rf"include: '{name}' cannot be quantized to nvfp4 \(stor"):
        copied(gpt2(), tmp_path, format="nvfp4", include=[name])
    assert not (tmp_path / "out").exists()


def test_nothing_is_left(tmp_path: Path, blockscale: Cli):
    save_file(gpt2(), tmp_path / "in")
    ran = blockscale("quantize", tmp_path / "in", tmp_path / "out", "--format", "mxfp8")
    assert ran.code == 2
    assert "nothing in" in ran.err
    assert "(stored (in, out), as its bias or a like weight tells" in ran.err
    assert "then checkpoint.save_file" in ran.err
    assert "include" not in ran.err, "it would be refused"


def shards(tmp_path: Path, *states: dict[str, Tensor]) -> list[Path]:
    names = [f"model-{i + 1:05}-of-{len(states):05}.safetensors" for i in range(len(states))]
    for name, state in zip(names, states, strict=True):
        save_file(state, tmp_path / name)
    places = {n: name for name, state in zip(names, states, strict=True) for n in state}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return [tmp_path / name for name in names]


def test_another_file_tells(tmp_path: Path):
    """What a square weight is like, and a bias, may lie in another file of the checkpoint."""
    first = {n: t for n, t in gpt2().items() if "attn" in n and n != "h.0.attn.c_attn.bias"}
    second = {n: t for n, t in gpt2().items() if n not in first}
    a, _ = shards(tmp_path, {**first, **LINEAR}, second)
    tensors = checkpoint.quantize_file(a, tmp_path / "out")["tensors"]
    assert {n for n, t in tensors.items() if t.get("copied", "").startswith("stored (in")} == {
        "h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight",
    }  # fmt: skip


def test_other_files_need_not_be_there(tmp_path: Path):
    a, b = shards(tmp_path, LINEAR, {"layers.1.q_proj.bias": torch.ones(64)})
    b.unlink()
    manifest = checkpoint.quantize_file(a, tmp_path / "out")
    assert "format" in manifest["tensors"]["q_proj.weight"]


class Conv1D(nn.Module):
    """As transformers' one."""

    def __init__(self) -> None:
        super().__init__()
        self.nf = 192
        self.weight = nn.Parameter(torch.randn(64, 192))
        self.bias = nn.Parameter(torch.zeros(192))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@pytest.mark.parametrize("assign", [False, True])
def test_an_old_file_says_the_axis_and_the_remedy(assign: bool, tmp_path: Path):
    """Of a version that quantized such weights along their last dimension."""
    recipe, model = bs.Recipe("mxfp8"), nn.Sequential(Conv1D())
    state = {**model.state_dict(), "0.weight": bs.quantize(model[0].weight.detach(), "mxfp8")}
    if assign:
        model.load_state_dict(state, assign=True)
        with pytest.raises(ValueError, match=r"blocked along axis -2.*high-precision.*save_file"):
            bs.quantize_(model, recipe)
    else:
        quantized = bs.quantize_(nn.Sequential(Conv1D()), recipe)
        with pytest.raises(RuntimeError, match=r"along -1, .* along -2: .*no recipe.*save_file"):
            quantized.load_state_dict(state)
    # what it says to do works
    model = bs.quantize_(nn.Sequential(Conv1D()), recipe)
    checkpoint.save_file(model.state_dict(), tmp_path / "q")
    other = bs.quantize_(nn.Sequential(Conv1D()), recipe)
    other.load_state_dict(checkpoint.load_file(tmp_path / "q"))
    x = torch.randn(3, 64)
    assert torch.equal(other(x), model(x))


def test_stacks_along_the_other_axis_can_be_saved(tmp_path: Path):
    """What the reason says of experts."""
    q = bs.quantize(GPT_OSS["experts.gate_up_proj"], "mxfp8", axis=-2)
    checkpoint.save_file({"experts.gate_up_proj": q}, tmp_path / "q")
    loaded = checkpoint.load_file(tmp_path / "q")["experts.gate_up_proj"]
    assert loaded.axis == -2
    assert torch.equal(loaded.dequantize(), q.dequantize())
