"""Checks of what layers of grouped rows are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import choose
from ..formats import formats, get_format
from ..quantization import PLAIN
from ..routing import INTEGERS, Routing
from ..tensor import ScaledTensor
from ..tensor_checks import DTYPES, check_is_tensor, check_offsets, is_looked_at
from ..watching import refuse_tangents
from .holds import check_called
from .linear import check_dtype, check_whole
from .recipe import Recipe, check_inference_recipe, check_training_recipe

__all__ = [
    "ExpertParameters",
    "check_experts",
    "check_grouped",
    "check_held_experts",
    "check_inference_recipe_of_groups",
    "check_plain",
    "check_recipe_of_groups",
    "check_saved_format",
]


class ExpertParameters(NamedTuple):
    """Matrices and biases of all experts of a layer, a stack each; ``gate``: where it is apart from
    ``up``."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    gate: Tensor | None = None


def check_recipe_of_groups(recipe: Recipe | None) -> None:
    """TypeError or ValueError unless all three products of groups can be quantized so."""
    if recipe is None:
        return
    check_training_recipe(recipe)
    if not recipe.is_plain:
        raise ValueError(
            f"recipe: {recipe} does more than round to nearest, which experts do not know yet; "
            "give them a recipe of their own: overrides={'*.experts': blockscale.Recipe("
            f"{get_format(recipe.format).name!r})}}"
        )
    for role in ("activations", "gradients"):
        found = recipe.format_of(role)
        if found.block[0] > 1 or (found.element.bits not in (4, 8)):
            raise ValueError(
                f"recipe: {recipe} has {role} of {found.name!r}, which cannot be grouped along the "
                'contraction; choose "mxfp8", "nvfp4", "mxfp4" or "fp8_block"'
            )


def check_inference_recipe_of_groups(recipe: Recipe) -> None:
    """TypeError or ValueError unless rows in groups can be multiplied by quantized stacks so."""
    check_inference_recipe(recipe)
    if "fprop" in recipe.high_precision:
        raise ValueError(
            f"recipe: {recipe} leaves fprop in high precision; pass activations='bfloat16' for "
            "quantized weights alone"
        )
    if recipe.weight_only:
        return
    if recipe.operand("activations").rows != PLAIN:
        raise ValueError(
            f"recipe: {recipe} does more than round activations of fprop to nearest, which experts "
            "do not know yet; give them a recipe of their own: overrides={'*.experts': "
            f"blockscale.Recipe({get_format(recipe.format).name!r})}}"
        )
    found = recipe.format_of("activations")
    if found.block[0] > 1:
        raise ValueError(
            f"recipe: {recipe} has activations of {found.name!r}, whose blocks of {found.block[0]} "
            'rows would be of several groups; choose "mxfp8", "nvfp4", "mxfp4" or "fp8_block", or '
            "activations='bfloat16'"
        )


def check_saved_format(name: str | None, dtype: torch.dtype = torch.bfloat16) -> None:
    """ValueError or TypeError unless what is kept for a backward, of ``dtype``, can be of this
    format."""
    if name is None:
        return
    choose("saved_format", name, formats)
    if dtype not in DTYPES:
        raise TypeError(f"saved_format: {dtype} cannot be quantized; leave it out, or cast x")


def check_plain(name: str, x: Tensor, recipe: Recipe | None) -> None:
    """TypeError unless it is a dense tensor that can be quantized, or multiplied as it is."""
    check_whole(name, x)
    if isinstance(x, ScaledTensor):
        raise TypeError(f"{name}: is a ScaledTensor; pass the high-precision tensor")
    if recipe is not None or x.dtype != torch.float64:
        check_dtype(name, x)


def check_grouped(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, recipe: Recipe | None
) -> None:
    """Raise unless these are operands of ``grouped_linear``."""
    check_recipe_of_groups(recipe)
    for name, each in (("x", x), ("weight", weight)):
        check_plain(name, each, recipe)
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x, weight: got {tuple(x.shape)} and {tuple(weight.shape)}; expected (M, K) and "
            "(groups, N, K)"
        )
    _check_biases(recipe, tuple(weight.shape[:2]), bias=bias)
    _check_alike(x, weight=weight, bias=bias)
    refuse_tangents("layers of groups have", x, weight, bias)
    check_offsets(offsets, len(x), x.device)
    _check_count("offsets", offsets, len(weight))


