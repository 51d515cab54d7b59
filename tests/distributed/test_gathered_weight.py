"""Weights that FSDP2 gathers quantized: the losses of those that it gathers as they are."""

from __future__ import annotations

import io

import fsdp_ranks
import pytest
import torch
from torch import nn

import blockscale as bs
from blockscale.distributed import gather_quantized
from blockscale.distributed.gathered_weight import GatheredWeight


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(fsdp_ranks.run, (request.param, str(folder)), nprocs=request.param)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("name", fsdp_ranks.CASES)
def test_losses(found, name):
    for losses, _, _ in found:
        plain, quantized = losses[name]
        assert plain == quantized
        assert len(set(plain)) == len(plain)  # it trains


def test_bytes_that_travel(found):
    """Once in the forward and once in the backward, each at most 0.52 of bfloat16's."""
    for _, sent, _ in found:
        for name, (each, elements) in sent.items():
            assert len(each) == 2 * 4, name
            assert max(each) / (2 * elements) <= 0.52, name


def test_checkpoint(found):
    assert all(same for *_, same in found)


def layer(recipe: str = "mxfp8") -> nn.Module:
    return bs.convert(nn.Sequential(nn.Linear(64, 96)), bs.Recipe(recipe))


def test_alone():
    """Before it is sharded, a layer has the bits it had, and so has its gradient."""
    torch.manual_seed(0)
    model, x = layer(), torch.randn(8, 64)
    want = model(x)
    want.sum().backward()
    grad = model[0].weight.grad
    gather_quantized(model)
    assert type(model[0].weight.detach()) is GatheredWeight
    got = model(x)
    got.sum().backward()
    assert torch.equal(got, want)
    assert torch.equal(model[0].weight.grad, grad)


def test_plain_in_files():
    model = gather_quantized(layer())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert type(state["0.weight"]) is torch.Tensor
    model.load_state_dict(state)
    assert torch.equal(model[0].weight.detach().master, state["0.weight"])


def test_others_stay():
    """NVFP4's global scale is of the whole weight; a filter leaves layers out."""
    assert type(gather_quantized(layer("nvfp4"))[0].weight) is nn.Parameter
    model = gather_quantized(layer(), lambda module, name: False)
    assert type(model[0].weight.detach()) is torch.Tensor
