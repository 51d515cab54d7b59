"""Layers that are no plain torch.nn.Linear: subclasses, Conv1D, lazy ones; what is reported."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import blockscale as bs
from blockscale.nn import ConversionReport, Linear, QuantizedLinear, linear

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
RECIPE = bs.Recipe()


class Own(nn.Linear):
    """A subclass as users write them, with an attribute and a method."""

    factor = 3

    def scaled(self, x):
        return self.factor * self(x)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Conv1D(nn.Module):
    """As in transformers: the weight is (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class Experts(nn.Module):
    """As in transformers' Mixtral: matrices of all experts in one parameter."""

    def __init__(self, experts=4, size=64):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * size, size))
        self.down_proj = nn.Parameter(torch.randn(experts, size, size))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(64, 64, bias=False)
        self.gate_proj = nn.Linear(64, 64, bias=False)
        self.gate = nn.Linear(64, 4, bias=False)
        self.router = nn.Sequential(nn.Linear(64, 4, bias=False))
        self.shared_expert_gate = nn.Linear(64, 1, bias=False)
        self.experts = Experts()
        self.norm = nn.LayerNorm(64)


class LanguageModel(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.block = Block()
        self.unembed = nn.Linear(64, 100, bias=False)
        if tied:
            self.unembed.weight = self.embed.weight


def named(entries):
    return [entry.name for entry in entries]


# --- subclasses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "ours"), [(bs.convert, Linear), (bs.quantize_, QuantizedLinear)]
)
@pytest.mark.parametrize("cls", [Own, nn.modules.linear.NonDynamicallyQuantizableLinear])
def test_a_subclass_without_forward_stays_what_it_is(change, ours, cls):
    layer = cls(64, 32)
    plain = nn.Linear(64, 32)
    plain.load_state_dict(layer.state_dict())
    model = change(nn.Sequential(layer), RECIPE)
    assert model[0] is layer
    assert isinstance(layer, cls)
    assert isinstance(layer, ours)
    assert type(layer).__name__ == cls.__name__
    y = change(plain, RECIPE)(X)
    assert torch.equal(layer(X), y)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[0]) is type(layer)
        assert torch.equal(twin(X), y)
        assert twin[0].recipe == RECIPE
    if cls is Own:
        assert torch.equal(layer.scaled(X), 3 * y)
    change(model, bs.Recipe(scale_rounding="floor"))
    assert layer.recipe.scale_rounding == "floor"
    if change is bs.convert:
        bs.convert(model, None)
        assert type(layer) is cls


def test_a_subclass_with_forward_is_left_and_reported():
    model, report = nn.Sequential(Doubled(64, 64), nn.Linear(64, 64)), ConversionReport()
    for change in (bs.convert, bs.quantize_):
        change(model, RECIPE, report=report)
        assert type(model[0]) is Doubled
        assert [(e.name, e.type, e.parameters, e.why) for e in report.left] == [
            ("0", "Doubled", 64 * 65, "a subclass with a forward of its own")
        ]


def test_a_forward_that_was_replaced_is_reported():
    """Our class would not be asked."""
    model, report = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), ConversionReport()
    model[0].forward = lambda x: x
    bs.convert(model, RECIPE, report=report)
    assert type(model[0]) is nn.Linear
    assert "forward was replaced" in report.left[0].why


def test_subclasses_of_ours():
    class Mine(Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(Mine(64, 64), nn.Linear(64, 64))
    report = ConversionReport()
    bs.convert(model, bs.Recipe("mxfp4"), report=report)
    assert named(report.left) == ["0"]
    bs.convert(model, None, report=report)
    assert named(report.left) == ["0"]
    assert type(model[0]) is Mine


def test_parametrized_weights():
    layer = torch.nn.utils.weight_norm(nn.Linear(64, 32))
    wanted = linear(X, layer.weight, layer.bias, recipe=RECIPE)
    with pytest.raises(ValueError, match="its weight is computed"):
        bs.quantize_(layer, RECIPE)
    bs.convert(layer, RECIPE)
    assert torch.equal(layer(X), wanted)
    layer(X).sum().backward()
    assert layer.weight_g.grad is not None


# --- Conv1D ---------------------------------------------------------------------------------------


def test_conv1d():
    torch.manual_seed(0)
    layer = Conv1D(32, 64)
    weight = layer.weight
    x = X.clone().requires_grad_()
    wanted = linear(x, weight.mT.contiguous(), layer.bias, recipe=RECIPE)
    wanted.square().sum().backward()
    grads = x.grad, weight.grad, layer.bias.grad
    x.grad = weight.grad = layer.bias.grad = None
    bs.convert(layer, RECIPE)
    assert isinstance(layer, Conv1D)
    assert layer.weight is weight
    y = layer(x)
    assert torch.equal(y, wanted)
    y.square().sum().backward()
    for a, b in zip((x.grad, weight.grad, layer.bias.grad), grads, strict=True):
        assert torch.equal(a, b)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(X), y)
    assert layer(X.view(2, 4, 64)).shape == (2, 4, 32)
    bs.convert(layer, None)
    assert type(layer) is Conv1D


