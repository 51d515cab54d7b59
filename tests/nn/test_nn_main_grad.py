"""``weight.main_grad``: weight gradients are added to it in their product, or it is an error."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from main_grads import (
    BF16,
    F32,
    RECIPES,
    batches,
    columns,
    expected,
    made,
    random,
    train,
    with_main_grad,
)
from planned import torch_gpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import blockscale as bs

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


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
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
