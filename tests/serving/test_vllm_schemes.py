"""What the plugin for vLLM does with activations, as configurations say it."""

from __future__ import annotations

from typing import Any

import pytest

import blockscale as bs
from blockscale.checkpoint.conventions import CONVENTIONS, Scheme
from blockscale.vllm.schemes import kv_cache_scheme_of, served_activations, served_recipe


def configured(convention: str, *formats: str, weight_only: bool = False) -> dict[str, Any]:
    """A quantization_config as we write it."""
    layers = {each: (f"layers.{i}.mlp.up_proj",) for i, each in enumerate(formats)}
    scheme = Scheme(layers, ("lm_head",), weight_only)
    return dict(CONVENTIONS[convention].configure(scheme)["config.json"]["quantization_config"])


def told(convention: str, quantization: dict[str, Any]) -> dict[str, str]:
    return served_activations(quantization, CONVENTIONS[convention])


@pytest.mark.parametrize(
    ("convention", "format"),
    [
        *(("modelopt", each) for each in ("nvfp4", "mxfp8")),
        *(("compressed-tensors", each) for each in ("nvfp4", "mxfp4", "mxfp8")),
        *(("blockscale", each) for each in ("nvfp4", "mxfp4", "mxfp8")),
        ("fine-grained", "mxfp8"),
    ],
)
def test_activations_are_quantized_as_weights_are(convention, format):
    assert told(convention, configured(convention, format)) == {format: format}


@pytest.mark.parametrize(
    ("convention", "format"),
    [
        ("modelopt", "nvfp4"),
        *(("compressed-tensors", each) for each in ("nvfp4", "mxfp4", "mxfp8")),
        ("blockscale", "nvfp4"),
    ],
)
def test_weights_alone(convention, format):
    quantization = configured(convention, format, weight_only=True)
    assert told(convention, quantization) == {format: "bfloat16"}


def test_gpt_oss_leaves_activations_as_they_are():
    assert told("gpt-oss", {"quant_method": "mxfp4"}) == {"mxfp4": "bfloat16"}


@pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors", "blockscale"])
def test_several_formats(convention):
    quantization = configured(convention, "nvfp4", "mxfp8")
    assert told(convention, quantization) == {"nvfp4": "nvfp4", "mxfp8": "mxfp8"}


def test_mxfp8_activations_of_mxfp4_weights():
    quantization = configured("compressed-tensors", "mxfp4")
    group = quantization["config_groups"]["group_0"]
    group["input_activations"] = {**group["input_activations"], "num_bits": 8}
    assert told("compressed-tensors", quantization) == {"mxfp4": "mxfp8"}
    assert served_recipe("mxfp4", "mxfp8") == bs.Recipe("mxfp4", activations="mxfp8")


def changed(what: str, **values: Any) -> dict[str, Any]:
    """A group of compressed-tensors with something else in it."""
    quantization = configured("compressed-tensors", "nvfp4")
    group = quantization["config_groups"]["group_0"]
    group[what] = {**(group[what] or {}), **values}
    return quantization


def in_two_ways() -> dict[str, Any]:
    quantization = configured("compressed-tensors", "nvfp4")
    groups = quantization["config_groups"]
    groups["group_1"] = {**groups["group_0"], "input_activations": None}
    return quantization


@pytest.mark.parametrize(
    ("convention", "quantization", "words"),
    [
        ("modelopt", {"quant_algo": "W4A8_NVFP4_FP8"}, "'W4A8_NVFP4_FP8'"),
        ("modelopt", {}, "quant_algo 'NONE'"),
        ("modelopt", {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, "of no layer"),
        ("compressed-tensors", {"config_groups": {}}, "of no layer"),
        ("compressed-tensors", changed("weights", type="int"), "weights of group_0"),
        ("compressed-tensors", changed("weights", group_size=128), "'group_size': 128"),
        ("compressed-tensors", changed("input_activations", num_bits=16), "input_activations of"),
        ("compressed-tensors", changed("output_activations", num_bits=8), "output_activations"),
        ("compressed-tensors", in_two_ways(), "one scheme for a format"),
        ("blockscale", {"formats": ["fp8_128x128"]}, "are in fp8_128x128"),
        ("deepseek", {"quant_method": "fp8"}, "weight_block_size is None"),
        ("deepseek", {"weight_block_size": [128, 128]}, "in fp8_128x128, as DeepSeek's FP8 blo"),
    ],
)
def test_what_is_not_served_is_said(convention, quantization, words):
    with pytest.raises(ValueError, match=r"^quantization: ") as raised:
        told(convention, quantization)
    assert words in str(raised.value)
    if "of no layer" not in words:
        assert "without quantization='blockscale'" in str(raised.value)


def test_activations_that_no_weights_of_that_format_meet():
    with pytest.raises(
        ValueError, match="activations in mxfp8 are not multiplied by weights in nv"
    ):
        served_recipe("nvfp4", "mxfp8")


def test_recipes():
    assert served_recipe("nvfp4", "bfloat16") == bs.Recipe("nvfp4", activations="bfloat16")
    assert served_recipe("mxfp8", "mxfp8") == bs.Recipe("mxfp8")


def test_caches_of_keys_and_values():
    fp8 = {"type": "float", "num_bits": 8, "dynamic": False}
    assert kv_cache_scheme_of({"kv_cache_scheme": None}) is None
    assert kv_cache_scheme_of({"kv_cache_quant_algo": "FP8"}) == fp8
    assert kv_cache_scheme_of({"kv_cache_scheme": {**fp8, "strategy": "tensor"}}) is not None


@pytest.mark.parametrize(
    "scheme",
    [
        {"kv_cache_quant_algo": "NVFP4"},
        {"kv_cache_scheme": {"type": "float", "num_bits": 4}},
        {"kv_cache_scheme": {"type": "int", "num_bits": 8}},
        {"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": True}},
        {"kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "attn_head"}},
    ],
)
def test_other_caches_are_refused(scheme):
    with pytest.raises(ValueError, match="keys and values are quantized as") as raised:
        kv_cache_scheme_of(scheme)
    assert "convert-checkpoint IN OUT --to modelopt" in str(raised.value)
