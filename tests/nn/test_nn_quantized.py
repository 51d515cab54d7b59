"""quantize_: the bits of a converted model, from weights that are held quantized."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import blockscale as bs
from blockscale.kernels.common.gpu import GPUS
from blockscale.nn import Linear, QuantizedLinear, quantized, quantized_linear
from blockscale.ops import operand_layout

RECIPES = {
    "mxfp8": bs.Recipe(),
    "nvfp4": bs.Recipe("nvfp4"),
    "mxfp4_floor": bs.Recipe("mxfp4", scale_rounding="floor"),
    "fp8_block": bs.Recipe("fp8_1x128", weights="fp8_128x128"),
    "mixed": bs.Recipe("mxfp8", weights="mxfp4"),
}
WEIGHT_ONLY = {
    name: bs.Recipe(name, activations="bfloat16") for name in ("mxfp8", "nvfp4", "fp8_128x128")
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tensor(*shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def model(dtype=torch.float32, k=96):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, 128), nn.GELU(), nn.Linear(128, 40, bias=False)).to(dtype)


def parts(q):
    return [p.view(torch.uint8) if p.dtype.itemsize == 1 else p for p in (q.qdata, q.qscale)]


# --- forward --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [96, 70])
def test_the_bits_of_a_converted_model(name, dtype, k):
    converted = bs.convert(model(dtype, k), RECIPES[name])
    held = bs.quantize_(model(dtype, k), RECIPES[name])
    assert [type(m) for m in held] == [QuantizedLinear, nn.GELU, QuantizedLinear]
    for shape in ((8, k), (2, 3, k), (k,)):
        x = tensor(*shape, dtype=dtype)
        y = held(x)
        assert y.dtype == dtype
        assert torch.equal(y, converted(x))


@pytest.mark.parametrize("name", RECIPES)
def test_a_trained_model(name):
    """A model that is converted is quantized like a plain one."""
    trained = bs.convert(model(), RECIPES[name])
    y = trained(tensor(8, 96))
    assert torch.equal(bs.quantize_(trained, RECIPES[name])(tensor(8, 96)), y)


@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_only_products_are_of_the_exact_values(name, dtype):
    layer = nn.Linear(96, 40, dtype=dtype)
    bias = layer.bias
    q = bs.quantize(layer.weight, name, pad=True)
    bs.quantize_(layer, WEIGHT_ONLY[name])
    x = tensor(8, 96, dtype=dtype)
    exact = x.double() @ q.dequantize(torch.float64).mT + bias.double()
    y = layer(x)
    assert y.dtype == dtype
    error = (y.double() - exact).abs()
    assert (error <= exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weight_only_does_not_round_x_to_bfloat16(dtype):
    """1 + 2^-9 would be 1 in bfloat16."""
    layer = bs.quantize_(nn.Linear(32, 32, bias=False, dtype=dtype), WEIGHT_ONLY["mxfp8"])
    values = layer.weight.dequantize(dtype)
    x = torch.eye(32, dtype=dtype) * (1 + 2**-9)
    wanted = (values.double() * (1 + 2**-9)).to(dtype).mT
    assert torch.equal(layer(x), wanted)


def test_weight_only_of_other_dtypes_says_that_it_is_slow(monkeypatch):
    """A FallbackWarning on a GPU; the sentence is fall_back's."""
    said = []
    monkeypatch.setattr(quantized, "fall_back", lambda *args: said.append(args))
    layer = bs.quantize_(nn.Linear(32, 32), WEIGHT_ONLY["mxfp8"])
    layer(torch.ones(4, 32, dtype=torch.bfloat16))
    assert not said
    layer(torch.ones(4, 32))
    ((operation, x, backend, why),) = said
    assert (operation, x.dtype, backend) == ("gemm", torch.float32, "auto")
    assert why == "x is torch.float32; kernels multiply bfloat16 by quantized weights"


