"""Routers, the MoE layer, and experts of transformers."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import blockscale as bs
from blockscale.nn import GatedActivation, MoE, Router, choose_experts, gate, load_balancing_loss
from blockscale.nn.hf_activation import activation_of
from blockscale.nn.hf_experts import Experts

RECIPE = bs.Recipe("mxfp8")


def logits(tokens: int = 12, count: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(tokens, count, generator=torch.Generator().manual_seed(seed))


# --- routers --------------------------------------------------------------------------------------


def test_softmax():
    weights, chosen, scores = choose_experts(logits(), Router(top_k=3))
    want = logits().softmax(-1).topk(3)
    assert torch.equal(chosen, want.indices)
    assert torch.allclose(weights, want.values / want.values.sum(-1, keepdim=True))
    assert torch.allclose(scores.sum(-1), torch.ones(12))
    plain, *_ = choose_experts(
        logits(), Router(top_k=3, norm_topk_prob=False, routed_scaling_factor=2.0)
    )
    assert torch.allclose(plain, 2 * want.values)


def test_softmax_of_those_that_are_taken():
    weights, chosen, _ = choose_experts(logits(), Router(top_k=2, pre_softmax=False))
    want = logits().topk(2)
    assert torch.equal(chosen, want.indices)
    assert torch.allclose(weights, want.values.softmax(-1))


def test_groups_of_experts():
    """As DeepSeek-V3 chooses: a bias for the choice alone, and the best of the best groups."""
    bias = torch.linspace(-1, 1, 8)
    how = {"score_function": "sigmoid", "n_group": 4, "topk_group": 2}
    router = Router(top_k=2, routed_scaling_factor=2.5, **how)
    weights, chosen, scores = choose_experts(logits(), router, bias)
    for token in range(12):
        ranked = scores[token] + bias
        sums = ranked.view(4, 2).sum(-1)
        groups = sums.topk(2).indices.tolist()
        allowed = [e for e in range(8) if e // 2 in groups]
        want = sorted(allowed, key=lambda e: -ranked[e])[:2]
        assert chosen[token].tolist() == want
        own = scores[token, want]
        assert torch.allclose(weights[token], 2.5 * own / own.sum())


def test_equal_scores_take_the_first():
    _, chosen, _ = choose_experts(torch.zeros(3, 8), Router(top_k=4))
    assert chosen.tolist() == [[0, 1, 2, 3]] * 3


def test_nan_is_named():
    given = logits()
    given[5, 2] = torch.nan
    with pytest.raises(ValueError, match="logits: token 5 has NaN"):
        choose_experts(given, Router(top_k=2))
    weights, *_ = torch.compile(choose_experts, backend="eager")(given, Router(top_k=2))
    assert weights[5].isnan().all()
    assert weights[torch.arange(12) != 5].isfinite().all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 9}, "top_k: got 9; there are 8"),
        ({"top_k": 3, "n_group": 4}, "top_k: got 3; there are 2 experts to choose from, in 1 of 4"),
        ({"top_k": 2, "n_group": 3}, "n_group: got 3; 8 experts are no multiple"),
        ({"top_k": 0}, "top_k: got 0"),
        ({"top_k": 2, "score_function": "tanh"}, "score_function: .*tanh"),
        ({"top_k": 2, "n_group": 2, "topk_group": 3}, "topk_group: got 3"),
        ({"top_k": 2, "pre_softmax": False, "score_function": "sigmoid"}, "pre_softmax: got False"),
    ],
)
def test_routers_that_are_none(fields, message):
    with pytest.raises(ValueError, match=message):
        choose_experts(logits(), Router(**fields))


def test_load_balancing_loss():
    """1 where all are alike; as many as there are experts where one has all."""
    assert load_balancing_loss(torch.full((8, 4), 0.25), torch.arange(8)[:, None] % 4) == 1
    scores = nn.functional.one_hot(torch.zeros(8, dtype=torch.int64), 4).float()
    assert load_balancing_loss(scores, torch.zeros(8, 1, dtype=torch.int64)) == 4
    assert load_balancing_loss(scores[:0], torch.zeros(0, 1, dtype=torch.int64)) == 0


# --- the layer ------------------------------------------------------------------------------------


def layer(recipe=RECIPE, **how) -> MoE:
    torch.manual_seed(0)
    return MoE(64, 32, 8, Router(top_k=2), recipe=recipe, **how)


def test_layer():
    moe, plain = layer(shared_size=48, bias=True), layer(None, shared_size=48, bias=True)
    plain.load_state_dict(moe.state_dict())
    x = torch.randn(2, 30, 64)
    results = []
    for each in (moe, plain):
        own = x.clone().requires_grad_()
        y = each(own)
        assert y.shape == x.shape
        (y.square().mean() + 0.01 * each.loss).backward()
        assert int(each.load.sum()) == 2 * 60
        results.append((y.detach(), own.grad, *(p.grad for p in each.parameters())))
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 0.15 * want.norm()
    assert moe.eval()(x).shape == x.shape
    assert moe.loss is None


def test_balancing_loss_of_parts():
    """By the load of both, halves have the loss of all tokens as their mean, and its gradient."""
    moe, x = layer(None), torch.randn(60, 64)
    moe(x)
    (want,) = torch.autograd.grad(moe.loss, moe.gate.weight)
    loads, losses = [], []
    for half in x.chunk(2):
        moe(half)
        loads.append(moe.load)
    for half in x.chunk(2):
        moe(half)
        losses.append(moe.balancing_loss(sum(loads)))
    (got,) = torch.autograd.grad(sum(losses) / 2, moe.gate.weight)
    torch.testing.assert_close(got, want)
    assert moe.balancing_loss(moe.load) == moe.loss
    moe.eval()(x)
    with pytest.raises(RuntimeError, match=r"^balancing_loss: .*call module.train\(\)"):
        moe.balancing_loss(moe.load)


def test_names_and_round_trip():
    """Those of transformers; a state_dict is what it was, and a file of the whole layer loads."""
    moe = layer(bias=True, shared_size=16)
    names = {"gate.weight", "gate.e_score_correction_bias", "experts.gate_up_proj",
             "experts.down_proj", "experts.gate_up_proj_bias", "experts.down_proj_bias",
             "shared_experts.gate_proj.weight", "shared_experts.up_proj.weight",
             "shared_experts.down_proj.weight"}  # fmt: skip
    assert set(moe.state_dict()) == names
    file = io.BytesIO()
    torch.save(moe, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    x = torch.randn(5, 64)
    assert torch.equal(other(x), moe(x))
    assert torch.equal(copy.deepcopy(moe)(x), moe(x))


def test_convert():
    """Another recipe for all that multiplies, but the router; what was not quantized, too."""
    for recipe in (None, RECIPE):
        moe, report = layer(recipe, shared_size=32), bs.nn.ConversionReport()
        want = layer(bs.Recipe("nvfp4"), shared_size=32)
        want.load_state_dict(moe.state_dict())
        bs.convert(moe, bs.Recipe("nvfp4"), report=report)
        assert {entry.name for entry in report.left} == {"gate"}
        x = torch.randn(20, 64)
        assert torch.equal(moe(x), want(x))
        bs.convert(moe, None)
        assert moe.experts.recipe == recipe
        with pytest.raises(ValueError, match="cannot be grouped along the contraction"):
            bs.convert(moe, bs.Recipe("mxfp6_e2m3"))
        assert moe.experts.recipe == recipe


def test_the_router_is_in_fp32():
    """Also under autocast, and with weights of another type."""
    moe, x = layer(), torch.randn(50, 64)
    want = torch.nn.functional.linear(x.bfloat16().float(), moe.gate.weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(moe.gate(x.bfloat16()), want)
    assert torch.equal(moe.gate(x.bfloat16()), want)
    assert moe(x.bfloat16()).dtype == torch.bfloat16


def test_logits_of_bf16_by_tensor_cores(monkeypatch):
    """As they are made on CUDA: forward, and gradients from two bf16 parts of the incoming one."""
    monkeypatch.setattr(gate, "widened", lambda a, b: a.float() @ b.float())
    rows = (torch.randn(count, 64).bfloat16() for count in (50, 8))
    x, weight = (each.requires_grad_() for each in rows)
    x64, weight64 = (each.detach().double().requires_grad_() for each in (x, weight))
    got, grad = gate.WidenedProduct.apply(x, weight), torch.randn(50, 8)
    want = x64 @ weight64.mT
    assert got.dtype == torch.float32
    assert (got - want).norm() <= 1e-6 * want.norm()
    got.backward(grad)
    want.backward(grad.double())
    for a, b in ((x, x64), (weight, weight64)):
        assert a.grad.dtype == torch.bfloat16
        assert torch.allclose(a.grad.double(), b.grad, rtol=2**-8, atol=1e-4)
        assert ((a.grad - b.grad) / b.grad).abs().median() < 2**-9


def test_logits_whose_gradients_nobody_asks_for(monkeypatch):
    monkeypatch.setattr(gate, "widened", lambda a, b: a.float() @ b.float())
    x, weight = (torch.randn(count, 64).bfloat16() for count in (50, 8))
    for one, other in ((x, weight), (weight, x)):
        one.requires_grad_(True)
        gate.WidenedProduct.apply(x, weight).sum().backward()
        assert one.grad is not None
        assert other.grad is None
        one.requires_grad_(False)
        one.grad = None
    x.requires_grad_()
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        torch.autograd.grad(gate.WidenedProduct.apply(x, weight).sum(), x, create_graph=True)


def test_the_router_is_not_quantized_by_autocast():
    moe, x = layer(), torch.randn(50, 64)
    want = moe.gate(x)
    with bs.autocast(bs.Recipe("nvfp4")):
        assert torch.equal(moe.gate(x), want)


def test_logits_are_as_wide_as_what_they_are_made_of():
    moe, x = layer(), torch.randn(50, 64, dtype=torch.float64)
    assert moe.double().gate(x).dtype == torch.float64
    assert torch.equal(moe.gate(x), x @ moe.gate.weight.mT)
    assert moe.gate(x.view(5, 10, 64)).shape == (5, 10, 8)


def test_made_on_meta():
    """As FSDP wants it: memory first, numbers then."""
    with torch.device("meta"):
        moe = layer()
    moe.to_empty(device="cpu")
    for parameter in (*moe.parameters(), *moe.buffers()):
        torch.nn.init.constant_(parameter, float("nan"))
    for module in moe.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not moe.gate.e_score_correction_bias.any()
    assert not any(each.isnan().any() for each in (*moe.parameters(), *moe.buffers()))


def test_steps_of_balance_survive_a_cast():
    """bf16 has no number between 0.6 and 0.601."""
    moe = layer()
    moe.gate.e_score_correction_bias.fill_(0.6)
    moe.bfloat16()
    assert moe.gate.e_score_correction_bias.dtype == torch.float32
    for _ in range(100):
        moe.balance_(load=torch.arange(8))
    assert torch.allclose(moe.gate.e_score_correction_bias[[0, 7]], torch.tensor([0.7, 0.5]))
    assert copy.deepcopy(moe).half().gate.weight.dtype == torch.float16


@pytest.mark.parametrize("recipe", [None, bs.Recipe("mxfp8"), bs.Recipe("nvfp4")], ids=str)
def test_transformed(recipe):
    """torch.func's gradient is that of backward."""
    moe, x = MoE(64, 32, 8, Router(2), recipe=recipe), torch.randn(20, 64)
    parameters = {name: each.detach() for name, each in moe.named_parameters()}

    def loss(given):
        return torch.func.functional_call(moe, given, (x,)).square().sum()

    got = torch.func.grad(loss)(parameters)
    moe(x).square().sum().backward()
    for name, each in moe.named_parameters():
        assert torch.equal(got[name], each.grad), name
    with pytest.raises(NotImplementedError, match=r"have no rule for torch\.vmap"):
        torch.vmap(moe)(torch.randn(3, 20, 64))


