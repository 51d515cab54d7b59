"""Checkpoints into quantized models, quantized checkpoints into plain ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import blockscale as bs
from blockscale import checkpoint
from blockscale.nn import QuantizedLinear

RECIPE = bs.Recipe("nvfp4")
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


def model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32, bias=False)).to(dtype)


@pytest.fixture
def file(tmp_path):
    """Quantized by the command line's function, from a plain file."""
    plain = tmp_path / "model.safetensors"
    checkpoint.save_file(model().state_dict(), plain)
    checkpoint.quantize_file(plain, tmp_path / "q.safetensors", "nvfp4")
    return tmp_path / "q.safetensors"


@pytest.fixture
def wanted():
    return bs.convert(model(), RECIPE)(X)


@pytest.mark.parametrize("assign", [False, True])
def test_into_a_quantized_model(file, wanted, assign):
    other = bs.quantize_(model(seed=1), RECIPE)
    assert not torch.equal(other(X), wanted)
    other.load_state_dict(checkpoint.load_file(file), assign=assign)
    assert torch.equal(other(X), wanted)
    assert isinstance(other[0].weight, nn.Parameter)
    assert not other[0].weight.requires_grad


def test_into_a_plain_model(file, wanted):
    """Its layers do not know the scales: they say what to do."""
    other = model(seed=1)
    other.load_state_dict(checkpoint.load_file(file), assign=True)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for shape in ((64,), (4, 64), (2, 4, 64)):
            with (
                mode(),
                pytest.raises(ValueError, match=r"runs after blockscale\.quantize_\(model, recipe"),
            ):
                other(torch.ones(shape))
    bs.quantize_(other, RECIPE)
    assert [type(m) for m in other] == [QuantizedLinear, nn.GELU, QuantizedLinear]
    assert torch.equal(other(X), wanted)


def test_into_a_plain_model_without_assign(file):
    with pytest.raises(RuntimeError, match=r"blockscale\.quantize_ before load_state_dict"):
        model().load_state_dict(checkpoint.load_file(file))


def test_a_recipe_that_is_not_the_files(file):
    other = model(seed=1)
    other.load_state_dict(checkpoint.load_file(file), assign=True)
    with pytest.raises(ValueError, match="weight of 0 is in nvfp4, the recipe wants mxfp8"):
        bs.quantize_(other, bs.Recipe("mxfp8"))
    assert type(other[0]) is nn.Linear


def test_a_file_with_layers_left_alone(tmp_path, wanted):
    """What is plain in the file is quantized from what it is."""
    plain = tmp_path / "model.safetensors"
    checkpoint.save_file(model().state_dict(), plain)
    checkpoint.quantize_file(plain, tmp_path / "q.safetensors", "nvfp4", exclude=["2.weight"])
    other = model(seed=1)
    other.load_state_dict(checkpoint.load_file(tmp_path / "q.safetensors"), assign=True)
    assert torch.equal(bs.quantize_(other, RECIPE)(X), wanted)


@pytest.mark.parametrize("order", ["quantize first", "load first"])
def test_from_the_meta_device(file, wanted, order):
    with torch.device("meta"):
        other = model()
    if order == "quantize first":
        bs.quantize_(other, RECIPE)
        assert other[0].weight.device.type == "meta"
    other.load_state_dict(checkpoint.load_file(file), assign=True)
    bs.quantize_(other, RECIPE)
    assert other[0].weight.device.type == "cpu"
    assert torch.equal(other(X), wanted)


def test_round_trip(tmp_path, wanted):
    m = bs.quantize_(model(), RECIPE)
    checkpoint.save_file(m.state_dict(), tmp_path / "a.safetensors")
    torch.save(m.state_dict(), tmp_path / "b.pt")
    for state in (
        m.state_dict(),
        checkpoint.load_file(tmp_path / "a.safetensors"),
        torch.load(tmp_path / "b.pt", weights_only=True),
    ):
        assert state.keys() == model().state_dict().keys()
        other = bs.quantize_(model(seed=1), RECIPE)
        other.load_state_dict(state)
        assert torch.equal(other(X), wanted)


def test_the_dtype_of_the_original_may_differ(file, wanted):
    """It is only what dequantize() gives: bytes are the same."""
    other = bs.quantize_(model(seed=1, dtype=torch.bfloat16), RECIPE).float()
    other.half().load_state_dict(checkpoint.load_file(file))
    assert other[0].weight.dtype == torch.float16
    assert torch.equal(other.float()[2](torch.ones(128)), bs.quantize_(model(), RECIPE)[2](
        torch.ones(128)
    ))  # fmt: skip


def test_between_forward_and_backward():
    """The gradient would be that of other weights."""
    m = bs.quantize_(model(), RECIPE)
    y = m(X.clone().requires_grad_())
    m.load_state_dict(copy.deepcopy(m).state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("weight", "message"), [
    (torch.ones(128, 64), r"0\.weight: got a plain torch\.float32 tensor, the layer holds its "
     r"weight in nvfp4; load high-precision weights before blockscale\.quantize_"),
    (torch.ones(128, 64).to(torch.float8_e4m3fn), r"read quantized files by blockscale\.checkp"),
    (bs.quantize(torch.ones(128, 64), "mxfp8"), r"0\.weight: got mxfp8 \(128, 64\) along -1, the "
     r"layer holds nvfp4 \(128, 64\) along -1; choose the recipe"),
    (bs.quantize(torch.ones(64, 64), "nvfp4"), r"got nvfp4 \(64, 64\) along -1, the layer"),
    (bs.quantize(torch.ones(128, 64), "nvfp4", -2), r"got nvfp4 \(128, 64\) along -2, the layer"),
], ids=["plain", "fp8", "format", "shape", "axis"])  # fmt: skip
def test_weights_that_do_not_fit(weight, message, assign):
    m = bs.quantize_(model(), RECIPE)
    before, state = copy.deepcopy(m), m.state_dict()
    with pytest.raises(RuntimeError, match=message):
        m.load_state_dict({**state, "0.weight": weight}, assign=assign)
    assert torch.equal(m[0].weight, before[0].weight)


def test_strict_is_torchs():
    m = bs.quantize_(model(), RECIPE)
    state = m.state_dict()
    del state["0.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"0\.weight\""):
        m.load_state_dict(state)
    assert m.load_state_dict(state, strict=False).missing_keys == ["0.weight"]


@pytest.mark.parametrize("weight", [
    bs.quantize(torch.ones(32, 64), "nvfp4", -2),
    bs.quantize(torch.ones(32, 64), "mxfp8", offsets=torch.tensor([8, 32], dtype=torch.int32)),
], ids=["axis", "groups"])  # fmt: skip
def test_plain_layers_with_weights_that_cannot_be_multiplied(weight):
    layer = nn.Linear(64, 32)
    layer.load_state_dict({"weight": weight}, assign=True, strict=False)
    with pytest.raises(ValueError, match=r"model: weight of the layer got ScaledTensor.*quantize"):
        bs.quantize_(layer, bs.Recipe(weight.format_name))
