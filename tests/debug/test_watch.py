"""What a watch tells of quantized tensors in training."""

from __future__ import annotations

import copy
import gc
import json
import math
import re
import warnings
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.debug import NonfiniteWarning, WatchFiles, watch, write_watch_report
from blockscale.debug.form_samples import SAMPLE, take_sample
from blockscale.measure import error_sums
from blockscale.nn import observing

MXFP8 = bs.Recipe("mxfp8")
#: Products that read a tensor, and the axis that it is blocked along.
USES = {
    ("activations", "fprop"): -1,
    ("activations", "wgrad"): -2,
    ("weights", "fprop"): -1,
    ("weights", "dgrad"): -2,
    ("gradients", "dgrad"): -1,
    ("gradients", "wgrad"): -2,
}


class Model(nn.Module):
    """Layers one after the other, and one that nobody calls."""

    def __init__(self, sizes: tuple[int, ...] = (64, 96, 64), recipe: bs.Recipe = MXFP8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.idle = nn.Linear(64, 64)
        self.checkpoints: dict | None = None
        bs.convert(self, recipe)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.checkpoints is None:
                x = torch.tanh(layer(x))
            else:
                x = checkpoint(lambda x, f=layer: torch.tanh(f(x)), x, **self.checkpoints)
        return x


def data(rows: int = 64, columns: int = 64, seed: int = 1) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-3, 1, columns)  # blocks differ, and some elements become zero


