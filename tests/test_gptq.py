"""gptq: weights rounded for the inputs that they are multiplied with."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import blockscale as bs
from blockscale.formats import E4M3, formats
from blockscale.gptq import round_columns
from blockscale.layer_weights import global_scales, layer_weights
from blockscale.rounding import decode

FORMATS = tuple(formats)


def inputs(rows: int = 512, columns: int = 128, seed: int = 0) -> Tensor:
    """Channels that depend on each other, some of them large."""
    all_alike = torch.Generator().manual_seed(7)
    mix = (
        torch.randn(columns, columns, generator=all_alike) * torch.logspace(0, -2, columns)[:, None]
    )
    size = torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=all_alike)]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) @ mix * size


def weight(rows: int = 96, columns: int = 128, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def error(w: Tensor, q: bs.ScaledTensor, x: Tensor) -> float:
    return ((q.dequantize(torch.float32) - w) @ x.mT).square().sum().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_inputs_that_do_not_depend_on_each_other(format: str, dtype: torch.dtype):
    """Nothing makes up for anything: the bytes of ``quantize``."""
    w = weight().to(dtype)
    w[3], w[5, 10:40] = 0, 0
    q = round_columns(w, torch.logspace(-2, 2, 128).diag(), format)
    want = bs.quantize(w, format)
    assert (q.shape, q.dtype, q.format) == (want.shape, dtype, want.format)
    assert torch.equal(q.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
    assert torch.equal(q.compact_bytes(), want.compact_bytes())
    assert q.global_scale is want.global_scale or q.global_scale == want.global_scale


@pytest.mark.parametrize("format", FORMATS)
def test_outputs_change_less(format: str):
    w, x, others = weight(), inputs(), inputs(seed=3)
    moments = x.mT @ x / len(x)
    plain, q = bs.quantize(w, format), round_columns(w, moments, format)
    assert error(w, q, x) < 0.6 * error(w, plain, x)
    assert error(w, q, others) < 0.7 * error(w, plain, others)


@pytest.mark.parametrize("scaling", ["four_over_six", "search"])
def test_scaling(scaling: str):
    w, x = weight(), inputs()
    moments = x.mT @ x
    q = round_columns(w, moments, "nvfp4", scaling=scaling)
    assert q.global_scale == bs.quantize(w, "nvfp4", scaling=scaling).global_scale
    assert error(w, q, x) < error(w, round_columns(w, moments, "nvfp4"), x)


def test_each_element_is_the_best_after_those_before():
    """Of its neighbours none has a smaller error, whatever those after it would become."""
    k = 32
    w, x = weight(4, k).double(), inputs(64, k)
    h = (x.mT @ x).double()
    h += 0.01 * h.diagonal().mean() * torch.eye(k)
    q = round_columns(w.float(), x.mT @ x, "mxfp8")
    values, codes = q.dequantize(torch.float32).double(), q.qdata.view(torch.uint8)

    def least(row: int, given: Tensor) -> float:
        """The least error of a row that begins with these elements, all others free."""
        n = len(given)
        lost = w[row, :n] - given
        after = h[:n, n:] @ torch.linalg.solve(h[n:, n:], h[n:, :n])
        return (lost @ (h[:n, :n] - after) @ lost).item()

    tried = 0
    for row, n in product(range(4), range(1, k + 1)):
        best = least(row, values[row, :n])
        for code in (int(codes[row, n - 1]) + 1, int(codes[row, n - 1]) - 1):
            if code & 0x7F > E4M3.max_code or code < 0:
                continue
            other, scale = values[row, :n].clone(), values[row, 0] / decode(codes[row, :1], E4M3)
            other[-1] = decode(torch.tensor([code], dtype=torch.uint8), E4M3)[0] * scale[0]
            assert best <= least(row, other) * (1 + 1e-4)
            tried += 1
    assert tried > 200


class Block(nn.Module):
    """As in a transformer, by name."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(size, size))
        self.odd, self.idle = nn.Linear(size, 9), nn.Linear(size, size)
        self.lm_head = nn.Linear(9, 5)
        with torch.no_grad():
            self.k_proj.weight *= 7

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.tanh(self.q_proj(x)) * self.k_proj(x) + self.v_proj(x)
        return self.lm_head(self.odd(x + self.o_proj(mixed)))


def model() -> Block:
    torch.manual_seed(0)
    return Block().bfloat16()


BATCHES = [inputs(96, 64, seed).bfloat16() for seed in range(4)]
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "odd")


