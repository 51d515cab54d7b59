"""GroupedExperts of torchtitan, as it is called and shaped there, against its own formulas."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import silu

import blockscale as bs
from blockscale.nn import experts
from blockscale.nn.titan_experts import TitanExperts

H, I, COUNT = 64, 96, 5  # noqa: E741


class GroupedExperts(torch.nn.Module):
    def __init__(self, dim: int = H, hidden_dim: int = I, num_experts: int = COUNT) -> None:
        super().__init__()
        self.num_experts = num_experts
        for name, shape in (("w1", (hidden_dim, dim)), ("w2", (dim, hidden_dim)),
                            ("w3", (hidden_dim, dim))):  # fmt: skip
            weight = torch.randn(num_experts, *shape) * shape[1] ** -0.5
            setattr(self, name, torch.nn.Parameter(weight))

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        ends = [0, *num_tokens_per_expert.cumsum(0).tolist()]
        made = []
        for i, (start, end) in enumerate(pairwise(ends)):
            rows = x[start:end]
            h = torch.nn.functional.silu(rows @ self.w1[i].T) * (rows @ self.w3[i].T)
            made.append(h @ self.w2[i].T)
        return torch.cat([*made, x.new_zeros(len(x) - ends[-1], x.shape[1])])


COUNTS = torch.tensor([33, 0, 1, 60, 30])


def run(layer: torch.nn.Module, dtype: torch.dtype = torch.float32):
    x = torch.randn(128, H, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    layer.zero_grad()
    y = layer(x, COUNTS)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
    return y.detach(), [x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize(("name", "most"), [("mxfp8", 0.12), ("fp8_block", 0.12), ("nvfp4", 0.4)])
def test_converted(name, most):
    torch.manual_seed(0)
    layer = GroupedExperts()
    want, gradients = run(layer)
    state = copy.deepcopy(layer.state_dict())
    bs.convert(layer, bs.Recipe(name))
    assert isinstance(layer, TitanExperts)
    assert isinstance(layer, GroupedExperts)
    assert list(layer.state_dict()) == list(state)
    got, theirs = run(layer)
    assert not got[124:].any()  # rows of no expert
    assert (got - want).norm() <= most * want.norm()
    for a, b in zip(theirs, gradients, strict=True):
        assert (a - b).norm() <= most * b.norm()
    bs.convert(layer, None)
    assert type(layer) is GroupedExperts
    assert torch.equal(run(layer)[0], want)


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block", "nvfp4"])
def test_two_stacks_have_the_bits_of_one(name):
    """Of I = 96 blocks of 128 would have rows of both, and of 128 end where a stack does."""
    for inner in (96, 128):
        torch.manual_seed(0)
        layer, ends = GroupedExperts(H, inner), COUNTS.cumsum(0).int()
        x = torch.randn(128, H).bfloat16()
        recipe = bs.Recipe(name)
        w1, w2, w3 = (w.detach().bfloat16().requires_grad_() for w in layer.parameters())
        y = experts(x, None, ends, w3, w2, gate=w1, recipe=recipe)
        y.backward(torch.ones_like(y))
        whole, down = torch.cat((w1, w3), 1).detach().requires_grad_(), w2.detach().clone()
        down.requires_grad_()
        again = experts(x, None, ends, whole, down, recipe=recipe)
        again.backward(torch.ones_like(y))
        assert torch.equal(y, again)
        assert torch.equal(torch.cat((w1.grad, w3.grad), 1), whole.grad)
        assert torch.equal(w2.grad, down.grad)


def test_rows_in_order_are_routed_rows():
    """The result of each row, which a token of one expert with weight one gets."""
    torch.manual_seed(0)
    layer, recipe = GroupedExperts(), bs.Recipe("mxfp8")
    x = torch.randn(124, H).bfloat16()
    up, down = torch.cat((layer.w1, layer.w3), 1).bfloat16(), layer.w2.bfloat16()
    routing = bs.route(torch.arange(COUNT).repeat_interleave(COUNTS)[:, None], COUNT)
    want = experts(x, torch.ones(124, 1), routing, up, down, recipe=recipe)
    assert torch.equal(experts(x, None, routing.offsets, up, down, recipe=recipe), want)
    double = [t.double().requires_grad_() for t in (x[:20], layer.w3.detach(), layer.w2.detach())]
    gate, ends = layer.w1.detach().double(), torch.tensor([3, 3, 9, 9, 18], dtype=torch.int32)

    def call(x, up, down):
        return experts(x, None, ends, up, down, gate=gate, recipe=None)

    assert torch.autograd.gradcheck(call, double, fast_mode=True)


def test_weights_are_reused():
    torch.manual_seed(0)
    layer = bs.convert(GroupedExperts(128, 64).bfloat16(), bs.Recipe("mxfp8"))
    x = torch.randn(124, 128).bfloat16()
    with bs.reuse_weights():
        first = layer(x, COUNTS)
        assert torch.equal(layer(x, COUNTS), first)
        with torch.no_grad():
            layer.w1.mul_(2)
        assert not torch.equal(layer(x, COUNTS), first)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_reuse_sees_what_either_stack_does(name):
    """NVFP4's global scale is that of both: what is made of one depends on the other."""
    torch.manual_seed(0)
    x, ends, recipe = torch.randn(124, H), COUNTS.cumsum(0).int(), bs.Recipe(name)
    gate, up, down = (p.detach().clone() for p in (lambda m: (m.w1, m.w3, m.w2))(GroupedExperts()))

    def call(gate, up):
        return experts(x, None, ends, up, down, gate=gate, recipe=recipe)

    def alone():
        return bs.nn.grouped_linear(x, up, ends, recipe=recipe)

    wanted = alone()
    with torch.no_grad(), bs.reuse_weights():
        first = call(gate, up)
        assert torch.equal(call(gate, up), first)
        large = call(1e4 * gate, up)
        assert torch.equal(alone(), wanted)
        gate.mul_(1e4)
        assert torch.equal(call(gate, up), large)


