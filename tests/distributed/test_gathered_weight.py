"""Weights that FSDP2 gathers quantized: the losses of those that it gathers as they are."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from typing import Any

import fsdp_ranks
import pytest
import torch
from processes import gather
from torch import nn
from torch._subclasses import FakeTensorMode

import blockscale as bs
from blockscale.distributed import gather_quantized
from blockscale.distributed.gathered_weight import GatheredWeight, Like
from blockscale.distributed.weight_state import WeightState


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return gather(fsdp_ranks.run, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return gather(fsdp_ranks.run, 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(params=["two", "four"])
def found(request):
    return request.getfixturevalue(request.param)


def check_losses(found, name):
    for losses, _, _ in found:
        plain, quantized = losses[name]
        assert plain == quantized
        assert len(set(plain)) == len(plain)  # it trains


@pytest.mark.parametrize("name", fsdp_ranks.CASES)
def test_losses(two, name):
    check_losses(two, name)


@pytest.mark.parametrize("name", fsdp_ranks.OF_FOUR)
def test_losses_of_four_ranks(four, name):
    check_losses(four, name)


def test_bytes_that_travel(found):
    """Once in the forward and once in the backward, each at most 0.52 of bfloat16's; what was sent
    is not kept."""
    for _, sent, _ in found:
        for name, (each, elements, kept) in sent.items():
            assert not kept, name
            assert len(each) == 2 * 4, name
            assert max(each) / (2 * elements) <= 0.52, name


def test_checkpoint(found):
    assert all(same for *_, same in found)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return gather(fsdp_ranks.compiled, 2, tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("name", fsdp_ranks.COMPILED)
def test_losses_of_compiled_blocks(compiled, name):
    """One graph each. Backends that decompose or fuse what is between have bits of their own."""
    for losses in compiled:
        quantized, plain, eager = losses[name]
        assert quantized == plain
        assert len(set(plain)) == len(plain)
        if fsdp_ranks.COMPILED[name] == "aot_eager":
            assert quantized == eager


@pytest.fixture(scope="module")
def reused(tmp_path_factory):
    return gather(fsdp_ranks.reused, 2, tmp_path_factory.mktemp("reused"))


@pytest.mark.parametrize("name", fsdp_ranks.REUSED)
def test_a_shard_is_quantized_once_a_step(reused, name):
    """Of four weights, along both axes (of FP8's squares, too), and anew after a step. Where they
    stay gathered, nobody asks for columns of the first, whose input has no gradient."""
    columns = 3 if "kept" in name else 4
    for cases, *_ in reused:
        (want, often), (losses, once) = cases[name]
        assert losses == want
        agreed = {"agreed": 4} if name == "nvfp4" else {"agreed": 0}
        for step in (0, 1):
            assert +once[step] == +Counter({"-1": 4, "-2": columns, **agreed})
            parts = fsdp_ranks.PARTS
            assert often[step]["-2"] == columns * parts
            assert often[step]["-1"] == 4 * parts
            assert often[step]["agreed"] == 2 * parts * agreed["agreed"]


@pytest.mark.parametrize("write", fsdp_ranks.WRITES)
@pytest.mark.parametrize("name", ["mxfp8 bf16", "nvfp4"])
def test_writes_to_shards_are_seen(reused, name, write):
    for _, writes, _ in reused:
        assert writes[name][write] == (False, True)


def test_a_rank_without_rows(reused):
    assert all(same for *_, same in reused)


def test_refusals(tmp_path):
    """Rows of old values and columns of new ones would be no weight."""
    for told in gather(fsdp_ranks.refusals, 2, tmp_path):
        assert "up.weight was written to after FSDP gathered it" in told["gathered"]
        assert told["sharded"] == "nothing"
        assert "give it Shard(0), or leave the layer out" in told["columns"]


def test_loaded_by_assignment(tmp_path):
    """A weight is gathered quantized as the one that it takes the place of."""
    for found in gather(fsdp_ranks.assigned, 2, tmp_path):
        for plain, quantized in zip(found[::2], found[1::2], strict=True):
            assert plain[0] == quantized[0]
            assert (plain[1], quantized[1]) == ("Tensor", "GatheredWeight")


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
    for assign in (False, True):
        model.load_state_dict(state, assign=assign)
        assert torch.equal(model[0].weight.detach().master, state["0.weight"])


def test_compilers_pickle_what_stands_in():
    """For a weight, as torch 2.11 does for the key of a graph it has cached; a weight that was
    gathered is still refused."""
    model = gather_quantized(bs.convert(nn.Sequential(nn.Linear(64, 32)), bs.Recipe("mxfp8")))
    weight: Any = model[0].weight
    with FakeTensorMode() as mode:
        keys = [pickle.loads(pickle.dumps(mode.from_tensor(weight))) for _ in range(2)]
    assert keys[0] == keys[1]
    assert "[32, 64]), (64, 1), torch.float32" in keys[0]
    gathered = GatheredWeight(
        WeightState(weight.quantizer, "up", handle=torch.tensor([1])), Like.of(weight)
    )
    with pytest.raises(ValueError, match="up has no values in high precision"):
        pickle.dumps(gathered)


def test_cached_graphs_are_of_like_weights():
    """Torch tells weights apart by what they say of themselves: of a frozen one the graph has no
    gradient."""

    def weight(n: int, *, frozen: bool = False) -> Any:
        layer = nn.Linear(64, n, bias=False).requires_grad_(not frozen)
        return gather_quantized(bs.convert(nn.Sequential(layer), bs.Recipe("mxfp8")))[0].weight

    each = [weight(32), weight(64), weight(32, frozen=True)]
    assert len({x._stable_hash_for_caching() for x in each}) == 3
    assert weight(32)._stable_hash_for_caching() == each[0]._stable_hash_for_caching()


def test_others_stay():
    """A filter leaves layers out, and products in high precision do."""
    two = nn.Sequential(*layer(), *layer())
    model = gather_quantized(two, lambda module, name: name == "1")
    assert type(model[0].weight.detach()) is torch.Tensor
    assert type(model[1].weight.detach()) is GatheredWeight
    recipe = bs.Recipe("mxfp8", high_precision=("dgrad",))
    model = gather_quantized(bs.convert(nn.Sequential(nn.Linear(64, 96)), recipe))
    assert type(model[0].weight.detach()) is torch.Tensor


def test_nothing_to_gather():
    for model, accepts in ((nn.Sequential(nn.Linear(64, 96)), None), (layer(), lambda *_: False)):
        with pytest.raises(ValueError, match=r"no layer made by blockscale\.convert"):
            gather_quantized(model, accepts)


def test_compiled_before_it_is_sharded():
    """One graph, and gradients arrive."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = layer(), torch.randn(8, 64)
    model(x).sum().backward()
    grad = model[0].weight.grad
    gather_quantized(model)
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, model(x))
    got.sum().backward()
    assert torch.equal(model[0].weight.grad, grad)


