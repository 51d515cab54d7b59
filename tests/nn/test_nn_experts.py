"""Experts and grouped linear layers: the bits of one expert after the other; gradients in fp64."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale import reference
from blockscale.nn import SWIGLU, GatedActivation, GroupedLinear, experts, grouped_linear, reuse
from blockscale.nn.forms import quantize_forms

RECIPES = ["mxfp8", "nvfp4", "mxfp4", "fp8_block"]
#: Relative error of random matrices' results, by format: measured, and half as much again.
ERROR = {"mxfp8": 0.12, "nvfp4": 0.38, "mxfp4": 0.46, "fp8_block": 0.12}
GPT_OSS = GatedActivation(1.702, 0.7, 1.0, interleaved=True)
H, I = 64, 32  # noqa: E741


def given(tokens: int, top_k: int, count: int, dtype=torch.bfloat16, seed: int = 0, bias=True):
    """x, weights, up, down and biases."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    weights = torch.rand(tokens, top_k, generator=generator).to(dtype).requires_grad_()
    biases = (normal(count, 2 * I), normal(count, H)) if bias else (None, None)
    return normal(tokens, H), weights, normal(count, 2 * I, H), normal(count, H, I), *biases


def routed(tokens: int, top_k: int, count: int, seed: int = 0) -> bs.Routing:
    generator = torch.Generator().manual_seed(seed)
    return bs.route(torch.rand(tokens, count, generator=generator).argsort(1)[:, :top_k], count)


def run(operands, routing, recipe, grad=None, **how):
    """The result, and all gradients."""
    x, weights, up, down, up_bias, down_bias = operands
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in operands]
    x, weights, up, down, up_bias, down_bias = leaves
    y = experts(x, weights, routing, up, down, recipe=recipe, up_bias=up_bias,
                down_bias=down_bias, **how)  # fmt: skip
    if grad is None:
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    y.backward(grad)
    return y.detach(), [None if t is None else t.grad for t in leaves]


def one_by_one(operands, routing, activation=SWIGLU):
    """By plain torch, each pair by itself."""
    x, weights, up, down, up_bias, down_bias = operands
    out = torch.zeros_like(x)
    ends = routing.offsets.tolist()
    for e, (start, end) in enumerate(pairwise([0, *ends])):
        for pair in routing.pairs[start:end].tolist():
            token, j = divmod(pair, weights.shape[1])
            h = x[token] @ up[e].T + (0 if up_bias is None else up_bias[e])
            y = activation(h) @ down[e].T + (0 if down_bias is None else down_bias[e])
            out = (
                out
                + weights[token, j]
                * torch.nn.functional.one_hot(torch.tensor(token), len(x)).to(x.dtype)[:, None]
                * y
            )
    return out


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


# --- against fp64 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS, GatedActivation(limit=0.5)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradcheck(activation, transposed):
    routing = routed(6, 2, 3)
    x, weights, up, down, *biases = given(6, 2, 3, torch.float64)
    if transposed:
        up, down = (t.detach().mT.contiguous().requires_grad_() for t in (up, down))

    def call(x, weights, up, down, up_bias, down_bias):
        how = {"up_bias": up_bias, "down_bias": down_bias, "transposed": transposed}
        return experts(x, weights, routing, up, down, recipe=None, activation=activation, **how)

    assert torch.autograd.gradcheck(call, (x, weights, up, down, *biases), fast_mode=True)


def test_plain_products():
    routing, operands = routed(9, 2, 4), given(9, 2, 4, torch.float64)
    y, gradients = run(operands, routing, None, torch.ones(9, H, dtype=torch.float64))
    want = one_by_one(operands, routing, swiglu)
    assert torch.allclose(y, want)
    want.sum().backward()
    for got, t in zip(gradients, operands, strict=True):
        assert torch.allclose(got, t.grad)


@pytest.mark.parametrize("name", RECIPES)
def test_error_of_the_format(name):
    routing, operands = routed(40, 2, 5), given(40, 2, 5)
    grad = torch.randn(40, H).bfloat16()
    y, gradients = run(operands, routing, bs.Recipe(name), grad)
    wide = [t.detach().double().requires_grad_() for t in operands]
    want = one_by_one(wide, routing, swiglu)
    want.backward(grad.double())
    assert (y - want).norm() <= ERROR[name] * want.norm()
    for got, t in zip(gradients, wide, strict=True):
        assert (got - t.grad).norm() <= ERROR[name] * t.grad.norm()


