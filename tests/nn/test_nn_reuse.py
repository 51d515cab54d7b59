"""Weights are quantized in every pass; ``reuse_weights`` keeps them while they are unchanged."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch._dynamo.testing

import blockscale as bs
from blockscale import ops
from blockscale.nn import Linear, clear_weight_cache, linear, reuse
from blockscale.nn.forms import quantize_forms
from blockscale.nn.operand import Operand


@pytest.fixture
def counted(monkeypatch):
    """The forms that weights were quantized to, in order."""
    calls = []

    def count(*args, rows, columns, **kwargs):
        if rows or columns:
            calls.append("rows" * rows + "columns" * columns)
        return quantize_forms(*args, rows=rows, columns=columns, **kwargs)

    monkeypatch.setattr(reuse, "quantize_forms", count)
    return calls


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return Linear(64, 32, bias=False)


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


def fresh(layer):
    """The layer's output by way of a weight that nobody has seen."""
    return linear(X.to(layer.weight.dtype), layer.weight.detach().clone(), recipe=layer.recipe)


# --- unasked --------------------------------------------------------------------------------------


def test_every_pass_quantizes_what_it_reads(counted, layer):
    for _ in range(2):
        layer(X.clone().requires_grad_()).sum().backward()
    layer(X).sum().backward()  # no gradient of x
    with torch.no_grad():
        layer(X.clone().requires_grad_())
    assert counted == ["rows", "columns", "rows", "columns", "rows", "rows"]