def test_what_is_not_taken_for_it():
    """Square matrices, whose order is unknown; other parameters, and other calls."""

    class Biased(GroupedExperts):
        def __init__(self) -> None:
            super().__init__()
            self.b1 = torch.nn.Parameter(torch.zeros(COUNT, I))

    class Weighted(GroupedExperts):
        def forward(self, x, num_tokens_per_expert, routed_prob=None):
            return super().forward(x, num_tokens_per_expert)

    for layer, why in (
        (GroupedExperts(64, 64), "whether they are transposed cannot be told"),
        (Biased(), "stacked matrices"),
        (Weighted(), "stacked matrices"),
    ):
        with pytest.raises(ValueError, match=why):
            bs.convert(torch.nn.Sequential(layer), bs.Recipe("mxfp8"))


def test_other_activations_are_left_alone():
    """A copy with GELU looks the same; its values do not."""

    class Geglu(GroupedExperts):
        def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
            ends = num_tokens_per_expert.cumsum(0).int()
            w1, w2, w3 = (w.bfloat16().mT for w in (self.w1, self.w2, self.w3))
            h = torch.nn.functional.gelu(torch._grouped_mm(x.bfloat16(), w1, offs=ends))
            h = h * torch._grouped_mm(x.bfloat16(), w3, offs=ends)
            return torch._grouped_mm(h, w2, offs=ends).type_as(x)

    class Silu(Geglu):
        def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
            ends = num_tokens_per_expert.cumsum(0).int()
            w1, w2, w3 = (w.bfloat16().mT for w in (self.w1, self.w2, self.w3))
            h = torch.nn.functional.silu(torch._grouped_mm(x.bfloat16(), w1, offs=ends))
            h = h * torch._grouped_mm(x.bfloat16(), w3, offs=ends)
            return torch._grouped_mm(h, w2, offs=ends).type_as(x)

    class Strange(GroupedExperts):
        def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("needs a GPU")

    assert isinstance(bs.convert(Silu(), bs.Recipe("mxfp8")), TitanExperts)
    for layer, why in ((Geglu(), "another activation than SwiGLU"), (Strange(), "needs a GPU")):
        with pytest.raises(ValueError, match=why):
            bs.convert(torch.nn.Sequential(layer), bs.Recipe("mxfp8"))


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda g, u: silu(g.clamp(max=7)) * u.clamp(-7, 7), "another activation than SwiGLU"),
        (lambda g, u: silu(g) * u.clamp(max=1e6), "another activation than SwiGLU"),
        (lambda g, u: 1.02 * silu(g) * u, "another activation than SwiGLU"),
        (lambda g, u: 1.004 * silu(g) * u, "another activation than SwiGLU"),
        (lambda g, u: (silu(g) * u).half(), "overflows where bf16 does not"),
    ],
    ids=["clamp", "clamp far outside", "factor", "factor below a rounding", "fp16"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearly_swiglu_is_left_alone(act, why, dtype):
    """What numbers of models hardly show, in either type of products."""

    class Nearly(GroupedExperts):
        def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
            made, ends = [], [0, *num_tokens_per_expert.cumsum(0).tolist()]
            for rows, *weights in zip(pairwise(ends), self.w1, self.w2, self.w3, strict=True):
                w1, w2, w3 = (w.to(dtype).T for w in weights)
                part = x[slice(*rows)].to(dtype)
                made.append(act(part @ w1, part @ w3).to(dtype) @ w2)
            return torch.cat(made).type_as(x)

    report = bs.nn.ConversionReport()
    model = torch.nn.Sequential(Nearly(), torch.nn.Linear(H, H))
    bs.convert(model, bs.Recipe("mxfp8"), report=report)
    assert not isinstance(model[0], TitanExperts)
    assert why in str(report)


def test_bad_input():
    gpt_oss = bs.nn.GatedActivation(interleaved=True)
    with pytest.raises(ValueError, match="activation: has interleaved=True, and gate is a stack"):
        experts(
            torch.randn(4, H),
            None,
            torch.tensor([4, 4, 4, 4, 4], dtype=torch.int32),
            torch.randn(5, I, H),
            torch.randn(5, H, I),
            gate=torch.randn(5, I, H),
            activation=gpt_oss,
            recipe=None,
        )
    converted = bs.convert(GroupedExperts(), bs.Recipe("mxfp8"))
    with pytest.raises(TypeError, match="num_tokens_per_expert: got list"):
        converted(torch.randn(124, H), COUNTS.tolist())
    layer, recipe = GroupedExperts(), bs.Recipe("mxfp8")
    x, ends = torch.randn(124, H), COUNTS.cumsum(0).int()
    up, down = layer.w3, layer.w2
    for message, error, given in (
        ("weights: are given beside offsets", ValueError, (x, torch.ones(124, 1), ends, layer.w1)),
        ("gate: has shape", ValueError, (x, None, ends, layer.w1[:, :32])),
        ("offsets: got", ValueError, (x[:100], None, ends, layer.w1)),
        ("routing: is of 3 groups", ValueError, (x, None, ends[:3], layer.w1)),
        (r"offsets: got torch\.int64", TypeError, (x, None, ends.long(), layer.w1)),
        (r"gate: got torch\.float16, up has", TypeError, (x, None, ends, layer.w1.half())),
    ):
        x_, weights, routing, gate = given
        with pytest.raises(error, match=message):
            experts(x_, weights, routing, up, down, gate=gate, recipe=recipe)