@pytest.mark.parametrize("recipe", [RECIPES["nvfp4"], WEIGHT_ONLY["nvfp4"]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_autocast(recipe, dtype):
    """It decides the output, and rounds activations that are not quantized, as for any layer."""
    layer = bs.quantize_(nn.Linear(96, 40), recipe)
    x = tensor(8, 96)
    with torch.autocast("cpu", dtype):
        y = layer(x)
    assert y.dtype == dtype
    assert torch.equal(y, layer(x.to(dtype)) if recipe.weight_only else layer(x).to(dtype))


@pytest.mark.parametrize("recipe", [*RECIPES.values(), *WEIGHT_ONLY.values()], ids=str)
def test_zero_rows(recipe):
    layer = bs.quantize_(nn.Linear(96, 40), recipe)
    for shape in ((0, 96), (2, 0, 96)):
        x = torch.empty(shape, requires_grad=True)
        y = layer(x)
        assert y.shape == (*shape[:-1], 40)
        y.sum().backward()
        assert x.grad.shape == shape


def test_what_is_no_matrix():
    """One bias for a layer, not for each row; x dense, and as it is."""
    weight, x = torch.randn(32, 64), torch.randn(2, 64)
    q = bs.quantize(weight, "mxfp8")
    only = bs.Recipe("mxfp8", activations="bfloat16")
    plain = bs.Recipe("mxfp8", high_precision=("fprop",))
    for call in (
        lambda x, bias: quantized_linear(x, q, bias, recipe=only),
        lambda x, bias: bs.nn.linear(x, weight, bias, recipe=plain),
    ):
        for shape in ((1,), (2, 32)):
            with pytest.raises(ValueError, match=r"bias: .*; expected \(32,\)"):
                call(x, torch.randn(shape))
        for given, kind in (
            (x.to_sparse(), "sparse"),
            (torch.nested.nested_tensor([x, x], layout=torch.jagged), "nested"),
        ):
            with pytest.raises(TypeError, match=f"x: got a {kind} tensor"):
                call(given, None)
        with pytest.raises(NotImplementedError, match="trace cannot record"):
            torch.jit.trace(lambda x, call=call: call(x, None), (x,))


def test_what_cannot_be_multiplied():
    layer = bs.quantize_(nn.Linear(96, 40), bs.Recipe())
    for shape in ((), (4, 95)):
        with pytest.raises(ValueError, match=r"x, weight: got .*expected \(..., K\), \(N, K\)"):
            layer(torch.ones(shape))
    for dtype in (torch.float64, torch.int64):
        for recipe in (bs.Recipe(), WEIGHT_ONLY["mxfp8"]):
            layer.recipe = recipe
            with pytest.raises(TypeError, match=f"x: got {dtype}"):
                layer(torch.ones(4, 96, dtype=dtype))


@pytest.mark.parametrize("recipe", [bs.Recipe(), WEIGHT_ONLY["mxfp8"]], ids=str)
def test_a_plain_weight_is_refused(recipe):
    """As transformers' tie_weights puts one in a layer."""
    layer = bs.quantize_(nn.Linear(64, 64), recipe)
    layer.weight = nn.Embedding(64, 64).weight
    with pytest.raises(TypeError, match=r"weight: got a plain torch\.float32 tensor; expected"):
        layer(tensor(4, 64))


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [*RECIPES.values(), *WEIGHT_ONLY.values()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_x(recipe, dtype):
    """As adapters on a quantized base need it."""
    layer = bs.quantize_(nn.Linear(96, 40), recipe)
    x, g = tensor(2, 4, 96, dtype=dtype).requires_grad_(), tensor(2, 4, 40, dtype=dtype, seed=2)
    layer(x).backward(g)
    wanted = g.float() @ layer.weight.dequantize(torch.float32)
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, wanted.to(dtype))
    torch.testing.assert_close(layer.bias.grad, g.float().sum((0, 1)))
    assert layer.weight.grad is None


def test_a_weight_that_wants_a_gradient_is_refused():
    layer = bs.quantize_(nn.Linear(64, 32), bs.Recipe())
    layer.requires_grad_(True)
    with pytest.raises(ValueError, match=r"weight: is quantized and has no gradient"):
        layer(tensor(4, 64))
    with torch.no_grad():
        layer(tensor(4, 64))


# --- what a layer holds ---------------------------------------------------------------------------


def test_masters_are_dropped():
    m = model()
    masters = [weakref.ref(m[i].weight) for i in (0, 2)]
    bias = m[0].bias
    bs.quantize_(m, bs.Recipe())
    gc.collect()
    assert [master() for master in masters] == [None, None]
    assert m[0].bias is bias
    assert [p.requires_grad for p in m.parameters()] == [False, True, False]
    assert isinstance(m[0], nn.Linear)
    assert "in_features=96, out_features=128, bias=True, weight=mxfp8, recipe=" in repr(m[0])


def test_shared_weights_stay_shared():
    m = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Linear(64, 64))
    m[1].weight = m[2].weight = m[0].weight
    bs.quantize_(m, bs.Recipe())
    assert m[0].weight is m[1].weight
    assert m[0].weight is m[2].weight
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m)), m.to(torch.bfloat16)):
        assert twin[0].weight is twin[2].weight


