"""Models of transformers from quantized folders, saved again, and quantized on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import held, load, logits, make

import blockscale as bs
from blockscale import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

# kind, format, convention, weight-only, quantized parameters
CASES = [
    ("llama", "nvfp4", "blockscale", False, 14),
    ("llama", "nvfp4", "modelopt", False, 14),
    ("llama", "nvfp4", "modelopt", True, 14),
    ("llama", "nvfp4", "compressed-tensors", False, 14),
    ("llama", "nvfp4", "compressed-tensors", True, 14),
    ("llama", "mxfp4", "compressed-tensors", True, 14),
    ("llama", "mxfp8", "compressed-tensors", False, 14),
    ("llama", "mxfp8", "modelopt", False, 14),
    ("llama", "mxfp8", "fine-grained", False, 14),
    ("llama", "mxfp6_e2m3", "blockscale", False, 14),
    ("llama", "fp8_128x128", "deepseek", False, 14),
    ("llama", "fp8_128x128", "compressed-tensors", False, 14),
    ("qwen3_moe", "nvfp4", "modelopt", False, 13),
    ("qwen3_moe", "nvfp4", "compressed-tensors", True, 13),
    ("qwen3_moe", "mxfp4", "compressed-tensors", True, 13),
    ("qwen3_moe", "mxfp8", "blockscale", False, 13),
    ("qwen3_moe", "mxfp8", "fine-grained", False, 13),
    ("qwen3_moe", "fp8_128x128", "deepseek", False, 13),
    ("deepseek_v3", "fp8_128x128", "deepseek", False, 18),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: Any) -> Any:
    """Folders in bf16, made once."""
    root = tmp_path_factory.mktemp("plain")
    return lambda kind: root / kind if (root / kind).exists() else make(root / kind, kind)


def quantized(source: Path, target: Path, format: str, convention: str, weight_only: bool) -> Path:
    activations = "bfloat16" if weight_only else None
    checkpoint.quantize_folder(source, target, format, convention, activations=activations)
    return target


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(("kind", "format", "convention", "weight_only", "count"), CASES)
def test_folders(plain, tmp_path, kind, format, convention, weight_only, count):
    """The weights that load_folder has, by the layers of quantize_; what is saved is the same."""
    folder = quantized(plain(kind), tmp_path / "in", format, convention, weight_only)
    model, state = load(folder), checkpoint.load_folder(folder)
    assert len(held(model)) == count
    recipes = {m.recipe for m in model.modules() if hasattr(m, "recipe")}
    assert {r.weight_only for r in recipes} == {weight_only}
    for name, weight in held(model).items():
        assert not weight.requires_grad
        assert name not in state or torch.equal(weight.dequantize(), state[name].dequantize())

    model.save_pretrained(tmp_path / "out", max_shard_size="100KB")
    saved = checkpoint.load_folder(tmp_path / "out")
    assert saved.keys() == state.keys()
    for name, tensor in state.items():
        both = (
            t.dequantize() if isinstance(t, bs.ScaledTensor) else t for t in (tensor, saved[name])
        )
        assert torch.equal(*both)
    assert config_of(tmp_path / "out") == config_of(folder)
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


@pytest.mark.parametrize(("kind", "format", "convention", "weight_only", "count"), CASES)
def test_on_the_way(plain, tmp_path, kind, format, convention, weight_only, count, registered):
    """Quantized while it is read, a model has the logits of the folder, bit for bit."""
    folder = quantized(plain(kind), tmp_path / "in", format, convention, weight_only)
    model = load(folder)
    (recipe,) = {m.recipe for m in model.modules() if hasattr(m, "recipe")}
    given = registered.BlockscaleConfig(recipe, convention)
    other = load(plain(kind), quantization_config=given)
    assert torch.equal(logits(other), logits(model))
    other.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "fp8_block"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt2"])
def test_a_converted_model(plain, kind, format, registered):
    """Without global scales, which quantize_ takes for each layer by itself."""
    model = load(plain(kind), quantization_config=registered.BlockscaleConfig(format))
    other = bs.quantize_(load(plain(kind)), bs.Recipe(format))
    assert torch.equal(logits(model), logits(other))


def test_servers_weights_share_a_global_scale(plain, tmp_path, registered):
    given = registered.BlockscaleConfig("nvfp4", "compressed-tensors")
    model = load(plain("qwen3_moe"), quantization_config=given)
    attention = model.model.layers[0].self_attn
    scales = {x.weight.global_scale.item() for x in (attention.q_proj, attention.k_proj)}
    assert len(scales) == 1
    assert scales != {attention.o_proj.weight.global_scale.item()}
    assert model.model.layers[1].mlp.experts.gate_up_proj.global_scale.shape == (4,)
    # those of compressed-tensors are powers of two
    assert all((q.global_scale.frexp().mantissa == 0.5).all() for q in held(model).values())


def test_calibrated_input_scales_are_saved(plain, tmp_path):
    amax = {f"model.layers.{i}.mlp.{n}_proj": 5.0 for i in (0, 1) for n in ("gate", "up", "down")}
    checkpoint.quantize_folder(
        plain("llama"), tmp_path / "in", "nvfp4", "modelopt", activations=amax
    )
    load(tmp_path / "in").save_pretrained(tmp_path / "out")
    one, two = (checkpoint.load_folder(tmp_path / name) for name in ("in", "out"))
    assert one["model.layers.0.mlp.up_proj.input_scale"].item() == pytest.approx(5 / 2688)
    assert {n: x.item() for n, x in one.items() if "input_scale" in n} == {
        n: x.item() for n, x in two.items() if "input_scale" in n
    }


def test_tied_head(tmp_path):
    source = make(tmp_path / "plain", tie_word_embeddings=True)
    model = load(quantized(source, tmp_path / "in", "nvfp4", "modelopt", False))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "out")
    assert "lm_head.weight" not in checkpoint.load_folder(tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


def test_formats_by_layer(plain, tmp_path, registered):
    overrides = {"*.down_proj": bs.Recipe("mxfp8"), "*.q_proj": None}
    given = registered.BlockscaleConfig(bs.Recipe("nvfp4", overrides=overrides), "modelopt")
    model = load(plain("llama"), quantization_config=given)
    model.save_pretrained(tmp_path / "out")
    other = load(tmp_path / "out")
    assert torch.equal(logits(other), logits(model))
    layer = other.model.layers[1]
    assert type(layer.self_attn.q_proj) is torch.nn.Linear
    assert layer.mlp.down_proj.recipe == bs.Recipe("mxfp8")
    assert layer.mlp.up_proj.recipe == bs.Recipe("nvfp4")


def test_recipe_of_a_folder(plain, tmp_path, registered):
    """The user's says what becomes of activations."""
    folder = quantized(plain("llama"), tmp_path / "in", "nvfp4", "modelopt", False)
    recipe = bs.Recipe("nvfp4", activations="bfloat16")
    model = load(folder, quantization_config=registered.BlockscaleConfig(recipe))
    assert model.model.layers[0].mlp.up_proj.recipe == recipe
    assert all(
        torch.equal(q.dequantize(), held(load(folder))[n].dequantize())
        for n, q in held(model).items()
    )


