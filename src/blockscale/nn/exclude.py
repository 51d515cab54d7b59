"""Layers that are left alone unless filter_fn asks for them: heads, routers, adapters, ..."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from ..exclusions import ANYWHERE, LAST, WHOLE, gated_by, why_left_alone
from .parametrized import parameters_of, sources_of

__all__ = ["DEFAULT_EXCLUDE", "default_exclusions"]

#: What a layer is -> patterns of parts of its name (between dots, in lower case). Those of norms,
#: biases, scales, state matrices and embedding tables are of the last part only, those of the head
#: of a model of the whole name; a ``gate`` beside an ``up`` is no router. The same names are left
#: alone in files: :data:`blockscale.checkpoint.DEFAULT_EXCLUDE`.
DEFAULT_EXCLUDE: Mapping[str, tuple[str, ...]] = MappingProxyType({**ANYWHERE, **LAST, **WHOLE})

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def default_exclusions(model: torch.nn.Module) -> Callable[[torch.nn.Module, str], str]:
    """A function that says of a module, given its name, why it is left alone; "" if it is not."""
    heads: set[torch.nn.Module] = set()
    looked_up: set[int] = set()
    shapes: dict[str, torch.Size] = {}
    for name, module in model.named_modules():
        sources = sources_of(module, "weight")
        if len(sources) == 1 and not torch.nn.parameter.is_lazy(sources[0]):
            shapes[f"{name}.weight"] = sources[0].shape
    names = gated_by(shapes, shapes.get)
    for module in model.modules():
        if isinstance(module, _EMBEDDINGS):
            looked_up.update(map(id, parameters_of(module)))
        head = getattr(module, "get_output_embeddings", None)
        if callable(head):
            try:
                heads.add(head())
            except (NotImplementedError, AttributeError):  # models without a head, in transformers
                continue

    def why(module: torch.nn.Module, name: str) -> str:
        if module in heads:
            return "left alone by default: get_output_embeddings() returns it"
        if any(id(parameter) in looked_up for parameter in parameters_of(module)):
            return "left alone by default: its weight is that of an embedding"
        return why_left_alone(f"{name}.weight", names)

    return why
