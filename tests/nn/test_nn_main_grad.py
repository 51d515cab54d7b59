"""``weight.main_grad``: weight gradients are added to it in their product, or it is an error."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest
import torch
from planned import torch_gpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale import reference

BF16, F32 = torch.bfloat16, torch.float32
RECIPES = {
    "mxfp8": bs.Recipe("mxfp8"),
    "nvfp4": bs.Recipe("nvfp4"),
    "fp8_block": bs.Recipe("fp8_block"),
}


def random(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(recipe=RECIPES["mxfp8"], n=48, k=96, dtype=BF16, bias=True):
    layer = bs.nn.Linear(k, n, bias, dtype=dtype, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(random(n, k, seed=1))
    return layer


def with_main_grad(layer, dtype=F32):
    layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=dtype)
    return layer


def batches(count=3, m=40, n=48, k=96):
    """Inputs, and gradients of outputs, of micro-batches; small beside what was added before."""
    return [(random(m, k, seed=2 * i), random(m, n, seed=2 * i + 1)) for i in range(1, count + 1)]


def train(layer, given):
    """Gradients of the inputs."""
    found = []
    for x, g in given:
        x = x.clone().requires_grad_()
        layer(x).backward(g)
        found.append(x.grad)
    return found


def columns(x, recipe, role):
    q = bs.quantize(x, recipe.format_of(role).name, -2, pad=True)
    return q.dequantize(F32)


def expected(given, recipe, dtype=F32):
    """By the definition of the product: fp32 sums, rounded once a micro-batch."""
    total = torch.zeros(given[0][1].shape[1], given[0][0].shape[1], dtype=dtype)
    for x, g in given:
        left, right = columns(g, recipe, "gradients"), columns(x, recipe, "activations")
        total = reference.gemm(left.mT, right, out_dtype=dtype, c=total)
    return total


# --- linear layers --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_bits(name, dtype):
    layer, plain = with_main_grad(made(RECIPES[name]), dtype), made(RECIPES[name])
    plain.load_state_dict(layer.state_dict())
    given = batches()
    of_x, want_x = train(layer, given), train(plain, given)
    assert layer.weight.grad is None
    assert layer.weight.grad_added_to_main_grad is True
    assert torch.equal(layer.weight.main_grad, expected(given, RECIPES[name], dtype))
    assert all(map(torch.equal, of_x, want_x))
    assert torch.equal(layer.bias.grad, plain.bias.grad)
    assert not hasattr(plain.weight, "grad_added_to_main_grad")


def test_closer_than_grad():
    """To the float64 sum of the same quantized operands; .grad of a bf16 weight rounds each."""
    recipe, given = RECIPES["mxfp8"], batches(16)
    layer, plain = with_main_grad(made()), made()
    train(layer, given)
    train(plain, given)
    truth = sum(
        columns(g, recipe, "gradients").double().mT @ columns(x, recipe, "activations").double()
        for x, g in given
    )
    fused, rounded = (
        (found.double() - truth).norm() / truth.norm()
        for found in (layer.weight.main_grad, plain.weight.grad)
    )
    assert fused < 1e-6
    assert rounded > 1e-3


@pytest.mark.parametrize("x_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_high_precision_wgrad(dtype, x_dtype):
    layer = with_main_grad(made(bs.Recipe("mxfp8", high_precision=("wgrad",))), dtype)
    given = [(x.to(x_dtype), g.to(x_dtype)) for x, g in batches()]
    train(layer, given)
    want = torch.zeros(48, 96, dtype=dtype)
    for x, g in given:
        want = (want.double() + g.double().mT @ x.double()).to(dtype)
    assert layer.weight.grad is None
    tolerance = {F32: 1e-6, BF16: 2**-8}[dtype]  # of fp32 sums; of a sum at the edge of a rounding
    torch.testing.assert_close(layer.weight.main_grad, want, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_planned(monkeypatch, dtype):
    """Where kernels are launched by a plan, and where its backward has to look on."""
    given, recipe = batches(), RECIPES["mxfp8"]
    with torch_gpu(monkeypatch) as counts:
        layer = with_main_grad(made(), dtype)
        of_x = train(layer, given)
        assert counts.products == 9
        found = layer.weight.main_grad.clone()
        layer.weight.main_grad.zero_()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            train(layer, given)
    assert torch.equal(found, expected(given, recipe, dtype))
    assert torch.equal(layer.weight.main_grad, found)
    assert layer.weight.grad is None
    assert all(map(torch.equal, of_x, train(made(), given)))


class _Results(TorchDispatchMode):
    """What ops return."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.found += [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        return result


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_no_gradient_of_its_size_is_made(dtype):
    layer, (x, g) = with_main_grad(made(), dtype), batches(1)[0]
    y = layer(x)
    with _Results() as seen:
        y.backward(g)
    assert seen.found
    like = [x for x in seen.found if x.shape == layer.weight.shape and x.dtype in (F32, BF16)]
    assert all(x.data_ptr() == layer.weight.data_ptr() for x in like)  # views of it