@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_in_high_precision(product, dtype):
    """One of the three is plain; what it alone makes is what it is without a recipe."""
    routing, operands = routed(30, 2, 4), given(30, 2, 4, dtype)
    recipe = bs.Recipe("mxfp8", high_precision=[product])
    y, gradients = run(operands, routing, recipe)
    plain, others = run(operands, routing, None)
    for got, want in zip((y, *gradients), (plain, *others), strict=True):
        assert got.dtype == want.dtype == dtype
        assert (got.float() - want.float()).norm() <= 0.12 * want.float().norm()
    if product == "fprop":
        assert (y.float() - plain.float()).norm() <= 1e-2 * plain.float().norm()


# --- against products of their own ----------------------------------------------------------------


def quantized(x: Tensor, name: str, axis: int) -> bs.ScaledTensor:
    return bs.quantize(x.contiguous(), name, axis, pad=True)


def product(a: bs.ScaledTensor, b: bs.ScaledTensor, dtype=torch.bfloat16) -> Tensor:
    return bs.gemm(a, b, dtype)


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block", "mxfp4"])
def test_bits_of_each_expert_alone(name):
    """Gathered, quantized and multiplied by itself; only sums of wgrad have another order."""
    recipe = bs.Recipe(name)
    act, own = (recipe.format_of(role).name for role in ("activations", "weights"))
    routing, operands = routed(60, 2, 4), given(60, 2, 4, bias=False)
    x, weights, up, down, *_ = (None if t is None else t.detach() for t in operands)
    grad = torch.randn(60, H).bfloat16()
    got, (dx, dweights, dup, ddown, *_) = run(operands, routing, recipe, grad)
    rows = len(routing.pairs)
    y, dx_rows, of_rows = torch.zeros(rows, H).bfloat16(), torch.zeros(rows, H), torch.zeros(rows)
    dx_rows = dx_rows.bfloat16()
    scale = weights.flatten()[routing.pairs].float()
    for e, (start, end) in enumerate(pairwise([0, *routing.offsets.tolist()])):
        if start == end:
            continue
        mine = slice(start, end)
        tokens = routing.tokens[mine]
        h = product(quantized(x[tokens], act, -1), quantized(up[e], own, -1).mT)
        a = reference.swiglu(h)
        y[mine] = product(quantized(a, act, -1), quantized(down[e], own, -1).mT)
        g = grad[tokens]
        da = product(quantized(g, act, -1), quantized(down[e], own, -2))
        of_rows[mine] = reference.weight_gradient(da, a)
        da = (da.float() * scale[mine, None]).bfloat16()
        dh = reference.swiglu_backward(da, h)
        dx_rows[mine] = product(quantized(dh, act, -1), quantized(up[e], own, -2))
        scaled = (a.float() * scale[mine, None]).bfloat16()
        for of_weight, left, right in ((ddown, g, scaled), (dup, dh, x[tokens])):
            left, right = (quantized(t, act, -2) for t in (left, right))
            want = bs.gemm(left.mT, right, torch.float32)
            assert (of_weight[e].float() - want).norm() <= 2.0**-8 * want.norm()
    assert torch.equal(got, bs.combine(y, routing.slots, weights))
    assert torch.equal(dx, bs.combine(dx_rows, routing.slots))
    assert torch.equal(dweights, of_rows[routing.slots].bfloat16())


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_transposed_weights(name):
    """The same numbers, blocked along the same axes."""
    routing, operands = routed(40, 2, 4), given(40, 2, 4)
    x, weights, up, down, *biases = operands
    turned = x, weights, up.detach().mT.contiguous(), down.detach().mT.contiguous(), *biases
    y, gradients = run(operands, routing, bs.Recipe(name))
    other, others = run(turned, routing, bs.Recipe(name), transposed=True)
    assert torch.equal(y, other)
    for i, (a, b) in enumerate(zip(gradients, others, strict=True)):
        assert torch.allclose(a.float(), (b.mT if i in (2, 3) else b).float(), rtol=1e-2, atol=1e-3)


def test_grouped_linear_has_the_bits_of_linear():
    for sizes in ((31, 0, 129, 1), (0, 0, 0, 33), (127, 0, 0, 0)):
        recipe, ends = bs.Recipe("mxfp8"), torch.tensor(sizes).cumsum(0).int()
        layer = GroupedLinear(4, H, 96, bias=True, recipe=recipe, dtype=torch.bfloat16)
        x = torch.randn(sum(sizes) + 3, H).bfloat16().requires_grad_()
        y = layer(x, ends)
        grad = torch.randn(y.shape).bfloat16()
        y.backward(grad)
        for i, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
            if start == end:
                assert not layer.weight.grad[i].any()
                continue
            own, w = x.detach()[start:end].requires_grad_(), layer.weight.detach()[i]
            w = w.clone().requires_grad_()
            alone = bs.nn.linear(own, w, recipe=recipe)
            alone.backward(grad[start:end])
            assert torch.equal(y[start:end], alone + layer.bias[i])
            assert torch.equal(x.grad[start:end], own.grad)
            assert torch.allclose(layer.weight.grad[i], w.grad, rtol=1e-2, atol=1e-3)
            of_bias = grad[start:end].float().sum(0)
            assert torch.allclose(layer.bias.grad[i].float(), of_bias, rtol=1e-2, atol=1e-2)
        assert not y[ends[-1] :].any()
        assert not x.grad[ends[-1] :].any()


