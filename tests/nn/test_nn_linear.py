"""Linear: its three products are exactly those of quantize and gemm, along the right axes."""

from __future__ import annotations

import pytest
import torch

import blockscale as bs
from blockscale.nn import Linear, linear

RECIPES = {
    "mxfp8": bs.Recipe(),
    "e5m2_gradients": bs.Recipe(gradients="mxfp8_e5m2"),
    "floor": bs.Recipe(scale_rounding="floor"),
    "mixed": bs.Recipe("mxfp6_e2m3", weights="mxfp4"),
    "nvfp4": bs.Recipe("nvfp4"),
    "fp8": bs.Recipe("fp8_1x128", weights="fp8_128x128"),
}
#: Relative error of a product of random matrices, by the coarsest element: measured, doubled.
ERROR = {
    "mxfp8": 0.08,
    "e5m2_gradients": 0.14,
    "floor": 0.09,
    "mixed": 0.35,
    "nvfp4": 0.3,
    "fp8": 0.08,
}


def tensors(m=64, k=96, n=160, dtype=torch.bfloat16, lead=()):
    generator = torch.Generator().manual_seed(m + k + n)
    x, g = (torch.randn(*lead, m, d, generator=generator).to(dtype) for d in (k, n))
    w = torch.randn(n, k, generator=generator) / k**0.5
    return x.requires_grad_(), w.requires_grad_(), g


def run(x, w, g, recipe, bias=None):
    """(y, dx, dw) of the layer's function."""
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y = linear(x, w, bias, recipe=recipe)
    y.backward(g)
    return y.detach(), x.grad, w.grad


def quantized(x, recipe, role, axis):
    name = recipe.format_of(role).name
    return bs.quantize(x, name, axis, scale_rounding=recipe.scale_rounding, pad=True)


@pytest.mark.sampled(23)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("m", "k", "n"), [(64, 96, 160), (33, 64, 48), (1, 32, 32), (130, 70, 5)])
def test_products(backend, name, m, k, n):
    """Each operand is blocked along the contraction: K forward, N for dgrad, M for wgrad."""
    recipe = RECIPES[name]
    x, w, g = tensors(m, k, n)
    y, dx, dw = run(x, w, g, recipe)
    rows, columns = -1, -2
    x_rows, x_columns = (quantized(x, recipe, "activations", a) for a in (rows, columns))
    w_rows, w_columns = (quantized(w, recipe, "weights", a) for a in (rows, columns))
    g_rows, g_columns = (quantized(g, recipe, "gradients", a) for a in (rows, columns))
    assert torch.equal(y, bs.gemm(x_rows, w_rows.mT, torch.bfloat16))
    assert torch.equal(dx, bs.gemm(g_rows, w_columns, torch.bfloat16))
    assert torch.equal(dw, bs.gemm(g_columns.mT, x_columns, torch.float32))


def test_blocks_run_along_the_contraction():
    """A power of two per row or column passes through exactly where no block spans them.

    This needs neither quantize nor gemm to say what is right.
    """
    recipe = bs.Recipe()
    x, w, g = tensors(64, 96, 160, torch.float32)
    y, dx, dw = run(x, w, g, recipe)
    m, k, n = (2.0 ** torch.randint(-9, 9, (size,)) for size in (64, 96, 160))
    scaled = run(x * m[:, None], w * n[:, None], g, recipe)[0]
    assert torch.equal(scaled, y * m[:, None] * n)
    scaled = run(x, w * k, g * m[:, None], recipe)[1]
    assert torch.equal(scaled, dx * m[:, None] * k)
    scaled = run(x * k, w, g * n, recipe)[2]
    assert torch.equal(scaled, dw * n[:, None] * k)


@pytest.mark.parametrize("name", RECIPES)
def test_error_is_bounded(name):
    x, w, g = tensors(256, 256, 256, torch.float32)
    got = run(x, w, g, RECIPES[name])
    exact = (x @ w.mT, g @ w, g.mT @ x)
    for product, (a, b) in zip(
        ("fprop", "dgrad", "wgrad"), zip(got, exact, strict=True), strict=True
    ):
        error = ((a - b).norm() / b.norm()).item()
        assert 0.01 < error < ERROR[name], product


@pytest.mark.parametrize("lead", [(), (3,), (2, 5)])
def test_leading_dimensions_are_tokens(lead):
    x, w, g = tensors(7, 64, 32, lead=lead)
    y, dx, dw = run(x, w, g, bs.Recipe())
    flat = run(x.flatten(0, -2), w, g.flatten(0, -2), bs.Recipe())
    assert y.shape == (*lead, 7, 32)
    assert dx.shape == x.shape
    for a, b in zip((y, dx, dw), flat, strict=True):
        assert torch.equal(a.reshape(b.shape), b)


