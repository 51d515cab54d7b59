"""What a conversion cannot change: that it says so, and why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blockscale as bs
from blockscale.nn import ConversionReport, Linear

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
RECIPE = bs.Recipe()


def pair():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def why(report):
    return {entry.name: entry.why for entry in report.left}


# --- weights that are quantized already -----------------------------------------------------------


@pytest.mark.parametrize("converted", [False, True])
def test_a_quantized_weight_is_for_quantize_(tmp_path, converted):
    """Once "converted", and the next forward raised."""
    quantized = bs.quantize_(pair(), RECIPE)
    bs.checkpoint.save_file(quantized.state_dict(), tmp_path / "m.safetensors")
    model = bs.convert(pair(), RECIPE) if converted else pair()
    types = [type(layer) for layer in model]
    model.load_state_dict(bs.checkpoint.load_file(tmp_path / "m.safetensors"), assign=True)
    with pytest.raises(ValueError, match=r"weight is quantized already; call blockscale\.quantize"):
        bs.convert(model, bs.Recipe("mxfp4"))
    assert [type(layer) for layer in model] == types
    assert torch.equal(bs.quantize_(model, RECIPE)(X), quantized(X))


def test_a_quantized_weight_among_others():
    model, report = pair(), ConversionReport()
    layer = bs.quantize_(nn.Linear(64, 64), RECIPE)
    model[0].load_state_dict(layer.state_dict(), assign=True)
    bs.convert(model, RECIPE, lambda module, name: True, report=report)
    assert [type(each) for each in model] == [nn.Linear, Linear]
    assert [entry.name for entry in report.converted] == ["1"]
    assert "call blockscale.quantize_" in why(report)["0"]
    assert torch.equal(bs.quantize_(model, RECIPE)[0](X), layer(X))


@pytest.mark.parametrize("name", ["in_proj_weight", "out_proj.weight"])
def test_attention_with_a_quantized_weight(name):
    attention = nn.MultiheadAttention(64, 4)
    owner, _, attribute = name.rpartition(".")
    module = attention.get_submodule(owner)
    q = bs.quantize(getattr(module, attribute).detach(), "mxfp8")
    setattr(module, attribute, nn.Parameter(q, requires_grad=False))
    with pytest.raises(ValueError, match="its weight is quantized already; load the high-prec"):
        bs.convert(attention, RECIPE)
