"""Layers that hold weights quantized: how these are checked, placed, moved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.operand_layout import operand_layout
from ..stored import is_per_matrix
from ..tensor import ScaledTensor
from ..watching import has_tangent, is_transformed
from .recipe import Recipe
from .unscripted import Unscripted

__all__ = ["HoldsQuantized", "check_called", "check_held", "own_global_scale"]


class HoldsQuantized(Unscripted, torch.nn.Module):
    """What layers with quantized weights do when they are moved and loaded."""

    recipe: Recipe

    @staticmethod
    def held(module: Any) -> Mapping[str, int]:
        """The parameters that such a layer made of ``module`` holds quantized, and the axis that
        each is blocked along."""
        return {"weight": -1}

    def extra_repr(self) -> str:
        held = [f"{name}={getattr(self, name).format_name}" for name in self.held(self)]
        return ", ".join(filter(None, (super().extra_repr(), *held, f"recipe={self.recipe}")))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._place()
        return self

    def _begin_holding(self) -> None:
        """What a layer needs that became one of these, with its weights and recipe."""
        self._place()

    def _place(self) -> None:
        """Weights as the kernels of their device read them."""
        for name in self.held(self):
            weight = getattr(self, name)
            if isinstance(weight, ScaledTensor):
                placed = _placed(weight)
                if placed is not None:
                    new = torch.nn.Parameter(placed, requires_grad=False)
                    torch.utils.swap_tensors(weight, new)  # other layers may hold it, too

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        assigned = local_metadata.get("assign_to_params_buffers", False)
        fit: dict[str, Any] = {}
        for own in self.held(self):
            name = f"{prefix}{own}"
            if name not in state_dict:
                continue
            given, held = state_dict[name], getattr(self, own)
            why = _mismatch(given, held)
            if why:
                error_msgs.append(f"{name}: {why}")
                return
            given = given.to_layout(held.layout_name)
            # only what dequantize() returns
            fit[name] = given if assigned else given._with(dtype=held.dtype)
        super()._load_from_state_dict(
            {**state_dict, **fit},
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        self._place()


def _placed(weight: ScaledTensor) -> ScaledTensor | None:
    """A matrix whose scales lie in the layout of its device, or a stack whose contraction is
    contiguous, of data and scales, and which has a global scale for each of its matrices: any may
    be loaded into it then. None: it lies so."""
    if weight.dim() == 2:
        layout = operand_layout(weight.format_name, weight.device).layout
        return None if weight.layout_name == layout else weight.to_layout(layout)
    parts, changes = (weight.qdata, weight.compact_bytes()), dict[str, Any]()
    if weight.axis == -2:
        parts = parts[0].mT, parts[1].mT
    if not all(part.is_contiguous() for part in parts):
        data, scale = (part.contiguous() for part in parts)
        if weight.axis == -2:
            data, scale = data.mT, scale.mT
        changes = {"data": data, "scale": scale}
    scalar = weight.global_scale
    if scalar is not None and not is_per_matrix(scalar, weight.shape) and len(weight) > 1:
        changes["global_scale"] = scalar.reshape(()).repeat(len(weight))
    return weight._with(**changes) if changes else None


#: `blockscale quantize` makes blocks along the last dimension, and not of every weight.
_ANEW = (
    "load the high-precision weights, call blockscale.quantize_(model, recipe), and "
    "blockscale.checkpoint.save_file writes a file that this layer reads"
)

#: Of a stack that is blocked along the other axis: no shape of squares tells what it is.
_TURNED = "; if the file has the transposes, as gpt-oss's folders do, pass its .mT: no byte changes"


def _mismatch(given: Any, held: ScaledTensor) -> str:
    """Why a weight from a state_dict cannot take the place of the one held; "" if it can."""
    if not isinstance(given, ScaledTensor):
        kind = f"a plain {given.dtype} tensor" if isinstance(given, Tensor) else type(given)
        return (
            f"got {kind}, the layer holds its weight in {held.format_name}; load high-precision "
            "weights before blockscale.quantize_(model, recipe), and read quantized files by "
            "blockscale.checkpoint.load_file"
        )
    got, have = (f"{q.format_name} {tuple(q.shape)} along {q.axis}" for q in (given, held))
    if given.shape == held.shape and given.axis != held.axis and given.offsets is None:
        return (
            f"got {got}, the layer holds {have}: the file's blocks run along the other dimension, "
            f"which no recipe changes; {_ANEW}{_TURNED * (given.dim() > 2)}"
        )
    if given.dim() > 2 and given.axis != held.axis and given.mT.shape == held.shape:
        return f"got {got}, the layer holds {have}{_TURNED}"
    if got != have or given.offsets is not None:
        return (
            f"got {got}{' in groups' * (given.offsets is not None)}, the layer holds {have}; "
            "choose the recipe that the file was quantized with, or quantize anew from high "
            "precision"
        )
    return ""


def own_global_scale(weight: Any) -> None:
    """Copy it: what is loaded into a layer must not reach others that were quantized with it."""
    if weight.global_scale is not None:
        weight.global_scale = weight.global_scale.clone()


def check_held(weight: Any, recipe: Recipe, axis: int, dims: int = 2) -> str:
    """Why a layer cannot multiply by ``weight`` as ``recipe`` says; "" if it can."""
    wanted = recipe.format_of("weights").name
    if not isinstance(weight, ScaledTensor):
        return f"got {type(weight).__name__}; expected a blockscale.ScaledTensor"
    if weight.dim() != dims or weight.axis != axis or weight.offsets is not None:
        what = "one matrix that is" if dims == 2 else "a stack of matrices that are"
        remedy = _ANEW + _TURNED * (dims > 2)
        return f"got {weight}; expected {what} blocked along axis {axis}, without groups: {remedy}"
    if weight.format_name != wanted:
        return (
            f"is in {weight.format_name}, the recipe wants {wanted}; pass "
            f"Recipe(..., weights={weight.format_name!r}), and filter_fn where formats are mixed"
        )
    return ""


def check_called(
    weights: Mapping[str, Any], recipe: Recipe, others: Sequence[Tensor | None], plain: str
) -> None:
    """Raise unless products by these weights can be made now; ``plain``: what multiplies by
    high-precision ones."""
    for name, weight in weights.items():
        if not isinstance(weight, ScaledTensor):
            kind = f"plain {weight.dtype} tensor" if isinstance(weight, Tensor) else type(weight)
            raise TypeError(
                f"{name}: got a {kind}; expected a ScaledTensor: call blockscale.quantize, or "
                f"{plain} for a high-precision weight"
            )
        if weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: is quantized and has no gradient; call {name}.requires_grad_(False), or "
                "train a model with high-precision weights by blockscale.convert"
            )
    if is_transformed() or has_tangent(*others):
        raise NotImplementedError(
            "torch.func and forward-mode differentiation do not reach layers that hold quantized "
            "weights; transform the model with high-precision weights (blockscale.convert)"
        )
    _check_export(weights, recipe)


def _check_export(weights: Mapping[str, Any], recipe: Recipe) -> None:
    """torch.export watches the attributes of all tensors of the class that parameters have, and
    knows none of those that are made on the way."""
    # the flag itself: torch.compile of torch 2.11 takes is_exporting() to be True
    if recipe.weight_only or not torch.compiler._is_exporting_flag:
        return
    held = any(isinstance(weight, torch.nn.Parameter) for weight in weights.values())
    if held or torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(
            "torch.export cannot follow quantized activations beside weights that are parameters; "
            "call torch._functorch._aot_autograd.subclass_parametrization."
            "unwrap_tensor_subclass_parameters(copy.deepcopy(model)) first, and export what it "
            "returns with strict=False"
        )