# --- groups of all sizes --------------------------------------------------------------------------


def routing_of(sizes: list[int]) -> bs.Routing:
    return bs.route(torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[:, None],
                    len(sizes))  # fmt: skip


@pytest.mark.parametrize(
    "sizes", [[0, 1, 31, 33, 127, 129], [0, 0, 0, 200], [0, 0, 0, 0], [1, 0, 0, 0]], ids=str
)
def test_sizes(sizes):
    """One expert's tokens after another's; also where there are none at all."""
    routing, recipe = routing_of(sizes), bs.Recipe("mxfp8")
    operands = given(sum(sizes), 1, len(sizes), bias=False)
    y, (_, _, dup, ddown, *_) = run(operands, routing, recipe)
    assert y.shape == (sum(sizes), H)
    for e, size in enumerate(sizes):
        assert bool(dup[e].any()) == bool(ddown[e].any()) == bool(size)
    start = 0
    for e, size in enumerate(sizes):
        if size:
            mine = slice(start, start + size)
            x, weights, up, down, *_ = operands
            alone = x[mine], weights[mine], up[e : e + 1], down[e : e + 1], None, None
            assert torch.equal(run(alone, routing_of([size]), recipe)[0], y[mine])
        start += size


def test_200_routings():
    """Each has the result of plain products to the format's error, and the same bits again."""
    rng = random.Random(0)
    for i in range(200):
        count, tokens = rng.randint(1, 6), rng.randint(1, 40)
        top_k = rng.randint(1, count)
        routing, operands = routed(tokens, top_k, count, i), given(tokens, top_k, count, seed=i)
        x, weights, up, down, *biases = (t.detach() for t in operands)
        how = {"up_bias": biases[0], "down_bias": biases[1]}
        y, again = (experts(x, weights, routing, up, down, recipe=bs.Recipe("mxfp8"), **how)
                    for _ in range(2))  # fmt: skip
        assert torch.equal(y, again)
        want = experts(x, weights, routing, up, down, recipe=None, **how)
        assert (y - want).norm() <= 0.12 * want.norm()


def test_nan_stays_with_its_expert():
    """A NaN of a token goes to no other token, nor to gradients of experts it does not name."""
    ids = torch.tensor([[0, 1], [1, 2], [3, 2], [3, 0]]).repeat(10, 1)
    routing, operands = bs.route(ids, 4), given(40, 2, 4, bias=False)
    clean, _ = run(operands, routing, bs.Recipe("mxfp8"))
    x, *rest = operands
    x = x.detach().clone()
    x[4, 7] = torch.nan  # names 0 and 1
    y, (_, _, dup, ddown, *_) = run((x, *rest), routing, bs.Recipe("mxfp8"))
    others = torch.arange(40) != 4
    assert bool(y[4].isnan().all())
    assert torch.equal(y[others], clean[others])
    assert dup[2:].isfinite().all()
    assert ddown[2:].isfinite().all()
    assert not dup[:2].isfinite().all()


def test_no_pairs():
    x, _, up, down, *_ = given(5, 1, 3)
    weights = torch.zeros(5, 0, requires_grad=True)
    routing = bs.route(torch.zeros(5, 0, dtype=torch.int64), 3)
    y = experts(x, weights, routing, up, down, recipe=bs.Recipe("mxfp8"))
    y.sum().backward()
    assert y.shape == x.shape
    assert not y.any()
    assert not x.grad.any()
    assert not up.grad.any()


# --- memory, reuse and what torch does ------------------------------------------------------------


def test_what_is_kept():
    """What the caller has, and the first product: no gathered rows, and no second product."""
    tokens, top_k = 64, 4
    routing, (x, weights, up, down, *_) = routed(tokens, top_k, 8), given(tokens, top_k, 8)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        experts(x, weights, routing, up, down, recipe=bs.Recipe("mxfp8"))
    callers = {t.data_ptr() for t in (x, weights, up, down, *routing)}
    own = [t for t in kept if t.data_ptr() not in callers]
    assert [tuple(t.shape) for t in own] == [(tokens * top_k, 2 * I)]


