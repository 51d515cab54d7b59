"""The plugin for vLLM on folders: which layers are quantized, what is refused, names on a hub."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_stub
from safetensors.torch import load_file, save_file

from blockscale import checkpoint
from blockscale.vllm import METHOD, register
from blockscale.vllm.table import Table

LAYER = "model.layers.0."
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
SHAPES = {
    **{f"self_attn.{each}_proj": (64, 64) for each in "qkvo"},
    **{f"mlp.experts.{e}.{each}_proj": (32, 64) for e in (0, 1) for each in ("gate", "up")},
    **{f"mlp.experts.{e}.down_proj": (64, 32) for e in (0, 1)},
    "mlp.gate": (2, 64),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A mixture of one layer, as ``save_pretrained`` writes it."""
    g = torch.Generator().manual_seed(0)
    names = {f"{LAYER}{name}.weight": shape for name, shape in SHAPES.items()}
    names |= {"model.embed_tokens.weight": (32, 64), "lm_head.weight": (32, 64)}
    tensors = {name: torch.randn(shape, generator=g).bfloat16() for name, shape in names.items()}
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "dtype": "bfloat16"}))
    return folder


def quantized(source: Path, format: str, convention: str, **how: Any) -> Path:
    target = source.parent / f"{convention}-{format}-{len(how)}"
    checkpoint.quantize_folder(source, target, format, convention, **how)
    return target


@pytest.fixture
def stub() -> Iterator[Any]:
    with vllm_stub.vllm() as registry:
        yield registry


def read(folder: Path, name: str | None = None) -> Any:
    """vLLM's steps: a configuration of the quantization_config, then the checkpoint's name."""
    cls = import_module("blockscale.vllm.config").BlockscaleConfig
    about = json.loads((folder / "config.json").read_text())
    config = cls.from_config(about["quantization_config"])
    config.maybe_update_config(name or str(folder), vllm_stub.Config(about))
    return config


