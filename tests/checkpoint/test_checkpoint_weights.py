"""Weights that a caller has quantized already, for ``quantize_folder``."""

from __future__ import annotations

from pathlib import Path

import folders
import pytest
import torch
from folders import QUANTIZED, weights

import blockscale as bs
from blockscale import checkpoint

K = QUANTIZED[1]
DOWN = QUANTIZED[-1]


def test_they_are_what_the_folder_needs(tmp_path: Path):
    high = weights()[DOWN]
    q = bs.quantize(high, "nvfp4")
    given = folders.make(tmp_path / "in"), tmp_path / "out", "nvfp4", "modelopt"
    k = bs.quantize(weights()[K] * 2, "nvfp4")
    for made, message in (
        ({"model.norm.weight": q}, "there is no such tensor in the folder"),
        ({"model.embed_tokens.weight": q}, r"weights: .model\.embed_.*' would not be quantized"),
        ({DOWN: bs.quantize(high)}, r"is mxfp8 of \(128, 256\) along axis -1; expected nvfp4"),
        ({K: k}, "has the global scale .* make all .* scaling 'amax' and power_of_two=F"),
        ({DOWN: bs.quantize(high, "nvfp4", layout="tcgen05")}, "with compact scales"),
        ({DOWN: bs.quantize(high, "nvfp4", axis=-2)}, "along axis -2; expected .* axis -1"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoint.quantize_folder(*given, weights=made)
        assert not (tmp_path / "out.partial").exists()
    for made in ([q], {DOWN: high}):
        with pytest.raises(TypeError, match=r"weights: got .* expected a dictionary"):
            checkpoint.quantize_folder(*given, weights=made)
    manifest = checkpoint.quantize_folder(*given, weights={DOWN: q})
    assert any("6 of 7 weights" in each and "to nearest" in each for each in manifest["warnings"])
    with pytest.raises(ValueError, match=r"target: .* was made with another weights"):
        checkpoint.quantize_folder(*given)


@pytest.mark.filterwarnings("ignore")
def test_experts_by_other_names(tmp_path: Path):
    """Mixtral's files call them otherwise than its model does."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_local_experts=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "in")
    made = bs.gptq(model, [torch.arange(64)[None]], "nvfp4")
    given = tmp_path / "in", tmp_path / "out", "nvfp4", "modelopt"
    manifest = checkpoint.quantize_folder(*given, weights=made)
    assert not any("to nearest" in each for each in manifest["warnings"])
    state = checkpoint.load_folder(tmp_path / "out")
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        for expert in range(2):
            theirs = state[f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight"]
            ours = made[f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"]
            assert torch.equal(theirs.dequantize(), ours.dequantize())
    sizes = {q.global_scale.item() for name, q in made.items() if ".1." in name}
    assert len(sizes) == 2  # of gate and up together, and of down


def test_a_stack_of_matrices(tmp_path: Path):
    """Is refused by its name; it was compared with rows of the folder's, and no name was told."""
    experts = torch.randn(4, 64, 64).bfloat16()
    source = folders.make(tmp_path / "in", {"experts.up_proj": experts, "q.weight": experts[0]})
    with pytest.raises(ValueError, match=r"weights: 'experts.up_proj' is a stack of matrices"):
        checkpoint.quantize_folder(
            source, tmp_path / "out", weights={"experts.up_proj": bs.quantize(experts)}
        )
    assert not (tmp_path / "out.partial").exists()
