"""Experts that are held quantized: the bits of converted ones, exact values, and what a layer of
them is to do with its stacks."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import blockscale as bs
from blockscale import checkpoint, reference
from blockscale.distributed.expert_parallel import ExpertParallel
from blockscale.nn import (
    SWIGLU,
    GatedActivation,
    GatedExperts,
    QuantizedExperts,
    experts,
    held_groups,
    quantized_experts,
)
from stand_in import emulated

RECIPES = {
    "mxfp8": bs.Recipe("mxfp8"),
    "nvfp4": bs.Recipe("nvfp4"),
    "mxfp4": bs.Recipe("mxfp4", scale_rounding="floor"),
    "fp8_block": bs.Recipe("fp8_block"),
    "mixed": bs.Recipe("mxfp8", weights="mxfp4"),
    "by_weights": bs.Recipe("fp8_1x128", weights="nvfp4"),
}
WEIGHT_ONLY = {
    name: bs.Recipe(name, activations="bfloat16") for name in ("mxfp8", "nvfp4", "fp8_128x128")
}
GPT_OSS = GatedActivation(1.702, 7.0, 1.0, interleaved=True)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E, H, I = 4, 64, 32  # noqa: E741


def tensor(*shape: int, dtype=torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stacks(dtype=torch.float32, transposed: bool = False) -> list[Tensor]:
    """``up`` and ``down``."""
    made = tensor(E, 2 * I, H, dtype=dtype) / 8, tensor(E, H, I, dtype=dtype, seed=2) / 6
    return [w.mT.contiguous() if transposed else w for w in made]


def biases(dtype=torch.float32) -> dict[str, Tensor]:
    return {"up_bias": tensor(E, 2 * I, dtype=dtype), "down_bias": tensor(E, H, dtype=dtype)}


def held(w: Tensor, format: str, axis: int = -1) -> bs.ScaledTensor:
    """Each matrix with a global scale of its own, and another magnitude."""
    each = [bs.quantize(m * 2.0 ** (i - 2), format, axis, pad=True) for i, m in enumerate(w)]
    return torch.stack(each)


def indices(tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, E, generator=generator).argsort(1)[:, :2]


def pairs(tokens: int) -> tuple[Tensor, bs.Routing]:
    """Weights of pairs, and their routing."""
    return tensor(tokens, 2, seed=3).softmax(-1), bs.route(indices(tokens), E)


# --- forward --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_bits_of_experts(name, dtype, transposed):
    recipe, own = RECIPES[name], RECIPES[name].format_of("weights").name
    how = {"transposed": transposed, "activation": GPT_OSS if transposed else SWIGLU}
    how |= biases(dtype)
    given, plain = (tensor(50, H, dtype=dtype), *pairs(50)), stacks(dtype, transposed)
    rounding = {"scale_rounding": recipe.scale_rounding, "pad": True}
    quantized = [bs.quantize(w, own, -2 if transposed else -1, **rounding) for w in plain]
    want = experts(*given, *plain, recipe=recipe, **how)
    got = quantized_experts(*given, *quantized, recipe=recipe, **how)
    assert got.dtype == dtype
    assert torch.equal(got, want)


def one_by_one(x, weights, routing, up, down, activation, up_bias, down_bias):
    """In fp64, but for roundings to the type of x: of both products, and of the activation."""
    y = torch.zeros(len(routing.pairs), H, dtype=torch.float64)
    start = 0
    for e, end in enumerate(routing.offsets.tolist()):
        rows = x[routing.tokens[start:end]].double()
        h = (rows @ up[e].mT).to(x.dtype) + up_bias[e]
        y[start:end] = (activation(h).double() @ down[e].mT).to(x.dtype) + down_bias[e]
        start = end
    return (y[routing.slots] * weights[..., None].double()).sum(1)


@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_only_products_are_of_exact_values(name, dtype, transposed):
    """Each expert has a global scale of its own."""
    axis = -2 if transposed else -1
    up, down = (held(w, name, axis) for w in stacks(transposed=transposed))
    if name == "nvfp4":
        assert up.global_scale.unique().numel() == E
    given, only = (tensor(50, H, dtype=dtype), *pairs(50)), WEIGHT_ONLY[name]
    how = {"activation": GPT_OSS if transposed else SWIGLU, **biases(dtype)}
    got = quantized_experts(*given, up, down, recipe=only, transposed=transposed, **how)
    exact = [w.dequantize(torch.float64) for w in (up, down)]
    want = one_by_one(*given, *(w.mT if transposed else w for w in exact), **how)
    assert got.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert (got.double() - want).norm() <= max(eps, 1e-6) * want.norm()


def test_weight_only_does_not_round_x_to_bfloat16():
    """1 + 2^-9 would be 1."""
    up = bs.quantize(torch.eye(H).expand(E, H, H).contiguous(), "mxfp8")
    gate = bs.quantize(torch.zeros(E, H, H), "mxfp8")
    x = torch.full((3, H), 1 + 2**-9)
    rows = torch.tensor([1, 1, 2, 3], dtype=torch.int32)
    for dtype in (torch.float32, torch.float16):
        h = held_groups.product(x.to(dtype), up, rows, dtype, upright=False)
        assert torch.equal(h, x.to(dtype))
        both = held_groups.product(x.to(dtype), (gate, up), rows, dtype, upright=False)
        assert torch.equal(both, torch.cat((torch.zeros_like(h), h), 1))


def test_other_dtypes_say_that_they_are_slow(monkeypatch):
    """A FallbackWarning on a GPU; the sentence is fall_back's."""
    said = []
    monkeypatch.setattr(held_groups, "fall_back", lambda *args: said.append(args))
    up, down = (held(w, "mxfp8") for w in stacks())
    x, weights = tensor(5, H, dtype=torch.bfloat16), pairs(5)
    quantized_experts(x, *weights, up, down, recipe=WEIGHT_ONLY["mxfp8"])
    assert not said
    quantized_experts(x.float(), *weights, up, down, recipe=WEIGHT_ONLY["mxfp8"])
    assert [(name, given.dtype) for name, given, *_ in said] == [
        ("grouped_gemm", torch.float32)
    ] * 2
    assert said[0][3] == "x is torch.float32; kernels multiply bfloat16 by quantized weights"