@pytest.mark.parametrize("recipe", [RECIPE, bs.Recipe("nvfp4", activations="bfloat16")], ids=str)
def test_quantized_conv1d(recipe, tmp_path):
    layer = Conv1D(32, 80)  # no multiple of a block
    x = torch.randn(8, 80)
    model = nn.Sequential(copy.deepcopy(layer))
    bs.quantize_(model, recipe)
    q = bs.quantize(layer.weight.mT.contiguous(), recipe.format, pad=True)
    assert torch.equal(model[0].weight, q.mT)
    wanted = bs.nn.quantized_linear(x, q, layer.bias, recipe=recipe)
    assert torch.equal(model(x), wanted)
    bs.checkpoint.save_file(model.state_dict(), tmp_path / "m.safetensors")
    state = bs.checkpoint.load_file(tmp_path / "m.safetensors")
    other = bs.quantize_(nn.Sequential(Conv1D(32, 80)), recipe)
    other.load_state_dict(state)
    assert torch.equal(other(x), wanted)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), wanted)


def test_what_is_no_conv1d():
    class Square(Conv1D):
        def forward(self, x):
            return super().forward(x).square()

    odd = Conv1D(32, 64)
    odd.nf = 16
    for layer in (Square(32, 64), odd, nn.Conv1d(64, 32, 1)):
        with pytest.raises(ValueError, match="nothing was converted"):
            bs.convert(layer, RECIPE)


# --- lazy layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [bs.convert, bs.quantize_])
def test_lazy_layers_are_refused_until_they_have_a_shape(change):
    """They become a torch.nn.Linear in their first forward pass: the recipe would be lost."""
    model = nn.Sequential(nn.Linear(64, 32), nn.LazyLinear(16))
    with pytest.raises(ValueError, match="1 is a LazyLinear without a shape yet; run one batch"):
        change(model, RECIPE)
    assert type(model[0]) is nn.Linear
    change(copy.deepcopy(model), RECIPE, lambda module, name: name == "0")
    model(X)
    report = ConversionReport()
    change(model, RECIPE, report=report)
    assert named(report.converted) == ["0", "1"]


# --- what is left alone by default ----------------------------------------------------------------


def test_heads_and_routers_are_left_alone():
    model, report = LanguageModel(tied=True), ConversionReport()
    bs.convert(model, RECIPE, report=report)
    assert named(report.converted) == ["block.q_proj", "block.gate_proj"]
    why = {entry.name: entry.why for entry in report.left}
    assert list(why) == [
        *("embed", "block.gate", "block.router.0", "block.shared_expert_gate"),
        *("block.experts", "unembed"),
    ]
    assert why["embed"] == "looked up, not multiplied"
    assert why["block.gate"] == "left alone by default: router ('gate')"
    assert why["block.router.0"] == "left alone by default: router ('router')"
    assert why["block.experts"].startswith("stacked matrices of [(4, 64, 64), (4, 128, 64)]")
    assert why["unembed"] == "left alone by default: its weight is that of an embedding"


@pytest.mark.parametrize("name", ["lm_head", "model.lm_head", "head", "embed_out", "Router",
                                  "gate.wg", "mlp.expert_router", "x.lora_A.default"])  # fmt: skip
def test_names_that_are_left_alone(name):
    model = nn.Sequential(nn.Linear(64, 64))
    inner = model
    for part in name.split(".")[:-1]:
        inner.add_module(part, nn.Sequential())
        inner = getattr(inner, part)
    inner.add_module(name.split(".")[-1], nn.Linear(64, 64))
    report = ConversionReport()
    bs.convert(model, RECIPE, report=report)
    assert (named(report.converted), named(report.left)) == (["0"], [name])