def test_a_vector_is_one_token():
    layer = Linear(64, 32)
    x = torch.randn(64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (32,)
    assert x.grad.shape == (64,)
    assert torch.equal(y, layer(x[None])[0])


@pytest.mark.parametrize("shape", [(64,), (8, 64), (2, 4, 64)])
@pytest.mark.parametrize("quantized", [True, False])
def test_what_is_returned_may_be_changed_in_place(shape, quantized):
    """As in ``x += residual``; a view made inside an autograd.Function refuses that."""
    recipe = bs.Recipe(high_precision=() if quantized else ("fprop", "dgrad", "wgrad"))
    layer, x = Linear(64, 64, recipe=recipe), torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert not y._is_view()
    y += x
    y.sum().backward()
    grad, x.grad = x.grad, None
    (layer(x) + x).sum().backward()
    assert torch.equal(x.grad, grad)


def test_a_transposed_weight():
    """As torch's orthogonal parametrization makes it, and F.linear takes it."""
    recipe, (x, w, g) = bs.Recipe(), tensors()
    columns = w.detach().mT.contiguous().requires_grad_()
    y = linear(x, columns.mT, recipe=recipe)
    y.backward(g)
    wanted, dx, dw = run(x, w, g, recipe)
    assert torch.equal(y, wanted)
    assert torch.equal(x.grad, dx)
    assert torch.equal(columns.grad.mT, dw)
    with bs.autocast(recipe), bs.reuse_weights():
        assert torch.equal(torch.nn.functional.linear(x, columns.mT), wanted)


def test_strided_inputs_and_gradients():
    x, w, g = tensors(64, 96, 160)
    plain = run(x, w, g, bs.Recipe())
    strided = run(x.mT.contiguous().mT, w, g.mT.contiguous().mT, bs.Recipe())
    assert all(torch.equal(a, b) for a, b in zip(plain, strided, strict=True))
    x = x.detach().requires_grad_()
    linear(x, w, recipe=bs.Recipe()).sum().backward()  # an expanded gradient, all strides 0
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_bias(dtype, bias_dtype):
    x, w, g = tensors(40, 64, 32, dtype)
    bias = torch.randn(32).to(bias_dtype).requires_grad_()
    without = linear(x, w, recipe=bs.Recipe())
    y = linear(x, w, bias, recipe=bs.Recipe())
    y.backward(g)
    assert y.dtype == dtype
    assert bias.grad.dtype == bias_dtype
    torch.testing.assert_close(y, (without + bias).to(dtype), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(bias.grad, g.float().sum(0).to(bias_dtype))


@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
def test_high_precision_products(product):
    """The named product is that of torch, the two others are untouched."""
    x, w, g = tensors()
    low = run(x, w, g, bs.Recipe())
    kept = run(x, w, g, bs.Recipe(high_precision=(product,)))
    plain = run(x, w, g, bs.Recipe(high_precision=("fprop", "dgrad", "wgrad")))
    x16, w16 = x.detach().clone().requires_grad_(), w.detach().bfloat16().requires_grad_()
    (x16 @ w16.mT).backward(g)
    torch.testing.assert_close(plain[0], x16 @ w16.mT)
    torch.testing.assert_close(plain[1], x16.grad)
    torch.testing.assert_close(plain[2], w16.grad.float(), rtol=1e-2, atol=1e-2)
    for i, name in enumerate(("fprop", "dgrad", "wgrad")):
        assert torch.equal(kept[i], (plain if name == product else low)[i])


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_nothing_is_computed_for_what_needs_no_gradient(frozen):
    x, w, g = tensors()
    (w if frozen == "weight" else x).requires_grad_(False)
    linear(x, w, recipe=bs.Recipe()).backward(g)
    assert (w.grad is None) == (frozen == "weight")
    assert (x.grad is None) == (frozen == "input")


def test_gradients_are_those_of_the_dequantized_operands():
    """Where nothing is rounded (small integers), forward and backward are exact."""
    x, w, g = (torch.randint(-8, 9, shape).float() for shape in ((64, 96), (160, 96), (64, 160)))
    exact = (x @ w.mT, g @ w, g.mT @ x)
    assert all(torch.equal(a, b) for a, b in zip(run(x, w, g, bs.Recipe()), exact, strict=True))


def test_finite_differences():
    """The backward pass is the gradient of the forward pass, seen from far enough away."""
    x, w, g = tensors(64, 128, 96, torch.float32)
    _, dx, dw = run(x, w, g, bs.Recipe())
    for grad, move in ((dx, lambda d: (x + d, w)), (dw, lambda d: (x, w + d))):
        direction = grad / grad.norm() * 8

        def loss(step, move=move, direction=direction):
            return (linear(*move(step * direction), recipe=bs.Recipe()) * g).sum().item()

        slope = (loss(1) - loss(-1)) / 2
        assert slope == pytest.approx((grad * direction).sum().item(), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_autocast_decides_the_output(dtype):
    """Under torch.autocast as without it: the product accumulates in fp32 and is rounded once."""
    layer = Linear(64, 32)
    x = torch.randn(40, 64, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = layer(x)
        y.sum().backward()
    assert y.dtype == dtype
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert torch.equal(y, layer(x).to(dtype))


def test_overfits_a_tiny_problem():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    bs.convert(model, bs.Recipe())
    x, target = torch.randn(32, 32), torch.randn(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(200):
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.03


@pytest.mark.parametrize(
    ("lead", "k", "n"), [((0,), 64, 32), ((2, 0, 3), 64, 32), ((5,), 0, 4), ((5,), 64, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_nothing_to_multiply_is_as_torch_has_it(lead, k, n, dtype):
    """An expert without tokens, say: shapes, and gradients of zeros."""
    found = []
    for kind in (Linear, torch.nn.Linear):
        torch.manual_seed(0)
        layer = kind(k, n).to(dtype)
        x = torch.randn(*lead, k, dtype=dtype, requires_grad=True)
        y = layer(x)
        y.float().sum().backward()
        found.append((y, x.grad, layer.weight.grad, layer.bias.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_an_empty_batch_under_torch_autocast_and_ours():
    w = torch.randn(32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.empty(0, 64), w, recipe=bs.Recipe()).dtype == torch.bfloat16
    with bs.autocast(bs.Recipe()):
        assert torch.nn.functional.linear(torch.empty(0, 64), w).shape == (0, 32)


@pytest.mark.parametrize(
    ("x", "w"),
    [((4, 32), (8, 64)), ((), (8, 64)), ((4, 64), (64,)), ((4, 64), (2, 8, 64))],
)
def test_shapes_that_do_not_belong_together(x, w):
    with pytest.raises(ValueError, match=r"x, weight: got .*expected \(..., K\), \(N, K\)"):
        linear(torch.randn(x), torch.randn(w), recipe=bs.Recipe())


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64])
def test_dtypes_that_cannot_be_quantized(dtype):
    one, other = torch.ones(4, 32).to(dtype), torch.ones(8, 32)
    with pytest.raises(TypeError, match=f"x: got {dtype}.*cast the model and its inputs"):
        linear(one, other, recipe=bs.Recipe())
    with pytest.raises(TypeError, match=f"weight: got {dtype}.*cast the model and its inputs"):
        linear(other, one, recipe=bs.Recipe())


@pytest.mark.parametrize("wrong", ["mxfp8", None, torch.float8_e4m3fn])
def test_a_recipe_that_is_none(wrong):
    x, w = torch.randn(4, 64), torch.randn(32, 64)
    with pytest.raises(TypeError, match=r"recipe: got .*; expected blockscale\.Recipe"):
        linear(x, w, recipe=wrong)
    if wrong is not None:
        with pytest.raises(TypeError, match=r"recipe: got .*; expected blockscale\.Recipe"):
            Linear(64, 32, recipe=wrong)
    with pytest.raises(ValueError, match=r"recipe: .*quantizes weights only"):
        Linear(64, 32, recipe=bs.Recipe("nvfp4", activations="bfloat16"))


def holding_quantized():
    return bs.nn.QuantizedLinear(bs.quantize(torch.randn(32, 64)), recipe=bs.Recipe("mxfp8"))


@pytest.mark.parametrize(
    "make", [lambda: Linear(64, 32), holding_quantized], ids=["Linear", "quantized"]
)
def test_inputs_that_no_layer_takes(make):
    layer, x = make(), torch.randn(4, 64)
    for wrong in ("x", x.numpy(), [1.0], None):
        with pytest.raises(TypeError, match=r"x: got .*; expected a torch\.Tensor"):
            layer(wrong)
    with pytest.raises(TypeError, match=r"x: is a ScaledTensor, .*pass the high-precision tensor"):
        layer(bs.quantize(x))
    with pytest.raises(TypeError, match=r"x: got torch.float64; .*cast the model and its inputs"):
        layer(x.double())


def test_operands_that_are_no_tensors():
    x, w = torch.randn(4, 64), torch.randn(32, 64)
    with pytest.raises(TypeError, match=r"weight: got ndarray; expected a torch\.Tensor"):
        linear(x, w.numpy(), recipe=bs.Recipe())
    with pytest.raises(TypeError, match=r"bias: got float; expected a torch\.Tensor"):
        linear(x, w, 1.0, recipe=bs.Recipe())
    with pytest.raises(TypeError, match=r"weight: is a ScaledTensor; .*quantized_linear"):
        linear(x, bs.quantize(w), recipe=bs.Recipe())


def test_repr_names_the_recipe():
    assert "recipe=Recipe('mxfp8', scale_rounding='floor')" in repr(
        Linear(32, 64, recipe=bs.Recipe(scale_rounding="floor"))
    )