def test_masters_are_cast_moved_and_set_with_their_modules():
    model, x = gather_quantized(layer()), torch.randn(8, 64)
    weight = model[0].weight
    weight.data = torch.ones(96, 64)
    assert torch.equal(weight.detach().master, torch.ones(96, 64))
    with pytest.raises(TypeError, match="takes its like alone"):
        weight.data = torch.ones(96, 64).bfloat16()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.mul_(2)
    assert torch.equal(weight.detach().master, torch.ones(96, 64))
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        model.to(dtype)
        assert model[0].weight.detach().master.dtype == dtype
    model.to("meta").to_empty(device="cpu")
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    plain = layer()
    nn.init.ones_(plain[0].weight)
    plain[0].bias = model[0].bias
    assert torch.equal(model(x), plain(x))


def test_tied_weights_stay_tied():
    linears = nn.Linear(64, 64), nn.Linear(64, 64)
    linears[1].weight = linears[0].weight
    model = gather_quantized(bs.convert(nn.Sequential(*linears), bs.Recipe("mxfp8")))
    assert model[0].weight is model[1].weight
    assert len(list(model.parameters())) == 3


def test_a_weight_of_an_embedding_stays():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(64, 64), nn.Linear(64, 96)
            self.embedding = nn.Embedding(96, 64)
            self.embedding.weight = self.head.weight

    model = gather_quantized(bs.convert(Tied(), bs.Recipe("mxfp8"), filter_fn=lambda *_: True))
    assert model.head.weight is model.embedding.weight
    assert type(model.head.weight.detach()) is torch.Tensor
    assert type(model.inner.weight.detach()) is GatheredWeight