@pytest.mark.parametrize("recipe", [RECIPES["nvfp4"], WEIGHT_ONLY["nvfp4"]], ids=str)
def test_a_gate_of_its_own(recipe):
    """The bits of both as one; and global scales that differ."""
    up, down = stacks()
    given = tensor(50, H), *pairs(50)
    whole, down = bs.quantize(up, "nvfp4"), bs.quantize(down, "nvfp4")
    gate, own = whole[:, :I], whole[:, I:]
    want = quantized_experts(*given, whole, down, recipe=recipe)
    assert torch.equal(quantized_experts(*given, own, down, gate=gate, recipe=recipe), want)
    if not recipe.weight_only:
        return
    gate, own = held(up[:, :I], "nvfp4"), held(up[:, I:].flip(0), "nvfp4")
    x, *routed = given
    grads = []
    for call in (
        lambda x: quantized_experts(x, *routed, own, down, gate=gate, recipe=recipe),
        lambda x: experts(
            *(x, *routed, own.dequantize(torch.float32), down.dequantize(torch.float32)),
            gate=gate.dequantize(torch.float32),
            recipe=None,
        ),
    ):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.backward(tensor(50, H, seed=5))
        grads.append((y.detach(), leaf.grad))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("recipe", [RECIPES["mxfp8"], WEIGHT_ONLY["nvfp4"]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_autocast(recipe, dtype):
    up, down = (held(w, recipe.format_of("weights").name) for w in stacks())
    x, routed = tensor(20, H), pairs(20)
    with torch.autocast("cpu", dtype):
        y = quantized_experts(x, *routed, up, down, recipe=recipe)
    assert y.dtype == dtype
    if recipe.weight_only:
        assert torch.equal(y, quantized_experts(x.to(dtype), *routed, up, down, recipe=recipe))


# --- routing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [RECIPES["nvfp4"], WEIGHT_ONLY["nvfp4"]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_routing(recipe, dtype):
    """Experts without tokens, tokens without an expert, no tokens; and no experts a token."""
    up, down = (held(w, "nvfp4") for w in stacks())
    for chosen in (
        torch.tensor([[1, -1], [-1, E], [3, 1]]),
        torch.full((5, 2), -1),
        torch.full((7, 2), 2),
        torch.zeros(0, 2, dtype=torch.int64),
        torch.zeros(3, 0, dtype=torch.int64),
    ):
        routing, x = bs.route(chosen, E), tensor(len(chosen), H, dtype=dtype).requires_grad_()
        weights = torch.full(chosen.shape, 0.5)
        y = quantized_experts(x, weights, routing, up, down, recipe=recipe)
        assert y.shape == (len(chosen), H)
        assert y.dtype == dtype
        y.sum().backward()
        assert x.grad.shape == x.shape
        known = (chosen >= 0) & (chosen < E)
        nowhere = ~known.any(1)
        assert not y[nowhere].any()
        assert not x.grad[nowhere].any()
        assert known.any() == bool(y.any())


def test_rows_in_the_order_of_experts():
    recipe, (up, down) = RECIPES["mxfp8"], (held(w, "mxfp8") for w in stacks())
    x, (weights, routing) = tensor(20, H), pairs(20)
    rows = quantized_experts(x[routing.tokens], None, routing.offsets, up, down, recipe=recipe)
    want = quantized_experts(x, weights, routing, up, down, recipe=recipe)
    assert torch.equal(bs.combine(rows, routing.slots, weights), want)


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS], ids=str)
def test_gradients_are_of_exact_values(transposed, activation):
    """Those of x, of weights of pairs and of biases; matrices have none."""
    axis, recipe = -2 if transposed else -1, WEIGHT_ONLY["nvfp4"]
    up, down = (held(w, "nvfp4", axis) for w in stacks(transposed=transposed))
    x, (weights, routing), own, grad = tensor(30, H), pairs(30), biases(), tensor(30, H, seed=7)
    results = []
    for call, recipe_of, wide in (
        (quantized_experts, recipe, (up, down)),
        (experts, None, [w.dequantize(torch.float32) for w in (up, down)]),
    ):
        leaves = [t.clone().requires_grad_() for t in (x, weights, *own.values())]
        x_, weights_, up_bias, down_bias = leaves
        how = {"up_bias": up_bias, "down_bias": down_bias, "transposed": transposed}
        y = call(x_, weights_, routing, *wide, recipe=recipe_of, activation=activation, **how)
        y.backward(grad)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_behind_quantized_activations(name):
    """Near those of a converted layer, whose gradients are quantized, too."""
    recipe, plain = RECIPES[name], stacks(torch.bfloat16)
    quantized = [bs.quantize(w, recipe.format_of("weights"), pad=True) for w in plain]
    weights, routing = pairs(30)
    results = []
    for call, given in ((quantized_experts, quantized), (experts, plain)):
        x = tensor(30, H, dtype=torch.bfloat16).requires_grad_()
        call(x, weights, routing, *given, recipe=recipe).backward(torch.ones(30, H).bfloat16())
        results.append(x.grad.float())
    got, want = results
    bound = 0.1 if name in ("mxfp8", "fp8_block") else 0.4
    assert 0 < (got - want).norm() <= bound * want.norm()


