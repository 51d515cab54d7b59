"""Models of transformers from quantized folders, saved again, and quantized on the way."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import IDS, SIZES, held, load, logits, make

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


def test_parts_by_their_names_alone(tmp_path, registered):
    """Parameters that are called as parts are, beside stacks that are called as layers are."""
    import transformers as tr

    sizes = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "head_dim")}
    config = tr.DeepseekV4Config(
        **{**sizes, "num_key_value_heads": 1}, head_dim=64, moe_intermediate_size=128,
        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, q_lora_rank=128,
        o_lora_rank=128, o_groups=2, index_n_heads=2, index_head_dim=64, index_topk=8,
        num_hash_layers=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = tr.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    scale = model.model.layers[0].attn_hc.scale
    scale.data.copy_(torch.tensor([0.3, 2.0, 1.7]))
    model.save_pretrained(tmp_path / "plain")
    given = registered.BlockscaleConfig("fp8_block", "deepseek-v4")
    model = load(tmp_path / "plain", quantization_config=given)
    model.save_pretrained(tmp_path / "out")
    other = load(tmp_path / "out")
    assert torch.equal(other.model.layers[0].attn_hc.scale, scale)
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_a_matrix_that_transformers_cuts(tmp_path, format, registered):
    """Dinov2's gate and up are one in files."""
    import transformers as tr

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = tr.Dinov2Config(**sizes, use_swiglu_ffn=True, image_size=28, patch_size=14)
    torch.manual_seed(0)
    tr.Dinov2Model(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    given = {"dtype": torch.bfloat16, "quantization_config": registered.BlockscaleConfig(format)}
    model = tr.Dinov2Model.from_pretrained(tmp_path / "plain", **given)
    plain = tr.Dinov2Model.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    for name in ("gate_proj", "up_proj"):
        made, was = (getattr(m.encoder.layer[0].mlp, name).weight for m in (model, plain))
        assert isinstance(made, bs.ScaledTensor)
        error = (made.dequantize() - was).float().norm() / was.float().norm()
        assert error < 0.2
    model.save_pretrained(tmp_path / "out")
    again = tr.Dinov2Model.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for name, weight in held(model).items():
        assert torch.equal(held(again)[name].dequantize(), weight.dequantize())


def test_names_of_stacks_and_layers(tmp_path, registered):
    """GraniteMoe's experts have a layer's name in files."""
    import transformers as tr

    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config = tr.GraniteMoeConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    model = tr.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    checkpoint.quantize_folder(tmp_path / "plain", tmp_path / "in", "mxfp8")
    model = load(tmp_path / "in")
    assert len(held(model)) == 12
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


def test_several_savers(plain, tmp_path, registered):
    """Of one model, at once."""
    given = registered.BlockscaleConfig("nvfp4", "modelopt")
    model = load(plain("qwen3_moe"), quantization_config=given)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: model.save_pretrained(tmp_path / str(i)), range(4)))
    wanted = checkpoint.load_folder(tmp_path / "0").keys()
    assert all(checkpoint.load_folder(tmp_path / str(i)).keys() == wanted for i in range(4))
    assert torch.equal(logits(load(tmp_path / "3")), logits(model))


def test_what_the_folder_says_stays(plain, tmp_path):
    """Its configuration, in its own words; input scales also where names begin otherwise; and a
    model that was saved can be pickled and made plain."""
    import transformers as tr

    folder = tmp_path / "in"
    amax = {f"model.layers.{i}.mlp.{n}_proj": 5.0 for i in (0, 1) for n in ("gate", "up", "down")}
    checkpoint.quantize_folder(plain("llama"), folder, "nvfp4", "modelopt", activations=amax)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= {"something": "else", "kv_cache_quant_algo": "FP8"}
    path.write_text(json.dumps(config))
    model = tr.AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "out")
    found = config_of(tmp_path / "out")
    assert found["something"] == "else"
    assert found["kv_cache_quant_algo"] is None
    state = checkpoint.load_folder(tmp_path / "out")
    assert state["layers.0.mlp.up_proj.input_scale"].item() == pytest.approx(5 / 2688)
    assert len(held(pickle.loads(pickle.dumps(model)))) == 14
    assert not held(model.dequantize())


