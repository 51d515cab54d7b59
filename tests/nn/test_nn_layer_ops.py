"""The ops that compilers see of a layer: eager's bytes, one op a pass, what a plan launches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from planned import torch_gpu
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import blockscale as bs
from blockscale.nn import layer_ops, plan_cache
from stand_in import emulated

RECIPES = {
    "mxfp8": bs.Recipe("mxfp8"),
    "e5m2 gradients, floor": bs.Recipe(gradients="mxfp8_e5m2", scale_rounding="floor"),
    "nvfp4": bs.Recipe("nvfp4"),
    "fp8_block": bs.Recipe("fp8_block"),
}
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _start_anew():
    torch.compiler.reset()


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


def step(run, x, w, b, g, needs=(True, True, True)):
    """The output of a layer, and the gradients of x, weight and bias."""
    leaves = [
        None if t is None else t.detach().requires_grad_(need)
        for t, need in zip((x, w, b), needs, strict=True)
    ]
    y = run(*leaves)
    if y.requires_grad:
        y.backward(g)
    return y.detach(), *(None if t is None else t.grad for t in leaves)


def assert_same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert torch.equal(a, b)


def operands(m=40, k=96, n=48, leading=(), bias=True):
    x, g = random(*leading, m, k), random(*leading, m, n, seed=3)
    return x, random(n, k, seed=1), random(n, seed=2) if bias else None, g


# --- the same bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_eager_and_compiled_give_the_same_bytes(monkeypatch, name, on_gpu):
    """The GPU launches what a plan found: as many quantizers and products as eager code."""
    run = partial(bs.nn.linear, recipe=RECIPES[name])
    given = operands(leading=(2,))
    expected = step(run, *given)
    if not on_gpu:
        assert_same(step(compiled(run), *given), expected)
        return
    with torch_gpu(monkeypatch) as counts:
        step(run, *given)
        quantized, products = sorted(counts.quantized), counts.products
        quantized.remove(given[0].flatten(0, -2).shape)  # by an op of its own, here on a CPU
        counts.quantized.clear()
        assert_same(step(compiled(run), *given), expected)
        assert sorted(counts.quantized) == quantized
        assert counts.products == 2 * products
        found = [key[0] for key, plan in plan_cache._plans.items() if plan is not None]
        assert {"fprop", "backward"} <= set(found)


NEEDS = [(True, False, False), (False, True, False), (False, False, True), (False, False, False)]


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_gradients_that_are_asked_for(monkeypatch, name, needs):
    run = partial(bs.nn.linear, recipe=RECIPES[name])
    given = operands()
    expected = step(run, *given, needs)
    assert_same(step(compiled(run), *given, needs), expected)
    with torch_gpu(monkeypatch):
        assert_same(step(compiled(run), *given, needs), expected)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_rows_that_differ(monkeypatch, on_gpu):
    """Of one dynamic graph; and none, which needs one of its own."""
    run = partial(bs.nn.linear, recipe=RECIPES["nvfp4"])
    dynamic = compiled(run, dynamic=True)
    expected = {m: step(run, *operands(m)) for m in (40, 33, 1, 0)}
    if on_gpu:
        with torch_gpu(monkeypatch):
            found = {m: step(dynamic, *operands(m)) for m in expected}
    else:
        found = {m: step(dynamic, *operands(m)) for m in expected}
    for m in expected:
        assert_same(found[m], expected[m])


def test_a_transposed_weight(monkeypatch):
    run = partial(bs.nn.linear, recipe=RECIPES["mxfp8"])
    x, w, b, g = operands()
    turned = w.mT.contiguous().mT
    expected = step(run, x, w, b, g)
    with torch_gpu(monkeypatch):
        for got, want in zip(step(compiled(run), x, turned, b, g), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "name"), [("sm_90a", "mxfp8"), ("sm_90a", "fp8_block"), ("sm_100a", "nvfp4")]
)
def test_kernels_in_the_emulator(arch, name):
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    run, given = partial(bs.nn.linear, recipe=RECIPES[name]), operands(136, 160, 144)
    with emulated(arch, quantizes=True) as launched:
        expected = step(run, *given)
        eager = Counter(launched)
        launched.clear()
        assert_same(step(compiled(run), *given), expected)
        assert Counter(launched) == eager


@pytest.mark.slow
def test_a_graph_recorded_elsewhere():
    """Its scales lie as on a CPU; Blackwell's kernels read as many bytes, in another order."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    recipe = RECIPES["mxfp8"]
    x, w, _, g = operands(128, 128, 128)
    rows, columns = layer_ops.passes.quantized_activations(x, recipe, rows=True, columns=True)
    text, rest = recipe.text, ("compact", [128, 128], BF16)

    def passes():
        (y,) = torch.ops.blockscale.linear_fprop(
            rows.qdata, rows.qscale, None, *rest, w, None, text, BF16, True
        )
        grads = torch.ops.blockscale.linear_backward(
            g, columns.qdata, columns.qscale, None, *rest, w, None, BF16, text, True, True
        )
        return y, *grads

    expected = passes()
    with emulated("sm_100a", quantizes=True):
        assert_same(passes(), expected)


