"""Which parameters of a model the quantized tensors of a folder become."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from ..checkpoint.storage import Description, part_names

__all__ = [
    "ALONE",
    "Plan",
    "Source",
    "last_of",
    "module_of",
    "parameters_of",
    "plan_of",
]

#: Of a parameter that is one tensor of the files, without a converter of the model.
ALONE = ""


class Source(NamedTuple):
    """A quantized tensor of the files, and its name after transformers' renaming."""

    name: str
    description: Description
    renamed: str


#: Parameter -> pattern of names that it is made of -> tensors, in the order of the loader.
Plan = dict[str, dict[str, list[Source]]]


def plan_of(
    model: Any,
    descriptions: Mapping[str, Description],
    stored: Iterable[str],
    conversions: Sequence[Any],
) -> Plan:
    """Follow quantized tensors of files, which have all of ``stored``, to parameters.

    Those that the model does not have are left out: transformers names them. Raises ValueError
    where it would make parameters anew in their place.
    """
    plan, lost, names = Plan(), list[str](), _Names(model, conversions)
    for name in sorted(descriptions, key=dot_natural_key):
        found = names.follow(name)
        if found is None:
            lost.append(name)
            continue
        source = Source(name, descriptions[name], found.renamed)
        for parameter in found.parameters:  # several where transformers cuts it
            plan.setdefault(parameter, {}).setdefault(found.pattern, []).append(source)
    if lost:
        parts = part_names(descriptions)
        read = {*plan, *parameters_of(model, set(stored) - parts, conversions)}
        _check_lost(model, lost, {name for name, _ in model.named_parameters()} - read)
    return plan


def _check_lost(model: Any, lost: Sequence[str], missing: Collection[str]) -> None:
    """ValueError where a quantized tensor lies inside of a module whose own parameter is missing:
    experts by name where a model has stacks."""
    modules = {_in_block(module_of(name)): name for name in missing}
    for name in lost:
        place = _in_block(name)
        for module, parameter in modules.items():
            if module and place.startswith(f"{module}."):
                raise ValueError(
                    f"model: {name} is quantized in the folder, and {type(model).__name__} has no "
                    f"such weight, but {parameter}, which transformers would make anew; write the "
                    "values of the folder by `blockscale convert-checkpoint --to bf16`"
                )


def _in_block(name: str) -> str:
    """A name from the number of its block on; "" outside of blocks."""
    found = re.search(r"\w+\.\d+\..+", name)
    return found[0] if found else ""


def parameters_of(model: Any, names: Iterable[str], conversions: Sequence[Any]) -> Iterator[str]:
    """The parameters that tensors of files become."""
    follow = _Names(model, conversions).follow
    for name in names:
        found = follow(name)
        yield from found.parameters if found is not None else ()


class _Followed(NamedTuple):
    """Parameters that a tensor becomes, the pattern of the converter, and its name before that."""

    parameters: tuple[str, ...]
    pattern: str
    renamed: str


class _Names:
    """Follows names of files to parameters, by transformers' own rules.

    ``conversions`` are those of the model, which may stack, join and cut tensors.
    """

    def __init__(self, model: Any, conversions: Sequence[Any]) -> None:
        self.renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        self.converters = [each for each in conversions if isinstance(each, WeightConverter)]
        self.prefix, self.state = model.base_model_prefix, model.state_dict()

    def follow(self, name: str) -> _Followed | None:
        """None where the model has no such parameter."""
        rules: Any = (self.renamings, self.converters), ([], [])
        for renamings, converters in rules:
            parameter, pattern = rename_source_key(
                name, renamings, converters, self.prefix, self.state
            )
            if parameter in self.state:
                targets = [parameter]
                for each in converters:
                    if pattern in each.source_patterns:
                        first, *more = each.target_patterns
                        targets += [parameter.replace(first, other, 1) for other in more]
                renamed = apply_renamings(name, renamings)
                return _Followed(tuple(targets), pattern or ALONE, renamed)
        return None


def last_of(parameter: str) -> str:
    return parameter.rpartition(".")[2]


def module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]