@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_model(memory: int):
    """Layers that a batch reaches; weights that servers fuse share a global scale; the model then
    has what was made."""
    plain, changed = model(), model()
    made = bs.gptq(changed, BATCHES, "nvfp4", scaling="search", memory=memory)
    assert list(made) == [f"{name}.weight" for name in LAYERS]
    scales = {name: made[f"{name}.weight"].global_scale for name in LAYERS}
    assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"] != scales["o_proj"]
    for name in LAYERS:
        weight = changed.get_submodule(name).weight
        assert torch.equal(weight, made[f"{name}.weight"].dequantize())
        assert not changed.get_submodule(name)._forward_pre_hooks
    assert torch.equal(changed.idle.weight, plain.idle.weight)
    assert torch.equal(changed.lm_head.weight, plain.lm_head.weight)
    rounded = model()
    with torch.no_grad():
        for name in LAYERS:
            layer, scale = rounded.get_submodule(name), scales[name]
            q = bs.quantize(layer.weight, "nvfp4", global_scale=scale, scaling="search")
            layer.weight.copy_(q.dequantize())
        x = inputs(256, 64, 9).bfloat16()
        errors = [(each(x) - plain(x)).float().square().sum() for each in (changed, rounded)]
    assert errors[0] < 0.7 * errors[1]


def test_filter_fn():
    """Instead of what is left alone by default; others keep their weights."""
    changed = model()
    made = bs.gptq(changed, BATCHES, "mxfp8", filter_fn=lambda module, name: name == "k_proj")
    assert list(made) == ["k_proj.weight"]
    assert torch.equal(changed.q_proj.weight, model().q_proj.weight)
    with pytest.raises(ValueError, match=r"model: has no linear layer .* filter_fn takes some"):
        bs.gptq(model(), BATCHES, "mxfp8", filter_fn=lambda module, name: False)


def test_a_weight_of_two_layers():
    """Is rounded once, for the inputs of both."""
    shared = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).bfloat16()
    shared[2].weight = shared[0].weight
    w, x = shared[0].weight.detach().clone(), BATCHES[0].float()
    with torch.no_grad():
        y = shared[:2](BATCHES[0]).float()
    made = bs.gptq(shared, BATCHES[:1], "mxfp8")
    assert list(made) == ["0.weight"]
    want = round_columns(w, x.mT @ x + y.mT @ y, "mxfp8").qdata.view(torch.uint8)
    assert (made["0.weight"].qdata.view(torch.uint8) == want).float().mean() > 0.99  # order of sums
    assert torch.equal(shared[2].weight, made["0.weight"].dequantize())


def test_in_turns_and_at_once():
    """The first layers have the same inputs."""
    made = [bs.gptq(model(), BATCHES, "mxfp8", memory=memory) for memory in (1, 1 << 30)]
    same = [
        torch.equal(made[0][name].qdata.view(torch.uint8), made[1][name].qdata.view(torch.uint8))
        for name in made[0]
    ]
    assert same[:3] == [True] * 3
    assert not all(same)


def test_channels_without_input():
    """They may be anything: they are rounded to nearest."""
    x = inputs()
    x[:, 32:64] = 0
    w = weight()
    q = round_columns(w, x.mT @ x, "mxfp8")
    nearest = bs.quantize(w, "mxfp8").qdata.view(torch.uint8)
    assert torch.equal(q.qdata.view(torch.uint8)[:, 32:64], nearest[:, 32:64])
    q = round_columns(w, torch.zeros(128, 128), "mxfp8")
    assert torch.equal(q.qdata.view(torch.uint8), nearest)


@pytest.mark.parametrize("size", [1e-30, 1e-23, 1e-19, 1.0])
def test_inputs_of_any_size(size: float):
    """Squares of the smallest are subnormal, and no matrix of them is positive definite."""
    w, x = weight(), inputs() * size
    q = round_columns(w, x.mT @ x, "mxfp8")
    assert error(w, q, x / size) <= error(w, bs.quantize(w, "mxfp8"), x / size) * 1.001