# --- what a compiler sees -------------------------------------------------------------------------


class _Three(torch.nn.Module):
    """Layers that read the same, as those of an attention do."""

    def __init__(self, recipe):
        super().__init__()
        self.layers = torch.nn.ModuleList(bs.nn.Linear(64, 32, recipe=recipe) for _ in range(3))

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_one_op_a_pass(name):
    """And what layers read is quantized once for all of them."""
    graphs = []

    def note(gm, _):
        targets = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
        found = [t.split(".")[1] for t in targets if t.startswith("blockscale.")]
        graphs.append(Counter(found))
        return make_boxed_func(gm.forward)

    backend = aot_autograd(
        fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition
    )
    model = torch.compile(_Three(RECIPES[name]), backend=backend, fullgraph=True)
    model(torch.randn(8, 64, requires_grad=True)).sum().backward()
    forward, backward = graphs
    assert forward.pop("global_scale", 0) == (name == "nvfp4")
    assert forward == {"quantize_both": 1, "linear_fprop": 3}
    assert backward == {"linear_backward": 3}


@pytest.mark.parametrize("name", RECIPES)
def test_the_ops_are_what_torch_expects(name):
    recipe = RECIPES[name]
    x, w, b, g = operands()
    rows, columns = layer_ops.passes.quantized_activations(x, recipe, rows=True, columns=True)
    text = recipe.text
    fprop = torch.ops.blockscale.linear_fprop.default
    given = (
        rows.qdata,
        rows.qscale,
        rows.global_scale,
        "compact",
        list(x.shape),
        BF16,
        w,
        b,
        text,
        BF16,
    )
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if rows.qdata.dtype == torch.uint8:
        checks.append("test_schema")  # which multiplies inputs; torch has no product of FP8
    torch.library.opcheck(fprop, (*given, True), test_utils=checks)
    scalar = [*fprop(*given, True), None][1]
    parts = columns.qdata, columns.qscale, columns.global_scale, "compact", list(x.shape), BF16
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(
            torch.ops.blockscale.linear_backward.default,
            (g, *parts, w, scalar, BF16, text, *needs),
            test_utils=checks,
        )


@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_whole_layer_is_an_op_that_torch_takes_apart(needs_grad):
    given = [x.requires_grad_(needs_grad) for x in operands()[:3]]
    text = RECIPES["nvfp4"].text
    torch.library.opcheck(torch.ops.blockscale.linear.default, (*given, text, BF16, ""))


def test_products_in_high_precision_are_torch_s():
    recipe = bs.Recipe("mxfp8", high_precision=("wgrad",))
    run, given = partial(bs.nn.linear, recipe=recipe), operands()
    assert_same(step(compiled(run), *given), step(run, *given))


_FINGERPRINT = """
import torch
import blockscale
from blockscale.kernels.common import compile_cache
from blockscale.nn.compiled import fingerprint
from stand_in import gpu

print(fingerprint(torch.device("cpu"), blockscale.Recipe("nvfp4").text))
for arch in ("sm_90a", "sm_100a"):
    with gpu(arch, lambda config: None):
        print(fingerprint(torch.device("cpu"), blockscale.Recipe("nvfp4").text))
"""


def test_fingerprints_tell_machines_apart_and_no_processes():
    """Else caches of compiled graphs would serve the wrong code, or none."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", _FINGERPRINT],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3