def test_input_without_gradient():
    layer, given = with_main_grad(made()), batches(1)
    layer(given[0][0]).backward(given[0][1])
    assert torch.equal(layer.weight.main_grad, expected(given, RECIPES["mxfp8"]))


def test_frozen():
    layer = with_main_grad(made())
    layer.weight.requires_grad_(False)
    train(layer, batches(1))
    assert not layer.weight.main_grad.any()
    assert not hasattr(layer.weight, "grad_added_to_main_grad")


def test_retained_graph_adds_again():
    layer, (x, g) = with_main_grad(made()), batches(1)[0]
    y = layer(x)
    y.backward(g, retain_graph=True)
    y.backward(g)
    assert torch.equal(layer.weight.main_grad, expected([(x, g)] * 2, RECIPES["mxfp8"]))


def test_tied_weights_both_add():
    one, two = with_main_grad(made()), made()
    two.weight = one.weight
    (x, g), (x2, g2) = batches(2)
    ((one(x) * g).sum() + (two(x2) * g2).sum()).backward()
    orders = [expected(pairs, RECIPES["mxfp8"]) for pairs in
              ([(x, g), (x2, g2)], [(x2, g2), (x, g)])]  # fmt: skip
    assert any(torch.equal(one.weight.main_grad, want) for want in orders)
    assert one.weight.grad is None


