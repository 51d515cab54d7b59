"""What the plugin for vLLM does not do, by layers as vLLM has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blockscale.vllm.limits import check_adapters, check_experts, check_latent, check_other
from blockscale.vllm.table import Table
from blockscale.vllm.weights import Kind

PREFIX = "model.layers.3.mlp.experts"


def layer(activation: str = "silu", **given: Any) -> Any:
    """A RoutedExperts; what is given goes where vLLM has it."""
    parallel = SimpleNamespace(use_ep=given.pop("use_ep", False))
    config = {"is_lora_enabled": False, "has_bias": False, "moe_parallel_config": parallel}
    config |= {name: given.pop(name) for name in list(given) if name in config}
    own = dict.fromkeys(("swiglu_limit", "swiglu_alpha", "swiglu_beta"))
    own |= {"apply_router_weight_on_input": False, **given}
    return SimpleNamespace(
        moe_config=SimpleNamespace(**config), activation=SimpleNamespace(value=activation), **own
    )


def test_swiglu_and_gpt_oss_are_served():
    check_experts(layer(), "silu", False, PREFIX)
    check_experts(layer("swigluoai", has_bias=True), "swigluoai", True, PREFIX)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"use_ep": True}, "expert parallelism; serve without --enable-expert-parallel"),
        ({"is_lora_enabled": True}, "LoRA adapters; serve without --enable-lora"),
        ({"has_bias": True}, "biases"),
        ({"activation": "gelu"}, "the activation 'gelu'"),
        ({"swiglu_limit": 7.0}, "a limit of SwiGLU"),
        ({"swiglu_beta": 1.0}, "a limit of SwiGLU"),
        ({"apply_router_weight_on_input": True}, "weights of the router on their inputs"),
    ],
)
def test_other_experts_are_refused(given, words):
    with pytest.raises(ValueError, match=f"^{PREFIX}: blockscale's experts do not have") as raised:
        check_experts(layer(**given), "silu", False, PREFIX)
    assert words in str(raised.value)
    assert "without quantization='blockscale'" in str(raised.value).replace(
        "or without ", "without "
    )


def test_adapters():
    check_adapters(None, "o_proj")
    check_adapters(SimpleNamespace(lora_config=None), "o_proj")
    with pytest.raises(ValueError, match=r"o_proj: LoRA adapters .* without --enable-lora"):
        check_adapters(SimpleNamespace(lora_config=object()), "o_proj")


def table(*names: str) -> Table:
    return Table(dict.fromkeys(names, Kind("mxfp8", {}, {})), frozenset(names))


def test_latent_attention():
    check_latent(table("model.layers.0.self_attn.o_proj.weight"), "model.layers.0.self_attn.attn")
    with pytest.raises(ValueError, match=r"self_attn\.kv_b_proj: .* bf16 copy .* '\*kv_b_proj\*'"):
        check_latent(
            table("model.layers.0.self_attn.kv_b_proj.weight"), "model.layers.0.self_attn.attn"
        )


def test_layers_of_another_kind():
    check_other(table("a.weight"), object(), "b")
    with pytest.raises(ValueError, match=r"^a: this layer \(object\) has a quantized weight"):
        check_other(table("a.weight"), object(), "a")