@pytest.mark.parametrize("name", ["gate_proj", "up", "heads", "aggregate", "delegated", "gated"])
def test_names_that_are_not(name):
    model = nn.Sequential()
    model.add_module(name, nn.Linear(64, 64))
    assert isinstance(bs.convert(model, RECIPE)[0], Linear)


def test_get_output_embeddings():
    class Model(LanguageModel):
        def get_output_embeddings(self):
            return self.unembed

    class Headless(nn.Module):
        def get_output_embeddings(self):
            raise NotImplementedError

    model, report = nn.ModuleDict({"inner": Model(), "other": Headless()}), ConversionReport()
    bs.quantize_(model, RECIPE, report=report)
    why = {entry.name: entry.why for entry in report.left}
    assert why["inner.unembed"] == "left alone by default: get_output_embeddings() returns it"


def test_filter_fn_overrides_the_defaults():
    model, seen = LanguageModel(tied=True), []

    def accept(module, name):
        seen.append(name)
        return name == "unembed"

    bs.convert(model, RECIPE, accept)
    assert {n for n, m in model.named_modules() if isinstance(m, Linear)} == {"unembed"}
    assert "block.gate" in seen
    assert "block.router.0" in seen
    assert "block.experts" not in seen
    assert model.unembed.weight is model.embed.weight
    bs.convert(model, bs.Recipe("mxfp4"))  # what was asked for once is not left alone
    assert model.unembed.recipe == bs.Recipe("mxfp4")


# --- the report -----------------------------------------------------------------------------------


def test_the_report_counts_parameters(caplog):
    model, report = LanguageModel(), ConversionReport()
    with caplog.at_level(logging.INFO, "blockscale"):
        bs.convert(model, RECIPE, report=report)
    products = 2 * 64 * 64 + 9 * 64 + 4 * 3 * 64 * 64 + 100 * 64
    assert report.product_parameters == products
    assert report.converted_parameters == 2 * 64 * 64
    assert report.share == report.converted_parameters / products
    (record,) = caplog.records
    assert (record.levelname, record.message) == ("WARNING", str(report))
    assert str(report).splitlines() == [
        "2 layers converted: 8,192 of 64,320 parameters of matrix products (13%)",
        "converted: 2 Linear, 8,192 parameters (block.q_proj, block.gate_proj)",
        "not converted: 1 Embedding, 6,400 parameters (embed): looked up, not multiplied",
        "not converted: 1 Linear, 256 parameters (block.gate): left alone by default: router "
        "('gate')",
        "not converted: 1 Linear, 256 parameters (block.router.0): left alone by default: router "
        "('router')",
        "not converted: 1 Linear, 64 parameters (block.shared_expert_gate): left alone by default: "
        "router ('*_expert_gate')",
        "not converted: 1 Experts, 49,152 parameters (block.experts): stacked matrices of "
        "[(4, 64, 64), (4, 128, 64)]; blockscale.nn.experts multiplies by such",
        "not converted: 1 Linear, 6,400 parameters (unembed): left alone by default: output head "
        "('unembed')",
    ]


def test_most_of_a_model_is_no_warning(caplog):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight  # counts once
    with caplog.at_level(logging.INFO, "blockscale"):
        report = ConversionReport()
        bs.quantize_(model, RECIPE, report=report)
        bs.convert(nn.Linear(64, 64), RECIPE)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert report.product_parameters == report.converted_parameters == 64 * 64
    assert "the model itself" in caplog.records[1].message


def test_a_report_can_be_used_again():
    model, report = nn.Sequential(nn.Linear(64, 64)), ConversionReport()
    bs.convert(model, bs.Recipe("mxfp4"), report=report)
    bs.convert(model, RECIPE, report=report)
    assert [(e.name, e.why) for e in report.converted] == [("0", "before by Recipe('mxfp4')")]
    bs.convert(model, None, report=report)
    assert [(e.name, e.why) for e in report.converted] == [("0", "back to what it was")]
    assert report.share == 1


def test_fused_recurrences_are_reported():
    model, report = nn.ModuleList([nn.LSTM(64, 64), nn.Linear(64, 64)]), ConversionReport()
    bs.convert(model, RECIPE, report=report)
    assert [(e.type, e.why) for e in report.left] == [
        ("LSTM", "torch multiplies all its steps by one operation")
    ]