# --- layers ---------------------------------------------------------------------------------------


class Marked(nn.Module):
    """Experts as transformers marks them."""

    def __init__(self, transposed: bool, act: str = "swiglu", gate: bool = True) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias, self.act = E, gate, transposed, act
        self.is_transposed, self.is_concatenated = transposed, not transposed
        up, down = stacks(transposed=transposed)
        if not gate:
            up, self.act_fn = up[:, :I], nn.ReLU()
        self.register_parameter("gate_up_proj" if gate else "up_proj", nn.Parameter(up))
        self.down_proj = nn.Parameter(down)
        if transposed:
            self.gate_up_proj_bias, self.down_proj_bias = map(nn.Parameter, biases().values())

    def _apply_gate(self, h: Tensor) -> Tensor:
        if self.act == "geglu":
            gate, up = h.chunk(2, -1)
            return nn.functional.gelu(gate) * up
        return GatedActivation(interleaved=self.is_transposed)(h)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


KINDS = {
    "concatenated": lambda: Marked(False),
    "gpt-oss": lambda: Marked(True),
    "another activation": lambda: Marked(False, "geglu"),
    "no gate": lambda: Marked(False, gate=False),
}


def call(model: nn.Module, dtype=torch.float32) -> Tensor:
    weights = pairs(50)[0]
    y: Tensor = model(tensor(50, H, dtype=dtype), indices(50), weights)
    return y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
