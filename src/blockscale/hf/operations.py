"""What transformers' loader does with tensors on their way from files to parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
)

from ..tensor import ScaledTensor
from .plan import ALONE, Plan, Source

__all__ = ["Assemble", "Parts", "Quantize", "reading_parts"]


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
        if ALONE in planned:
            (source,) = planned[ALONE]
            read = {part: input_dict[_role_of(part)][0] for part in source.description.parts}
            return {full_layer_name: [self._assembled(source, read)]}
        # lists of parts have the order of what is planned
        left = {pattern: iter(found) for pattern, found in input_dict.items()}
        out: dict[str, list[Tensor]] = {}
        for pattern, sources in planned.items():
            for source in sources:
                names = source.description.names(pattern)
                read = {part: next(left[each]) for part, each in names.items()}
                out.setdefault(pattern, []).append(self._assembled(source, read))
        for pattern, found in left.items():
            if next(found, None) is not None:
                raise ValueError(
                    f"{full_layer_name} is made of quantized tensors and of others ({pattern}), "
                    "and one parameter has one format; make the folder anew by `blockscale "
                    "convert-checkpoint --to bf16` and `blockscale quantize`"
                )
        return out

    def _assembled(self, source: Source, read: Mapping[str, Tensor]) -> ScaledTensor:
        """The tensor of its parts."""
        name, description, _ = source
        if "input_scale" in read:
            place = description.storage.places["input_scale"]
            value = place.decode(read["input_scale"], torch.float32)
            self.input_scales[name] = value.reshape(()).item()
        parts = {stored: read[part] for part, stored in description.names(name).items()}
        q = description.assemble(name, parts.__getitem__)
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


def _role_of(part: str) -> str:
    """The pattern that a part has which needs no converter of the model."""
    return f"blockscale_{part}"


class Parts(WeightConverter):
    """Brings the parts of a tensor together, by their names alone.

    ``known``: name of a part, after renaming -> that of the tensor, and the role of the part.
    """

    __slots__ = ("known",)

    def __init__(self, known: Mapping[str, tuple[str, str]], operation: Assemble) -> None:
        super().__init__(sorted({role for _, role in known.values()}), "weight", [operation])
        self.known = known

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return self.known.get(source_key, (source_key, None))

    def __deepcopy__(self, memo: dict[int, Any]) -> Parts:
        operation = self.operations[0]
        assert isinstance(operation, Assemble)
        return Parts(self.known, copy.deepcopy(operation, memo))


def reading_parts(conversions: Sequence[Any], plan: Plan, assemble: Assemble) -> list[Any]:
    """The model's conversions, which then read parts of quantized tensors and stack these."""
    known: dict[str, tuple[str, str]] = {}
    stacked: dict[str, set[str]] = {}
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    for sources in plan.values():
        for pattern, found in sources.items():
            for name, description, renamed in found:
                if pattern != ALONE:
                    stacked.setdefault(pattern, set()).update(description.names(pattern).values())
                    continue
                for part, stored in description.names(name).items():
                    known[apply_renamings(stored, renamings)] = renamed, _role_of(part)
    read = [_stacking_parts(each, stacked, assemble) for each in conversions]
    # before the model's own, whose patterns may have such names in them
    return [Parts(known, assemble), *read] if known else read


def _stacking_parts(converter: Any, stacked: Mapping[str, set[str]], assemble: Assemble) -> Any:
    """A converter that makes quantized tensors of parts first, if they are among what it takes."""
    if not isinstance(converter, WeightConverter):
        return converter
    sources = converter._original_source_patterns
    parts = set().union(*(stacked.get(each, ()) for each in converter.source_patterns))
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
