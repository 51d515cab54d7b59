"""What cannot be loaded, saved or asked for: an argument, what it was given, what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import held, load, make
from safetensors.torch import load_file, save_file

import blockscale as bs
from blockscale import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
MLP = "model.layers.1.mlp."


@pytest.fixture(scope="module")
def plain(tmp_path_factory: Any) -> Path:
    return make(tmp_path_factory.mktemp("plain") / "llama", num_hidden_layers=2)


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """NVFP4 of ModelOpt, in one file."""
    checkpoint.quantize_folder(plain, tmp_path / "in", "nvfp4", "modelopt")
    model = load(tmp_path / "in")
    model.save_pretrained(tmp_path / "one")
    return tmp_path / "one"


def changed(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the file, by the ends of their names; None: leave them out."""
    path = folder / "model.safetensors"
    state = load_file(path)
    for end, tensor in tensors.items():
        name = f"{MLP}up_proj.{end}"
        state.pop(name)
        if tensor is not None:
            state[name] = tensor
    save_file(state, path, {"format": "pt"})


def reconfigured(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= values
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_2", "weight"])
def test_a_part_is_missing(folder, part):
    changed(folder, **{part: None})
    with pytest.raises(ValueError, match=r"^pretrained_model_name_or_path: .*up_proj"):
        load(folder)


def test_no_input_scale(folder):
    """Servers need one; layers here scale their inputs as they come."""
    changed(folder, input_scale=None)
    assert len(held(load(folder))) == 14


def test_a_layer_is_missing(folder):
    """None of its parts: transformers would make it anew."""
    changed(folder, weight=None, weight_scale=None, weight_scale_2=None, input_scale=None)
    model = load(folder)
    # as it does, with a warning of its own: in high precision
    assert f"{MLP}up_proj.weight" not in held(model)


@pytest.mark.parametrize("algo", ["W4A8_AWQ", "FP8", "none"])
def test_an_unknown_algorithm(folder, algo):
    reconfigured(folder, quant_algo=algo)
    with pytest.raises(ValueError, match=rf"got quant_algo '{algo.upper()}'; known are MXFP8, NV"):
        load(folder)


def test_formats_of_others_stay_theirs(registered):
    from transformers.quantizers.auto import AutoQuantizationConfig

    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}
    for theirs in (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
        {"quant_method": "gptq", "bits": 4},
    ):
        found = AutoQuantizationConfig.from_dict(theirs)
        assert not isinstance(found, registered.BlockscaleConfig)
        assert found.quant_method == theirs["quant_method"]


