"""``main_grad`` of grouped layers and experts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from main_grads import BF16, F32, RECIPES, batches, columns, made, random, train, with_main_grad

import blockscale as bs
from blockscale import reference
from blockscale.nn import plan_cache
from stand_in import emulated


@pytest.fixture
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


ENDS = torch.tensor([13, 13, 37], dtype=torch.int32)  # of 40 rows: one group empty, 3 in none


def grouped_expected(given, recipe, dtype, groups=3):
    x, g = given[0]
    total = torch.zeros(groups, g.shape[1], x.shape[1], dtype=dtype)
    for x, g in given:
        starts = [0, *ENDS.tolist()]
        for i, (start, end) in enumerate(pairwise(starts)):
            if end > start:
                left = columns(g[start:end], recipe, "gradients")
                right = columns(x[start:end], recipe, "activations")
                total[i] = reference.gemm(left.mT, right, out_dtype=dtype, c=total[i])
    return total


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "fp8_block"])
def test_grouped_linear(name, dtype):
    recipe = RECIPES[name]
    layer, plain = (bs.nn.GroupedLinear(3, 96, 48, bias=True, dtype=BF16, recipe=recipe)
                    for _ in range(2))  # fmt: skip
    plain.load_state_dict(layer.state_dict())
    with_main_grad(layer, dtype)
    given = batches()
    of_x = train(lambda x: layer(x, ENDS), given)
    assert all(map(torch.equal, of_x, train(lambda x: plain(x, ENDS), given)))
    assert layer.weight.grad is None
    assert layer.weight.grad_added_to_main_grad is True
    assert torch.equal(layer.weight.main_grad, grouped_expected(given, recipe, dtype))
    assert torch.equal(layer.bias.grad, plain.bias.grad)


def test_grouped_linear_without_recipe_or_rows():
    layer = with_main_grad(bs.nn.GroupedLinear(3, 96, 48, dtype=BF16, recipe=None))
    x, g = batches(1)[0]
    layer(x, ENDS).backward(g)
    want = torch.zeros(3, 48, 96, dtype=torch.float64)
    want[0] = g[:13].double().mT @ x[:13].double()
    want[2] = g[13:37].double().mT @ x[13:37].double()
    torch.testing.assert_close(layer.weight.main_grad.double(), want, rtol=1e-6, atol=1e-5)
    before = layer.weight.main_grad.clone()
    layer(x[:0], torch.zeros_like(ENDS)).sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(layer.weight.main_grad, before)


class Stacks(torch.nn.Module):
    """Weights of ``experts``, as its three forms have them."""

    def __init__(self, form, recipe):
        super().__init__()
        self.form, self.recipe = form, recipe
        self.up = torch.nn.Parameter(random(4, 64, 64, seed=1) / 8)
        self.down = torch.nn.Parameter(random(4, 64, 32, seed=2) / 8)
        if form == "transposed":
            self.up, self.down = (torch.nn.Parameter(w.detach().mT.contiguous())
                                  for w in (self.up, self.down))  # fmt: skip
        if form == "gate":
            gate, up = self.up.detach().chunk(2, 1)
            self.gate, self.up = map(torch.nn.Parameter, (gate.clone(), up.clone()))

    def forward(self, x):
        chosen = torch.arange(2 * len(x)).reshape(-1, 2) % 3  # the last expert has no rows
        weights = torch.full(chosen.shape, 0.5)
        how = {"gate": self.gate} if self.form == "gate" else {}
        return bs.nn.experts(
            x, weights, bs.route(chosen, 4), self.up, self.down,
            recipe=self.recipe, transposed=self.form == "transposed", **how,
        )  # fmt: skip


FORMS = "one stack", "transposed", "gate"


@pytest.mark.parametrize("recipe", [*RECIPES.values(), None], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_experts(form, recipe):
    """fp32 sums of what fp32 weights of the same values get, each as one product."""
    held, plain = Stacks(form, recipe), Stacks(form, recipe)
    for p in held.parameters():
        p.main_grad = torch.zeros(p.shape)
    given = [(random(40, 64, seed=i), random(40, 64, seed=i + 5)) for i in range(2)]
    assert all(map(torch.equal, train(held, given), train(plain, given)))
    wide = Stacks(form, recipe).float()
    totals = [torch.zeros(p.shape) for p in wide.parameters()]
    for x, g in given:
        wide.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            y = wide(x)
        y.backward(g)
        for total, p in zip(totals, wide.parameters(), strict=True):
            total += p.grad
    for p, total in zip(held.parameters(), totals, strict=True):
        assert p.grad is None
        assert p.grad_added_to_main_grad is True
        assert torch.equal(p.main_grad, total)


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_experts_of_which_one_has_it(name):
    held, plain = Stacks("gate", RECIPES["mxfp8"]), Stacks("gate", RECIPES["mxfp8"])
    weight = getattr(held, name)
    weight.main_grad = torch.zeros(weight.shape)
    given = [(random(40, 64), random(40, 64, seed=5))]
    train(held, given)
    train(plain, given)
    for key, p in held.named_parameters():
        want = getattr(plain, key).grad
        found = p.main_grad.to(BF16) if key == name else p.grad
        assert torch.equal(found, want)
        assert (p.grad is None) == (key == name)


def test_experts_say_which_does_not_fit():
    held = Stacks("gate", RECIPES["mxfp8"])
    held.gate.main_grad = torch.zeros(1)
    with pytest.raises(ValueError, match=r"gate\.main_grad: has shape"):
        train(held, [(random(40, 64), random(40, 64))])


def test_compiled_groups(fresh):
    layer = bs.nn.GroupedLinear(3, 96, 48, dtype=BF16, recipe=RECIPES["mxfp8"])
    with_main_grad(layer)
    held = Stacks("one stack", RECIPES["mxfp8"])
    for p in held.parameters():
        p.main_grad = torch.zeros(p.shape)
    given, others = batches(1), [(random(40, 64), random(40, 64, seed=5))]
    train(torch.compile(lambda x: layer(x, ENDS), backend="aot_eager"), given)
    train(torch.compile(held, backend="aot_eager"), others)
    assert torch.equal(layer.weight.main_grad, grouped_expected(given, RECIPES["mxfp8"], F32))
    eager = Stacks("one stack", RECIPES["mxfp8"])
    train(eager, others)
    for p, want in zip(held.parameters(), eager.parameters(), strict=True):
        assert p.grad is None
        assert torch.equal(p.main_grad.to(BF16), want.grad)


# --- kernels, in the emulator ---------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch", "dtype"), [("fp8_block", "sm_90a", BF16), ("mxfp8", "sm_100a", F32)]
)
def test_kernels_add(monkeypatch, name, arch, dtype):
    """Layers and experts whose kernels read what kernels have quantized; as weights of fp32 add up
    in .grad, which is rounded no more, but for the order of sums."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    monkeypatch.setattr(plan_cache, "_plans", {})
    recipe, routing = RECIPES[name], bs.route(torch.arange(20)[:, None] % 2, 2)
    held = bs.nn.GatedExperts(128, 128, 2, dtype=BF16, recipe=recipe)
    wide = bs.nn.GatedExperts(128, 128, 2, recipe=recipe)
    wide.load_state_dict(held.state_dict())
    layer, wide_layer = made(recipe, 128, 128), made(recipe, 128, 128, F32)
    given = batches(2, 20, 128, 128)
    for p in (layer.weight, *held.parameters()):
        p.main_grad = torch.zeros(p.shape, dtype=dtype)
    with emulated(arch, quantizes=True) as launched:
        for experts, linear in ((held, layer), (wide, wide_layer)):
            train(lambda x, experts=experts: experts(x, torch.ones(20, 1), routing), given)
            train(linear, given)
    assert any(plan is not None for plan in plan_cache._plans.values())
    assert launched
    mine, theirs = (layer.weight, *held.parameters()), (wide_layer.weight, *wide.parameters())
    for p, want in zip(mine, theirs, strict=True):
        assert p.grad is None
        error = (p.main_grad.double() - want.grad.double()).norm() / want.grad.norm()
        assert error <= (1e-6 if dtype == F32 else 2**-8)
