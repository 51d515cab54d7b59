"""calibrate: the largest inputs of layers and of experts, as transformers holds them."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import nn

import blockscale as bs


def test_layers():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    batches = [torch.randn(3, 8), 5 * torch.randn(3, 8), torch.randn(0, 8)]
    found = bs.calibrate(model, batches)
    assert found == {
        "0": max(x.abs().max().item() for x in batches[:2]),
        "2": max(model[:2](x).abs().max().item() for x in batches[:2]),
    }
    assert not model[0]._forward_pre_hooks
    with pytest.raises(ValueError, match="batches: there are none"):
        bs.calibrate(model, [])
    with pytest.raises(ValueError, match="batches: no linear layer saw a batch"):
        bs.calibrate(nn.ReLU(), batches)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite(bad: float):
    """The largest of the others was taken for that of all."""
    model, x = nn.Sequential(nn.Linear(8, 4)), torch.randn(3, 8)
    x[1, 2] = bad
    with pytest.raises(ValueError, match="batches: 0 is given NaN or infinities"):
        bs.calibrate(model, [torch.randn(3, 8), x])
    assert not model[0]._forward_pre_hooks


def test_one_batch_is_no_list():
    model = nn.Sequential(nn.Linear(32, 4))
    for run in (bs.calibrate, bs.gptq):
        with pytest.raises(TypeError, match="batches: got a mapping, which is one batch; pass a l"):
            run(model, {"input": torch.randn(3, 32)})


def test_what_a_tokenizer_returns():
    """A mapping, and no dict."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    x = torch.randn(3, 8)
    assert bs.calibrate(Model(), [UserDict(x=x)]) == {"layer": x.abs().max().item()}


def test_hooks_go_with_an_error():
    model = nn.Sequential(nn.Linear(8, 4))
    with pytest.raises(RuntimeError):
        bs.calibrate(model, [torch.randn(3, 9)])
    assert not model[0]._forward_pre_hooks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "GptOss"])
def test_experts(name: str):
    """Against a model with one expert a time written out."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=48, num_hidden_layers=1,
        vocab_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=4, num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = torch.arange(6)[None]
    found = bs.calibrate(model, [{"input_ids": ids}])
    path, experts = next((n, m) for n, m in model.named_modules() if n.endswith("experts"))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    experts.register_forward_pre_hook(lambda _, args: seen.append(args[:2]))
    with torch.no_grad():
        model(ids)
    hidden, index = seen[0][0].reshape(-1, 32), seen[0][1].reshape(6, -1)
    for expert in range(4):
        rows = hidden[(index == expert).any(-1)]
        name_of = f"{path}.{expert}"
        if not len(rows):
            assert f"{name_of}.down_proj" not in found
            continue
        assert found[f"{name_of}.gate_proj"] == found[f"{name_of}.up_proj"] == rows.abs().max()
        weight = experts.gate_up_proj[expert].detach()
        between = rows @ (weight if experts.is_transposed else weight.mT)
        if experts.has_bias:
            between = between + experts.gate_up_proj_bias[expert].detach()
        expected = experts._apply_gate(between).abs().max().item()
        assert found[f"{name_of}.down_proj"] == pytest.approx(expected, rel=1e-5)