def test_the_bits_of_a_converted_model(kind, name):
    want = call(bs.convert(KINDS[kind](), RECIPES[name]))
    model, report = KINDS[kind](), bs.nn.ConversionReport()
    masters = [weakref.ref(p) for n, p in model.named_parameters() if "bias" not in n]
    names = list(model.state_dict())
    bs.quantize_(model, RECIPES[name], report=report)
    gc.collect()
    assert [master() for master in masters] == [None, None]
    assert isinstance(model, QuantizedExperts)
    assert isinstance(model, Marked)
    assert list(model.state_dict()) == names
    assert report.share == 1
    assert torch.equal(call(model), want)
    converted = bs.convert(KINDS[kind](), RECIPES[name])
    assert torch.equal(call(bs.quantize_(converted, RECIPES[name])), want)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(call(twin), want)
        assert twin.down_proj.qdata.data_ptr() != model.down_proj.qdata.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_only_layers(kind, dtype):
    """As experts by the values of their stacks."""
    model = bs.quantize_(KINDS[kind]().to(dtype), WEIGHT_ONLY["nvfp4"])
    plain = KINDS[kind]()
    for name, p in model.named_parameters():
        exact = p.dequantize(torch.float32) if isinstance(p, bs.ScaledTensor) else p.float()
        setattr(plain, name, nn.Parameter(exact.detach()))
    got = call(model, dtype)
    assert got.dtype == dtype
    bs.convert(plain, bs.Recipe(high_precision=("fprop",)))
    want = plain(tensor(50, H, dtype=dtype).float(), indices(50), pairs(50)[0])
    assert (got.float() - want).norm() <= 4 * torch.finfo(dtype).eps * want.norm() + 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [RECIPES["nvfp4"], WEIGHT_ONLY["nvfp4"]], ids=str)
def test_state_dicts_and_files(kind, recipe, tmp_path):
    """Into a quantized model, and into a plain one on the meta device; with global scales of each
    expert. The contraction stays contiguous, as kernels read it."""
    model = bs.quantize_(KINDS[kind](), recipe)
    for name, axis in model.held(model).items():
        with torch.no_grad():
            getattr(model, name).copy_(held(tensor(*getattr(model, name).shape), "nvfp4", axis))
    y, path = call(model), tmp_path / "experts.safetensors"
    checkpoint.save_file(model.state_dict(), path)
    others = [bs.quantize_(KINDS[kind](), recipe) for _ in range(2)]
    others[0].load_state_dict(model.state_dict())
    others[1].load_state_dict(checkpoint.load_file(path), assign=True)
    with torch.device("meta"):
        others.append(KINDS[kind]())
    others[2].load_state_dict(checkpoint.load_file(path), assign=True)
    bs.quantize_(others[2], recipe)
    others.append(bs.quantize_(KINDS[kind](), recipe).to("meta").to_empty(device="cpu"))
    others[3].load_state_dict(model.state_dict())
    for other in others:
        assert torch.equal(call(other), y)
        for name, axis in model.held(model).items():
            q = getattr(other, name)
            assert not q.requires_grad
            assert q.global_scale.shape == (E,)
            assert all((p if axis == -1 else p.mT).is_contiguous() for p in (q.qdata, q.qscale))


def test_what_a_layer_does_not_take():
    model = bs.quantize_(Marked(False), RECIPES["mxfp8"])
    before = model.gate_up_proj
    for recipe, why in (
        (
            bs.Recipe("mxfp4"),
            r"model: gate_up_proj of the layer is in mxfp8, the recipe wants mxfp4",
        ),
        (bs.Recipe("mxfp8", high_precision=("fprop",)), "fprop in high precision"),
        (bs.Recipe("fp8_128x128"), "blocks of 128 rows would be of several groups"),
        (bs.Recipe.nvfp4("four_over_six"), r"overrides=\{'\*\.experts': blockscale\.Recipe"),
    ):
        with pytest.raises(ValueError, match=why):
            bs.quantize_(model, recipe)
    assert model.gate_up_proj is before
    for given, why in (
        (tensor(E, 2 * I, H), r"got a plain torch\.float32 tensor, the layer holds its weight in"),
        (held(tensor(E, 2 * I, H), "mxfp4"), "choose the recipe that the file was quantized with"),
        (held(tensor(E, 2 * I, H), "mxfp8", -2), "the file's blocks run along the other dimension"),
        (held(tensor(E, 2 * I, H), "mxfp8", -2), r"has the transposes, .* pass its \.mT"),
        (held(tensor(E, 2 * I, H), "mxfp8")[:2], "choose the recipe"),
    ):
        with pytest.raises(RuntimeError, match=f"gate_up_proj: .*{why}"):
            model.load_state_dict({"gate_up_proj": given}, strict=False)
    turned = held(tensor(E, I, H), "mxfp8", -2)
    with pytest.raises(RuntimeError, match=r"down_proj: got .*the transposes, .* pass its \.mT"):
        model.load_state_dict({"down_proj": turned}, strict=False)
    model.load_state_dict({"down_proj": turned.mT}, strict=False)
    report = bs.nn.ConversionReport()
    for recipe in (bs.Recipe("mxfp4"), None):
        both = nn.ModuleList([model, bs.convert(nn.Linear(64, 64), bs.Recipe())])
        bs.convert(both, recipe, report=report)
        assert [e.why for e in report.left] == [
            "holds a quantized weight and no other; load the high-precision one to convert it"
        ]
    assert model.recipe == RECIPES["mxfp8"]
    bs.quantize_(model, WEIGHT_ONLY["mxfp8"])  # activations may change
    assert model.gate_up_proj is before