WRITES = {
    "data": lambda w: w.data.mul_(2),
    "detach": lambda w: w.detach().mul_(2),
    "numpy": lambda w: np.multiply(w.detach().numpy(), 2, out=w.detach().numpy()),
    "set_data": lambda w: setattr(w, "data", 2 * w.data),
    "storage": lambda w: w.untyped_storage().copy_((2 * w.detach()).untyped_storage()),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_writes_behind_torchs_back(layer, how, context):
    with context():
        before = layer(X)
    WRITES[how](layer.weight)
    with context():
        assert torch.equal(layer(X), 2 * before)


def test_a_step_through_data_trains(layer):
    """As plain loops, EMA and clamping write."""
    target, losses = X @ torch.randn(64, 32), []
    for _ in range(60):
        loss = (layer(X) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        for p in layer.parameters():
            p.data -= 0.5 * p.grad
            p.grad = None
    assert losses[-1] < 0.02 * losses[0]


def test_two_new_data_in_a_row(layer):
    """The second may get the address of the first."""
    for seed in range(200):
        layer.weight.data = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(layer(X), fresh(layer))


def test_the_backward_reads_the_weight_of_the_forward(layer):
    """autograd keeps it, and sees what changes it, as for torch.nn.Linear."""
    y = layer(X.clone().requires_grad_())
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nothing_of_the_weights_size_is_kept_for_the_backward(layer):
    """What gathers a weight anew for the backward has to be able to free it until then."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        layer(X.clone().requires_grad_())
    weights = [x for x in kept if x.shape == layer.weight.shape]
    assert [x.data_ptr() for x in weights] == [layer.weight.data_ptr()]
    assert not any(isinstance(x, bs.ScaledTensor) for x in weights)


def test_the_global_scale_is_found_once(monkeypatch):
    """It costs a read of the whole weight."""
    found = []
    monkeypatch.setattr(ops, "global_scale", lambda x, *a: found.append(x.shape) or run(x, *a))
    layer = Linear(64, 32, bias=False, recipe=bs.Recipe("nvfp4"))
    layer(X.clone().requires_grad_()).sum().backward()
    assert found == [(8, 64), (32, 64), (8, 32)]


run = ops.global_scale


# --- the hint -------------------------------------------------------------------------------------


@pytest.fixture
def unsaid(monkeypatch):
    monkeypatch.setattr(reuse, "_passes", {})


def test_the_hundredth_pass_says_once_how_to_reuse(layer, unsaid):
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(99):
            layer(X)
        assert not said
        for _ in range(200):
            layer(X)
    assert len(said) == 1
    assert "reuse_weights" in str(said[0].message)
    assert "quantize_" in str(said[0].message)


def test_another_thread_may_say_the_hint(layer, monkeypatch):
    class Passes(dict):
        def get(self, key, default=None):
            reuse._passes = None
            return super().get(key, default)

    monkeypatch.setattr(reuse, "_passes", Passes())
    with torch.no_grad():
        layer(X)


def test_no_hint_while_the_weight_changes_or_trains(layer, unsaid):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(120):
            layer(X)
            with torch.no_grad():
                layer(X)
                layer.weight.mul_(1.01)
        fused = torch.optim.SGD(layer.parameters(), 0.1, fused=True)  # leaves the version as it is
        for _ in range(120):
            layer(X).sum().backward()
            fused.step()
        with bs.reuse_weights(), torch.no_grad():
            for _ in range(120):
                layer(X)


# --- asked for ------------------------------------------------------------------------------------


def test_a_block_quantizes_each_form_once(counted, layer):
    with bs.reuse_weights():
        for _ in range(3):
            layer(X.clone().requires_grad_()).sum().backward()
        with torch.no_grad():
            layer(X)
    assert counted == ["rowscolumns"]  # from one read
    layer(X)
    assert counted == ["rowscolumns", "rows"]


def test_a_block_makes_the_form_of_a_backward_only_if_there_is_one(counted, layer):
    with bs.reuse_weights():
        with torch.no_grad():
            layer(X.clone().requires_grad_())
        layer(X).sum().backward()  # no gradient of x
        assert counted == ["rows"]
        layer(X.clone().requires_grad_()).sum().backward()
    assert counted == ["rows", "columns"]


def test_blocks_nest_and_end(counted, layer):
    with bs.reuse_weights():
        with bs.reuse_weights():
            layer(X)
        layer(X)
        assert len(counted) == 1
    with pytest.raises(ZeroDivisionError), bs.reuse_weights():  # noqa: PT012
        layer(X)
        1 / 0  # noqa: B018
    layer.weight.data.mul_(2)
    with bs.reuse_weights():  # writes between blocks are seen, whatever they are
        assert torch.equal(layer(X), fresh(layer))
    assert not reuse._kept


def test_micro_batches_give_the_same_bits(layer):
    found = []
    for block in (contextlib.nullcontext, bs.reuse_weights):
        layer.zero_grad()
        with block():
            inputs = [
                torch.randn(8, 64, generator=torch.Generator().manual_seed(i)) for i in (1, 2)
            ]
            outputs = [layer(x.requires_grad_()) for x in inputs]
            for y in outputs:
                y.square().sum().backward()
        found.append([*outputs, *(x.grad for x in inputs), layer.weight.grad])
    assert all(map(torch.equal, *found))


def test_another_stream_makes_its_own(counted, layer, monkeypatch):
    """It would not wait for the one that made them."""
    with bs.reuse_weights():
        for stream in (1, 2, 1, 2):
            monkeypatch.setattr(reuse, "_stream", lambda weight, stream=stream: stream)
            layer(X)
    assert counted == ["rows", "rows"]


def test_a_captured_graph_quantizes_in_each_replay(counted, layer, monkeypatch):
    monkeypatch.setattr(reuse, "_is_captured", lambda weight: True)
    with bs.reuse_weights():
        for _ in range(2):
            layer(X)
        assert not reuse._kept  # what is made in a graph is nothing before a replay
    assert counted == ["rows", "rows"]


def test_two_recipes_do_not_share(layer):
    with bs.reuse_weights():
        for recipe in (bs.Recipe(), bs.Recipe(scale_rounding="floor"), bs.Recipe("mxfp4")):
            y = linear(X, layer.weight, recipe=recipe)
            assert torch.equal(y, linear(X, layer.weight.detach().clone(), recipe=recipe))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_step_refreshes(layer, optimizer, options):
    """Fused optimizers do not count versions: they are seen all the same."""
    optimizer = optimizer(layer.parameters(), lr=0.1, **options)
    with bs.reuse_weights():
        before = layer(X)
        before.sum().backward()
        optimizer.step()
        assert torch.equal(layer(X), fresh(layer))
        assert not torch.equal(layer(X), before)


def test_an_optimizer_step_that_fails_halfway_refreshes():
    layer = Linear(64, 32)
    optimizer = torch.optim.SGD([{"params": [p]} for p in layer.parameters()], lr=0.1, fused=True)
    with bs.reuse_weights():
        before = layer(X)
        before.sum().backward()
        layer.bias.grad = torch.zeros(32).to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
        want = linear(X, layer.weight.detach().clone(), layer.bias, recipe=layer.recipe)
        assert not torch.equal(want, before)
        assert torch.equal(layer(X), want)


@pytest.fixture
def block():
    with bs.reuse_weights():
        yield


def test_an_optimizer_of_other_tensors_refreshes(layer, block):
    """One of sharded weights steps those, and never sees the gathered one."""
    layer(X)
    layer.weight.data.mul_(2)
    shard = torch.zeros(4, requires_grad=True)
    shard.grad = torch.ones(4)
    torch.optim.SGD([shard], lr=0.1).step()
    assert torch.equal(layer(X), fresh(layer))


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_refreshes(layer, block, assign):
    layer(X)
    other = Linear(64, 32, bias=False)
    layer.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(layer(X), other(X))


@pytest.fixture
def swapped(monkeypatch):
    """Modules swap their parameters instead of changing what is in them."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)


@pytest.mark.parametrize("reused", [False, True])
def test_parameters_that_are_swapped(layer, swapped, reused):
    other = Linear(64, 32, bias=False)
    with bs.reuse_weights() if reused else contextlib.nullcontext():
        layer(X)
        layer.load_state_dict(other.state_dict())
        assert torch.equal(layer(X), other(X))
    layer.bfloat16()
    assert torch.equal(layer(X.bfloat16()), fresh(layer))


def test_load_state_dict_refreshes_what_was_gathered(block):
    """Whoever gathers weights loads their shards; the layer learns that something was loaded."""
    layer = Linear(64, 32, bias=False)
    layer(X)
    layer.weight.data.mul_(2)
    torch.nn.Module.load_state_dict(layer, {}, strict=False)
    assert torch.equal(layer(X), fresh(layer))


def test_in_place_changes_refresh(layer, block):
    layer(X)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer(X), fresh(layer))
    torch.nn.init.ones_(layer.weight)
    assert torch.equal(layer(X), fresh(layer))


def test_to_refreshes(layer, block):
    layer(X)
    layer.to(torch.bfloat16)
    assert torch.equal(layer(X.bfloat16()), fresh(layer))


def test_new_data_refreshes(layer, block):
    """The memory of the old one is kept, so that the new one has another address."""
    for seed in range(200):
        layer.weight.data = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(layer(X), fresh(layer))


def test_a_new_parameter_refreshes(layer, block):
    layer(X)
    layer.weight = torch.nn.Parameter(torch.randn(32, 64))
    assert torch.equal(layer(X), fresh(layer))


def test_nothing_outlives_the_weight(block):
    layer = Linear(64, 32)
    layer(X)
    forms = reuse.quantized_weight(layer.weight, Operand("mxfp8", None), rows=True)
    q = weakref.ref(forms.rows)
    del forms
    weight = weakref.ref(layer.weight)
    size = len(reuse._kept)
    del layer
    gc.collect()
    assert weight() is None
    assert q() is None
    assert len(reuse._kept) < size


def test_a_deep_copy_has_its_own(layer, block):
    before = layer(X)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(layer(X), before)
    assert not twin(X).any()


def test_inference_mode_then_training(layer, block):
    with torch.inference_mode():
        before = layer(X)
    x = X.clone().requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, before)
    columns = bs.quantize(layer.weight, "mxfp8", -2).dequantize()
    assert torch.equal(x.grad, torch.ones(8, 32) @ columns)