def test_the_configuration_is_told(registered):
    recipe = bs.Recipe("nvfp4", overrides={"*.down_proj": bs.Recipe("mxfp8")})
    config = registered.BlockscaleConfig(recipe, "modelopt")
    again = registered.BlockscaleConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert (again.recipe, again.convention) == (recipe, "modelopt")
    assert "down_proj" in repr(config)
    assert registered.BlockscaleConfig.from_dict({"recipe": "mxfp8"}).recipe == bs.Recipe("mxfp8")


def test_scales_of_activations_that_are_powers_of_two(plain, tmp_path):
    folder = quantized(plain("llama"), tmp_path / "in", "fp8_128x128", "deepseek", False)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["scale_fmt"] = "ue8m0"  # of DeepSeek V3.1
    path.write_text(json.dumps(config))
    recipe = bs.Recipe("fp8_block", scale_rounding="rceil")
    assert load(folder).model.layers[0].mlp.up_proj.recipe == recipe


def test_calibrated_activations(plain, tmp_path):
    """A row's product does not depend on those beside it, or after it, as in servers."""
    names = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up")
    layers = [f"model.layers.{i}.{name}_proj" for i in (0, 1) for name in (*names, "mlp.down")]
    amax = dict.fromkeys(layers, 5.0)
    folder = tmp_path / "in"
    checkpoint.quantize_folder(plain("llama"), folder, "nvfp4", "modelopt", activations=amax)
    model = load(folder)
    whole = logits(model)
    with torch.no_grad():
        assert torch.equal(model(IDS[:1]).logits, whole[:1])
        assert torch.equal(model(IDS[:, :4]).logits, whole[:, :4])
    layer, x = model.model.layers[0].mlp.up_proj, torch.randn(3, 128).bfloat16()
    scale = torch.tensor(5 / 2688)
    q = bs.quantize(x, "nvfp4", global_scale=layer.input_scale)
    assert layer.input_scale.item() == pytest.approx(scale.item())
    assert torch.equal(layer(x), bs.gemm(q, layer.weight.mT))

    other = bs.quantize_(load(plain("llama")), bs.Recipe("nvfp4"))
    other.load_state_dict(checkpoint.load_folder(folder))  # with its input scales
    assert torch.equal(logits(other), whole)
    alone = bs.quantize_(load(plain("llama")), bs.Recipe("nvfp4", activations="bfloat16"))
    alone.load_state_dict(checkpoint.load_folder(folder))
    assert alone.model.layers[0].mlp.up_proj.input_scale is None
    fused = bs.nn.fuse_projections(load(folder))
    assert torch.equal(logits(fused), whole)
    assert fused.state_dict().keys() == model.state_dict().keys()
    again = load(folder)
    for module in again.modules():
        if isinstance(module, bs.nn.QuantizedLinear):
            module.input_scale = None
    again.load_state_dict(fused.state_dict())
    assert torch.equal(logits(again), whole)
    fused.save_pretrained(tmp_path / "fused")
    assert torch.equal(logits(load(tmp_path / "fused")), whole)
    assert not held(load(folder).dequantize())
    q = bs.quantize(torch.randn(64, 128), "mxfp8")
    with pytest.raises(ValueError, match=r"^input_scale: activations of Recipe\('mxfp8'\) have no"):
        bs.nn.quantized_linear(x, q, recipe=bs.Recipe("mxfp8"), input_scale=scale)


def test_calibrated_experts(plain, tmp_path):
    """A token's experts do not depend on the tokens beside it; all share the largest scale."""
    folder = tmp_path / "in"
    state = checkpoint.load_folder(plain("qwen3_moe"))
    layers = [n.removesuffix(".weight") for n in state if n.endswith("_proj.weight")]
    amax = {layer: 5.0 + i / 100 for i, layer in enumerate(layers)}
    checkpoint.quantize_folder(plain("qwen3_moe"), folder, "nvfp4", "modelopt", activations=amax)
    model = load(folder)
    experts = model.model.layers[1].mlp.experts
    of_down = max(v for n, v in amax.items() if ".experts." in n and n.endswith("down_proj"))
    assert experts.down_input_scale.item() == pytest.approx(of_down / 2688)
    whole = logits(model)
    with torch.no_grad():
        assert torch.equal(model(IDS[:1]).logits, whole[:1])
        assert torch.equal(model(IDS[:, :4]).logits, whole[:, :4])
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), whole)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), whole)
    assert not experts.state_dict().keys() & {"up_input_scale", "down_input_scale"}
    assert not list(model.dequantize().model.layers[1].mlp.experts.buffers())
