"""bs.nn.fuse_projections: q, k and v by one product, with the numbers of three."""

from __future__ import annotations

import copy
import pickle
import re
import threading

import pytest
import torch
from torch.nn import Linear

import blockscale as bs
from blockscale.nn.fused_projections import FusedProjections

WEIGHT_ONLY = bs.Recipe("nvfp4", activations="bfloat16")


class Attention(torch.nn.Module):
    """Adds up what q, k and v give, in any order, of one input or of two."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj = Linear(64, 96, bias), Linear(64, 32, bias)
        self.v_proj, self.o_proj = Linear(64, 32, bias), Linear(96, 64, bias)

    def forward(self, x, other=None, order="qkv"):
        y = x if other is None else other
        found = {n: getattr(self, f"{n}_proj")(x if n == "q" else y) for n in order}
        return torch.cat([found[n].flatten() for n in "qkv"])


def made(recipe: bs.Recipe, bias: bool = False) -> Attention:
    """With one global scale for the three."""
    torch.manual_seed(0)
    model = Attention(bias).bfloat16()
    largest = max(p.abs().max().item() for n, p in model.named_parameters() if "weight" in n)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(model, name).weight.data[0, 0] = largest
    return bs.quantize_(model, recipe)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 64).bfloat16()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", [bs.Recipe("mxfp8"), bs.Recipe("nvfp4"), WEIGHT_ONLY], ids=str)
def test_bits(recipe, bias):
    model = made(recipe, bias)
    fused = bs.nn.fuse_projections(copy.deepcopy(model))
    assert isinstance(fused.q_proj, FusedProjections)
    assert len(list(fused.parameters())) == (4 if bias else 2)
    for given in (x(1), x(5), x(2, 3)):
        for order in ("qkv", "vkq", "kqv"):
            assert torch.equal(fused(given, order=order), model(given, order=order))
            assert fused.q_proj.waiting is None  # nothing is kept
    one, two = x(4), x(7)  # attention across
    assert torch.equal(fused(one, two), model(one, two))
    assert torch.equal(fused(one), model(one))
    state, wanted = fused.state_dict(), model.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        pair = (
            t.dequantize() if isinstance(t, bs.ScaledTensor) else t for t in (tensor, state[name])
        )
        assert torch.equal(*pair)
    assert torch.equal(fused.k_proj.weight.dequantize(), model.k_proj.weight.dequantize())


def test_one_product(monkeypatch):
    from blockscale.nn import fused_projections

    calls, plain = [], fused_projections.quantized_linear
    monkeypatch.setattr(
        fused_projections, "quantized_linear", lambda *a, **k: calls.append(1) or plain(*a, **k)
    )
    model = bs.nn.fuse_projections(made(WEIGHT_ONLY))
    model(x(3))
    assert len(calls) == 1


def test_an_input_that_is_changed_in_place():
    model = made(WEIGHT_ONLY)
    fused, given = bs.nn.fuse_projections(copy.deepcopy(model)), x(3)
    fused.q_proj(given)
    given.mul_(2)
    assert torch.equal(fused.k_proj(given), model.k_proj(given))


def test_copies_files_and_compilers():
    model = made(WEIGHT_ONLY)
    fused, given = bs.nn.fuse_projections(copy.deepcopy(model)), x(3)
    wanted = model(given)
    fused.q_proj(given)  # which is waiting
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert other.k_proj._first[0] is other.q_proj
        assert torch.equal(other(given), wanted)
    assert torch.equal(torch.compile(fused, fullgraph=True, backend="eager")(given), wanted)
    fused.to(torch.float32)
    assert torch.equal(fused(given), wanted)
    loaded = made(WEIGHT_ONLY)
    loaded.load_state_dict(fused.state_dict())
    assert torch.equal(loaded(given), wanted)
    with pytest.raises(RuntimeError, match=r"fused with others; load the weights before"):
        fused.load_state_dict(model.state_dict())


def test_gradient_of_the_input():
    model = made(WEIGHT_ONLY)
    fused = bs.nn.fuse_projections(copy.deepcopy(model))
    one, two = (x(3).requires_grad_() for _ in range(2))
    two.data.copy_(one.data)
    model(one).float().sum().backward()
    fused(two).float().sum().backward()
    torch.testing.assert_close(one.grad, two.grad, rtol=2e-2, atol=2e-2)  # sums in another order


def test_threads():
    model = made(WEIGHT_ONLY)
    fused, given = bs.nn.fuse_projections(copy.deepcopy(model)), [x(3) for _ in range(4)]
    wanted, wrong = [model(each) for each in given], []

    def run(i: int) -> None:
        for _ in range(50):
            if not torch.equal(fused(given[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: None, "q_proj: not all hold a quantized weight"),
        (lambda m: bs.quantize_(m, bs.Recipe("nvfp4")), "q_proj: global scales differ"),
        (
            lambda m: bs.quantize_(m, bs.Recipe("mxfp8", overrides={"k_*": WEIGHT_ONLY})),
            "q_proj: recipes, inputs or devices differ",
        ),
    ],
)
def test_refusals(change, why):
    model = Attention()
    change(model)
    with pytest.raises(ValueError, match=rf"^model: no layers can be fused \({re.escape(why)}"):
        bs.nn.fuse_projections(model)


def test_filter():
    model = torch.nn.ModuleDict({"a": Attention(), "b": Attention()})
    bs.quantize_(model, bs.Recipe("mxfp8"))
    bs.nn.fuse_projections(model, lambda module, name: name == "b")
    assert [isinstance(model[n].q_proj, FusedProjections) for n in "ab"] == [False, True]
    with pytest.raises(ValueError, match="no layers can be fused"):
        bs.nn.fuse_projections(model, lambda module, name: False)
    with pytest.raises(ValueError, match="none has neighbours of such names"):
        bs.nn.fuse_projections(torch.nn.Sequential(torch.nn.Linear(64, 64)))