def test_other_heads(plain, tmp_path):
    """The model without its head, and one with a new head, which stays in high precision."""
    import transformers as tr

    folder = quantized(plain("llama"), tmp_path / "in", "mxfp8", "compressed-tensors", False)
    base = tr.AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert len(held(base)) == 14
    new = {"num_labels": 3, "pad_token_id": 0, "dtype": torch.bfloat16}
    for source, given in (
        (folder, {}),
        (plain("llama"), {"quantization_config": _config("mxfp8")}),
    ):
        model = tr.AutoModelForSequenceClassification.from_pretrained(source, **new, **given)
        assert type(model.score) is torch.nn.Linear
        assert model.score.weight.std() > 0
        assert len(held(model)) == 14


def _config(recipe: str) -> Any:
    from blockscale.hf import BlockscaleConfig

    return BlockscaleConfig(recipe)


def test_dequantized(plain, tmp_path):
    folder = quantized(plain("qwen3_moe"), tmp_path / "in", "nvfp4", "modelopt", False)
    model = load(folder)
    values = {name: q.dequantize() for name, q in held(model).items()}
    model = model.dequantize()
    assert not held(model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in values.items())
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("place", ["cpu", "auto", {"": "cpu"}])
def test_device_maps(plain, tmp_path, place):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    folder = quantized(plain("llama"), tmp_path / "in", "mxfp4", "compressed-tensors", True)
    assert torch.equal(logits(load(folder, device_map=place)), logits(load(folder)))


def test_generate(plain, tmp_path):
    folder = quantized(plain("qwen3_moe"), tmp_path / "in", "nvfp4", "modelopt", True)
    model, how = load(folder), {"max_new_tokens": 6, "do_sample": False}
    ids = torch.arange(10).reshape(2, 5)
    tokens = model.generate(ids, **how)
    assert tokens.shape == (2, 11)
    assert torch.equal(model.generate(ids, cache_implementation="static", **how), tokens)
    assert model.hf_quantizer.is_compileable


def test_gpt_oss(plain, tmp_path):
    """Stacks (experts, out, in) in the folder, (experts, in, out) in the model."""
    recipe, folder = bs.Recipe("mxfp4", activations="bfloat16"), tmp_path / "in"
    source, state = load(plain("gpt_oss")), {}
    for name, tensor in source.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            q = bs.quantize(tensor.mT.contiguous(), "mxfp4")
            experts, rows, k = q.shape
            state[f"{name}_blocks"] = q.qdata.view(torch.uint8).view(experts, rows, k // 32, 16)
            state[f"{name}_scales"] = q.scale.view(torch.uint8)
        else:
            state[name] = tensor
    folder.mkdir()
    checkpoint.save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((plain("gpt_oss") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))

    model = load(folder)
    bs.quantize_(source, recipe, lambda module, name: name.endswith("experts"))
    assert len(held(model)) == 4
    assert torch.equal(logits(model), logits(source))
    model.save_pretrained(tmp_path / "out")
    saved = checkpoint.load_file(tmp_path / "out" / "model.safetensors")
    read = checkpoint.load_folder(folder)
    assert saved.keys() == read.keys()
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


def test_activations_of_other_bits(plain, tmp_path):
    """MXFP8 activations by MXFP4 weights, as compressed-tensors may say."""
    folder = quantized(plain("llama"), tmp_path / "in", "mxfp4", "compressed-tensors", False)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"]["num_bits"] = 8
    path.write_text(json.dumps(config))
    recipe = bs.Recipe("mxfp4", activations="mxfp8")
    assert load(folder).model.layers[0].mlp.up_proj.recipe == recipe
