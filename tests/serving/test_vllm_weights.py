"""Parameters of the plugin for vLLM: their layout, what nobody wrote, and what is made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.checkpoint.conventions import CONVENTIONS
from blockscale.checkpoint.header import TORCH_DTYPES
from blockscale.checkpoint.storage import parts_of
from blockscale.vllm.weights import Kind, assemble, assemble_experts

KINDS = [
    *(("modelopt", each) for each in ("nvfp4", "mxfp8")),
    *(("compressed-tensors", each) for each in ("nvfp4", "mxfp4", "mxfp8")),
    ("fine-grained", "mxfp8"),
]
ROWS = [64, 32, 32]
K = 128


def kind_of(convention: str, format: str, dtype: int = 0) -> Kind:
    places = CONVENTIONS[convention].storages[format].places
    parts = [part for part in parts_of(bs.formats[format], (1, K)) if part in places]
    dtypes = {part: places[part].dtypes for part in parts}
    chosen = {part: TORCH_DTYPES[each[min(dtype, len(each) - 1)]] for part, each in dtypes.items()}
    return Kind(format, {part: places[part] for part in parts}, chosen)


def quantized(format: str, *shape: int, seed: int = 0, scale: float = 1.0) -> bs.ScaledTensor:
    x = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    one = 0.01 if format == "nvfp4" else None
    return bs.quantize(x.bfloat16(), format, global_scale=one)


def empty(kind: Kind, rows: list[int], k: int = K) -> dict[str, Tensor]:
    """The parameters of a linear layer before they are read."""
    made = {}
    for slot in kind.slots(k, "layer"):
        shape = (len(rows),) if slot.columns is None else (sum(rows), slot.columns)
        made[slot.part] = torch.empty(shape, dtype=slot.dtype)
        kind.poison(slot.part, made[slot.part])
    return made


def stored(kind: Kind, q: bs.ScaledTensor) -> dict[str, Tensor]:
    """The tensors of a checkpoint."""
    parts = {"data": q.qdata, "scale": q.scale, "global_scale": q.global_scale}
    parts["input_scale"] = torch.tensor(0.5)
    return {
        part: kind.places[part].encode(parts[part]).view(kind.dtypes[part]).view(parts[part].shape)
        for part in kind.places
    }


def write(kind: Kind, parameters: dict[str, Tensor], weights: list[bs.ScaledTensor]) -> None:
    """As vLLM's loaders do."""
    start = 0
    for i, q in enumerate(weights):
        for part, x in stored(kind, q).items():
            into = parameters[part]
            (into[i] if into.dim() == 1 else into[start : start + len(q)]).copy_(x)
        start += len(q)


@pytest.mark.parametrize(("convention", "format"), KINDS)
@pytest.mark.parametrize("dtype", [0, 1])
def test_a_fused_layer_is_one_weight(convention, format, dtype):
    kind = kind_of(convention, format, dtype)
    parameters, whole = empty(kind, ROWS), quantized(format, sum(ROWS), K)
    write(kind, parameters, list(whole.split(ROWS)))
    (made,) = assemble(kind, parameters, ROWS, "layer")
    assert torch.equal(made.q.qdata.view(torch.uint8), whole.qdata.view(torch.uint8))
    assert torch.equal(made.q.qscale, whole.qscale)
    assert torch.equal(made.q.dequantize(), whole.dequantize())
    assert (made.input_scale is None) == (format != "nvfp4")
    assert made.input_scale is None or made.input_scale.item() == 0.5


@pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("part", ["global_scale", "input_scale"])
def test_parts_with_scales_of_their_own_stay_apart(convention, part):
    kind = kind_of(convention, "nvfp4")
    parameters, whole = empty(kind, ROWS), quantized("nvfp4", sum(ROWS), K)
    weights = list(whole.split(ROWS))
    write(kind, parameters, weights)
    parameters[part][1] *= 2
    made = assemble(kind, parameters, ROWS, "layer")
    assert [len(each.q) for each in made] == ROWS
    factor = (0.5 if convention == "compressed-tensors" else 2) if part == "global_scale" else 1
    for each, q, f in zip(made, weights, (1, factor, 1), strict=True):
        assert torch.equal(each.q.dequantize(torch.float32), q.dequantize(torch.float32) * f)


