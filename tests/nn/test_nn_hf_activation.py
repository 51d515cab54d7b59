"""What experts of transformers have between their products: found by values, kept with the module.

Modules here are as transformers marks them, which is not imported.
"""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor, nn

import blockscale as bs
from blockscale.nn import GatedActivation
from blockscale.nn.hf_activation import activation_of
from blockscale.nn.hf_experts import _PLAIN, run_experts

RECIPE = bs.Recipe("mxfp8")
COUNT, H, I = 4, 64, 32  # noqa: E741


class Marked(nn.Module):
    """With a clamp: ``numbers`` are attributes, of which ``clamp`` is the limit's name."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self, act_fn: nn.Module | None = None, clamp: str = "", **numbers: object) -> None:
        super().__init__()
        self.num_experts, self.clamp = COUNT, clamp
        self.gate_up_proj = nn.Parameter(torch.randn(COUNT, 2 * I, H))
        self.down_proj = nn.Parameter(torch.randn(COUNT, H, I))
        self.act_fn = nn.SiLU() if act_fn is None else act_fn
        for name, number in numbers.items():
            setattr(self, name, number)

    def _apply_gate(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        if self.clamp:
            limit = getattr(self, self.clamp)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for e in range(COUNT):
            y = self._apply_gate(hidden_states @ self.gate_up_proj[e].T) @ self.down_proj[e].T
            out = out + y * (weights * (index == e)).sum(-1, keepdim=True)
        return out


class GptOss(Marked):
    """Interleaved, with a factor in the sigmoid."""

    is_concatenated = False

    def _apply_gate(self, h: Tensor) -> Tensor:
        gate, up = h[..., ::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


class Swish(nn.Module):
    """SiLU, as long as nobody trains it."""

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(beta))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


def converted(module: Marked) -> Marked:
    bs.convert(nn.Sequential(module), RECIPE)
    return module


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, scores = torch.randn(50, H, generator=generator), torch.rand(50, COUNT, generator=generator)
    weights, index = scores.topk(2)
    return 4 * x, index, weights


def error(module: Marked) -> float:
    """Relative, of what its class computes without conversion."""
    with torch.no_grad():
        want = Marked.forward(module, *inputs())
        return float((module(*inputs()) - want).norm() / want.norm())


def found(module: Marked) -> GatedActivation | None:
    return activation_of(module, torch.device("cpu"))


class Backend:
    """Counts what is compiled."""

    count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


def compiled(module: nn.Module, backend: Backend) -> nn.Module:
    return torch.compile(module, fullgraph=True, backend=backend)


@pytest.mark.parametrize("limit", [7.0, 29, 31.0, 50.0, 1e5, 1e20])
@pytest.mark.parametrize("name", ["limit", "swiglu_limit"])
def test_a_limit_is_kept(name, limit):
    torch.manual_seed(0)
    module = converted(Marked(clamp=name, **{name: limit}))
    assert error(module) <= 0.2
    assert found(module) == GatedActivation(limit=limit)


@pytest.mark.parametrize("limit", [7.0, 31.0, 50.0, 1e5])
def test_limits_of_gpt_oss(limit):
    torch.manual_seed(0)
    module = converted(GptOss(alpha=1.702, limit=limit))
    assert error(module) <= 0.2
    assert found(module) == GatedActivation(1.702, limit, 1.0, True)


@pytest.mark.parametrize(
    ("module", "want"),
    [
        (lambda: Marked(clamp="most", most=50.0), None),
        (lambda: Marked(clamp="limit", limit=torch.tensor(50.0)), None),
        (lambda: Marked(clamp="limit", limit=float("inf")), GatedActivation()),
        (lambda: Marked(limit=50.0), GatedActivation()),  # which it does not use
        (lambda: Marked(Swish()), None),
        (lambda: Marked(nn.Sequential(nn.SiLU())), None),
        (lambda: Marked(nn.SiLU(), norm=nn.Identity()), None),
    ],
    ids=["another name", "tensor", "infinite", "unused", "trained", "inside", "more modules"],
)
def test_what_is_not_sure_is_asked_each_time(module, want):
    torch.manual_seed(0)
    made = converted(module())
    assert error(made) <= 0.2
    assert found(made) == want


def test_what_is_trained_gets_its_gradient():
    torch.manual_seed(0)
    module = converted(Marked(Swish()))
    module(*inputs()).sum().backward()
    assert module.act_fn.beta.grad is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [("act_fn", nn.ReLU()), ("act_fn", Swish(2.0)), ("limit", 3.0), ("limit", torch.tensor(3.0))],
    ids=["act_fn", "act_fn with values", "limit", "limit as a tensor"],
)
def test_what_is_replaced_is_seen(name, value):
    """In modules, their copies, and compiled."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = converted(Marked(clamp="limit", limit=50.0))
    call = compiled(module, Backend())
    before = module(*inputs())
    assert torch.equal(call(*inputs()), before)
    setattr(module, name, value)
    assert error(module) <= 0.2
    after = module(*inputs())
    for again in (call, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(*inputs()), after)
    assert not torch.equal(before, after)


def test_alpha_is_seen():
    torch.manual_seed(0)
    module = converted(GptOss(alpha=1.702, limit=7.0))
    module(*inputs())
    module.alpha = 1.0
    assert error(module) <= 0.2
    assert found(module) == GatedActivation(1.0, 7.0, 1.0, True)


def test_nothing_is_left_behind():
    module = Marked(clamp="limit", limit=7.0)
    before, state = set(vars(module)), list(module.state_dict())
    converted(module)(*inputs())
    assert list(module.state_dict()) == state
    bs.convert(nn.Sequential(module), None)
    assert set(vars(module)) == before


def test_other_models_do_not_matter_to_compiled_ones():
    torch.manual_seed(0)
    torch._dynamo.reset()
    backend, module = Backend(), converted(Marked())
    call = compiled(module, backend)
    want = call(*inputs())
    others = [converted(Marked()) for _ in range(3)]
    for other in others:
        other(*inputs())
    assert torch.equal(call(*inputs()), want)
    del others[0], other
    gc.collect()
    assert torch.equal(call(*inputs()), want)
    module(*inputs())
    assert torch.equal(call(*inputs()), want)
    assert backend.count == 1


def test_layers_alike_are_compiled_once():
    """More of them than torch compiles one function anew, which have not run before."""

    class Layer(Marked):
        def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return run_experts(self, hidden_states, index, weights, RECIPE, _PLAIN)

    torch._dynamo.reset()
    backend = Backend()
    layers = [Layer(clamp="limit", limit=7.0) for _ in range(12)]
    got = [compiled(layer, backend)(*inputs()) for layer in layers]
    assert backend.count == 1
    assert all(map(torch.equal, got, [layer(*inputs()) for layer in layers]))
    layers[0].limit = 3.0
    want = layers[0](*inputs())
    assert torch.equal(compiled(layers[0], backend)(*inputs()), want)
    assert not torch.equal(want, got[0])