def test_reuse_weights():
    layer, given = with_main_grad(made()), batches()
    with bs.reuse_weights():
        train(layer, given)
    assert torch.equal(layer.weight.main_grad, expected(given, RECIPES["mxfp8"]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    layer, given = with_main_grad(made()), batches()
    train(partial(checkpoint, layer, use_reentrant=reentrant), given)
    assert torch.equal(layer.weight.main_grad, expected(given, RECIPES["mxfp8"]))
    assert layer.weight.grad is None


def test_no_rows():
    layer = with_main_grad(made())
    x = torch.zeros(2, 0, 96, dtype=BF16, requires_grad=True)
    y = layer(x)
    assert y.shape == (2, 0, 48)
    y.sum().backward()
    assert layer.weight.grad is None
    assert layer.weight.grad_added_to_main_grad is True
    assert not layer.weight.main_grad.any()
    assert torch.equal(layer.bias.grad, torch.zeros(48, dtype=BF16))
    assert x.grad.shape == x.shape
    train(layer, given := batches(1))
    assert torch.equal(layer.weight.main_grad, expected(given, RECIPES["mxfp8"]))


def test_bs_autocast_adds_too():
    layer, given = torch.nn.Linear(96, 48, dtype=BF16), batches(1)
    with_main_grad(layer)
    with bs.autocast(RECIPES["mxfp8"]):
        train(layer, given)
    assert torch.equal(layer.weight.main_grad, expected(given, RECIPES["mxfp8"]))


# --- what is asked of autograd --------------------------------------------------------------------


def test_autograd_grad_returns_the_gradient():
    """torch.autograd.grad, and backward(inputs=...) of another tensor, leave main_grad alone."""
    layer, (x, g) = with_main_grad(made()), batches(1)[0]
    x = x.requires_grad_()
    of_x, of_w = torch.autograd.grad(layer(x), [x, layer.weight], g)
    want = made()
    want(x.detach()).backward(g)
    assert torch.equal(of_w, want.weight.grad)
    assert torch.equal(of_x, torch.autograd.grad(layer(x), x, g)[0])
    layer(x).backward(g, inputs=[x])
    assert not layer.weight.main_grad.any()
    assert layer.weight.grad is None
    layer(x).backward(g, inputs=[layer.weight])
    assert torch.equal(layer.weight.main_grad, expected([(x, g)], RECIPES["mxfp8"]))


def test_double_backward_is_refused_and_adds_nothing():
    layer, (x, g) = with_main_grad(made()), batches(1)[0]
    with pytest.raises(NotImplementedError, match="create_graph"):
        layer(x).backward(g, create_graph=True)
    assert not layer.weight.main_grad.any()


def test_torch_func_returns_gradients():
    layer, (x, g) = with_main_grad(made()), batches(1)[0]

    def loss(parameters):
        return (torch.func.functional_call(layer, parameters, (x,)) * g).sum()

    found = torch.func.grad(loss)(dict(layer.named_parameters()))
    assert found["weight"].any()
    assert not layer.weight.main_grad.any()


def test_hooks_of_the_accumulation_see_it_added():
    """What Megatron registers on AccumulateGrad runs once a backward, after the product."""
    layer, given = with_main_grad(made()), batches(1)
    seen = []

    def hook(*_):
        seen.append((layer.weight.grad, layer.weight.grad_added_to_main_grad,
                     layer.weight.main_grad.clone()))  # fmt: skip

    node = torch.autograd.graph.get_gradient_edge(layer.weight).node
    node.register_hook(hook)
    train(layer, given)
    ((grad, added, main_grad),) = seen
    assert grad is None
    assert added is True
    assert torch.equal(main_grad, expected(given, RECIPES["mxfp8"]))


def test_set_between_the_passes():
    """What the weight has when the backward runs decides."""
    layer, given = made(), batches(1)
    y = layer(given[0][0])
    with_main_grad(layer)
    y.backward(given[0][1])
    assert layer.weight.grad is None
    assert torch.equal(layer.weight.main_grad, expected(given, RECIPES["mxfp8"]))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("main_grad", "error", "said"),
    [
        (torch.zeros(48, 95), ValueError, r"shape \(48, 95\)"),
        (torch.zeros(96, 48).mT, ValueError, "contiguous"),
        (torch.zeros(48, 96, dtype=torch.float16), TypeError, "torch.float16"),
        (torch.zeros(48, 96, device="meta"), ValueError, "is on meta"),
        (torch.zeros(48, 96, requires_grad=True), ValueError, "requires a gradient"),
        ([0.0], TypeError, "got list"),
    ],
)
def test_what_does_not_fit(main_grad, error, said):
    layer = made()
    layer.weight.main_grad = main_grad
    with pytest.raises(error, match=rf"weight\.main_grad: .*{said}"):
        train(layer, batches(1))
    with torch.no_grad():
        layer(batches(1)[0][0])


def test_what_does_not_fit_in_the_backward():
    layer, (x, g) = made(), batches(1)[0]
    y = layer(x)
    layer.weight.main_grad = torch.zeros(1)
    with pytest.raises(ValueError, match=r"weight\.main_grad: has shape"):
        y.backward(g)


def test_hooks_of_the_gradient_are_refused():
    layer = with_main_grad(made())
    handle = layer.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(ValueError, match="register_hook"):
        train(layer, batches(1))
    handle.remove()
    train(layer, batches(1))


def test_computed_and_transposed_weights_are_refused():
    x, w = random(40, 96), random(48, 96).requires_grad_()
    computed = w * 2
    computed.main_grad = torch.zeros(48, 96)
    with pytest.raises(ValueError, match="computed from other tensors"):
        bs.nn.linear(x, computed, recipe=RECIPES["mxfp8"])
    turned = torch.nn.Parameter(random(96, 48).mT)
    turned.main_grad = torch.zeros(48, 96)
    with pytest.raises(ValueError, match="rows contiguous"):
        bs.nn.linear(x, turned, recipe=RECIPES["mxfp8"])


@contextmanager
def one_rank():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_ddp_is_refused():
    layer = with_main_grad(made())
    with one_rank():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(layer))
        with pytest.raises(ValueError, match="DistributedDataParallel reduces"):
            train(model, batches(1))
        del layer.weight.main_grad
        train(model, batches(1))
    assert layer.weight.grad.any()


def test_fsdp2_keeps_its_gradients():
    """The weight that is gathered has no main_grad; MainGradients refuses the shards."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, given = torch.nn.Sequential(made()), batches(1)
    plain = made()
    plain.load_state_dict(model[0].state_dict())
    with one_rank():
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"0\.weight is a DTensor"):
            bs.nn.MainGradients(model)
        train(model, given)
        train(plain, given)
        assert torch.equal(model[0].weight.grad.full_tensor(), plain.weight.grad)


# --- compilers ------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_compiled(fresh):
    """The layer runs as it is inside of compiled code; main_grad may come and go."""
    layer, given = made(), batches(1)
    model = torch.compile(torch.nn.Sequential(layer, torch.nn.ReLU()), backend="aot_eager")
    x, g = given[0]
    model(x).backward(g)
    want = layer.weight.grad
    layer.weight.grad = None
    with_main_grad(layer)
    model(x).backward(g)
    assert layer.weight.grad is None
    assert layer.weight.grad_added_to_main_grad is True
    assert torch.equal(layer.weight.main_grad.to(BF16), want)
    del layer.weight.main_grad
    model(x).backward(g)
    assert torch.equal(layer.weight.grad, want)


def test_compiled_as_one_graph_is_refused(fresh):
    layer = with_main_grad(made())
    with pytest.raises(Exception, match=r"backward that adds to weight\.main_grad is not recorded"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(batches(1)[0][0])


# --- groups ---------------------------------------------------------------------------------------

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
