"""The layer on a GPU: its products by kernels, each tensor read once in a pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from gpu_inputs import DEVICE, only_on

import blockscale as bs
from blockscale.nn import Linear, linear
from blockscale.ops import backends

only_on("sm_90a")

BF16, FP32 = torch.bfloat16, torch.float32
RECIPES = {
    "fp8_block": bs.Recipe("fp8_1x128", weights="fp8_128x128"),
    "fp8_1x128": bs.Recipe("fp8_1x128"),
    "mxfp8": bs.Recipe(),
    "mxfp8_e5m2_grad": bs.Recipe(gradients="mxfp8_e5m2"),
    "mxfp4": bs.Recipe("mxfp4"),
    "nvfp4": bs.Recipe("nvfp4"),
}
#: Relative error of FP8 products, whose sums a Hopper GPU rounds below fp32.
_FP8_SUMS = 3e-4
#: Of bf16 products: 4096 / 16 of them, each cut to an fp32.
_FP32_SUMS = 256 * 2.0**-23
SHAPES = [(256, 384, 512), (4096, 1024, 768), (200, 304, 136), (1, 256, 128)]  # M, K, N


@pytest.fixture(autouse=True)
def _kernels_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What runs as plain torch fails."""
    monkeypatch.setattr(backends, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error", bs.FallbackWarning)
        yield


def tensors(m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + k + n)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((m, k), (n, k), (m, n)))
    return x.to(BF16).to(DEVICE), (w / k**0.5).to(DEVICE), g.to(BF16).to(DEVICE)


def both_passes(x, w, g, recipe, bias=None):
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y = linear(x, w, bias, recipe=recipe)
    y.backward(g)
    return y.detach(), x.grad, w.grad


def values(x: torch.Tensor, recipe: bs.Recipe, role: str, axis: int) -> torch.Tensor:
    """Of ``x`` as it is multiplied, in fp64, by the CPU's quantizer."""
    q = bs.quantize(x.cpu(), recipe.format_of(role), axis, pad=True)
    return q.dequantize(torch.float64).to(x.device)


def assert_close(got: torch.Tensor, want: torch.Tensor, recipe: bs.Recipe) -> None:
    """The error is that of rounding and of the sums."""
    sums = _FP8_SUMS if recipe.format.startswith("fp8") else _FP32_SUMS
    rounding = (want.to(got.dtype).double() - want).norm() / want.norm()
    error = (got.double() - want).norm() / want.norm()
    assert error <= (rounding**2 + sums**2) ** 0.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_products(name, shape):
    """Against fp64 products of the dequantized operands, each blocked along the contraction."""
    recipe = RECIPES[name]
    x, w, g = tensors(*shape)
    y, dx, dw = both_passes(x, w, g, recipe)
    assert (y.dtype, dx.dtype, dw.dtype) == (BF16, BF16, FP32)
    rows, columns = -1, -2
    x_rows, x_columns = (values(x, recipe, "activations", axis) for axis in (rows, columns))
    w_rows, w_columns = (values(w, recipe, "weights", axis) for axis in (rows, columns))
    g_rows, g_columns = (values(g, recipe, "gradients", axis) for axis in (rows, columns))
    assert_close(y, x_rows @ w_rows.mT, recipe)
    assert_close(dx, g_rows @ w_columns, recipe)
    assert_close(dw, g_columns.mT @ x_columns, recipe)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_bias_is_added_before_rounding(name, dtype):
    recipe = RECIPES[name]
    x, w, g = tensors(256, 384, 512)
    bias = torch.randn(512, device=DEVICE).to(dtype).requires_grad_()
    y, *_ = both_passes(x, w, g, recipe, bias)
    exact = values(x, recipe, "activations", -1) @ values(w, recipe, "weights", -1).mT
    assert_close(y, exact + bias.double(), recipe)
    torch.testing.assert_close(bias.grad, g.double().sum(0).to(dtype), rtol=1e-2, atol=1e-2)


def launches(call: Callable[[], object]) -> int:
    """Of the quantizer, as the profiler sees them."""
    call()  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum("Quantizer" in event.name for event in profile.events())


@pytest.mark.parametrize("name", RECIPES)
def test_each_tensor_is_read_once_a_pass(name):
    """x and g for both of their forms, w in each pass. (The amax of a global scale is another
    kernel.)"""
    x, w, g = tensors(4096, 1024, 768)
    assert launches(lambda: both_passes(x, w, g, RECIPES[name])) == 4


def test_a_weight_is_quantized_once_where_that_is_asked_for():
    layer = Linear(1024, 768, bias=False, device=DEVICE, recipe=RECIPES["fp8_block"])
    x, _, g = tensors(512, 1024, 768)

    def step() -> None:
        layer.zero_grad()
        layer(x.clone().requires_grad_()).backward(g)

    step()
    layer.zero_grad()
    before = torch.cuda.memory_allocated()
    with bs.reuse_weights():
        assert launches(step) == 2
        layer.zero_grad()
        kept = torch.cuda.memory_allocated() - before
        assert 2 * layer.weight.numel() <= kept < 3 * layer.weight.numel()  # both forms, once
    assert torch.cuda.memory_allocated() == before