def test_hooks_stay():
    m, calls = model(), []
    m[0].register_forward_hook(lambda *_: calls.append("hook"))
    bs.quantize_(m, bs.Recipe())(tensor(4, 96))
    assert calls == ["hook"]


def test_again_with_another_recipe():
    """Activations may change; weights cannot."""
    m = bs.quantize_(model(), bs.Recipe())
    before = m[0].weight
    bs.quantize_(m, WEIGHT_ONLY["mxfp8"])
    assert m[0].recipe == WEIGHT_ONLY["mxfp8"]
    assert m[0].weight is before
    with pytest.raises(ValueError, match=r"weight of 0 is in mxfp8, the recipe wants mxfp4; pass"):
        bs.quantize_(m, bs.Recipe("mxfp4"))
    assert m[0].recipe == WEIGHT_ONLY["mxfp8"]


def test_converting_what_is_quantized():
    m = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    bs.quantize_(m, bs.Recipe(), lambda module, name: name == "0")
    report = bs.nn.ConversionReport()
    for recipe in (bs.Recipe("mxfp4"), None):
        bs.convert(m, recipe, report=report)
        assert [e.why for e in report.left] == [
            "holds a quantized weight and no other; load the high-precision one to convert it"
        ]
    assert m[0].recipe == bs.Recipe()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Linear(64, 32, dtype=torch.float64), r"its weight is \(32, 64\) torch.float64"),
        (lambda: nn.Linear(0, 32), r"its weight is \(32, 0\)"),
        (nn.ReLU, "nothing was quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_what_cannot_be_quantized(make, why):
    with pytest.raises(ValueError, match=why):
        bs.quantize_(make(), bs.Recipe())


def test_a_recipe_without_quantized_forward():
    with pytest.raises(ValueError, match="there is nothing to quantize"):
        bs.quantize_(model(), bs.Recipe(high_precision=("fprop",)))


def test_a_layer_of_finished_parts():
    q = bs.quantize(tensor(32, 64), "nvfp4")
    layer = QuantizedLinear(q, tensor(32), recipe=WEIGHT_ONLY["nvfp4"])
    assert torch.equal(
        layer(tensor(4, 64)),
        quantized_linear(tensor(4, 64), q, layer.bias, recipe=WEIGHT_ONLY["nvfp4"]),
    )
    for wrong in (q.mT, bs.quantize(tensor(32, 64), "mxfp8"), tensor(32, 64)):
        with pytest.raises(ValueError, match="weight: "):
            QuantizedLinear(wrong, recipe=bs.Recipe("nvfp4"))


# --- copies, moves, compilers ---------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_copies(name):
    m, x = bs.quantize_(model(), RECIPES[name]), tensor(4, 96)
    y = m(x)
    buffer = io.BytesIO()
    torch.save(m, buffer)
    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m)), saved):
        assert torch.equal(twin(x), y)
        assert twin[0].weight.qdata.data_ptr() != m[0].weight.qdata.data_ptr()
        assert isinstance(twin[0].weight, nn.Parameter)
        assert not twin[0].weight.requires_grad
        twin.load_state_dict(m.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_change_of_dtype_touches_no_stored_byte(dtype):
    m = bs.quantize_(model(), bs.Recipe("nvfp4"))
    before = [p.clone() for p in parts(m[0].weight)]
    scalar = m[0].weight.global_scale
    m.to(dtype)
    assert m[0].bias.dtype == m[0].weight.dtype == dtype
    assert all(map(torch.equal, parts(m[0].weight), before))
    assert m[0].weight.global_scale.dtype == torch.float32
    assert torch.equal(m[0].weight.global_scale, scalar)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recipe", [*RECIPES.values(), *WEIGHT_ONLY.values()], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(recipe, dynamic):
    torch.compiler.reset()
    m = bs.quantize_(model(), recipe)
    compiled = torch.compile(m, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 7) if dynamic else (5,):
        results = []
        for function in (m, compiled):
            x = tensor(tokens, 96).requires_grad_()
            y = function(x)
            y.sum().backward()
            results.append((y.detach(), x.grad))
        for a, b in zip(*results, strict=True):
            assert (a - b).norm() <= 0.01 * a.norm()  # GELU is computed anew


def test_inference_mode():
    m, x = bs.quantize_(model(), bs.Recipe()), tensor(4, 96)
    with torch.inference_mode():
        y = m(x)
    assert torch.equal(m(x), y)


# --- operand layout -------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "layout"), [("sm_90a", "sm90"), ("sm_100a", "compact")])
def test_a_layer_that_moves_is_placed_anew(monkeypatch, arch, layout):
    m = nn.Sequential(nn.Linear(256, 64), nn.Linear(256, 64))
    m[1].weight = m[0].weight
    bs.quantize_(m, bs.Recipe("fp8_1x128"))
    x, state = tensor(4, 256), copy.deepcopy(m).state_dict()
    wanted = m[0](x.requires_grad_())
    assert m[0].weight.layout_name == "compact"
    monkeypatch.setattr(operand_layout, "gpu_of", lambda device: GPUS[arch])
    m.to(torch.float32)  # any move
    assert m[0].weight.layout_name == layout
    assert m[0].weight is m[1].weight
    assert torch.equal(m[0](x), wanted)
    for assign in (False, True):  # from a file: compact
        m.load_state_dict(state, assign=assign)
        assert m[0].weight.layout_name == layout
        assert torch.equal(m[0](x), wanted)


# --- by autocast ----------------------------------------------------------------------------------


def test_it_keeps_its_recipe_under_autocast():
    m, x = bs.quantize_(model(), bs.Recipe()), tensor(4, 96)
    y = m(x)
    with bs.autocast(bs.Recipe("mxfp4")):
        assert torch.equal(m(x), y)


def test_meta_and_back(tmp_path):
    """Built without memory, then filled: the usual way to load a large model."""
    model = bs.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 32)), bs.Recipe())
    state, x = copy.deepcopy(model.state_dict()), torch.randn(4, 64)
    want = model(x)
    model.to("meta")
    assert model(x.to("meta")).shape == (4, 32)
    model.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(model(x), want)


def test_transforms_say_what_to_do():
    layer = bs.quantize_(torch.nn.Linear(64, 32), bs.Recipe())
    x = torch.randn(4, 64)
    for call in (
        lambda: torch.func.grad(lambda x: layer(x).sum())(x),
        lambda: torch.func.vmap(layer)(x),
        lambda: torch.func.jvp(layer, (x,), (x,)),
    ):
        with pytest.raises(NotImplementedError, match=r"blockscale\.convert"):
            call()