def test_compiled_without_tokens():
    moe = torch.compile(layer(), fullgraph=True, backend="eager")
    for tokens in (64, 5, 0):
        assert moe(torch.randn(tokens, 64)).shape == (tokens, 64)


@pytest.mark.parametrize(("made", "error", "match"), [
    (lambda: MoE(64, 32, 8, 2), TypeError, r"router: got 2; expected a blockscale\.nn\.Router"),
    (lambda: Router("2"), TypeError, "top_k: got '2'; expected an integer"),
    (lambda: Router(True), TypeError, "top_k: got True; expected an integer"),
    (lambda: Router(2, routed_scaling_factor=float("nan")), ValueError, "expected a finite number"),
    (lambda: layer()(torch.zeros(2, 64, dtype=torch.complex64)), TypeError, "x: got torch.complex"),
])  # fmt: skip
def test_what_is_refused(made, error, match):
    with pytest.raises(error, match=match):
        made()


def test_balance():
    moe = layer()
    with pytest.raises(RuntimeError, match="no forward has been run"):
        moe.balance_()
    moe(torch.randn(100, 64))
    load = moe.load.float()
    moe.balance_(0.5)
    assert torch.equal(moe.gate.e_score_correction_bias, 0.5 * (load.mean() - load).sign())


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (1, 64)])
def test_few_tokens(shape):
    moe = layer(shared_size=16)
    x = torch.randn(shape).requires_grad_()
    y = moe(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert moe.experts.down_proj.grad is not None


def test_compile():
    """Without breaks; the same bits."""
    moe, x = layer(), torch.randn(20, 64)
    torch._dynamo.reset()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    results = []
    for call in (moe, compiled):
        own = x.clone().requires_grad_()
        y = call(own)
        y.square().sum().backward()
        results.append((y.detach(), own.grad, moe.experts.down_proj.grad.clone()))
        moe.zero_grad()
    for got, want in zip(*results, strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)


def test_compile_with_sizes_that_change():
    """One graph for all numbers of tokens."""
    moe, frames = layer(), []
    torch._dynamo.reset()

    def backend(graph, inputs):
        frames.append(graph)
        return graph

    compiled = torch.compile(moe, fullgraph=True, backend=backend)
    for tokens in (40, 56, 24, 31):
        x = torch.randn(tokens, 64)
        assert torch.allclose(compiled(x), moe(x), rtol=1e-5, atol=1e-6)
    assert len(frames) == 2  # of a size, and of any


# --- transformers ---------------------------------------------------------------------------------


class Marked(nn.Module):
    """Experts as transformers marks them."""

    def __init__(self, transposed: bool, interleaved: bool, bias: bool, gate=None) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias = 4, True, bias
        self.is_transposed, self.is_concatenated = transposed, not interleaved
        up, down = torch.randn(4, 64, 64) / 8, torch.randn(4, 64, 32) / 6
        if transposed:
            up, down = up.mT.contiguous(), down.mT.contiguous()
        self.gate_up_proj, self.down_proj = nn.Parameter(up), nn.Parameter(down)
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(4, 64))
            self.down_proj_bias = nn.Parameter(torch.randn(4, 64))
        self.alpha, self.limit, self.gate = 1.702, 7.0, gate

    def _apply_gate(self, h: Tensor) -> Tensor:
        if self.gate is not None:
            return self.gate(h)
        if self.is_concatenated:
            gate, up = h.chunk(2, -1)
            return nn.functional.silu(gate) * up
        gate, up = h[..., ::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in range(4):
            up, down = self.gate_up_proj[e], self.down_proj[e]
            h = hidden_states @ (up if self.is_transposed else up.mT)
            h = h + self.gate_up_proj_bias[e] if self.has_bias else h
            y = self._apply_gate(h) @ (down if self.is_transposed else down.mT)
            y = y + self.down_proj_bias[e] if self.has_bias else y
            out = out + y * (top_k_weights * (top_k_index == e)).sum(-1, keepdim=True)
        return out


def _geglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return nn.functional.gelu(gate) * up


@pytest.mark.parametrize(
    "marks",
    [(False, False, False), (True, True, True), (True, False, False), (False, False, True, _geglu)],
    ids=["concatenated", "gpt-oss", "transposed", "another activation"],
)
def test_experts_of_transformers(marks):
    """Converted, and back; gradients of all parameters."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Marked(*marks)})})
    module = model["mlp"]["experts"]
    x = torch.randn(50, 64)
    index, weights = logits(50, 4).topk(2).indices, torch.rand(50, 2)

    def run() -> list[Tensor]:
        model.zero_grad()
        y = module(x, index, weights)
        y.backward(torch.ones_like(y))
        return [y.detach(), *(p.grad.clone() for p in model.parameters())]

    want, names = run(), list(model.state_dict())
    report = bs.nn.ConversionReport()
    bs.convert(model, RECIPE, report=report)
    assert [entry.name for entry in report.converted] == ["mlp.experts"]
    assert report.share == 1
    assert isinstance(module, Experts)
    assert isinstance(module, Marked)
    assert list(model.state_dict()) == names
    got = run()
    for a, b in zip(got, want, strict=True):
        assert 0 < (a - b).norm() <= 0.12 * b.norm()
    bs.convert(model, None)
    assert type(module) is Marked
    assert all(map(torch.equal, run(), want))


@pytest.mark.parametrize("marks", [(False, False, False), (True, True, True)])
def test_converted_experts_are_compiled_before_they_run(marks):
    module = bs.convert(Marked(*marks), RECIPE)
    given = torch.randn(50, 64), logits(50, 4).topk(2).indices, torch.rand(50, 2)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(*given), module(*given), rtol=1e-4, atol=1e-5)


def test_activations_are_found():
    cpu = torch.device("cpu")
    assert activation_of(Marked(False, False, False), cpu) == GatedActivation()
    assert activation_of(Marked(True, True, True), cpu) == GatedActivation(1.702, 7.0, 1.0, True)
    assert activation_of(Marked(False, False, False, _geglu), cpu) is None


def test_register_without_transformers(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    monkeypatch.setitem(__import__("sys").modules, "transformers.integrations.moe", None)
    with pytest.raises(ImportError, match="transformers, of version 5 or later, is not installed"):
        bs.nn.register_experts()