def test_a_module_that_is_no_layer(folder):
    """A quantized embedding."""
    path = folder / "model.safetensors"
    state, q = load_file(path), bs.quantize(torch.randn(96, 128), "nvfp4")
    name = "model.embed_tokens.weight"
    parts = {"": q.qdata.view(torch.uint8), "_scale": q.scale, "_scale_2": q.global_scale}
    state |= {f"{name}{part}": tensor for part, tensor in parts.items()}
    save_file(state, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model: model\.embed_tokens is a Embedding, .*--exclude"):
        load(folder)


def test_recipes(folder, plain, registered):
    config = registered.BlockscaleConfig
    for recipe, match in (
        (bs.Recipe("mxfp8"), r"quantization_config: its recipe .* is nvfp4; pass bs\.Recipe"),
        (bs.Recipe("nvfp4", overrides={"*.up_proj": None}), "leaves model.layers.0.mlp.up_proj in"),
    ):
        with pytest.raises(ValueError, match=match):
            load(folder, quantization_config=config(recipe))
    with pytest.raises(ValueError, match="this has no recipe; pass"):
        load(plain, quantization_config=config())
    with pytest.raises(ValueError, match="format: got 'mxfp9'"):
        config("mxfp9")
    with pytest.raises(TypeError, match="recipe: got int"):
        config(4)
    with pytest.raises(ValueError, match="convention: got 'gguf'; choose one of"):
        config("mxfp8", "gguf")
    with pytest.raises(ValueError, match="lm_tail"):
        load(plain, quantization_config=config(bs.Recipe("mxfp8", overrides={"lm_tail": None})))


def test_other_classes(folder):
    from transformers import CompressedTensorsConfig

    with pytest.raises(ValueError, match="quantized with BlockscaleConfig but you are passing"):
        load(folder, quantization_config=CompressedTensorsConfig())


def test_a_disk(folder):
    with pytest.raises(ValueError, match="device_map: has layers on the disk"):
        load(folder, device_map={"": "disk"})


def test_other_files(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="read from safetensors files, and there are none"):
        load(folder)


@pytest.mark.parametrize(
    ("recipe", "convention", "match"),
    [
        ("mxfp6_e2m3", "modelopt", "convention: NVIDIA ModelOpt has no mxfp6_e2m3, .*'blockscale'"),
        ("mxfp4", "gpt-oss", "convention: gpt-oss is for models of type gpt_oss"),
        ("nvfp4", "deepseek", "convention: DeepSeek's FP8 blocks has no nvfp4"),
    ],
)
def test_conventions_that_lack_it(plain, recipe, convention, match, registered):
    """Said before any weight is read."""
    given = registered.BlockscaleConfig(recipe, convention)
    with pytest.raises(ValueError, match=match):
        load(plain, quantization_config=given)


def test_conventions_without_weights_alone(plain, tmp_path, registered):
    recipe = bs.Recipe("mxfp8", activations="bfloat16")
    given = registered.BlockscaleConfig(recipe, "fine-grained")
    model = load(plain, quantization_config=given)
    with pytest.raises(ValueError, match="no mxfp8 with activations in high precision"):
        model.save_pretrained(tmp_path / "out")


def test_split_scales_are_not_saved_for_servers(plain, tmp_path, registered):
    model = load(plain, quantization_config=registered.BlockscaleConfig("nvfp4", "modelopt"))
    layer = model.model.layers[0].self_attn.k_proj
    layer.weight.data.copy_(bs.quantize(torch.randn(64, 128).bfloat16(), "nvfp4"))
    with pytest.raises(ValueError, match=r"_proj.* have 2 global scales"):
        model.save_pretrained(tmp_path / "out")


def test_mixed_activations(plain, tmp_path, registered):
    overrides = {"*.up_proj": bs.Recipe("mxfp8", activations="bfloat16")}
    given = registered.BlockscaleConfig(bs.Recipe("mxfp8", overrides=overrides))
    model = load(plain, quantization_config=given)
    with pytest.raises(ValueError, match="some of its layers quantize activations and others"):
        model.save_pretrained(tmp_path / "out")


def test_folders_are_read_twice(folder, tmp_path):
    """A folder that was saved over is what it says."""
    shutil.copytree(folder, tmp_path / "copy")
    model = load(tmp_path / "copy")
    model.save_pretrained(tmp_path / "copy")
    assert len(held(load(tmp_path / "copy"))) == 14


# --- what loading would hide ----------------------------------------------------------------------


def test_another_shape(folder):
    """As of plain weights: a configuration that is not the folder's."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "head_dim": 16}))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(folder)


@pytest.mark.parametrize("on_the_way", [False, True])
def test_an_expert_is_missing(tmp_path, registered, on_the_way):
    source = make(tmp_path / "plain", "qwen3_moe")
    folder, given = source, {"quantization_config": registered.BlockscaleConfig("mxfp8")}
    if not on_the_way:
        folder, given = tmp_path / "in", {}
        checkpoint.quantize_folder(source, folder, "mxfp8")
    state = checkpoint.load_folder(folder)
    shutil.rmtree(tmp_path / "one", ignore_errors=True)
    (tmp_path / "one").mkdir()
    kept = {name: tensor for name, tensor in state.items() if ".experts.1." not in name}
    checkpoint.save_file(kept, tmp_path / "one" / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", tmp_path / "one")
    with pytest.raises((RuntimeError, ValueError), match=r"mismatched|is \(3, 256, 128\)"):
        load(tmp_path / "one", **given)


def test_experts_by_name_where_a_model_has_stacks(tmp_path):
    """Llama 4: transformers would make its stacks anew."""
    import transformers as tr

    sizes = {"hidden_size": 128, "intermediate_size": 128, "intermediate_size_mlp": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96}
    config = tr.Llama4TextConfig(
        **sizes, **heads, num_hidden_layers=1, num_local_experts=2, interleave_moe_layer_step=1
    )
    tr.Llama4ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    checkpoint.quantize_folder(tmp_path / "plain", tmp_path / "in", "mxfp8", "compressed-tensors")
    path = tmp_path / "in" / "model.safetensors"
    state = load_file(path)
    stack = state.pop("model.layers.0.feed_forward.experts.down_proj")
    for i, matrix in enumerate(stack):
        q = bs.quantize(matrix.mT.contiguous(), "mxfp8")
        name = f"model.layers.0.feed_forward.experts.{i}.down_proj.weight"
        state |= {name: q.qdata, f"{name}_scale": q.scale.view(torch.uint8)}
    save_file(state, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj\.weight is quantized in"):
        load(tmp_path / "in")


def test_stacks_are_not_written_where_a_convention_has_none(tmp_path, registered):
    from blockscale.checkpoint.saving import written_as

    q = bs.quantize(torch.randn(4, 64, 64), "mxfp8")
    how = {"weight_only": False, "input_scales": {}, "config": {}}
    with pytest.raises(ValueError, match="is a stack of matrices, and NVIDIA ModelOpt has each"):
        written_as("modelopt", {"experts.down_proj": q}, **how)
    q = bs.quantize(torch.randn(64, 64), "mxfp4")
    how |= {"weight_only": True, "config": {"model_type": "gpt_oss"}}
    with pytest.raises(ValueError, match="is a matrix, and gpt-oss has stacks of experts alone"):
        written_as("gpt-oss", {"q_proj.weight": q}, **how)