def test_a_changed_weight_is_quantized_anew():
    layer = Linear(1024, 768, bias=False, device=DEVICE, recipe=RECIPES["fp8_block"])
    x, _, _ = tensors(512, 1024, 768)
    with torch.no_grad():
        stale = layer(x)
        layer.weight.mul_(2)
        assert torch.equal(layer(x), 2 * stale)


def test_gradients_of_micro_batches_add_up_in_fp32():
    x, w, g = tensors(512, 1024, 768)
    w.requires_grad_()
    alone = []
    for part in (0, 256):
        w.grad = None
        linear(x[part : part + 256], w, recipe=RECIPES["fp8_block"]).backward(g[part : part + 256])
        alone.append(w.grad)
    w.grad = None
    for part in (0, 256):
        linear(x[part : part + 256], w, recipe=RECIPES["fp8_block"]).backward(g[part : part + 256])
    assert torch.equal(w.grad, alone[0] + alone[1])


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_same_bits_each_time(name):
    x, w, g = tensors(4096, 1024, 768)
    first, second = (both_passes(x, w, g, RECIPES[name]) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_compiled_whole(name):
    torch.compiler.reset()
    layers = [torch.nn.Linear(1024, 768), torch.nn.GELU(), torch.nn.Linear(768, 1024, bias=False)]
    model = bs.convert(torch.nn.Sequential(*layers).to(DEVICE), RECIPES[name])
    compiled = torch.compile(model, fullgraph=True)
    x, g = (t.to(BF16) for t in torch.randn(2, 512, 1024, device=DEVICE))
    results = []
    for function in (model, compiled):
        model.zero_grad()
        y = function(x)
        y.backward(g)
        results.append([y.detach(), *(p.grad for p in model.parameters())])
    for one, two in zip(*results, strict=True):
        assert (one.float() - two.float()).norm() < 0.01 * two.float().norm()


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_reduce_overhead(name, trains):
    """What plans keep has no memory of a graph's pool. (No shape of this test ran eagerly.)"""
    torch.compiler.reset()
    k = 1024 + 64 * (2 * list(RECIPES).index(name) + trains)
    layers = [torch.nn.Linear(k, 768), torch.nn.GELU(), torch.nn.Linear(768, k, bias=False)]
    model = bs.convert(torch.nn.Sequential(*layers).to(DEVICE, BF16), RECIPES[name])
    model.requires_grad_(trains)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for step in range(4):
        x, g = (torch.randn(192, k, device=DEVICE, dtype=BF16) for _ in range(2))
        results = []
        for function in (compiled, model):
            torch.compiler.cudagraph_mark_step_begin()
            model.zero_grad()
            y = function(x)
            if trains:
                y.backward(g)
            grads = [p.grad.clone() for p in model.parameters()] if trains else []
            results.append([y.detach().clone(), *grads])
            if not step:  # only later the eager model may run: it would make all plans first
                break
        for one, two in zip(*results, strict=True) if step else ():
            assert (one.float() - two.float()).norm() < 0.01 * two.float().norm()


def test_a_cuda_graph_of_a_step_sees_each_change_of_the_weight():
    layer = Linear(1024, 768, bias=False, device=DEVICE, recipe=RECIPES["fp8_block"])
    x, _, g = tensors(512, 1024, 768)
    x.requires_grad_()

    def step():
        layer.weight.grad = x.grad = None
        y = layer(x)
        y.backward(g)
        return y, x.grad, layer.weight.grad

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        layer.weight.copy_(torch.randn_like(layer.weight))
    graph.replay()
    replayed = [t.detach().clone() for t in captured]
    for one, two in zip(replayed, step(), strict=True):
        assert torch.equal(one, two.detach())


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_main_grad(name, shape, dtype):
    """Two micro-batches in one sum, which the second rounds once more."""
    recipe = RECIPES[name]
    weight = torch.nn.Parameter(tensors(*shape)[1].to(BF16))
    weight.main_grad = torch.zeros(weight.shape, dtype=dtype, device=DEVICE)
    want = torch.zeros(weight.shape, dtype=torch.float64, device=DEVICE)
    for seed in range(2):
        x, _, g = (t.roll(seed, 0) for t in tensors(*shape))
        linear(x, weight, recipe=recipe).backward(g)
        g_columns, x_columns = (
            values(t, recipe, role, -2) for t, role in ((g, "gradients"), (x, "activations"))
        )
        want += g_columns.mT @ x_columns
        assert_close(weight.main_grad, want, recipe)
        want = weight.main_grad.double()
    assert weight.grad is None


@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_main_grad_in_high_precision(dtype, x_dtype):
    recipe = bs.Recipe(high_precision=("wgrad",))
    x, w, g = tensors(256, 384, 512)
    weight = torch.nn.Parameter(w.to(BF16))
    weight.main_grad = torch.ones(weight.shape, dtype=dtype, device=DEVICE)
    linear(x.to(x_dtype), weight, recipe=recipe).backward(g.to(x_dtype))
    want = 1 + g.double().mT @ x.double()
    assert_close(weight.main_grad, want, recipe)
    assert weight.grad is None