def check_experts(
    x: Tensor,
    weights: Tensor | None,
    routing: Routing | Tensor,
    held: ExpertParameters,
    recipe: Recipe | None,
    transposed: bool,
    interleaved: bool = False,
    ranks: int = 1,
) -> None:
    """Raise unless these are operands of ``experts``, which so many ``ranks`` share evenly."""
    check_recipe_of_groups(recipe)
    for name, each in _stacks(held).items():
        if isinstance(each, ScaledTensor):
            raise TypeError(
                f"{name}: is a ScaledTensor; call blockscale.nn.quantized_experts (of a model: "
                "blockscale.quantize_), or pass the high-precision stack"
            )
        check_plain(name, each, recipe)
        _check_rows(name, each, recipe)
    if held.gate is not None and held.gate.dtype != held.up.dtype:
        raise TypeError(f"gate: got {held.gate.dtype}, up has {held.up.dtype}; cast one of them")
    _check_all(x, weights, routing, held, recipe, transposed, interleaved, ranks)


def check_held_experts(
    x: Tensor,
    weights: Tensor | None,
    routing: Routing | Tensor,
    held: ExpertParameters,
    recipe: Recipe,
    transposed: bool,
    interleaved: bool = False,
) -> None:
    """Raise unless these are operands of ``quantized_experts``."""
    check_inference_recipe_of_groups(recipe)
    stacks = _stacks(held)
    others = x, weights, held.up_bias, held.down_bias
    check_called(stacks, recipe, others, "blockscale.nn.experts")
    axis = -2 if transposed else -1
    for name, each in stacks.items():
        if each.dim() != 3 or each.axis != axis or each.offsets is not None:
            raise ValueError(
                f"{name}: got {each}; expected a stack of matrices that are blocked along axis "
                f"{axis}, without groups"
            )
    _check_all(x, weights, routing, held, recipe, transposed, interleaved)


def _stacks(held: ExpertParameters) -> dict[str, Any]:
    """What experts multiply by, by name."""
    stacks = {"up": held.up, "down": held.down}
    return stacks if held.gate is None else {**stacks, "gate": held.gate}


def _check_all(
    x: Tensor,
    weights: Tensor | None,
    routing: Routing | Tensor,
    held: ExpertParameters,
    recipe: Recipe | None,
    transposed: bool,
    interleaved: bool,
    ranks: int = 1,
) -> None:
    """Raise unless experts, whose stacks are known to be some, can be called so."""
    if held.gate is not None and interleaved:
        raise ValueError(
            "activation: has interleaved=True, and gate is a stack of its own; pass it with "
            "interleaved=False"
        )
    _check_held(x, held, recipe, transposed)
    if isinstance(routing, Tensor):
        if weights is not None:
            raise ValueError(
                "weights: are given beside offsets, whose rows have results of their own; pass "
                "None, or blockscale.route(...) as routing"
            )
        check_offsets(routing, len(x), x.device)
        _check_count("routing", routing, len(held.up))
    else:
        _check_routing(x, weights, routing, ranks * len(held.up))
    plain = [each for each in held if not isinstance(each, ScaledTensor)]
    refuse_tangents("layers of groups have", x, weights, *plain)


def _check_held(x: Tensor, held: ExpertParameters, recipe: Recipe | None, transposed: bool) -> None:
    up, down, up_bias, down_bias, gate = held
    check_plain("x", x, recipe)
    halves = 2 if gate is None else 1
    if up.dim() != 3 or x.dim() != 2:
        raise _misfit(x, up, halves, transposed)
    count, rows, columns = _turned(up.shape, transposed)
    if x.shape[1] != columns or rows % halves:
        raise _misfit(x, up, halves, transposed)
    if gate is not None and (gate.shape != up.shape or transposed):
        raise ValueError(
            f"gate: has shape {tuple(gate.shape)}; expected that of up, {tuple(up.shape)}, and "
            "transposed=False"
        )
    wanted = count, columns, rows // halves
    if down.shape != _turned(wanted, transposed):
        want = _turned(wanted, transposed)
        raise ValueError(f"down: has shape {tuple(down.shape)}; expected {want}, as up's")
    _check_biases(recipe, (count, 2 * wanted[2]), up_bias=up_bias)
    _check_biases(recipe, wanted[:2], down_bias=down_bias)
    _check_alike(x, up=up, down=down, up_bias=up_bias, down_bias=down_bias, gate=gate)