@pytest.mark.parametrize("reused", [False, True])
def test_a_weight_made_in_inference_mode(reused):
    with torch.inference_mode(), bs.reuse_weights() if reused else contextlib.nullcontext():
        layer = Linear(64, 32, bias=False)
        first = layer(X)
        layer.weight.mul_(2)
        assert torch.equal(layer(X), 2 * first)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("within", [False, True])
def test_compiled_code_quantizes_in_every_pass(layer, within):
    torch.compiler.reset()

    def both(x):
        with bs.reuse_weights():
            return layer(x) + layer(x)

    run = torch.compile(both if within else layer, fullgraph=True, backend="aot_eager")
    with contextlib.nullcontext() if within else bs.reuse_weights():
        for _ in range(2):
            layer.weight.data.mul_(2)
            assert torch.equal(run(X), fresh(layer) * (1 + within))


def test_a_graph_that_writes_to_the_weight_it_read(layer, block):
    """Its kernels write in place, and the version is counted up before they run: what an op kept
    of the weight would be taken for the weight as it is after them."""
    torch.compiler.reset()

    def step(x):
        y = layer(x)
        layer.weight.mul_(2)
        return y

    with torch.no_grad():
        want = fresh(layer)
        assert torch.equal(torch.compile(step, fullgraph=True)(X), want)
        assert torch.equal(layer(X), 2 * want)


def test_blocks_compile_nothing_anew(layer, unsaid):
    """Compiled code asks neither whether a block is open nor whether the hint was given."""
    torch.compiler.reset()
    count = torch._dynamo.testing.CompileCounter()
    run = torch.compile(layer, fullgraph=True, backend=count)
    with torch.no_grad():
        for _ in range(3):
            run(X)
            with bs.reuse_weights():
                run(X)
            reuse._passes = None
    assert count.frame_count == 1


def test_clearing_a_cache_is_no_longer_needed(layer):
    with pytest.warns(DeprecationWarning, match="there is nothing to clear; leave the call out"):
        clear_weight_cache()