@pytest.mark.parametrize("top_k", [1, 4])
def test_bytes_kept_of_a_token(top_k):
    """Beside the caller's tokens: the first product, a weight and three integers of each pair, one
    of which is short."""
    tokens, recipe = 256, bs.Recipe("mxfp8")
    routing, (x, weights, up, down, *_) = routed(tokens, top_k, 8), given(tokens, top_k, 8)
    for saved, each in ((None, 2), ("mxfp8", 1 + 1 / 32)):
        kept: dict[int, int] = {}

        def keep(t, kept=kept):
            for part in t._parts().values() if isinstance(t, bs.ScaledTensor) else [t]:
                kept[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            experts(x, weights, routing, up, down, recipe=recipe, saved_format=saved)
        for parameter in (up, down):
            del kept[parameter.untyped_storage().data_ptr()]
        of_pairs = top_k * (2 * I * each + 2 + 8 + 8 + 4)
        assert sum(kept.values()) == tokens * (2 * H + of_pairs) + 4 * len(routing.offsets)


def test_a_saved_format_changes_gradients_alone():
    routing, operands = routed(60, 2, 4), given(60, 2, 4)
    recipe = bs.Recipe("mxfp8")
    y, plain = run(operands, routing, recipe)
    again, gradients = run(operands, routing, recipe, saved_format="mxfp8")
    assert torch.equal(again, y)
    for i, (got, want) in enumerate(zip(gradients, plain, strict=True)):
        assert (got - want).norm() <= 0.06 * want.norm()
        assert torch.equal(got, want) == (i == 5)  # that of down_bias needs no activation
    with torch.no_grad():
        x, weights, up, down, *_ = operands
        experts(x, weights, routing, up, down, recipe=recipe, saved_format="mxfp8")
    with pytest.raises(ValueError, match="saved_format: got 'fp8'"):
        experts(x, weights, routing, up, down, recipe=recipe, saved_format="fp8")
    wide = [t.double() for t in (x, weights, up, down)]
    with pytest.raises(TypeError, match=r"saved_format: torch.float64 cannot be quantized"):
        experts(*wide[:2], routing, *wide[2:], recipe=None, saved_format="mxfp8")


def test_weights_are_reused_where_asked(monkeypatch):
    from blockscale.nn import reuse

    made = []
    original = reuse.quantize_forms
    monkeypatch.setattr(
        reuse, "quantize_forms", lambda x, *a, **k: made.append((k["rows"], k["columns"]))
        or original(x, *a, **k)
    )  # fmt: skip
    routing, operands = routed(20, 2, 4), given(20, 2, 4)
    x, weights, up, down, *_ = operands

    def step() -> None:
        experts(x, weights, routing, up, down, recipe=bs.Recipe("mxfp8")).sum().backward()

    step()
    assert len(made) == 4
    made.clear()
    with bs.reuse_weights():
        step()
        step()
    assert sum(rows for rows, _ in made) == 2
    assert sum(columns for _, columns in made) == 2


def test_checkpoint():
    routing, operands = routed(30, 2, 4), given(30, 2, 4)
    y, gradients = run(operands, routing, bs.Recipe("mxfp8"))
    x, weights, up, down, up_bias, down_bias = (t.detach().requires_grad_() for t in operands)
    again = checkpoint(
        lambda *t: experts(*t[:2], routing, *t[2:4], recipe=bs.Recipe("mxfp8"), up_bias=t[4],
                           down_bias=t[5]),
        x, weights, up, down, up_bias, down_bias, use_reentrant=False,
    )  # fmt: skip
    again.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype))
    assert torch.equal(again, y)
    for got, t in zip(gradients, (x, weights, up, down, up_bias, down_bias), strict=True):
        assert torch.equal(got, t.grad)


def test_autocast():
    routing, operands = routed(20, 2, 4), given(20, 2, 4, torch.float32, bias=False)
    x, weights, up, down, *_ = operands
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, weights, routing, up, down, recipe=bs.Recipe("mxfp8"))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == up.grad.dtype == torch.float32


