"""Which tensors of a checkpoint are quantized, whoever wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from .conventions import CONVENTIONS, Convention
from .files import Files
from .header import Stored, show
from .ours import read_descriptions
from .storage import Description, Storage

__all__ = ["convention_of", "descriptions_of"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: Names of what belongs to a quantized weight in some convention, and dtypes of codes.
_PARTS = re.compile(
    r"(^|[._])weight_(packed|scale|scale_inv|scale_2|global_scale|zero_point|shape)$"
)
_CODES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8")


def convention_of(config: Mapping[str, Any], argument: str) -> Convention | None:
    """The convention that a model's configuration names; None where it is not quantized.

    Raises ValueError for one that is not known.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    model = config.get("model_type")
    for each in CONVENTIONS.values():
        if method in each.methods and (not each.model_types or model in each.model_types):
            return each
    known = sorted({method for each in CONVENTIONS.values() for method in each.methods})
    raise ValueError(
        f"{argument}: its config.json has quant_method {method!r:.40}; known are {', '.join(known)}"
    )


def descriptions_of(
    files: Files, config: Mapping[str, Any], argument: str
) -> dict[str, Description]:
    """All quantized tensors of ``files``, by name: as headers say, or else by convention.

    ``config`` is the model's configuration. Raises ValueError where parts are missing, or of no
    format of the convention.
    """
    found: dict[str, Description] = {}
    for file in files.names:
        try:
            found |= read_descriptions(files.file(file).header)
        except ValueError as error:
            raise ValueError(f"{argument}: {files.folder / file}: {error}; save it again") from None
    convention = convention_of(config, argument)
    if convention is None or convention.describes_itself:
        return found
    claimed = {part for name, each in found.items() for part in each.names(name).values()}
    dtype = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)
    everywhere, storages = (
        _Everywhere(files),
        (*convention.storages.values(), *convention.also_read),
    )
    for stored in files.tensors:
        for storage in storages if stored not in claimed else ():
            match = _match(storage, stored, everywhere, dtype)
            if match is not None:
                name, description = match
                found[name] = description
                claimed.update(description.names(name).values())
    _check_all_claimed(files.tensors, claimed, convention, argument)
    return found


class _Everywhere(Mapping[str, Stored]):
    """Stored tensors of all files of a checkpoint: parts of one tensor may lie in several."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Stored:
        file = self._files.find(name)
        if file is None:
            raise KeyError(name)
        return file.header.tensors[name]

    def __iter__(self) -> Any:
        return iter(self._files.tensors)

    def __len__(self) -> int:
        return len(self._files.tensors)


def _match(
    storage: Storage, stored: str, tensors: Mapping[str, Stored], dtype: torch.dtype
) -> tuple[str, Description] | None:
    """The tensor whose data is stored under this name, if it is stored so."""
    name, place, data = storage.tensor_name(stored), storage.places["data"], tensors[stored]
    if name is None or data.dtype not in place.dtypes or len(data.shape) < 2:
        return None
    shape = list(place.shapes.part(data.shape))
    shape[storage.axis] = storage.format.element.elements(shape[storage.axis])
    given = storage.places.get("input_scale")
    description = Description(
        storage,
        tuple(shape),
        dtype,
        storage.axis,
        has_input_scale=given is not None and given.of(name) in tensors,
    )
    try:
        description.check(name, tensors)
    except ValueError:
        return None
    return name, description


def _check_all_claimed(
    tensors: Mapping[str, Stored], claimed: set[str], convention: Convention, argument: str
) -> None:
    for name, tensor in tensors.items():
        is_part = _PARTS.search(name) or (tensor.dtype in _CODES and len(tensor.shape) > 1)
        if is_part and name not in claimed:
            raise ValueError(
                f"{argument}: {show(name)} ({tensor.dtype} {list(tensor.shape)}) belongs to no "
                f"tensor of a format that blockscale reads from {convention.title} "
                f"({', '.join(convention.storages)}): parts are missing, or it is of another format"
            )