def test_moments_that_sums_made_indefinite():
    w = weight()
    q = round_columns(w, torch.full((128, 128), 1.0) - 0.5 * torch.eye(128), "mxfp8")
    x = torch.ones(1, 128)
    assert error(w, q, x) < error(w, bs.quantize(w, "mxfp8"), x)
    with pytest.raises(ValueError, match="batches: give it inputs with NaN"):
        round_columns(w, torch.full((128, 128), math.nan).fill_diagonal_(1.0), "mxfp8")


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_weights_that_are_no_parameters():
    """What is computed at each look has no place for a result, and all are made at one address."""
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)) for _ in range(3)]
    mixed = nn.Sequential(*layers, nn.Linear(64, 64))
    mixed[3].idle = nn.ModuleList([nn.Linear(64, 9).double(), nn.LazyLinear(9), nn.Linear(64, 0)])
    x = [inputs(columns=64)]
    made = bs.gptq(mixed, x, "mxfp8")
    assert list(made) == ["3.weight"]
    for layer in layers:
        nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert list(bs.gptq(mixed, x, "mxfp8")) == [f"{i}.weight" for i in range(4)]
    bs.quantize_(mixed[0], bs.Recipe("mxfp8"))
    assert list(bs.gptq(mixed, x, "mxfp8")) == [f"{i}.weight" for i in range(1, 4)]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_autocast_and_default_dtypes(format: str):
    """They are the model's; sums of errors stay in fp32."""
    models, batches = [model().float() for _ in range(3)], [x.float() for x in BATCHES]
    made = [bs.gptq(models[0], batches, format)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made += [bs.gptq(models[1], batches, format)]
    try:
        torch.set_default_dtype(torch.float64)
        made += [bs.gptq(models[2], batches, format)]
    finally:
        torch.set_default_dtype(torch.float32)
    codes = [each["q_proj.weight"].qdata.view(torch.uint8) for each in made]
    assert torch.equal(codes[0], codes[1])
    assert torch.equal(codes[0], codes[2])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_experts(memory: int):
    """Each is rounded for its own tokens, and nearly to nearest where these are few."""
    import transformers

    def mixture() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(
            hidden_size=64, intermediate_size=64, moe_intermediate_size=48, num_hidden_layers=2,
            vocab_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
            num_experts=4, num_experts_per_tok=2, initializer_range=0.2,
            attn_implementation="eager",
        )  # fmt: skip
        made = transformers.Qwen3MoeForCausalLM(config).eval()
        with torch.no_grad():  # the last expert of the first layer is for nobody
            made.model.layers[0].mlp.gate.weight[3] = 0
            made.model.layers[0].mlp.gate.weight[:3].abs_()
        return made

    plain, changed, rounded = mixture(), mixture(), mixture()
    batches = [
        torch.randint(64, (8, 64), generator=torch.Generator().manual_seed(i)) for i in (0, 1)
    ]
    made = bs.gptq(changed, batches[:1], "nvfp4", memory=memory)
    path = "model.layers.0.mlp.experts"
    experts, before = (m.get_submodule(path) for m in (changed, plain))
    for expert in range(4):
        names = [f"{path}.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
        if names[0] not in made:
            assert torch.equal(experts.gate_up_proj[expert], before.gate_up_proj[expert])
            continue
        gate, up, down = (made[name] for name in names)
        assert gate.global_scale == up.global_scale  # servers fuse them
        both = torch.cat([gate.dequantize(), up.dequantize()])
        assert torch.equal(experts.gate_up_proj[expert], both)
        assert torch.equal(experts.down_proj[expert], down.dequantize())
    weights = layer_weights(rounded, formats["nvfp4"])
    scales = global_scales(weights, formats["nvfp4"])
    with torch.no_grad():
        for name, weight in weights.items():
            if f"{name}.weight" in made:
                q = bs.quantize(weight, "nvfp4", global_scale=scales[name])
                weight.copy_(q.dequantize())
        errors = [
            (m(batches[1]).logits - plain(batches[1]).logits).square().sum()
            for m in (changed, rounded)
        ]
    assert errors[0] < 0.8 * errors[1], errors


def test_few_rows():
    """They tell little, and nothing is made worse by them."""
    w, x, others = weight(), inputs(rows=8), inputs(rows=512, seed=3)
    layer = nn.Linear(128, 96, bias=False)
    with torch.no_grad():
        layer.weight.copy_(w)
    q = bs.gptq(nn.Sequential(layer), [x], "mxfp8")["0.weight"]
    nearest = bs.quantize(w, "mxfp8")
    assert error(w, q, x) < 0.5 * error(w, nearest, x)
    assert error(w, q, others) < error(w, nearest, others)


def test_refusals():
    with pytest.raises(ValueError, match="scaling: 'search' is for nvfp4, not mxfp8"):
        bs.gptq(model(), BATCHES, "mxfp8", scaling="search")
    with pytest.raises(ValueError, match="scaling: got 'ms_eden'"):
        bs.gptq(model(), BATCHES, scaling="ms_eden")
    with pytest.raises(ValueError, match="model: has no linear layer that could be nvfp4"):
        bs.gptq(nn.Linear(9, 9), BATCHES)
    with pytest.raises(ValueError, match="model: the weight of q_proj is on device meta"):
        bs.gptq(model().to("meta"), BATCHES)
    with pytest.raises(ValueError, match=r"batches: can be gone through once, .* runs 6 times"):
        bs.gptq(model(), iter(BATCHES), memory=1)
    assert bs.gptq(model(), iter(BATCHES))
    with pytest.raises(ValueError, match="batches: no layer that can be quantized saw one"):
        bs.gptq(model(), [])
    bad = [BATCHES[0].clone()]
    bad[0][3, 4] = math.nan
    with pytest.raises(ValueError, match="q_proj: batches: give it inputs with NaN"):
        bs.gptq(model(), bad)
    broken = model()
    with torch.no_grad():
        broken.v_proj.weight[0, 0] = math.inf
    with pytest.raises(ValueError, match="v_proj: weight: has NaN or infinities"):
        bs.gptq(broken, BATCHES)