def train(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def lines(files) -> list[dict]:
    return [json.loads(line) for line in files.jsonl.read_text().splitlines()]


def by_use(found: list[dict]) -> dict[tuple[str, str, str], dict]:
    made = {(line["module"], line["tensor"], line["product"]): line for line in found}
    assert len(made) == len(found)
    return made


def tensors_of(model: nn.Module, x: Tensor) -> dict[tuple[str, str], Tensor]:
    """What each layer multiplies, as hooks of torch see it."""
    seen, hooks = {}, []
    for name, module in model.named_modules():
        if isinstance(module, bs.nn.Linear):

            def look(module: nn.Module, inputs: tuple[Tensor], output: Tensor, name=name) -> None:
                seen[name, "activations"] = inputs[0].detach().clone()
                seen[name, "weights"] = module.weight.detach().clone()
                output.register_hook(lambda g: seen.__setitem__((name, "gradients"), g.clone()))

            hooks.append(module.register_forward_hook(look))
    train(model, x)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block", "mxfp6_e2m3", "mxfp8_e5m2"])
@pytest.mark.parametrize("sizes", [(32, 32, 32), (24, 20)], ids=["whole blocks", "padded"])
def test_numbers(recipe, sizes, tmp_path):
    """Each is that of the tensor quantized anew, and compared by what checkpoints are measured
    with: all of it, where it is no larger than a sample."""
    recipe = bs.Recipe(recipe)
    model, x = Model(sizes, recipe), data(sizes[0], sizes[0])
    x[3:20, :8] = 0
    expected = tensors_of(copy.deepcopy(model), x)
    with watch(model, out=tmp_path) as files:
        train(model, x)
    found = by_use(lines(files))
    layers = [f"layers.{i}" for i in range(len(sizes) - 1)]
    first = {("layers.0", "weights", "dgrad"), ("layers.0", "gradients", "dgrad")}  # x needs none
    assert found.keys() == {(name, *use) for name in layers for use in USES} - first
    for (name, tensor, product), line in found.items():
        whole = expected[name, tensor]
        axis = USES[tensor, product]
        along = whole if axis == -1 else whole.mT.contiguous()
        format = recipe.format_of(tensor)
        q = bs.quantize(along, format, scale_rounding=recipe.scale_rounding, pad=True)
        sums = error_sums(along, q)
        assert line["format"] == format.name
        assert line["shape"] == list(whole.shape)
        assert line["calls"] == 1
        assert line["elements"] == whole.numel() <= SAMPLE
        assert line["amax"] == pytest.approx(whole.abs().max().item())
        n = whole.numel()
        assert line["compared"] == n
        assert line["sqnr_db"] == pytest.approx(10 * math.log10(sums.signal / sums.noise), rel=1e-5)
        assert line["underflow"] == pytest.approx(sums.flushed / n)
        assert line["saturated"] == pytest.approx(sums.saturated / n)
        assert line["zeros"] == pytest.approx((whole == 0).sum().item() / n)
        assert line["nonfinite_blocks"] == 0
        assert "first_nonfinite" not in line
        check_scales(line, q, along)
        check_magnitudes(line, along, format.block)


def check_scales(line: dict, q: bs.ScaledTensor, x: Tensor) -> None:
    rows, size = q.format.block
    padded = nn.functional.pad(x, (0, -x.shape[1] % size, 0, -x.shape[0] % rows))
    blocks = padded.unfold(0, rows, rows).unfold(1, size, size).abs().amax((-2, -1))
    scale = q.compact_scale().double() * (1 if q.global_scale is None else q.global_scale)
    scale = scale[blocks > 0]
    exponents = scale.log2().floor().int()
    assert line["blocks"] == blocks.numel()
    assert line["zero_blocks"] == (blocks == 0).sum()
    values, counts = exponents.unique(return_counts=True)
    expected = dict(zip(map(str, values.tolist()), counts.tolist(), strict=True))
    assert line["scale_histogram"] == expected
    low, high = exponents.min().item(), exponents.max().item()
    found = line["scale_log2"]
    assert (found["min"], found["max"], found["spread"]) == (low, high, high - low)
    middle = exponents.sort().values[math.ceil(len(exponents) / 2) - 1].item()
    assert found["p50"] == middle


def check_magnitudes(line: dict, x: Tensor, block: tuple[int, int]) -> None:
    """Over the largest of what is compared: a row of a block."""
    size = block[1]
    lined = nn.functional.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size)).abs()
    ratio = lined / lined.amax(-1, keepdim=True)
    octave = -ratio[ratio > 0].log2().floor().int()
    expected = octave.clamp(max=23).bincount(minlength=24).tolist()
    assert line["magnitude_histogram"] == expected


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block"])
def test_samples_of_large_tensors(recipe, tmp_path):
    """Stand for the whole: 4096 of 98,304 elements."""
    model, x = Model((256, 384), bs.Recipe(recipe)), data(384, 256)
    expected = tensors_of(copy.deepcopy(model), x)
    with watch(model, out=tmp_path) as files:
        train(model, x)
    for (name, tensor, product), line in by_use(lines(files)).items():
        whole = expected[name, tensor]
        along = whole if USES[tensor, product] == -1 else whole.mT.contiguous()
        sums = error_sums(along, bs.quantize(along, model.layers[0].recipe.format_of(tensor)))
        assert line["compared"] == SAMPLE < line["elements"]
        assert line["sqnr_db"] == pytest.approx(10 * math.log10(sums.signal / sums.noise), abs=1)
        assert line["underflow"] == pytest.approx(sums.flushed / whole.numel(), abs=0.02)
        assert line["amax"] == pytest.approx(whole.abs().max().item())


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("where", ["activations", "weights", "gradients"])
def test_what_is_not_finite_is_named(recipe, value, where, tmp_path):
    """In the step, with module, tensor and product, at its place."""
    model, x = Model((256, 256, 256), bs.Recipe(recipe)), data(256, 256)
    bad = torch.zeros(256, 256)
    bad[140, 201] = float(value)
    layer = model.layers[1]
    first = {"activations": "fprop", "weights": "fprop", "gradients": "dgrad"}[where]
    with warnings.catch_warnings(record=True) as said, watch(model, out=tmp_path) as files:
        warnings.simplefilter("always")
        train(model, x)
        if where == "weights":
            with torch.no_grad():
                layer.weight += bad
        elif where == "activations":
            layer.register_forward_pre_hook(lambda m, args: (args[0] + bad,))
        else:
            layer.register_forward_hook(lambda m, args, y: Bad.apply(y, bad))
        train(model, x)
    texts = [str(each.message) for each in said if each.category is NonfiniteWarning]
    assert len(texts) == 1
    start = f"step 1: {where} of layers.1 for {first} have NaN or infinities in 1 of"
    assert texts[0].startswith(start)
    assert f"the first ({value}) at [140, 201]" in texts[0]
    for line in lines(files):
        if (line["step"], line["module"], line["tensor"]) == (1, "layers.1", where):
            assert line["nonfinite_blocks"] == 1
            assert line["first_nonfinite"] == [140, 201]
            assert line["first_nonfinite_value"] == value
            assert line["amax"] is None
            assert line["sqnr_db"] is None or math.isfinite(line["sqnr_db"])
        elif line["step"] == 0:
            assert line["nonfinite_blocks"] == 0
    assert 'class="bad"' in files.html.read_text()