def test_what_cannot_be_quantized_is_reported():
    model = nn.ModuleDict({"wide": Marked(False).double(), "computed": Marked(False)})
    nn.utils.parametrize.register_parametrization(model["computed"], "down_proj", nn.Identity())
    model["linear"], report = nn.Linear(64, 64), bs.nn.ConversionReport()
    model["grouped"] = bs.nn.GroupedLinear(4, 64, 64)
    bs.quantize_(model, RECIPES["mxfp8"], report=report)
    why = {entry.name: entry.why for entry in report.left}
    assert why["wide"].startswith(f"its gate_up_proj is ({E}, {2 * I}, {H}) torch.float64; cast")
    assert why["computed"].startswith("its down_proj is computed")
    assert why["grouped"].startswith("its matrices are no layers that could hold quantized weights")


def test_a_mixture_of_ours():
    """Its router stays; MoE goes on as it did, and its experts are GatedExperts still."""
    torch.manual_seed(0)
    moe = bs.nn.MoE(H, I, E, bs.nn.Router(top_k=2), shared_size=16, bias=True)
    plain, x = copy.deepcopy(moe), tensor(20, H)
    recipe = RECIPES["nvfp4"]
    want = bs.convert(moe, recipe)(x)
    bs.quantize_(moe, recipe)
    assert torch.equal(moe(x), want)
    assert torch.equal(bs.quantize_(plain, recipe)(x), want)
    assert isinstance(moe.experts, GatedExperts)
    assert "nvfp4" in repr(moe.experts)
    for change in (recipe, None, bs.Recipe(overrides={"experts": None})):
        with pytest.raises(ValueError, match="nothing was converted"):
            bs.convert(moe, change, lambda module, name: name == "experts")
    assert moe.experts.recipe == recipe
    with pytest.raises(ValueError, match="leaves experts in high precision"):
        bs.quantize_(moe, bs.Recipe("nvfp4", overrides={"experts": None}))
    for twin in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe)), moe.to(torch.bfloat16)):
        assert isinstance(twin.experts.gate_up_proj, bs.ScaledTensor)
        twin.load_state_dict(plain.state_dict())
    mesh = SimpleNamespace(ndim=1, size=lambda: 2)
    with pytest.raises(TypeError, match="its experts are held quantized"):
        ExpertParallel()._apply(moe.experts, mesh)


def test_a_weight_that_wants_a_gradient_is_refused():
    model = bs.quantize_(Marked(False), RECIPES["mxfp8"]).requires_grad_(True)
    with pytest.raises(ValueError, match="up: is quantized and has no gradient"):
        call(model)
    with torch.no_grad():
        call(model)