def _turned(shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    """Of stacks as they are, that of (experts, N, K), or the other way round."""
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else tuple(shape)


def _misfit(x: Tensor, up: Tensor, halves: int, transposed: bool) -> ValueError:
    """Made where it is raised: a compiler traces no text of sizes that change."""
    sizes = ["2 * I" if halves == 2 else "I", "H"]
    wanted = ", ".join(reversed(sizes) if transposed else sizes)
    return ValueError(
        f"up: has shape {tuple(up.shape)}, x {tuple(x.shape)}; expected (experts, {wanted}) and "
        "(tokens, H)"
    )


def _check_rows(name: str, weight: Tensor, recipe: Recipe | None) -> None:
    """ValueError of a stack that quantizers would not read."""
    if torch.compiler.is_compiling() or recipe is None:
        return
    if weight.stride(-1) != 1 and weight.shape[-1] != 1:
        raise ValueError(
            f"{name}: has strides {weight.stride()}, its rows do not lie together; pass what it is "
            "the transpose of, with transposed=True, or call .contiguous()"
        )


def _check_routing(x: Tensor, weights: Tensor | None, routing: Routing, num_experts: int) -> None:
    if not isinstance(routing, Routing):
        raise TypeError(f"routing: got {type(routing).__name__}; expected blockscale.route(...)")
    slots = routing.slots
    if weights is None:
        raise TypeError("weights: got None; expected one for each pair of the routing")
    check_is_tensor("weights", weights)
    if weights.shape != slots.shape or not weights.is_floating_point():
        raise ValueError(
            f"weights: got {weights.dtype} {tuple(weights.shape)}; expected floating numbers "
            f"{tuple(slots.shape)}, one for each pair of the routing"
        )
    if len(slots) != len(x):
        raise ValueError(
            f"routing: is of {len(slots)} tokens, x has {len(x)}; route the experts of these"
        )
    pairs, count = routing.pairs, slots.numel()
    if slots.dtype not in INTEGERS:
        raise TypeError(f"routing: has slots {slots.dtype}; expected int64 or int32")
    if pairs.dtype not in INTEGERS or tuple(pairs.shape) != (count,):
        raise ValueError(
            f"routing: has pairs {pairs.dtype} {tuple(pairs.shape)}, slots of {count}; expected "
            f"integers ({count},), as blockscale.route(...) gives them"
        )
    tokens = routing.tokens
    if tokens.dtype != torch.int32 or tokens.shape != pairs.shape:
        raise ValueError(
            f"routing: has tokens {tokens.dtype} {tuple(tokens.shape)}; expected int32 ({count},), "
            "as blockscale.route(...) gives them"
        )
    _check_alike(x, weights=weights, routing=slots, pairs=pairs, tokens=tokens)
    check_offsets(routing.offsets, count, x.device)
    if is_looked_at(pairs) and not torch.equal(pairs // max(slots.shape[1], 1), tokens):
        raise ValueError(
            "routing: has tokens that are not those of its pairs, pairs // top_k; change both alike"
        )
    _check_count("routing", routing.offsets, num_experts)


def _check_alike(x: Tensor, **others: Tensor | None) -> None:
    """ValueError unless all are on the device of ``x``."""
    for name, each in others.items():
        if each is not None and each.device != x.device:
            raise ValueError(f"{name}: is on {each.device}, x on {x.device}; move it there")


def _check_biases(recipe: Recipe | None, wanted: tuple[int, ...], **given: Tensor | None) -> None:
    """Raise unless they are vectors of each group."""
    for name, bias in given.items():
        if bias is None:
            continue
        check_plain(name, bias, recipe)
        if tuple(bias.shape) != wanted:
            raise ValueError(f"{name}: has shape {tuple(bias.shape)}; expected {wanted}, or None")


def _check_count(name: str, offsets: Tensor, groups: int) -> None:
    if len(offsets) != groups:
        raise ValueError(
            f"{name}: is of {len(offsets)} groups, the weights of {groups}; pass as many"
        )