@pytest.mark.parametrize(("convention", "format"), KINDS)
def test_what_nobody_wrote_is_found(convention, format):
    """Each part of each fused weight, left as it was."""
    kind = kind_of(convention, format)
    whole = quantized(format, sum(ROWS), K)
    for part in kind.places:
        for i in range(len(ROWS)):
            written, poisoned = empty(kind, ROWS), empty(kind, ROWS)
            write(kind, written, list(whole.split(ROWS)))
            start, x = sum(ROWS[:i]), written[part]
            span = slice(i, i + 1) if x.dim() == 1 else slice(start, start + ROWS[i])
            x[span].copy_(poisoned[part][span])
            with pytest.raises(ValueError, match=r"layer: .* was not read from the checkpoint"):
                assemble(kind, written, ROWS, "layer")


@pytest.mark.parametrize(("format", "k"), [("nvfp4", 24), ("mxfp8", 48), ("mxfp4", 80)])
def test_blocks_that_are_cut(format, k):
    with pytest.raises(ValueError, match=f"o_proj: K = {k} of a rank is no multiple of"):
        list(kind_of("compressed-tensors", format).slots(k, "o_proj"))


# --- experts --------------------------------------------------------------------------------------

E, H, W = 3, 64, 32


def experts(kind: Kind, halves: list[list[bs.ScaledTensor]]) -> list[dict[str, Tensor]]:
    """Parameters of both stacks, written as vLLM's loader does: gate, up and down of each."""
    up, down = {}, {}
    for stack, (rows, k) in ((up, (2 * W, H)), (down, (H, W))):
        for slot in kind.slots(k, "experts"):
            numbers = (E, 2) if stack is up else (E,)
            shape = numbers if slot.columns is None else (E, rows, slot.columns)
            stack[slot.part] = torch.empty(shape, dtype=slot.dtype)
            kind.poison(slot.part, stack[slot.part])
    for e, (gate, of_up, of_down) in enumerate(halves):
        for j, q in enumerate((gate, of_up)):
            for part, x in stored(kind, q).items():
                into = up[part][e]
                (into[j] if into.dim() == 1 else into[j * W : (j + 1) * W]).copy_(x)
        for part, x in stored(kind, of_down).items():
            down[part][e].copy_(x)
    return [up, down]


def three(format: str, e: int) -> list[bs.ScaledTensor]:
    shapes = ((W, H), (W, H), (H, W))
    return [quantized(format, *shape, seed=3 * e + i) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize(("convention", "format"), KINDS)
def test_stacks_of_experts(convention, format):
    kind, each = kind_of(convention, format), [three(format, e) for e in range(E)]
    made = assemble_experts(kind, *experts(kind, each), "experts")
    assert made.gate is None
    for e, (gate, up, down) in enumerate(each):
        values = torch.cat([gate.dequantize(), up.dequantize()])
        assert torch.equal(made.up[e].dequantize(), values)
        assert torch.equal(made.down[e].dequantize(), down.dequantize())
    static = format == "nvfp4"
    assert (made.up_input_scale is not None) == (made.down_input_scale is not None) == static


def test_gate_and_up_with_scales_of_their_own_are_two_stacks():
    kind, each = kind_of("modelopt", "nvfp4"), [three("nvfp4", e) for e in range(E)]
    up, down = experts(kind, each)
    up["global_scale"][1, 1] *= 2
    made = assemble_experts(kind, up, down, "experts")
    assert made.gate is not None
    for e, (gate, of_up, _) in enumerate(each):
        factor = 2 if e == 1 else 1
        assert torch.equal(made.gate[e].dequantize(), gate.dequantize())
        assert torch.equal(made.up[e].dequantize(), of_up.dequantize() * factor)


def test_inputs_have_the_largest_scale_of_the_experts():
    kind, each = kind_of("modelopt", "nvfp4"), [three("nvfp4", e) for e in range(E)]
    up, down = experts(kind, each)
    up["input_scale"][:] = torch.tensor([[0.1, 0.2], [0.7, 0.3], [0.1, 0.1]])
    down["input_scale"][:] = torch.tensor([0.1, 0.2, 0.9])
    made: Any = assemble_experts(kind, up, down, "experts")
    assert torch.equal(made.up_input_scale, torch.tensor(0.7))
    assert torch.equal(made.down_input_scale, torch.tensor(0.9))


@pytest.mark.parametrize(("convention", "format"), KINDS)
def test_experts_that_nobody_wrote_are_found(convention, format):
    kind, each = kind_of(convention, format), [three(format, e) for e in range(E)]
    for stack in (0, 1):
        for part in kind.places:
            for half in (0, 1)[: 2 - stack]:
                written = experts(kind, each)
                x = written[stack][part]
                left = x[1] if stack or x.dim() == 2 else x[1, half * W : (half + 1) * W]
                kind.poison(part, left if left.dim() else x[1:2])
                with pytest.raises(ValueError, match=r"experts: .* was not read"):
                    assemble_experts(kind, *written, "experts")
