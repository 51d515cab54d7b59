"""What transformers' loader does with tensors on their way from files to parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..tensor import ScaledTensor
from .plan import Plan, Source

__all__ = ["Assemble", "Quantize", "reading_parts"]


class Assemble(ConversionOps):
    """Make quantized tensors of their parts, first of all: what follows stacks and joins them.

    ``input_scales`` gets those of files, by the names of weights there. ``transposed_stacks``: as
    of the convention.
    """

    supports_many_to_many = True

    def __init__(self, plan: Plan, input_scales: dict[str, float], transposed_stacks: bool) -> None:
        self.plan, self.input_scales = plan, input_scales
        self.transposed_stacks = transposed_stacks
        #: That of the parameter, where it turns out not to be quantized.
        self.dtype: torch.dtype | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Assemble:
        """The loader copies each converter, for each parameter."""
        return Assemble(self.plan, self.input_scales, self.transposed_stacks)

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **others: Any,
    ) -> dict[str, list[Tensor]]:
        full_layer_name = others["full_layer_name"]
        planned = self.plan.get(full_layer_name)
        if planned is None:
            return {name: [self._cast(t) for t in found] for name, found in input_dict.items()}
        # lists of parts have the order of what is planned
        parts = {pattern: iter(found) for pattern, found in input_dict.items()}
        out: dict[str, list[Tensor]] = {
            pattern: [self._assembled(pattern, source, parts) for source in sources]
            for pattern, sources in planned.items()
        }
        for pattern, found in parts.items():
            if next(found, None) is not None:
                raise ValueError(
                    f"{full_layer_name} is made of quantized tensors and of others ({pattern}), "
                    "and one parameter has one format; make the folder anew by `blockscale "
                    "convert-checkpoint --to bf16` and `blockscale quantize`"
                )
        return out

    def _assembled(
        self, pattern: str, source: Source, parts: dict[str, Iterator[Tensor]]
    ) -> ScaledTensor:
        name, description = source
        patterns, read = description.names(pattern), dict[str, Tensor]()
        for part, stored in description.names(name).items():
            read[stored] = next(parts[patterns[part]])
            if part == "input_scale":
                place = description.storage.places[part]
                value = place.decode(read[stored], torch.float32)
                self.input_scales[name] = value.reshape(()).item()
        q = description.assemble(name, read.__getitem__)
        return q.mT if self.transposed_stacks and q.dim() > 2 else q

    def _cast(self, plain: Tensor) -> Tensor:
        return plain.to(self.dtype) if plain.is_floating_point() else plain


class Quantize(ConversionOps):
    """Quantize parameters on their way, so that few at a time are there in high precision.

    ``group``: names of all parameters that share a global scale with one; those of a group are
    made together, when the last of them has come. ``make`` quantizes such a group.
    """

    def __init__(
        self,
        group: Callable[[str], tuple[str, ...]],
        make: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    ) -> None:
        self.group, self.make = group, make
        self.waiting: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Quantize:
        return self

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **others: Any,
    ) -> dict[str, list[Tensor]]:
        out: dict[str, list[Tensor]] = {}
        for name, given in input_dict.items():
            self.waiting[name] = given[0] if isinstance(given, list) else given
            group = self.group(name)
            if all(each in self.waiting for each in group):
                made = self.make({each: self.waiting.pop(each) for each in group})
                out |= {each: [q] for each, q in made.items()}
        return out


def reading_parts(converter: Any, stored: Mapping[str, set[str]], assemble: Assemble) -> Any:
    """A converter of the model that reads parts, if quantized tensors are among what it stacks."""
    if not isinstance(converter, WeightConverter):
        return converter
    sources = converter._original_source_patterns
    parts = set().union(*(stored.get(each, ()) for each in converter.source_patterns))
    if not parts:
        return converter
    if sources != converter.source_patterns:
        raise ValueError(
            f"model: transformers makes parameters of {sources} in a way that does not reach parts "
            "of quantized tensors; write their values by `blockscale convert-checkpoint --to bf16`"
        )
    names = [*sources, *sorted(parts - set(sources))]
    operations = [assemble, *converter.operations]
    return converter.copy(names, list(converter._original_target_patterns), operations=operations)