class Bad(torch.autograd.Function):
    """Adds to the gradient alone."""

    @staticmethod
    def forward(ctx, y, bad):
        ctx.bad = bad
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return grad + ctx.bad, None


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp6_e2m3"])
def test_finite_values_that_become_infinite(recipe, tmp_path):
    """Next to the largest of fp32 an element is rounded up to 2^128: the error has no decibel."""
    model, x = Model((64, 32), recipe=bs.Recipe(recipe)), data()
    x[3] = 3.38e38
    assert bs.quantize(x, recipe).dequantize()[3].isinf().all()
    with watch(model, out=tmp_path) as files:
        model(x)
    line = lines(files)[0]
    assert (line["tensor"], line["product"], line["nonfinite_blocks"]) == (
        "activations",
        "fprop",
        0,
    )
    assert line["amax"] == x.amax().item()
    assert line["sqnr_db"] is None


def test_nothing_as_large_as_scales_is_kept():
    """A sample is small, and what was cached for it, too: numbers of all blocks stayed on a GPU."""
    x = data(1031, 544)
    x[1000, 70] = math.nan
    q = bs.quantize(x)
    sample = take_sample(x, q, None)
    assert sample.first == 1000 * 17 + 2
    del x, q
    sizes = [each.numel() for each in gc.get_objects() if type(each) is Tensor]
    assert 1031 * 17 not in sizes


def test_a_loss_that_is_not_finite_needs_no_backward(tmp_path):
    """A loop that stops there leaves what was seen."""
    model, x = Model(), data()
    x[0, 0] = math.nan

    def loop() -> None:
        with watch(model, out=tmp_path):
            if not model(x).sum().isfinite():
                raise ArithmeticError

    with (
        pytest.warns(NonfiniteWarning, match=r"step 0: activations of layers.0"),
        pytest.raises(ArithmeticError),
    ):
        loop()
    files = WatchFiles(tmp_path / "watch.jsonl", tmp_path / "watch.html")
    assert {line["module"] for line in lines(files)} == {"layers.0", "layers.1"}
    assert "layers.0" in files.html.read_text()
    assert observing.observer is None


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block"])
def test_nothing_changes(recipe, tmp_path):
    def run(seen: bool) -> list[Tensor]:
        model = Model(recipe=bs.Recipe(recipe))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []

        def steps() -> None:
            for i in range(3):
                with torch.autocast("cpu", torch.bfloat16, enabled=i > 0):
                    losses.append(train(model, data(seed=i)))
                optimizer.step()
                optimizer.zero_grad()

        if seen:
            with watch(model, every=2, out=tmp_path):
                steps()
        else:
            steps()
        return [*losses, *(p.detach() for p in model.parameters())]

    for a, b in zip(run(False), run(True), strict=True):
        assert torch.equal(a, b)