def test_second_derivatives_are_refused():
    routing, (x, weights, up, down, *_) = routed(8, 1, 2), given(8, 1, 2)
    y = experts(x, weights, routing, up, down, recipe=bs.Recipe("mxfp8"))
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_reused_weights_have_the_form_of_a_backward_only_if_there_is_one(monkeypatch):
    made: list[str] = []

    def forms(*args, rows=False, columns=False, **how):
        if rows or columns:
            made.append("rows" * rows + "columns" * columns)
        return quantize_forms(*args, rows=rows, columns=columns, **how)

    monkeypatch.setattr(reuse, "quantize_forms", forms)
    routing, (x, weights, up, down, *_) = routed(8, 2, 4), given(8, 2, 4)
    layer = bs.nn.GroupedLinear(4, H, I)
    rows = x[routing.tokens]
    calls = {
        "experts": lambda x: experts(x, weights, routing, up, down, recipe=bs.Recipe("mxfp8")),
        "grouped": lambda x: layer(x, routing.offsets),
    }
    for name, call in calls.items():
        own = (x if name == "experts" else rows).detach()
        count = 2 if name == "experts" else 1
        with bs.reuse_weights(), torch.no_grad():
            call(own.clone().requires_grad_())
        assert made == ["rows"] * count
        made.clear()
        with bs.reuse_weights():
            call(own.clone().requires_grad_()).sum().backward()
        assert made == ["rowscolumns"] * count
        made.clear()
        with bs.reuse_weights():
            call(own).sum().backward()  # no gradient of x
        assert made == ["rows", "rowscolumns"][:count]
        made.clear()


# --- bad input ------------------------------------------------------------------------------------


def test_routings_of_int32():
    routing, (x, weights, up, down, *_) = routed(8, 2, 4), given(8, 2, 4)
    short = routing._replace(pairs=routing.pairs.int(), slots=routing.slots.int())
    for recipe in (None, bs.Recipe("mxfp8")):
        results = []
        for each in (routing, short):
            y = experts(x, weights, each, up, down, recipe=recipe)
            results.append([y, *torch.autograd.grad(y.sum(), (x, weights, up, down))])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def test_bad_input():
    routing, (x, weights, up, down, *_) = routed(8, 2, 4), given(8, 2, 4)
    recipe = bs.Recipe("mxfp8")
    cases = {
        "up: has shape": (x, weights, routing, up[:, :, :32], down, recipe),
        "down: has shape": (x, weights, routing, up, down[:, :, :16], recipe),
        "weights: got": (x, weights[:, :1], routing, up, down, recipe),
        "routing: is of 4 groups, the weights of 3": (
            x,
            weights,
            routing,
            up[:3],
            down[:3],
            recipe,
        ),
        "routing: is of 8 tokens, x has 7": (x[:7], weights, routing, up, down, recipe),
        r"routing: has pairs torch.int64 \(8, 2\)": (
            x,
            weights,
            routing._replace(pairs=routing.pairs.view(8, 2)),
            up,
            down,
            recipe,
        ),
    }
    for message, (a, s, r, u, d, how) in cases.items():
        with pytest.raises(ValueError, match=message):
            experts(a, s, r, u, d, recipe=how)
    for slots in (routing.slots.double(), routing.slots.short(), routing.slots > 2):
        with pytest.raises(TypeError, match="routing: has slots"):
            experts(x, weights, routing._replace(slots=slots), up, down, recipe=recipe)
    turned_rows = routing._replace(pairs=routing.pairs.flip(0))
    with pytest.raises(ValueError, match="tokens that are not those of its pairs"):
        experts(x, weights, turned_rows, up, down, recipe=recipe)
    other = routing._replace(offsets=routing.offsets.long())
    with pytest.raises(TypeError, match=r"offsets: got torch\.int64"):
        experts(x, weights, other, up, down, recipe=recipe)
    with pytest.raises(TypeError, match="routing: got tuple"):
        experts(x, weights, tuple(routing), up, down, recipe=recipe)
    with pytest.raises(TypeError, match=r"x: got torch\.float64"):
        experts(x.double(), weights, routing, up, down, recipe=recipe)
    with pytest.raises(ValueError, match="cannot be grouped along the contraction"):
        experts(x, weights, routing, up, down, recipe=bs.Recipe("mxfp6_e2m3"))
    turned = up.detach().mT.contiguous().mT
    with pytest.raises(ValueError, match=r"up: has strides .* transposed=True"):
        experts(x, weights, routing, turned, down, recipe=recipe)
    with pytest.raises(ValueError, match="up_bias: has shape"):
        experts(x, weights, routing, up, down, recipe=recipe, up_bias=torch.zeros(4, 3))
    with pytest.raises(ValueError, match="quantizes weights only"):
        experts(x, weights, routing, up, down, recipe=bs.Recipe(activations="bfloat16"))
    with pytest.raises(ValueError, match="x, weight: got"):
        grouped_linear(x, up[0], routing.offsets, recipe=recipe)