def test_vllm_finds_the_plugin():
    project = Path(__file__).parents[2] / "pyproject.toml"
    points = tomllib.loads(project.read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, name = points["blockscale"].split(":")
    assert getattr(import_module(module), name) is register


def test_registered_once(stub):
    register()
    register()
    assert stub.QUANTIZATION_METHODS[-1] == METHOD
    assert [each.__name__ for each in stub.registered] == ["BlockscaleConfig"]


def test_only_where_it_is_asked_for(stub):
    register()
    cls = stub.registered[0]
    ours = {"quant_method": "modelopt"}
    assert cls.override_quantization_method(ours, None) is None
    assert cls.override_quantization_method(ours, "modelopt") is None
    assert cls.override_quantization_method(ours, METHOD) == METHOD


@pytest.mark.parametrize(
    ("convention", "format"),
    [
        *(("modelopt", each) for each in ("nvfp4", "mxfp8")),
        *(("compressed-tensors", each) for each in ("nvfp4", "mxfp4", "mxfp8")),
        *(("blockscale", each) for each in ("nvfp4", "mxfp4", "mxfp8")),
        ("fine-grained", "mxfp8"),
    ],
)
def test_layers_of_a_folder(stub, source, convention, format):
    config = read(quantized(source, format, convention))
    table: Table = config.table
    for name in ("self_attn.qkv_proj", "self_attn.o_proj"):
        kind = table.linear(LAYER + name, PACKED)
        assert kind is not None
        assert kind.format_name == format
        assert str(config.recipe(kind, name).format) == format
    experts = table.experts(f"{LAYER}mlp.experts")
    assert experts == kind
    assert table.linear(f"{LAYER}mlp.gate", PACKED) is None
    assert table.linear("lm_head", PACKED) is None
    table.check_claimed()
    assert table.claimed == table.kinds.keys()


def test_parameters_have_the_names_of_the_checkpoint(stub, source):
    for convention, names in (
        ("modelopt", {"weight", "weight_scale", "weight_scale_2", "input_scale"}),
        (
            "compressed-tensors",
            {"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"},
        ),
    ):
        table = read(quantized(source, "nvfp4", convention)).table
        kind = table.linear(f"{LAYER}self_attn.o_proj", PACKED)
        assert {slot.name for slot in kind.slots(64, "o_proj")} == names


def test_weight_only_folders_need_no_input_scale(stub, source):
    folder = quantized(source, "nvfp4", "modelopt", activations="bfloat16")
    config = read(folder)
    kind = config.table.linear(f"{LAYER}self_attn.o_proj", PACKED)
    assert config.recipe(kind, "o_proj").weight_only
    assert "input_scale" not in kind.places


def test_names_of_vllm(stub, source):
    """Its models rename layers: "model." becomes "language_model.model."."""
    config = read(quantized(source, "mxfp8", "modelopt"))

    class Mapper:
        @staticmethod
        def _map_name(name: str) -> str | None:
            return None if name.startswith("lm_head") else f"language_model.{name}"

    config.table.linear(f"{LAYER}self_attn.o_proj", PACKED)
    config.apply_vllm_mapper(Mapper)
    table = config.table
    assert table.linear(f"language_model.{LAYER}self_attn.qkv_proj", PACKED) is not None
    assert f"language_model.{LAYER}self_attn.o_proj.weight" in table.claimed
    assert not table.has("lm_head")


# --- a hub ----------------------------------------------------------------------------------------


def test_a_name_on_a_hub(source):
    folder = quantized(source, "nvfp4", "compressed-tensors")
    tensors = load_file(folder / "model.safetensors")
    dtypes = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
    headers = {
        name: {"dtype": dtypes.get(x.dtype, "BF16"), "shape": list(x.shape)}
        for name, x in tensors.items()
    }
    headers["__metadata__"] = {"format": "pt"}
    with vllm_stub.vllm(lambda name, revision: headers):
        assert read(folder, "a/name").table == read(folder).table
    with vllm_stub.vllm(), pytest.raises(ValueError, match="hf download a/name"):
        read(folder, "a/name")


def test_headers_of_our_own_are_read_from_folders(stub, source):
    with pytest.raises(ValueError, match=r"do not say what is quantized.*serve the folder"):
        read(quantized(source, "nvfp4", "blockscale"), "a/name")


# --- refusals -------------------------------------------------------------------------------------


def test_a_folder_that_is_not_quantized(stub, source):
    cls = import_module("blockscale.vllm.config").BlockscaleConfig
    with pytest.raises(ValueError, match="has no quantization_config; make one"):
        cls().maybe_update_config(str(source), vllm_stub.Config({}))


def test_unknown_methods(stub, source):
    folder = quantized(source, "mxfp8", "modelopt")
    about = json.loads((folder / "config.json").read_text())
    about["quantization_config"]["quant_method"] = "awq"
    (folder / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"'awq'; known are .* without quantization='blockscale'"):
        read(folder)


def test_missing_block_scales(stub, source):
    folder = without(quantized(source, "mxfp8", "modelopt"), "q_proj.weight_scale")
    with pytest.raises(ValueError, match=r"q_proj\.weight' .* parts are missing"):
        read(folder)


def test_missing_input_scales(stub, source):
    config = read(without(quantized(source, "nvfp4", "modelopt"), "input_scale"))
    kind = config.table.linear(f"{LAYER}self_attn.o_proj", PACKED)
    with pytest.raises(ValueError, match=r"o_proj: .* no global scale for them.*--repair"):
        config.recipe(kind, "o_proj")


def test_formats_that_the_configuration_does_not_have(stub, source):
    folder = quantized(source, "mxfp8", "modelopt")
    about = json.loads((folder / "config.json").read_text())
    about["quantization_config"]["quant_algo"] = "NVFP4"
    (folder / "config.json").write_text(json.dumps(about))
    config = read(folder)
    kind = config.table.linear(f"{LAYER}self_attn.o_proj", PACKED)
    with pytest.raises(ValueError, match=r"o_proj: is in mxfp8, and its config.json speaks of nv"):
        config.recipe(kind, "o_proj")


def test_embeddings(stub, source):
    folder = quantized(source, "mxfp8", "modelopt", include=["*proj*", "*embed*"])
    with pytest.raises(ValueError, match=r"embed_tokens\.weight' is a quantized embedding"):
        read(folder)


def test_fused_layers_that_are_quantized_in_part(stub, source):
    table = read(quantized(source, "mxfp8", "modelopt", exclude=["*k_proj*"])).table
    with pytest.raises(ValueError, match=r"k_proj\.weight', which is not quantized"):
        table.linear(f"{LAYER}self_attn.qkv_proj", PACKED)


def test_experts_that_are_quantized_in_part(stub, source):
    table = read(quantized(source, "mxfp8", "modelopt", exclude=["*experts.1.*"])).table
    with pytest.raises(ValueError, match=r"experts\.1\..*, which is not quantized"):
        table.experts(f"{LAYER}mlp.experts")


def test_layers_that_the_checkpoint_has_by_no_such_name(stub, source):
    table = read(quantized(source, "mxfp8", "modelopt")).table
    with pytest.raises(ValueError, match="cannot tell whether this layer is quantized"):
        table.linear("model.layers.0.attention.dense", PACKED)
    with pytest.raises(ValueError, match="cannot tell whether this layer is quantized"):
        table.experts("model.layers.0.moe")


def test_weights_that_vllm_makes_no_layer_of(stub, source):
    """A router that is quantized beside layers that are made; other blocks may be other ranks'."""
    folder = quantized(source, "mxfp8", "modelopt", include=["*proj*", "*mlp.gate*"])
    table = read(folder).table
    table.check_claimed()
    for name in ("qkv_proj", "o_proj"):
        table.linear(f"{LAYER}self_attn.{name}", PACKED)
    table.experts(f"{LAYER}mlp.experts")
    with pytest.raises(
        ValueError, match=r"mlp\.gate\.weight' is in mxfp8, and vLLM makes no layer"
    ):
        table.check_claimed()


def without(folder: Path, end: str) -> Path:
    path = folder / "model.safetensors"
    kept = {name: x for name, x in load_file(path).items() if not name.endswith(end)}
    save_file(kept, path, {"format": "pt"})
    return folder