def test_every(tmp_path):
    """Micro-batches are steps; forwards without gradients are none; others leave no hooks."""
    model, hooks = Model(), []
    with watch(model, every=3, out=tmp_path) as files:
        for _ in range(8):
            with torch.no_grad():
                model(data())
            train(model, data())
            hooks.append(len(model.layers[0]._forward_hooks))
            assert observing.observer is None
    assert sorted({line["step"] for line in lines(files)}) == [0, 3, 6]
    assert hooks == [0] * 8
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_forwards_before_a_backward_are_one_step(tmp_path):
    """A validation between them is no part of it."""
    model = Model()
    with watch(model, out=tmp_path) as files:
        loss = model(data(seed=1)).mean() + model(data(32, seed=2)).mean()
        with torch.no_grad():
            model(data(seed=3) * 1000)
        loss.backward()
        train(model, data())
    found = by_use([line for line in lines(files) if line["step"] == 0])
    both = found["layers.1", "activations", "fprop"]
    assert (both["calls"], both["elements"]) == (2, 96 * 96)
    assert found["layers.1", "gradients", "wgrad"]["calls"] == 2
    assert found["layers.0", "activations", "fprop"]["amax"] < 1000
    assert {line["step"] for line in lines(files)} == {0, 1}


def test_models_beside_the_watched_one_are_not_seen(tmp_path):
    """Before it and after it in the forward, and computed again in the backward."""
    model, before, after = Model(), Model(), Model()

    def step():
        x = checkpoint(before, 1e4 * data().requires_grad_(), use_reentrant=False)
        y = model(data() + 0 * x)
        (checkpoint(after, 1e4 * y, use_reentrant=False) + y).sum().backward()

    found = []
    for _ in range(2):
        with watch(model, out=tmp_path) as files:
            step()
        found.append(lines(files))
        assert {line["module"] for line in found[-1]} == {"layers.0", "layers.1"}
        inputs = [line for line in found[-1] if line["tensor"] == "activations"]
        assert max(line["amax"] for line in inputs) == data().abs().max()
        assert {line["step"] for line in found[-1]} == {0}
    assert found[0] == found[1]


def test_gradients_that_a_forward_asks_for(tmp_path):
    """What comes after them in the forward is of the module that called."""

    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy, self.weight = Model(), nn.Parameter(data())

        def forward(self, x):
            (force,) = torch.autograd.grad(self.energy(x).sum(), x)
            return bs.nn.linear(force, self.weight, recipe=MXFP8)

    model = Forces()
    with watch(model, out=tmp_path) as files:
        model(data().requires_grad_()).sum().backward()
    of_function = [line for line in lines(files) if line["module"] == ""]
    weights = [line["amax"] for line in of_function if line["tensor"] == "weights"]
    assert weights == [model.weight.abs().max()]


