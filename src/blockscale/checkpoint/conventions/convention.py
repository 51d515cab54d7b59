"""What a convention is: where parts of quantized tensors lie, and what a configuration says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..storage import Storage
from .caveats import Made, no_caveats

__all__ = [
    "AS_THEY_ARE",
    "CONFIG",
    "KV_CACHE_KEYS",
    "Convention",
    "Pair",
    "Scheme",
    "activations_of",
    "model_config",
]

Json = Mapping[str, Any]

#: The file of a folder that says what the model is.
CONFIG = "config.json"
#: Keys of a ``quantization_config`` that say how keys and values are quantized.
KV_CACHE_KEYS = "kv_cache_scheme", "kv_cache_quant_algo"
#: Activations that are not quantized.
AS_THEY_ARE = "bfloat16"
#: Of formats: of weights, and of activations.
Pair = tuple[str, str]


def model_config(quantization: Json, **others: Any) -> dict[str, Json]:
    """What is put into :data:`CONFIG`: its ``quantization_config``, and ``others`` beside that.

    >>> model_config({"quant_method": "mxfp8"})
    {'config.json': {'quantization_config': {'quant_method': 'mxfp8'}}}
    """
    return {CONFIG: {"quantization_config": quantization, **others}}


@dataclass(frozen=True)
class Scheme:
    """What is quantized in a checkpoint, as its configuration says it.

    Attributes:
        layers: format -> names of the layers that have it.
        left_alone: names of layers with matrices that are not quantized.
        weight_only: products are of activations in high precision.
    """

    layers: Mapping[str, tuple[str, ...]]
    left_alone: tuple[str, ...] = ()
    weight_only: bool = False

    def only_format(self, title: str) -> str:
        """The format of all layers. ValueError where they have several."""
        if len(self.layers) > 1:
            raise ValueError(
                f"to: {title} has one format for a checkpoint, and this has "
                f"{', '.join(self.layers)}; choose one by format, or another convention"
            )
        return next(iter(self.layers))


def _never(quantization: Json) -> bool:
    return False


@dataclass(frozen=True)
class Convention:
    """How one family of programs writes quantized checkpoints.

    Attributes:
        name: as users choose it.
        title: whose it is.
        storages: how tensors of each format lie in files.
        also_read: more ways in which tensors lie that are not written.
        methods: values of ``quant_method`` in a configuration.
        configure: what files of a folder say of a scheme: name of a file -> what is put into it.
        is_weight_only: whether a ``quantization_config`` says that activations are not quantized.
        activations: what a ``quantization_config`` says: pairs of a format of weights and that of
            activations, :data:`AS_THEY_ARE` for none; ValueError for a scheme that is not known.
        fuses: servers that read it make one of several weights, which share a global scale, and
            need an ``input_scale``.
        weight_only: formats that it has with activations in high precision, too.
        describes_itself: files say in their headers what is quantized.
        stacks: it has tensors of several matrices; others have a name for each matrix.
        transposed_stacks: transformers' parameters are (experts, in, out), and these the others.
        model_types: the only ones that it is for; empty: for all.
        readers: programs of others that read such folders.
        caveats: what a reader gets wrong of weights, for the summary.
    """

    name: str
    title: str
    storages: Mapping[str, Storage]
    methods: tuple[str, ...]
    configure: Callable[[Scheme], Mapping[str, Json]]
    activations: Callable[[Json], Iterator[Pair]]
    is_weight_only: Callable[[Json], bool] = _never
    fuses: bool = False
    weight_only: tuple[str, ...] = ()
    also_read: tuple[Storage, ...] = ()
    describes_itself: bool = False
    stacks: bool = False
    transposed_stacks: bool = False
    model_types: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    caveats: Callable[[Made], list[str]] = no_caveats

    def check_model(self, config: Json, argument: str) -> None:
        """ValueError unless it can be written for such a model."""
        model = config.get("model_type")
        if self.model_types and model not in self.model_types:
            raise ValueError(
                f"{argument}: {self.title} is for models of type {', '.join(self.model_types)}, "
                f"and this config.json has {model!r:.40}; choose another convention"
            )


def activations_of(quantization: Json, convention: Convention) -> dict[str, str]:
    """Format of weights -> that of activations, :data:`AS_THEY_ARE` where they are not quantized.

    >>> activations_of({"quant_algo": "W4A16_NVFP4"}, CONVENTIONS["modelopt"])
    {'nvfp4': 'bfloat16'}

    Raises ValueError for a scheme that is not known, or not told.
    """
    found: dict[str, str] = {}
    for weights, activations in convention.activations(quantization):
        if found.setdefault(weights, activations) != activations:
            raise ValueError(
                f"quantization: activations of some {weights} weights are {found[weights]}, of "
                f"others {activations}; blockscale has one scheme for a format"
            )
    if not found:
        raise ValueError(
            "quantization: its config.json says of no layer how it is quantized; fetch the "
            "checkpoint again"
        )
    alone = convention.is_weight_only(quantization)
    return dict.fromkeys(found, AS_THEY_ARE) if alone else found
