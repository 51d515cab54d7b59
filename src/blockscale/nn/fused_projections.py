"""Layers that read one input made one product: q, k and v, or gate and up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fused_names import FUSED
from ..tensor import ScaledTensor
from .class_change import become
from .quantized import QuantizedLinear, quantized_linear
from .recipe import Recipe
from .survey import FilterFn, check_filter, check_model

__all__ = ["FusedPart", "FusedProjections", "fuse_projections"]


def fuse_projections(model: torch.nn.Module, filter_fn: FilterFn | None = None) -> torch.nn.Module:
    """Multiply by q, k and v at once, and by gate and up, in place: a decoding step waits less for
    kernels to begin.

    >>> names = "q_proj", "k_proj", "v_proj"
    >>> attention = torch.nn.ModuleDict({name: torch.nn.Linear(512, 256) for name in names})
    >>> bs.quantize_(attention, bs.Recipe("mxfp8", activations="bfloat16"))
    >>> bs.nn.fuse_projections(attention)

    Of neighbours in one module, by the names that servers fuse, the first holds the weights of all
    and the others take what it made of the same tensor. One that is called with another tensor
    computes all again. The numbers are the same, but for the order in which a GPU adds up; so are
    names and values of ``state_dict``. Load weights, and add adapters, before.

    Args:
        filter_fn: called with the module that has the layers, and its name; False leaves them.

    Returns the model. Raises ValueError where nothing can be fused: layers have to hold their
    weights quantized (:func:`blockscale.quantize_`), by one recipe and with one global scale, which
    folders of `blockscale quantize` have.
    """
    check_model(model)
    check_filter(filter_fn)
    used = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    left, fused = dict[str, str](), 0
    for name, parent in list(model.named_modules()):
        for names in _groups(parent):
            layers = [parent._modules[each] for each in names]
            why = "it is refused by filter_fn" if filter_fn and not filter_fn(parent, name) else ""
            why = why or _why_not(layers, used)
            if why:
                left[f"{name}.{names[0]}".removeprefix(".")] = why
                continue
            _fuse(parent, names)
            fused += 1
    if not fused:
        found = "; ".join(f"{layer}: {why}" for layer, why in list(left.items())[:3])
        raise ValueError(
            f"model: no layers can be fused ({found or 'none has neighbours of such names'}); call "
            "blockscale.quantize_(model, recipe) before, of NVFP4 load a folder of `blockscale "
            "quantize`, whose q, k and v share a global scale"
        )
    return model


def _groups(parent: torch.nn.Module) -> Iterator[tuple[str, ...]]:
    for names in FUSED:
        if all(parent._modules.get(each) is not None for each in names):
            yield names


def _why_not(layers: list[Any], used: Counter[int]) -> str:
    """Why layers cannot be fused; "" if they can."""
    if not all(
        getattr(type(layer), "forward", None) is QuantizedLinear.forward for layer in layers
    ):
        return "not all hold a quantized weight"
    if any(used[id(layer)] > 1 or "forward" in layer.__dict__ for layer in layers):
        return "one is used elsewhere, too, or its forward was replaced"
    if len({(each.recipe, each.in_features, each.weight.device) for each in layers}) > 1:
        return "recipes, inputs or devices differ"
    if len({None if each.bias is None else each.bias.dtype for each in layers}) > 1:
        return "not all have a bias"
    scales = [(each.weight.global_scale, each.input_scale) for each in layers]
    numbers = {tuple(None if x is None else x.item() for x in pair) for pair in scales}
    return "global scales differ" if len(numbers) > 1 else ""


def _fuse(parent: torch.nn.Module, names: tuple[str, ...]) -> None:
    layers: list[Any] = [parent._modules[each] for each in names]
    first, *others = layers
    sizes = tuple(layer.out_features for layer in layers)
    weights = [layer.weight.detach().to_layout("compact") for layer in layers]
    first.weight = torch.nn.Parameter(torch.cat(weights), requires_grad=False)
    if first.bias is not None:
        first.bias = torch.nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]))
    become(first, FusedProjections)
    first.sizes, first.waiting = sizes, None
    first._place()
    for i, (name, layer) in enumerate(zip(names[1:], others, strict=True), 1):
        parent._modules[name] = FusedPart(first, i, layer.in_features, layer.out_features)


class _Waiting(NamedTuple):
    """What layers will be called for: the input, by itself, as it was, and what it gave each."""

    x: Tensor
    version: int
    parts: tuple[Tensor, ...]
    left: frozenset[int]


class FusedProjections(QuantizedLinear):
    """The first of several layers, with the weights of all; made by :func:`fuse_projections`."""

    sizes: tuple[int, ...]
    waiting: _Waiting | None

    def forward(self, x: Tensor) -> Tensor:
        return self.part(0, x)

    def part(self, i: int, x: Tensor) -> Tensor:
        """What layer ``i`` of them gives."""
        waiting, version = self.waiting, _version(x)
        known = waiting is not None and waiting.x is x and waiting.version == version
        if waiting is not None and known and i in waiting.left:
            left = waiting.left - {i}
            self.waiting = waiting._replace(left=left) if left else None
            return waiting.parts[i]
        scale = self.input_scale
        y = quantized_linear(x, self.weight, self.bias, recipe=self.recipe, input_scale=scale)
        parts = y.split(self.sizes, -1)
        self.waiting = _Waiting(x, version, parts, frozenset(range(len(parts))) - {i})
        return parts[i]

    def rows(self, i: int) -> tuple[ScaledTensor, Tensor | None]:
        """The weight of layer ``i``, and its bias."""
        begin = sum(self.sizes[:i])
        where = slice(begin, begin + self.sizes[i])
        bias = None if self.bias is None else self.bias[where]
        return self.weight.detach().to_layout("compact")[where], bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fused={self.sizes}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        _save(self, 0, destination, prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        _refuse(state_dict, prefix, others[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "waiting": None}


class FusedPart(torch.nn.Module):
    """One of the other layers, which has nothing of its own."""

    def __init__(self, first: FusedProjections, index: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.index = inputs, outputs, index
        self._first = (first,)  # which is no child: its parameters are not this one's

    @property
    def recipe(self) -> Recipe:
        return self._first[0].recipe

    @property
    def weight(self) -> ScaledTensor:
        weight: ScaledTensor = self._first[0].rows(self.index)[0]
        return weight

    def forward(self, x: Tensor) -> Tensor:
        return self._first[0].part(self.index, x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        _save(self._first[0], self.index, destination, prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        _refuse(state_dict, prefix, others[-1])


def _version(x: Tensor) -> int:
    """Changes where x is changed in place; of what nobody counts, 0."""
    if torch.compiler.is_compiling() or x.is_inference():
        return 0
    return x._version


def _save(first: FusedProjections, i: int, destination: Any, prefix: str) -> None:
    weight, bias = first.rows(i)
    destination[f"{prefix}weight"] = weight
    if bias is not None:
        destination[f"{prefix}bias"] = bias.detach()
    if first.input_scale is not None:
        destination[f"{prefix}input_scale"] = first.input_scale.detach()


def _refuse(state_dict: Any, prefix: str, errors: list[str]) -> None:
    if any(key.startswith(prefix) for key in state_dict):
        errors.append(
            f"{prefix}weight: the layer is fused with others; load the weights before "
            "blockscale.nn.fuse_projections(model)"
        )
