"""Layers that launch what a plan found: the numbers of those that do not, whatever changed since.

The GPU is a CPU here; its kernels are the reference, or in the emulator.
"""

from __future__ import annotations

import sys
import threading
import warnings
from itertools import product

import pytest
import torch
from planned import torch_gpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.nn import layer_plan, linear, plan_cache, reuse
from stand_in import emulated

RECIPES = {
    "mxfp8": bs.Recipe("mxfp8"),
    "e5m2 gradients, floor": bs.Recipe(gradients="mxfp8_e5m2", scale_rounding="floor"),
    "mxfp4": bs.Recipe("mxfp4"),
    "nvfp4": bs.Recipe("nvfp4"),
    "fp8_block": bs.Recipe("fp8_block"),
    "fp8_1x128": bs.Recipe("fp8_1x128"),
}
BF16 = torch.bfloat16


def random(*shape, dtype=BF16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Layer:
    """Operands of a layer, and what its passes give."""

    def __init__(self, recipe, x=(40, 96), n=48, dtype=BF16, bias=True, needs=(True,) * 3):
        self.recipe, self.needs = recipe, needs
        self.x, self.w = random(*x, dtype=dtype), random(n, x[-1], dtype=dtype, seed=1)
        self.b = random(n, dtype=dtype, seed=2) if bias else None
        self.g = random(*x[:-1], n, dtype=dtype, seed=3)

    def step(self, x=None, w=None, g=None):
        """The output, and the gradients of x, weight and bias."""
        given = self.x if x is None else x, self.w if w is None else w, self.b
        leaves = [
            None if t is None else t.detach().requires_grad_(need)
            for t, need in zip(given, self.needs, strict=True)
        ]
        y = linear(*leaves, recipe=self.recipe)
        if y.requires_grad:
            y.backward(self.g.to(y.dtype) if g is None else g)
        return y.detach(), *(None if t is None else t.grad for t in leaves)


def assert_same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert torch.equal(a, b)


@pytest.fixture
def counts(monkeypatch):
    """Of launches."""
    with torch_gpu(monkeypatch) as found:
        yield found


def without_plans(monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[linear.__module__], "plan_key", lambda *given: None)
        return call()


def planned(counts, call):
    """What ``call`` gives, which launches by a plan."""
    plans = [plan for plan in plan_cache._plans.values() if plan is not None]
    assert plans
    before = counts.products
    result = call()
    assert counts.products > before
    return result


def check(monkeypatch, counts, layer, **changed):
    """Steps by a plan give what others do."""
    expected = without_plans(monkeypatch, lambda: layer.step(**changed))
    layer.step(**changed)
    for _ in range(2):
        assert_same(planned(counts, lambda: layer.step(**changed)), expected)


# --- the same numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("x", [(40, 96), (3, 11, 70)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_the_same_numbers(monkeypatch, counts, name, x, dtype):
    check(monkeypatch, counts, Layer(RECIPES[name], x, dtype=dtype, bias=len(x) == 2))


@pytest.mark.parametrize("needs", list(product((False, True), repeat=3)), ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_gradients_that_are_asked_for(monkeypatch, counts, name, needs):
    check(monkeypatch, counts, Layer(RECIPES[name], needs=needs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch", "x", "n"),
    [
        ("mxfp8", "sm_90a", (136, 64), 136),
        ("fp8_block", "sm_90a", (2, 20, 70), 48),
        ("mxfp8", "sm_90a", (40, 96), 48),  # so few rows that scales are copied for a kernel
        ("nvfp4", "sm_90a", (40, 96), 48),
        ("mxfp8", "sm_100a", (2, 20, 96), 48),
        ("nvfp4", "sm_100a", (40, 96), 48),
    ],
)
def test_the_kernels_are_the_same(monkeypatch, name, arch, x, n):
    """Bytes and launches, in the emulator."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    layer = Layer(RECIPES[name], x, n)
    monkeypatch.setattr(plan_cache, "_plans", {})
    with emulated(arch, quantizes=True) as launched:
        expected = without_plans(monkeypatch, layer.step)
        first = list(launched)
        assert_same(layer.step(), expected)
        assert launched[len(first) :] == first
        assert any(plan is not None for plan in plan_cache._plans.values())
        assert_same(layer.step(), expected)
        assert launched == 3 * first


# --- what changes between calls -------------------------------------------------------------------


def test_the_weight_is_read_anew(monkeypatch, counts):
    layer = Layer(RECIPES["nvfp4"])
    check(monkeypatch, counts, layer)
    layer.w.mul_(3)
    check(monkeypatch, counts, layer)
    layer.w.data = random(48, 96, seed=9)
    check(monkeypatch, counts, layer)


def test_a_weight_that_changes_before_the_backward(counts):
    layer = Layer(RECIPES["mxfp8"])
    layer.step()
    w = layer.w.requires_grad_()
    y = planned(counts, lambda: linear(layer.x.requires_grad_(), w, recipe=layer.recipe))
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(layer.g)


@pytest.mark.parametrize("start", [0, 1, 8, 16])
def test_operands_that_lie_elsewhere(monkeypatch, counts, start):
    layer = Layer(RECIPES["mxfp8"])
    layer.step()
    w, x = (torch.empty(t.numel() + 64, dtype=BF16) for t in (layer.w, layer.x))
    w, x = (
        memory[start:][: t.numel()].view(t.shape).copy_(t)
        for memory, t in ((w, layer.w), (x, layer.x))
    )
    check(monkeypatch, counts, layer, x=x, w=w)
    apart = torch.empty(48, 128, dtype=BF16)[:, :96].copy_(layer.w)
    check(monkeypatch, counts, layer, w=apart, x=layer.x.mT.contiguous().mT)


def test_a_transposed_weight(monkeypatch, counts):
    """It is copied in every call, by no plan."""
    layer = Layer(RECIPES["mxfp8"])
    layer.step()
    turned = layer.w.mT.contiguous().mT
    expected = without_plans(monkeypatch, lambda: layer.step(w=turned))
    for _ in range(2):
        assert_same(layer.step(w=turned), expected)


@pytest.mark.parametrize("name", ["expanded", "transposed", "moved", "with a gradient"])
def test_gradients_that_lie_anyhow(monkeypatch, counts, name):
    layer = Layer(RECIPES["mxfp8"])
    g = {
        "expanded": torch.ones((), dtype=BF16).expand(40, 48),
        "transposed": layer.g.mT.contiguous().mT,
        "moved": torch.cat([layer.g.flatten()[:1], layer.g.flatten()])[1:].view(40, 48),
        "with a gradient": layer.g.clone().requires_grad_(),
    }[name]
    check(monkeypatch, counts, layer, g=g)


def test_shapes_and_dtypes_in_turn(monkeypatch, counts):
    layers = [
        Layer(RECIPES["mxfp8"], **given)
        for given in (
            {},
            {"x": (41, 96)},
            {"x": (2, 20, 96)},
            {"n": 64},
            {"dtype": torch.float32},
            {"dtype": torch.float16},
            {"bias": False},
        )
    ]
    layers += [Layer(recipe) for recipe in RECIPES.values()]
    expected = [without_plans(monkeypatch, layer.step) for layer in layers]
    for _ in range(3):
        for layer, wanted in zip(layers, expected, strict=True):
            assert_same(layer.step(), wanted)


def test_other_biases(monkeypatch, counts):
    layer = Layer(RECIPES["mxfp8"])
    for bias in (layer.b.float(), layer.b.repeat_interleave(2)[::2], layer.b.double()):
        layer.b = bias
        expected = without_plans(monkeypatch, layer.step)
        for _ in range(3):
            assert_same(layer.step(), expected)


def test_arguments_that_do_not_fit_are_refused_after_some_that_do(counts):
    layer = Layer(RECIPES["mxfp8"])
    layer.step(), layer.step()
    with pytest.raises(ValueError, match="x, weight: got"):
        linear(layer.x[:, :64], layer.w, recipe=layer.recipe)
    with pytest.raises(ValueError, match="bias: got"):
        linear(layer.x, layer.w, layer.b[:32], recipe=layer.recipe)
    with pytest.raises(TypeError, match="weight: got"):
        linear(layer.x, layer.w.double(), recipe=layer.recipe)
    for x in (layer.x.to_sparse(), layer.x.to("meta"), torch.nested.nested_tensor([layer.x])):
        assert layer_plan.plan_key(x, layer.w, None, layer.recipe) is None


def test_an_empty_batch(counts):
    layer = Layer(RECIPES["mxfp8"], (0, 96))
    for _ in range(3):
        y, x_grad, w_grad, b_grad = layer.step()
        assert (y.shape, x_grad.shape) == ((0, 48), (0, 96))
        assert not w_grad.any()
        assert not b_grad.any()
    assert not counts.products


def test_autocast(monkeypatch, counts):
    layer = Layer(RECIPES["mxfp8"], dtype=torch.float32)

    def step():
        with torch.autocast("cpu", BF16):
            return layer.step()

    expected = without_plans(monkeypatch, step), without_plans(monkeypatch, layer.step)
    assert [each[0].dtype for each in expected] == [BF16, torch.float32]
    for _ in range(3):
        for call, wanted in zip((step, layer.step), expected, strict=True):
            assert_same(call(), wanted)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_plans_made_in_inference_mode(monkeypatch, counts, name):
    layer = Layer(RECIPES[name])
    expected = without_plans(monkeypatch, layer.step)
    with torch.inference_mode():
        for _ in range(2):
            y = call(layer, layer.x, layer.w)
            assert y.is_inference()
            assert torch.equal(y, expected[0])
    with torch.no_grad():
        y = planned(counts, lambda: call(layer, layer.x, layer.w))
    assert not y.is_inference()
    y.add_(1)
    for _ in range(2):
        assert_same(layer.step(), expected)
    with torch.inference_mode():
        layer.x = layer.x.clone()
    with torch.no_grad():
        assert torch.equal(call(layer, layer.x, layer.w), expected[0])


def test_products_in_high_precision_are_not_planned(monkeypatch, counts):
    layer = Layer(bs.Recipe(high_precision=("wgrad",)))
    expected = without_plans(monkeypatch, layer.step)
    for _ in range(3):
        assert_same(layer.step(), expected)
    assert list(plan_cache._plans.values()) == [None]


# --- autograd -------------------------------------------------------------------------------------


def moved(x):
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize(
    "unpack",
    [torch.clone, lambda x: x.mT.contiguous().mT if x.dim() == 2 else x, moved],
    ids=["copied", "transposed", "moved"],
)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_block"])
def test_hooks_of_saved_tensors(monkeypatch, counts, name, unpack):
    layer = Layer(RECIPES[name])
    expected = without_plans(monkeypatch, layer.step)
    layer.step()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
        assert_same(planned(counts, layer.step), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_same(planned(counts, layer.step), expected)


def test_second_derivatives_are_refused(counts):
    layer = Layer(RECIPES["mxfp8"])
    layer.step()
    x = layer.x.requires_grad_()
    y = planned(counts, lambda: linear(x, layer.w, recipe=layer.recipe))
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_graph_that_is_retained(counts):
    layer = Layer(RECIPES["mxfp8"])
    layer.step()
    x = layer.x.requires_grad_()
    y = linear(x, layer.w, recipe=layer.recipe)
    first, second = (
        torch.autograd.grad(y, x, layer.g, retain_graph=retain)[0] for retain in (True, False)
    )
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, layer.g)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(monkeypatch, counts, reentrant):
    layer = Layer(RECIPES["mxfp8"])
    expected = without_plans(monkeypatch, layer.step)
    for _ in range(3):
        x, w = layer.x.clone().requires_grad_(), layer.w.clone().requires_grad_()
        y = checkpoint(lambda x, w=w: call(layer, x, w), x, use_reentrant=reentrant)
        y.backward(layer.g)
        assert_same((y.detach(), x.grad, w.grad), expected[:3])


def call(layer, x, w):
    return linear(x, w, layer.b, recipe=layer.recipe)


def test_the_output_may_be_written_to_and_hooks_are_called(counts):
    layer, seen = bs.nn.Linear(96, 48, dtype=BF16), []
    layer.register_forward_hook(lambda module, args, y: seen.append("forward"))
    layer.register_full_backward_hook(lambda module, given, grad: seen.append("backward"))
    layer.weight.register_hook(lambda grad: seen.append("weight"))
    for x in (random(40, 96), random(2, 20, 96)) * 2:
        layer(x.requires_grad_()).relu().sum().backward()
        call(Layer(layer.recipe), x[..., :96], layer.weight).relu_().sum().backward()
    assert sorted(seen) == ["backward"] * 4 + ["forward"] * 4 + ["weight"] * 8


def test_a_gradient_that_torch_looks_at(monkeypatch, counts):
    layer, seen = Layer(RECIPES["nvfp4"]), []
    expected = without_plans(monkeypatch, layer.step)
    layer.step()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    x, w = layer.x.clone().requires_grad_(), layer.w.clone().requires_grad_()
    y = planned(counts, lambda: call(layer, x, w))
    with Mode():
        y.backward(layer.g)
    assert_same((y.detach(), x.grad, w.grad), expected[:3])
    assert sum(name.startswith("blockscale::gemm") for name in seen) == 2
    negated = torch._neg_view(-layer.g)
    x.grad = w.grad = None
    y = planned(counts, lambda: call(layer, x, w))
    y.backward(negated)
    assert_same((y.detach(), x.grad, w.grad), expected[:3])


# --- who looks on ---------------------------------------------------------------------------------


def test_what_is_no_plain_tensor_is_not_planned(counts):
    layer = Layer(RECIPES["mxfp8"])

    class Sub(torch.Tensor):
        pass

    def key(x=layer.x, w=layer.w, b=layer.b):
        return layer_plan.plan_key(x, w, b, layer.recipe)

    assert key() is not None
    assert key(w=torch.nn.Parameter(layer.w)) is not None
    for other in (layer.w.as_subclass(Sub), torch._neg_view(layer.w), bs.quantize(layer.w)):
        assert key(w=other) is None
    assert key(b=layer.b.as_subclass(Sub)) is None
    assert key(x=torch._efficientzerotensor((40, 96), dtype=BF16)) is None
    with torch.inference_mode():
        assert key(x=random(40, 96)) is not None
    found = []
    torch.func.vmap(lambda x: found.append(key(x=x)) or x)(random(2, 40, 96))
    torch.func.grad(lambda x: found.append(key(x=x)) or x.sum())(layer.x)
    with torch.autograd.forward_ad.dual_level():
        found.append(key())
    torch.compile(lambda x: found.append(key(x=x)), backend="eager")(layer.x)
    assert found[:3] == [None] * 3
    assert found[-1] is None


@pytest.mark.parametrize("transform", ["compile", "func", "batched"])
def test_transforms_after_a_plan(monkeypatch, counts, transform):
    layer = Layer(RECIPES["mxfp8"])

    def loss(x, w):
        return (call(layer, x, w) * layer.g).sum(dtype=torch.float32)

    def run():
        if transform == "func":
            return torch.func.grad(loss, (0, 1))(layer.x, layer.w)
        if transform == "batched":
            x = layer.x.detach().requires_grad_()
            grads = torch.stack([layer.g, layer.g * 2])
            return torch.func.vmap(lambda g: grad_of(layer, x, g))(grads), None
        x, w = layer.x.detach().requires_grad_(), layer.w.detach().requires_grad_()
        torch.compiler.reset()
        torch.compile(loss, backend="aot_eager", fullgraph=True)(x, w).backward()
        return x.grad, w.grad

    expected = without_plans(monkeypatch, run)
    layer.step()
    planned(counts, layer.step)
    assert_same(run(), expected)


def grad_of(layer, x, g):
    return (linear(x, layer.w, recipe=layer.recipe) * g).sum(dtype=torch.float32)


def test_parametrized_weights(monkeypatch, counts):
    layer = bs.nn.Linear(96, 48, dtype=BF16)
    torch.nn.utils.parametrizations.weight_norm(layer)
    x, g = random(40, 96), random(40, 48)

    def step():
        layer.zero_grad()
        y = layer(x)
        y.backward(g)
        return y.detach(), *(p.grad for p in layer.parameters())

    expected = without_plans(monkeypatch, step)
    step()
    assert_same(planned(counts, step), expected)


# --- weights that are reused ----------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_reuse_weights(monkeypatch, counts, name):
    layer = Layer(RECIPES[name], n=64)
    w = torch.nn.Parameter(layer.w)

    def step():
        x = layer.x.clone().requires_grad_()
        w.grad = None
        y = call(layer, x, w)
        y.backward(layer.g)
        return y.detach(), x.grad, w.grad

    expected = without_plans(monkeypatch, step)
    step()
    with bs.reuse_weights():
        for _ in range(3):
            del counts.quantized[:]
            assert_same(planned(counts, step), expected)
            assert (w.shape in counts.quantized) == 0
            assert bool(reuse._kept)
        with torch.no_grad():
            w.mul_(2)
        changed = planned(counts, step)
    assert_same(changed, without_plans(monkeypatch, step))
    assert not reuse._kept


def test_the_hint_is_given(monkeypatch, counts):
    monkeypatch.setattr(reuse, "_passes", {})
    layer, x = bs.nn.Linear(96, 48, dtype=BF16), random(40, 96)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(reuse._HINT_AT - 1):
            layer(x)
        with pytest.raises(UserWarning, match="quantized for the 100th time"):
            layer(x)


def test_threads(monkeypatch, counts):
    layer = Layer(RECIPES["mxfp8"])
    expected = without_plans(monkeypatch, layer.step)
    results = []

    def work():
        results.extend(layer.step() for _ in range(8))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 32
    for result in results:
        assert_same(result, expected)


def test_plans_do_not_pile_up(monkeypatch, counts):
    monkeypatch.setattr(plan_cache, "_LIMIT", 3)
    for m in range(8, 48, 4):
        Layer(RECIPES["mxfp8"], (m, 32), 32).step()
        assert len(plan_cache._plans) <= 3
