"""``.data`` of a quantized weight is what torch means by it: copies take scales along."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import blockscale as bs


def tensor(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(name="mxfp8", seed=0):
    torch.manual_seed(seed)
    return bs.quantize_(nn.Linear(64, 32), bs.Recipe(name))


def test_elements_of_a_plain_one():
    q = bs.quantize(tensor(32, 64), "mxfp8")
    assert q.data is q.qdata


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_the_detached_tensor_of_a_parameter(name):
    weight = layer(name).weight
    assert isinstance(weight.data, bs.ScaledTensor)
    assert not isinstance(weight.data, nn.Parameter)
    assert weight.data.qdata.data_ptr() == weight.qdata.data_ptr()
    assert torch.equal(weight.data, weight)
    assert weight.qdata.dtype == bs.formats[name].element.dtype


def test_plain_values_are_refused():
    m, x = layer(), tensor(4, 64)
    before, y = copy.deepcopy(m), m(x)
    for write in (
        lambda w: w.data.copy_(tensor(32, 64)),
        lambda w: w.data.copy_(tensor(32, 64).to(w.qdata.dtype)),
        lambda w: w.data.copy_(layer().weight.qdata),
    ):
        with pytest.raises(TypeError, match="a plain tensor: quantize it"):
            write(m.weight)
    with pytest.raises(ValueError, match=r"call \.dequantize\(\) first.* merge adapters before"):
        m.weight.data += tensor(32, 64)
    for value in (tensor(32, 64), layer(seed=1).weight, m.weight.qdata):
        with pytest.raises(TypeError, match=r"data: cannot be set.*\.copy_\(.*nn\.Parameter\("):
            m.weight.data = value
    assert torch.equal(m.weight, before.weight)
    assert torch.equal(m(x), y)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_another_quantized_weight_is_copied_with_its_scales(name):
    m, other, x = layer(name), layer(name, seed=1), tensor(4, 64)
    with torch.no_grad():
        other.weight = nn.Parameter(bs.quantize(100 * tensor(32, 64), name), requires_grad=False)
    m(x)  # what is kept for products to come reads the same memory
    m.weight.data.copy_(other.weight.data)
    other.bias.data.copy_(m.bias.data)
    assert torch.equal(m.weight, other.weight)
    assert torch.equal(m(x), other(x))
    kinds = (bs.quantize(tensor(32, 64), name, layout="tcgen05"), bs.quantize(tensor(32, 64)).mT)
    for wrong in (*kinds, bs.quantize(tensor(32, 64), "mxfp4")):
        with pytest.raises(TypeError, match="can be overwritten as a whole"):
            m.weight.data.copy_(wrong)
    assert torch.equal(m.weight, other.weight)


def test_slices_of_one_global_scale_keep_it():
    """Slices share the scalar: another one would change the rows that are not written."""
    q = bs.quantize(tensor(64, 64), "nvfp4")
    before = q.dequantize()
    other = bs.quantize(100 * tensor(32, 64), "nvfp4")
    with pytest.raises(ValueError, match=r"shares its global scale.*global_scale="):
        q[:32].copy_(other)
    assert torch.equal(q.dequantize(), before)
    fits = bs.quantize(2 * before[:32], "nvfp4", global_scale=q.global_scale.reshape(1))
    q[:32].copy_(fits)
    assert torch.equal(q.dequantize()[32:], before[32:])
    assert torch.equal(q[:32].dequantize(), fits.dequantize())


@pytest.mark.parametrize("by", ["layers", "quantize_"])
def test_layers_of_one_global_scale_load_for_themselves(by):
    shared, recipe = torch.tensor(0.003), bs.Recipe("nvfp4")
    weights = [bs.quantize(tensor(32, 64, seed=i), "nvfp4", global_scale=shared) for i in range(2)]
    if by == "layers":
        model = nn.Sequential(*(bs.nn.QuantizedLinear(q, recipe=recipe) for q in weights))
    else:
        model = nn.Sequential(*(nn.Linear(64, 32, bias=False, device="meta") for _ in weights))
        model.load_state_dict({f"{i}.weight": q for i, q in enumerate(weights)}, assign=True)
        bs.quantize_(model, recipe)
    other = nn.Sequential(*(layer("nvfp4", i) for i in range(2)))
    model.load_state_dict(other.state_dict(), strict=False)
    for one, two in zip(model, other, strict=True):
        assert torch.equal(one.weight, two.weight)
    assert shared.item() == torch.tensor(0.003).item()


def test_copies_with_other_groups_stop_before_they_start():
    def grouped(ends, seed):
        offsets = torch.tensor(ends, dtype=torch.int32)
        return bs.quantize(tensor(64, 64, seed=seed), "mxfp8", offsets=offsets)

    q, before = grouped([32, 64], 1), grouped([32, 64], 1)
    with pytest.raises(TypeError, match="as many groups"):
        q.copy_(grouped([64], 2))
    assert torch.equal(q, before)


def test_sizes():
    """``nbytes`` is what is stored; element by element it is what the weight stands for."""
    weight = layer().weight
    assert weight.nbytes == 32 * 64 + 32 * 64 // 32
    assert weight.numel() * weight.element_size() == 4 * 32 * 64


def test_the_meta_device_keeps_buffers_that_no_file_holds():
    """They are real again where they are made anew."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 32)
            self.register_buffer("factor", torch.tensor(3.0), persistent=False)

        def forward(self, x):
            return self.layer(x) * self.factor

    whole, x = bs.quantize_(Scaled(), bs.Recipe()), tensor(4, 64)
    with torch.device("meta"):
        empty = Scaled()
    empty.load_state_dict(whole.state_dict(), assign=True)
    bs.quantize_(empty, bs.Recipe())
    assert empty.factor.is_meta
    empty.factor = torch.tensor(3.0)
    assert torch.equal(empty(x), whole(x))


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_shards_are_refused(name):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        m = layer()
        given = {"x": tensor(4, 64), "weight": m.weight, "bias": m.bias.detach()}
        plain = tensor(32, 64) if name == "weight" else given[name]
        given[name] = distribute_tensor(plain, mesh, [Replicate()])
        with pytest.raises(TypeError, match=f"{name}: is a DTensor.*full_tensor"):
            bs.nn.quantized_linear(**given, recipe=m.recipe)
    finally:
        dist.destroy_process_group()
