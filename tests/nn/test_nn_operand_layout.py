"""The layer with operands placed as a GPU wants them: the same numbers, one read of each tensor.

The layout is that of Hopper or Blackwell, the device a CPU: what is asserted needs no kernel.
"""

from __future__ import annotations

import pytest
import torch

import blockscale as bs
from blockscale import ops
from blockscale.kernels.common.gpu import GPUS
from blockscale.kernels.sm100.config import Config
from blockscale.nn import Linear, forms, linear, passes
from blockscale.ops import operand_layout
from stand_in import gpu

CPU = torch.device("cpu")
RECIPES = {
    "mxfp8": bs.Recipe(),
    "nvfp4": bs.Recipe("nvfp4"),
    "fp8_block": bs.Recipe("fp8_1x128", weights="fp8_128x128"),
    "fp8_1x128": bs.Recipe("fp8_1x128"),
}


HOPPER, BLACKWELL = "sm_90a", "sm_100a"


def place(monkeypatch, arch):
    """As on a GPU of this architecture."""
    monkeypatch.setattr(operand_layout, "gpu_of", lambda device: GPUS[arch])


@pytest.fixture(params=[HOPPER, BLACKWELL])
def arch(request, monkeypatch):
    place(monkeypatch, request.param)
    return request.param


@pytest.fixture
def seen(monkeypatch):
    """Operands of every product, and every tensor that was quantized, in order."""
    products, reads = [], []

    def multiply(a, b, *args, **kwargs):
        products.append((a, b))
        return bs.gemm(a, b, *args, **kwargs)

    def count(function):
        def call(x, *args, **kwargs):
            reads.append((function.__name__, x.shape))
            return function(x, *args, **kwargs)

        return call

    monkeypatch.setattr(passes, "gemm", multiply)
    for function in (bs.quantize, bs.quantize_both):
        monkeypatch.setattr(forms, function.__name__, count(function))
    return products, reads


def both_passes(recipe, m=96, k=256, n=160):
    generator = torch.Generator().manual_seed(0)
    x, w, g = (
        torch.randn(*shape, generator=generator).to(torch.bfloat16)
        for shape in ((m, k), (n, k), (m, n))
    )
    x.requires_grad_(), w.requires_grad_()
    y = linear(x, w, recipe=recipe)
    y.backward(g)
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(96, 256, 160), (33, 70, 48)])
def test_the_same_numbers(monkeypatch, name, shape):
    plain = both_passes(RECIPES[name], *shape)
    for arch in (HOPPER, BLACKWELL):
        place(monkeypatch, arch)
        for a, b in zip(plain, both_passes(RECIPES[name], *shape), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("m", [96, 33])
def test_every_operand_lies_as_products_read_it(arch, seen, name, m):
    """On Hopper with the contraction contiguous, on Blackwell 8 bits as they lie; scales too."""
    both_passes(RECIPES[name], m)
    products, _ = seen
    assert len(products) == 3
    tiled = {HOPPER: {"fp8_1x128": "sm90"}, BLACKWELL: {"mxfp8": "tcgen05", "nvfp4": "tcgen05"}}
    for a, b in products:
        for q in (a, b.mT):
            assert q.axis == -1
            if arch == HOPPER or q.format.element.bits < 8:
                assert q.qdata.stride(-1) == 1
            if q.format.element.bits == 8:  # lines begin where TMA reads them; of any M
                assert max(q.qdata.stride()) % 16 == 0
            assert q.layout_name == tiled[arch].get(q.format_name, "compact")


@pytest.mark.parametrize("name", RECIPES)
def test_each_tensor_is_read_once_a_pass(arch, seen, name):
    """x and its gradient for both of their forms at once; the weight for one in each pass."""
    both_passes(RECIPES[name])
    _, reads = seen
    x, w, g = (96, 256), (160, 256), (96, 160)
    assert reads == [
        *(("quantize_both", x), ("quantize", w)),
        *(("quantize_both", g), ("quantize", w)),
    ]


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.filterwarnings("ignore::blockscale.FallbackWarning")
def test_products_on_blackwell_rewrite_nothing(monkeypatch, name):
    """All three are launched by a plan from the first step on, as operands lie as they should.
    The kernel is a stub."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    place(monkeypatch, BLACKWELL)
    launched, checked = [], []
    monkeypatch.setattr(ops, "gemm", lambda *args, run=ops.gemm: checked.append(0) or run(*args))

    def kernel(config):
        product = isinstance(config, Config)
        return lambda *args: launched.append(config) if product else None

    with gpu("sm_100a", kernel):
        for step in (1, 2, 3):
            both_passes(RECIPES[name])
            assert (len(launched), len(checked)) == (3 * step, 0)


def test_without_gradients_only_rows_are_made(arch, seen):
    layer = Linear(64, 32)
    with torch.no_grad():
        for _ in range(2):
            layer(torch.randn(8, 64))
    assert [name for name, _ in seen[1]] == ["quantize"] * 4  # x, w, x, w


def test_gradients_of_micro_batches_add_up(arch):
    """In fp32, as autograd does for any layer."""
    layer = Linear(64, 32, bias=False)
    alone = []
    for seed in (1, 2):
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(seed))
        layer.weight.grad = None
        layer(x).square().sum().backward()
        alone.append((x, layer.weight.grad))
    layer.weight.grad = None
    for x, _ in alone:
        layer(x).square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert torch.equal(layer.weight.grad, alone[0][1] + alone[1][1])


@pytest.mark.sampled(1)
def test_compiled(arch):
    torch.compiler.reset()
    layer = Linear(64, 32, recipe=RECIPES["fp8_block"])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(40, 64)
    results = []
    for function in (layer, compiled):
        layer.weight.grad = None
        y = function(x)
        y.square().sum().backward()
        results.append((y.detach(), layer.weight.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# --- the layouts themselves -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "format", "layout", "k_major"),
    [
        ("sm_90a", "fp8_1x128", "sm90", True),
        ("sm_90a", "fp8_128x128", "compact", True),
        ("sm_90a", "mxfp8", "compact", True),
        ("sm_90a", "nvfp4", "compact", True),
        ("sm_89", "fp8_1x128", "compact", False),
        ("sm_100a", "mxfp8", "tcgen05", False),
        ("sm_100a", "mxfp8_e5m2", "tcgen05", False),
        ("sm_103a", "mxfp4", "tcgen05", False),
        ("sm_100a", "nvfp4", "tcgen05", False),
        ("sm_100a", "fp8_1x128", "compact", False),
        ("sm_120", "mxfp8", "compact", False),
    ],
)
def test_operand_layouts(arch, format, layout, k_major):
    with gpu(arch):
        assert operand_layout.operand_layout(format, CPU) == (layout, k_major)
    assert operand_layout.operand_layout(format, CPU) == ("compact", False)


def test_the_layout_is_a_constant_to_the_compiler():
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def function(x):
        return x + (operand_layout.operand_layout("fp8_1x128", x.device).layout == "sm90")

    with gpu("sm_90a"):
        assert function(torch.zeros(2)).tolist() == [1, 1]
