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


# --- reasons --------------------------------------------------------------------------------------


class Embeddings(nn.Module):
    """As ViTEmbeddings of transformers."""

    def __init__(self, tokens=5):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 128))
        self.position_embeddings = nn.Parameter(torch.randn(1, tokens, 128))


class Router(nn.Module):
    """As MixtralTopKRouter of transformers: a matrix, and a forward of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64))


class Vectors(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.values = nn.Parameter(torch.randn(shape))


def test_positions_are_no_experts():
    model, report = nn.Sequential(nn.Linear(64, 64), Embeddings()), ConversionReport()
    bs.convert(model, RECIPE, report=report)
    shapes = "[(1, 1, 128), (1, 5, 128)]"
    assert why(report)["1"] == f"not a layer that blockscale knows, with parameters of {shapes}"


@pytest.mark.parametrize(
    ("shape", "stacked"),
    [
        ((4, 64, 32), True),
        ((1, 64, 32), False),
        ((4, 1, 32), False),
        ((4, 64, 1), False),
        ((2, 2, 64, 32), True),
        ((4, 64), False),
    ],
)
def test_stacked_matrices(shape, stacked):
    model, report = nn.Sequential(nn.Linear(64, 64), Vectors(*shape)), ConversionReport()
    bs.convert(model, RECIPE, report=report)
    assert ("blockscale.nn.experts multiplies by such" in why(report)["1"]) == stacked


def test_a_router_that_is_no_linear_layer():
    model = nn.ModuleDict({"up": nn.Linear(64, 64), "gate": Router(), "other": Router()})
    report, unknown = ConversionReport(), "not a layer that blockscale knows, with parameters of "
    bs.convert(model, RECIPE, report=report)
    assert why(report) == {
        "gate": "left alone by default: router ('gate')",
        "other": f"{unknown}[(4, 64)]",
    }
    bs.convert(model, RECIPE, lambda module, name: True, report=report)  # overrules the defaults
    assert why(report)["gate"] == f"{unknown}[(4, 64)]"


def test_what_embeddings_share_counts_once():
    """As in T5, where three of them and the head hold one weight."""
    model, report = nn.ModuleDict(), ConversionReport()
    for name in ("shared", "encoder", "decoder"):
        model[name] = nn.Embedding(10, 64)
        model[name].weight = model["shared"].weight
    model["up"], model["down"] = pair()
    model["down"].weight = model["up"].weight
    bs.convert(model, RECIPE, report=report)
    assert str(report).splitlines() == [
        "2 layers converted: 4,096 of 4,096 parameters of matrix products (100%)",
        f"converted: 2 Linear, {64 * 66:,} parameters (up, down)",
        "not converted: 3 Embedding, 640 parameters (shared, encoder, ...): looked up, not "
        "multiplied",
    ]
    assert [entry.parameters for entry in report.left] == [640] * 3


@pytest.mark.parametrize("embed", [False, True])
def test_a_model_in_float64_says_so(embed):
    layers = [nn.Embedding(4, 64)] * embed + [nn.Linear(64, 64) for _ in range(4)]
    with pytest.raises(ValueError, match="nothing was quantized") as error:
        bs.quantize_(nn.Sequential(*layers).double(), RECIPE)
    message = str(error.value)
    assert message.startswith(
        "model: nothing was quantized, as no layer could be: 4 Linear, 16,640 "
    )
    assert "filter_fn" not in message
    assert "its weight is (64, 64) torch.float64; cast it to one of torch.float32" in message


# --- what is no model -----------------------------------------------------------------------------


def changes():
    """Each call that takes a model."""
    yield lambda model: bs.convert(model, RECIPE)
    yield lambda model: bs.convert(model, None)
    yield lambda model: bs.quantize_(model, RECIPE)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("compile", [torch.jit.script, lambda m: torch.jit.trace(m, X)])
def test_scripted_models_are_refused(compile):
    """Once an AttributeError."""
    scripted = compile(pair())
    for change in changes():
        with pytest.raises(TypeError, match=r"model: is compiled by torch\.jit.*; change the mod"):
            change(scripted)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("change", [bs.convert, bs.quantize_])
def test_a_scripted_part_is_reported(change):
    part, report = torch.jit.script(nn.Linear(64, 64)), ConversionReport()
    model = nn.Sequential(part, nn.Linear(64, 64))
    change(model, RECIPE, report=report)
    assert [entry.name for entry in report.converted] == ["1"]
    assert "compiled by torch.jit" in why(report)["0"]
    assert torch.equal(model[0](X), part(X))


@pytest.mark.parametrize("wrong", [3, "0", lambda module: True, lambda: True, {"0": True}])
def test_a_filter_that_is_none_is_refused(wrong):
    model = pair()
    for change in (bs.convert, bs.quantize_):
        with pytest.raises(TypeError, match=r"filter_fn: got .*; .* \(module, name\) -> bool"):
            change(model, RECIPE, wrong)
    bs.convert(model, RECIPE)
    with pytest.raises(TypeError, match=r"filter_fn: got .*; .* \(module, name\) -> bool"):
        bs.convert(model, None, wrong)


@pytest.mark.parametrize("model", [pair().state_dict(), [nn.Linear(64, 64)], nn.Linear])
def test_what_is_no_module_is_refused(model):
    for change in changes():
        with pytest.raises(TypeError, match=r"model: got .*; expected a torch\.nn\.Module"):
            change(model)


def test_a_state_dict_is_told_where_it_belongs():
    with pytest.raises(TypeError, match=r"load_state_dict"):
        bs.convert(pair().state_dict(), RECIPE)


# --- what cannot be seen --------------------------------------------------------------------------


def test_a_weight_that_is_read_without_its_layer():
    """As Mamba's mixer reads dt_proj.weight; docs/training.md says what to do."""

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.in_proj, self.dt_proj = pair()

        def forward(self, x):
            return self.in_proj(x) @ self.dt_proj.weight.mT

    model, report = Mixer(), ConversionReport()
    bs.convert(model, RECIPE)
    assert torch.equal(model(X), model.in_proj(X) @ model.dt_proj.weight.mT)
    bs.convert(model, None)
    bs.convert(model, RECIPE, lambda module, name: name != "dt_proj", report=report)
    assert why(report) == {"dt_proj": "refused by filter_fn"}
    assert type(model.dt_proj) is nn.Linear