def test_a_retained_graph_is_looked_at_once(tmp_path):
    model = Model()
    with watch(model, out=tmp_path) as files:
        loss = model(data()).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert {line["calls"] for line in lines(files)} == {1}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant, tmp_path):
    """What is computed again counts once, and what is quantized then alone is seen."""
    model, x = Model(), data().requires_grad_()
    with watch(model, out=tmp_path) as files:
        train(model, x)
        model.checkpoints = {"use_reentrant": reentrant}
        train(model, x)
        model.checkpoints = None
        train(model, x)
    plain, again, last = (
        by_use([line | {"step": 0} for line in lines(files) if line["step"] == step])
        for step in range(3)
    )
    assert again == plain == last
    assert len(plain) == 12


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_ends_with_a_layer(reentrant, tmp_path):
    """Its backward is what calls the layers anew, and is seen all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(bs.convert(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)), MXFP8))
    called = model[0].forward
    model[0].forward = lambda x: checkpoint(called, x, use_reentrant=reentrant)
    with watch(model, out=tmp_path) as files:
        train(model, data().requires_grad_())
    assert len(by_use(lines(files))) == 12


def test_compiled(tmp_path):
    """Runs as it is written in watched steps, and compiled in others: nothing is compiled anew."""
    for name, wrap in {"model": torch.compile, "blocks": None, "in place": None}.items():
        torch._dynamo.reset()
        model, graphs = Model(), []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph

        called: nn.Module = model
        if wrap is not None:
            called = wrap(model, backend=backend)
        elif name == "blocks":
            for layer in model.layers:
                layer.compile(backend=backend)
        else:
            model.compile(backend=backend)
        train(called, data())
        before = len(graphs)
        assert before
        with watch(called, every=2, out=tmp_path / name) as files:
            for _ in range(4):
                train(called, data())
        train(called, data())
        assert len(graphs) == before
        found = [line for line in lines(files) if line["step"] == 2]
        assert {line["module"] for line in found} == {"layers.0", "layers.1"}
        assert len(found) == 10
        assert {line["step"] for line in lines(files)} == {0, 2}


def test_reused_weights(tmp_path):
    """Are seen where they are read, whoever made them."""
    model = Model()
    with watch(model, every=2, out=tmp_path) as files, bs.reuse_weights():
        for _ in range(3):
            train(model, data())
    of_steps = [
        [line | {"step": 0} for line in lines(files) if line["step"] == step] for step in (0, 2)
    ]
    assert of_steps[0] == of_steps[1]
    assert len(of_steps[0]) == 10


def test_frozen_tied_and_high_precision(tmp_path):
    model = Model((64, 64, 64))
    model.layers[0].weight.requires_grad_(False)
    model.layers[1].recipe = bs.Recipe("mxfp8", high_precision=("wgrad",))
    model.idle.weight = model.layers[1].weight
    model.layers.append(model.idle)
    model.layers.append(model.layers[1])
    with watch(model, out=tmp_path) as files:
        train(model, data())
    found = by_use(lines(files))
    frozen = {use for use in found if use[0] == "layers.0"}
    assert frozen == {("layers.0", "activations", "fprop"), ("layers.0", "weights", "fprop")}
    assert ("layers.1", "gradients", "wgrad") not in found
    assert found["layers.1", "gradients", "dgrad"]["calls"] == 2
    assert found["layers.2", "gradients", "wgrad"]["calls"] == 1


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block"])
def test_experts(recipe, tmp_path):
    """Both products, all experts together."""
    torch.manual_seed(0)
    moe = bs.nn.MoE(128, 64, 4, bs.nn.Router(top_k=2), recipe=bs.Recipe(recipe))
    with torch.no_grad():
        for p in moe.parameters():
            p.mul_(0.1)
    x = data(80, 128).requires_grad_()
    with watch(moe, out=tmp_path) as files:
        train(moe, x)
    found = by_use(lines(files))
    assert found.keys() == {(f"experts.{name}", *use) for name in ("up", "down") for use in USES}
    up = found["experts.up", "activations", "fprop"]
    assert up["shape"] == [160, 128]
    assert up["amax"] == pytest.approx(x.abs().max().item())
    for (_, _, product), line in found.items():
        knows = product != "wgrad"  # groups along the contraction are moved apart
        assert (line["sqnr_db"] is not None) == knows
        assert line["scale_log2"]["spread"] >= 0
    weight = found["experts.down", "weights", "dgrad"]
    whole = moe.experts.down_proj.detach().mT.contiguous()
    sums = error_sums(whole, bs.quantize(whole, bs.Recipe(recipe).format_of("weights"), pad=True))
    sqnr = 10 * math.log10(sums.signal / sums.noise)
    assert weight["sqnr_db"] == pytest.approx(sqnr, abs=0.6)
    moe.experts.gate_up_proj.data[2, 5, 7] = math.nan
    text = r"step 0: weights of experts.up for fprop have NaN .* at \[2, 5, 7\]"
    with pytest.warns(NonfiniteWarning, match=text), watch(moe, out=tmp_path):
        train(moe, x)


def test_grouped(tmp_path):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grouped = bs.nn.GroupedLinear(2, 64, 64, recipe=MXFP8)

        def forward(self, x: Tensor) -> Tensor:
            return self.grouped(x, torch.tensor([20, 50], dtype=torch.int32))

    with watch(Both(), out=tmp_path) as files:
        pass
    assert lines(files) == []
    assert "No step of training was seen" in files.html.read_text()
    model = Both()
    with watch(model, out=tmp_path) as files:
        train(model, data().requires_grad_())
    assert by_use(lines(files)).keys() == {("grouped", *use) for use in USES}
    assert files.jsonl.name == "watch-2.jsonl"


def test_files(tmp_path, pictures):
    """Lines are there after each step, and nothing is written over."""
    model = Model()
    seen = []
    for _ in range(2):
        with watch(model, out=tmp_path / "a" / "b") as files:
            for _ in range(2):
                train(model, data())
                seen.append(len(lines(files)))
    assert seen == [10, 20, 10, 20]
    names = sorted(path.name for path in (tmp_path / "a" / "b").iterdir())
    assert names == ["watch-2.html", "watch-2.jsonl", "watch.html", "watch.jsonl"]
    page = files.html.read_text()
    assert len(re.findall("data:image/png;base64,", page)) == 5
    assert "http" not in page.replace("<!doctype html>", "")
    with files.jsonl.open("a") as file:
        file.write('{"step": 2, "mod')  # killed in the middle of a line
    write_watch_report(files.jsonl, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == page


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="no converted layer"), watch(nn.Linear(4, 4)):
        pass
    for every in (0, -1, 1.0, True):
        with pytest.raises(ValueError, match="every"), watch(Model(), every=every):
            pass
    with (
        watch(Model(), out=tmp_path),
        pytest.raises(RuntimeError, match="another watch"),
        watch(Model(), out=tmp_path),
    ):
        pass
    with watch(Model(), out=tmp_path):
        pass


def test_finite_steps_say_nothing(tmp_path):
    model = Model()
    with warnings.catch_warnings(), watch(model, out=tmp_path):
        warnings.simplefilter("error")
        train(model, data())


@pytest.mark.parametrize("method", ["nvidia", "ms_eden"])
def test_transformed_forms_are_not_compared_with_what_they_were_made_of(tmp_path, method):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    bs.convert(model, bs.Recipe.nvfp4(method), lambda *_: True)
    with watch(model, out=tmp_path) as files:
        model(torch.randn(128, 64)).square().mean().backward()
    lines = [json.loads(line) for line in files.jsonl.read_text().splitlines()]
    assert {(line["module"], line["tensor"], line["product"]) for line in lines} == {
        *(("0", tensor, product) for tensor, product in USES if product != "dgrad"),
        *(("1", tensor, product) for tensor, product in USES),
    }
    for line in lines:
        transformed = line["product"] == "wgrad" or (
            method == "ms_eden" and line["product"] == "dgrad"
        )
        assert (line["sqnr_db"] is None) == transformed
        assert transformed or 8 < line["sqnr_db"] < 30
        assert line["scale_log2"]["spread"] >= 0


def test_a_compiled_function_that_calls_the_model_is_not_seen(tmp_path):
    """It runs as without a watch, whose hooks would be compiled; a warning says so."""
    torch.compiler.reset()
    model, x = Model(), data()
    expected = train(copy.deepcopy(model), x)

    @torch.compile(backend="eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        return model(x).square().mean()

    def watched() -> WatchFiles:
        with watch(model, out=tmp_path) as files:
            loss = step(x)
            loss.backward()
        assert torch.equal(loss, expected)
        return files

    with pytest.warns(UserWarning, match="no step of training was seen"):
        files = watched()
    assert lines(files) == []
    assert "No step of training was seen" in files.html.read_text()


def test_pages_are_made_by_names_of_files(tmp_path):
    model = Model()
    with watch(model, out=tmp_path) as files:
        train(model, data())
    write_watch_report(str(files.jsonl), str(tmp_path / "again.html"))
    assert (tmp_path / "again.html").read_text() == files.html.read_text()
