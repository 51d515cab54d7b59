"""Mixtures of experts of transformers, small, from their configurations, against eager."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0", reason="transformers is not installed")

import transformers

import blockscale as bs
from blockscale.nn import GatedActivation, QuantizedExperts
from blockscale.nn.hf_activation import activation_of
from blockscale.nn.hf_experts import Experts

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
CONFIGS = {
    "MixtralConfig": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": {
        "num_key_value_heads": 2, "moe_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "head_dim": 16,
    },
    "DeepseekV3Config": {
        "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
    "GptOssConfig": {
        "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
        "layer_types": ["full_attention"] * 2,
    },
}  # fmt: skip


def model_of(name: str, implementation: str = "eager", **others: float) -> torch.nn.Module:
    config = getattr(transformers, name)(**SIZES, **CONFIGS[name], **others)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation
    ).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def run(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    out = model(tokens, labels=tokens)
    out.loss.backward()
    named = model.named_parameters()
    return out.logits.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


def experts_alone(module: torch.nn.Module, name: str) -> bool:
    return name.endswith("experts") and not isinstance(module, torch.nn.Linear)


@pytest.mark.parametrize("name", CONFIGS)
def test_against_eager(name):
    """By the name of the implementation and converted, the same bits; and back."""
    eager = model_of(name)
    want, gradients = run(eager)
    bs.nn.register_experts(bs.Recipe("mxfp8"))
    named, converted = model_of(name, "blockscale"), copy.deepcopy(eager)
    bs.convert(converted, bs.Recipe("mxfp8"), experts_alone)
    assert any(isinstance(module, Experts) for module in converted.modules())
    results = run(named), run(converted)
    assert torch.equal(results[0][0], results[1][0])
    got, ours = results[0]
    assert 0 < (got - want).norm() <= 0.1 * want.norm()
    assert ours.keys() == gradients.keys()
    for key, grad in gradients.items():
        if "experts" in key:
            # a token may have another expert, where what comes before differs
            assert (ours[key] - grad).norm() <= 0.3 * grad.norm()
    bs.convert(converted, None)
    assert torch.equal(run(converted)[0], want)


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_models(name):
    """All layers; a state_dict goes round."""
    model, report = model_of(name), bs.nn.ConversionReport()
    names = list(model.state_dict())
    want, _ = run(model)
    bs.convert(model, bs.Recipe("mxfp8"), report=report)
    assert report.share > 0.9
    got, _ = run(model)
    assert (got - want).norm() <= 0.25 * want.norm()
    state = model.state_dict()
    assert list(state) == names
    other = model_of(name)
    other.load_state_dict(state)
    bs.convert(other, bs.Recipe("mxfp8"))
    assert torch.equal(run(other)[0], got)


@pytest.mark.parametrize("limit", [7.0, 50.0])
@pytest.mark.parametrize("implementation", ["eager", "blockscale"])
def test_limit_of_gpt_oss(limit, implementation):
    bs.nn.register_experts(bs.Recipe("mxfp8"))
    model = model_of("GptOssConfig", implementation, swiglu_limit=limit)
    module = model.model.layers[0].mlp.experts
    if implementation == "eager":
        bs.convert(model, bs.Recipe("mxfp8"), experts_alone)
        assert isinstance(module, Experts)
    run(model)
    want = GatedActivation(1.702, limit, 1.0, True)
    assert activation_of(module, torch.device("cpu")) == want


@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_at_the_first_call(name):
    """By the name of the implementation: nothing was found before."""
    bs.nn.register_experts(bs.Recipe("mxfp8"))
    torch._dynamo.reset()
    model = model_of(name, "blockscale").eval()
    tokens = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = torch.compile(model, fullgraph=True, backend="eager")(tokens).logits
        assert torch.allclose(got, model(tokens).logits, rtol=1e-4, atol=1e-5)


def test_autocast_has_its_type():
    """Eager sums in the tokens' type there."""
    eager = model_of("Qwen3MoeConfig").model.layers[0].mlp.experts
    module = bs.convert(copy.deepcopy(eager), bs.Recipe("mxfp8"))
    given = torch.randn(8, 64), torch.tensor([[0, 1]] * 8), torch.rand(8, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (eager(*given).dtype, module(*given).dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("recipe", [bs.Recipe("mxfp8"), bs.Recipe("nvfp4")], ids=str)
def test_quantized_models(name, recipe):
    """The logits of converted ones, bit for bit; a state_dict goes round; routers stay."""
    base, report = model_of(name).eval(), bs.nn.ConversionReport()
    tokens = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(0))
    converted = bs.convert(copy.deepcopy(base), recipe)
    held = bs.quantize_(copy.deepcopy(base), recipe, report=report)
    assert report.share > 0.9
    assert all("Router" in e.type for e in report.left if "mlp" in e.name)
    assert any(isinstance(module, QuantizedExperts) for module in held.modules())
    with torch.no_grad():
        want = converted(tokens).logits
        assert torch.equal(held(tokens).logits, want)
        other = bs.quantize_(model_of(name).eval(), recipe)
        other.load_state_dict(held.state_dict())
        assert torch.equal(other(tokens).logits, want)


@pytest.mark.parametrize("name", CONFIGS)
def test_weight_only_models(name):
    """Near the model that has the values of its weights; tokens after tokens, with a cache."""
    recipe = bs.Recipe("nvfp4", activations="bfloat16")
    held, plain = (model_of(name).eval() for _ in range(2))
    bs.quantize_(held, recipe)
    state = {
        key: each.dequantize() if isinstance(each, bs.ScaledTensor) else each
        for key, each in held.state_dict().items()
    }
    plain.load_state_dict(state)
    tokens = torch.randint(96, (1, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(held(tokens).logits, plain(tokens).logits, rtol=1e-3, atol=1e-3)
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(held.generate(tokens, **given), plain.generate(tokens, **given))