def test_what_is_refused():
    up, down = (held(w, "mxfp8") for w in stacks())
    given, recipe = (tensor(5, H), *pairs(5)), RECIPES["mxfp8"]
    with pytest.raises(
        TypeError, match=r"up: is a ScaledTensor; call blockscale\.nn\.quantized_ex"
    ):
        experts(*given, up, down, recipe=recipe)
    with pytest.raises(TypeError, match=r"down: got a plain torch\.float32 tensor; expected"):
        quantized_experts(*given, up, stacks()[1], recipe=recipe)
    with pytest.raises(ValueError, match=r"up: got .*; expected a stack .* blocked along axis -2"):
        quantized_experts(*given, up, down, recipe=recipe, transposed=True)
    with pytest.raises(ValueError, match=r"down: has shape .*; expected \(4, 64, 32\), as up's"):
        quantized_experts(*given, up, up, recipe=recipe)
    wrong = [held(w, "nvfp4") for w in stacks()]
    with pytest.raises(ValueError, match="formats 'mxfp8' and 'nvfp4' cannot be multiplied"):
        quantized_experts(*given, *wrong, recipe=recipe)
    with pytest.raises(NotImplementedError, match=r"blockscale\.convert"):
        torch.func.grad(lambda x: quantized_experts(x, *given[1:], up, down, recipe=recipe).sum())(
            given[0]
        )


# --- compilers, kernels ---------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "recipe", "dtype"),
    [
        ("concatenated", WEIGHT_ONLY["nvfp4"], torch.float32),
        ("concatenated", RECIPES["mxfp8"], torch.bfloat16),
        ("gpt-oss", RECIPES["nvfp4"], torch.bfloat16),
        ("another activation", WEIGHT_ONLY["nvfp4"], torch.bfloat16),
        ("no gate", RECIPES["nvfp4"], torch.float32),
    ],
    ids=str,
)
def test_compiled(kind, recipe, dtype):
    """Without breaks, and with sizes that change; values are read back inside of an op alone."""
    torch.compiler.reset()
    model = bs.quantize_(KINDS[kind]().to(dtype), recipe)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for tokens in (20, 31):
        results = []
        for function in (model, compiled):
            x = tensor(tokens, H, dtype=dtype).requires_grad_()
            y = function(x, indices(tokens), pairs(tokens)[0])
            y.sum().backward()
            results.append((y.detach(), x.grad))
        for a, b in zip(*results, strict=True):
            assert (a.float() - b.float()).norm() <= 0.01 * b.float().norm()


def test_values_are_made_of_one_matrix_after_the_other(monkeypatch):
    """Where no kernel multiplies, too: of experts that have rows."""
    module = sys.modules["blockscale.ops.grouped_values"]
    shapes, run = [], module.dequantize
    monkeypatch.setattr(module, "dequantize", lambda *args: shapes.append(args[3]) or run(*args))
    up, down = (held(w, "mxfp8") for w in stacks())
    routing, x = bs.route(torch.tensor([[1, 2], [2, 1]]), E), tensor(2, H).requires_grad_()
    only = WEIGHT_ONLY["mxfp8"]
    quantized_experts(x, torch.ones(2, 2), routing, up, down, recipe=only).sum().backward()
    assert sorted(map(tuple, shapes)) == sorted([(H, 2 * I), (I, H), (2 * I, H), (H, I)] * 2)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("arch", "recipe"),
    [
        ("sm_90a", bs.Recipe("nvfp4", activations="bfloat16")),
        ("sm_90a", bs.Recipe("mxfp4", activations="bfloat16")),
        ("sm_90a", bs.Recipe("fp8_1x128", weights="nvfp4")),
        ("sm_100a", bs.Recipe("nvfp4")),
    ],
    ids=str,
)
def test_kernels_multiply(monkeypatch, arch, recipe):
    """By each expert's own global scale, and nothing asks where groups end."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    name, transposed = recipe.format_of("weights").name, recipe.weight_only
    up, down = tensor(3, 128, 128) / 8, tensor(3, 128, 64, seed=2) / 8
    up, down = ((held(w, name).mT if transposed else held(w, name)) for w in (up, down))
    chosen, x = torch.tensor([[0, 2], [2, 0], [-1, 2]] * 5), tensor(15, 128, dtype=torch.bfloat16)
    routing, weights = bs.route(chosen, 3), torch.full((15, 2), 0.5)
    how = {"recipe": recipe, "transposed": transposed}
    want = quantized_experts(x, weights, routing, up, down, **how)

    def refuse(*_: object) -> None:
        raise AssertionError("the host waits for the device")

    with emulated(arch, quantizes=True) as launched:
        monkeypatch.setattr(reference, "bounds", refuse)
        got = quantized_experts(x, weights, routing, up, down, **how)
    assert launched
    assert (got.float() - want.float()).norm() <= 2**-8 * want.float().norm()
