"""Which tensors of a checkpoint are quantized, whoever wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .conventions import CONVENTIONS, Convention
from .files import Files
from .header import Stored, show
from .ours import KEY, read_descriptions
from .storage import Description, Storage, part_names

__all__ = ["convention_of", "described_in_headers", "descriptions_of", "descriptions_of_tensors"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: Names of what belongs to a quantized weight in some convention.
_PARTS = re.compile(
    r"(^|[._])weight_(packed|scale|scale_inv|scale_2|global_scale|zero_point|shape)$"
)
#: Names of what a weight was multiplied with, or its input is, which no format here undoes.
_SMOOTHED = re.compile(r"(^|[._])(pre_quant_scale|svdquant_lora_[ab])$")
#: Dtypes that hold codes: a matrix of one can only be a part of a quantized weight.
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
    alike = [each for each in CONVENTIONS.values() if method in each.methods]
    if others := {name for each in alike for name in each.model_types}:
        raise ValueError(
            f"{argument}: its config.json has quant_method {method!r:.40} and model_type "
            f"{model!r:.40}; blockscale reads that of {', '.join(sorted(others))}"
        )
    known = sorted({method for each in CONVENTIONS.values() for method in each.methods})
    raise ValueError(
        f"{argument}: its config.json has quant_method {method!r:.40}; known are {', '.join(known)}"
    )


def described_in_headers(files: Files, argument: str) -> dict[str, Description]:
    """The quantized tensors of ``files`` that headers describe, those of other files, too, as
    transformers writes one header for all. ValueError where one is damaged."""
    found: dict[str, Description] = {}
    everywhere, seen = _Everywhere(files), set[str]()
    for file in files.names:
        header = files.file(file).header
        if (text := header.metadata.get(KEY, "")) in seen:  # as of all files of transformers
            continue
        seen.add(text)
        try:
            found |= read_descriptions(header, everywhere)
        except ValueError as error:
            raise ValueError(f"{argument}: {files.folder / file}: {error}; save it again") from None
    return {n: each for n, each in found.items() if each.names(n)["data"] in files.tensors}


def descriptions_of(
    files: Files, config: Mapping[str, Any], argument: str
) -> dict[str, Description]:
    """All quantized tensors of ``files``, by name: as headers say, or else by convention.

    ``config`` is the model's configuration. Raises ValueError where parts are missing, or of no
    format of the convention.
    """
    found = described_in_headers(files, argument)
    convention = convention_of(config, argument)
    if convention is None:
        return found
    if convention.describes_itself:
        if not found:
            raise ValueError(
                f"{argument}: {files.path} is quantized, as its config.json says, but no header in "
                "it describes a tensor, so another program wrote it anew; fetch it again"
            )
        return found
    everywhere = _Everywhere(files)
    found, claimed = _by_convention(files.tensors, everywhere, found, config, convention, argument)
    if not files.is_folder and _unclaimed(files.tensors, claimed):
        storages = *convention.storages.values(), *convention.also_read
        claimed |= _claimed_elsewhere(files, everywhere, storages, _dtype(config))
    _check_all_claimed(files.tensors, claimed, convention, argument)
    return found


def descriptions_of_tensors(
    tensors: Mapping[str, Stored], config: Mapping[str, Any], argument: str
) -> dict[str, Description]:
    """The same by convention alone, where no file is there to be read: ``tensors`` are all those of
    a checkpoint, as a hub tells them.

    Raises ValueError as :func:`descriptions_of`.
    """
    convention = convention_of(config, argument)
    if convention is None:
        return {}
    found, claimed = _by_convention(tensors, tensors, {}, config, convention, argument)
    _check_all_claimed(tensors, claimed, convention, argument)
    return found


def _by_convention(
    tensors: Mapping[str, Stored],
    everywhere: Mapping[str, Stored],
    found: Mapping[str, Description],
    config: Mapping[str, Any],
    convention: Convention,
    argument: str,
) -> tuple[dict[str, Description], set[str]]:
    """``found`` and what ``tensors`` are by convention, with parts from everywhere; names of all
    their parts."""
    quantization = config["quantization_config"]
    _check_not_transformed(tensors, quantization, argument)
    found, claimed, dtype = dict(found), part_names(found), _dtype(config)
    storages = *convention.storages.values(), *convention.also_read
    for stored in tensors:
        for storage in storages if stored not in claimed else ():
            match = _match(storage, stored, everywhere, dtype)
            if match is not None:
                name, description = match
                found[name] = description
                claimed.update(description.names(name).values())
    _check_blocks(found, quantization, argument)
    return found, claimed


def _unclaimed(tensors: Mapping[str, Stored], claimed: set[str]) -> str | None:
    """A tensor that can only be a part of a quantized one, and is of none."""
    for name, tensor in tensors.items():
        is_part = _PARTS.search(name) or (tensor.dtype in _CODES and len(tensor.shape) > 1)
        if is_part and name not in claimed:
            return name
    return None


def _claimed_elsewhere(
    files: Files, everywhere: Mapping[str, Stored], storages: Iterable[Storage], dtype: torch.dtype
) -> set[str]:
    """Parts of tensors that have their data in the other files of a checkpoint."""
    claimed: set[str] = set()
    for stored in (files.places or {}).keys() - files.tensors.keys():
        for storage in storages:
            if (match := _match(storage, stored, everywhere, dtype)) is not None:
                claimed.update(match[1].names(match[0]).values())
    return claimed


def _check_blocks(
    found: Mapping[str, Description], quantization: Mapping[str, Any], argument: str
) -> None:
    """ValueError where a configuration has blocks of another size, which make as many scales."""
    groups = quantization.get("config_groups")
    weights = [
        group["weights"]
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    ]
    told = [quantization.get("weight_block_size"), *(w.get("block_structure") for w in weights)]
    sizes = [each for each in told if isinstance(each, list) and len(each) == 2]
    for name, description in found.items():
        block = description.format.block
        for size in sizes if min(block) > 1 else ():
            dims = zip(description.shape[-2:], size, block, strict=True)
            if any(given != own and n > min(given, own) for n, given, own in dims):
                raise ValueError(
                    f"{argument}: {show(name)} has blocks of {size[0]}x{size[1]}, as its "
                    f"config.json says; blockscale has {block[0]}x{block[1]}"
                )


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of the model; of one with more than text its part for text may say it. Else
    bfloat16."""
    for each in (config, config.get("text_config")):
        if isinstance(each, dict) and (said := each.get("dtype") or each.get("torch_dtype")):
            return _DTYPES.get(str(said), torch.bfloat16)
    return torch.bfloat16


def _check_not_transformed(
    tensors: Mapping[str, Stored], quantization: Mapping[str, Any], argument: str
) -> None:
    """ValueError where the stored weights are those of a changed model."""
    transform = quantization.get("transform_config")
    if isinstance(transform, dict) and transform.get("config_groups"):
        raise ValueError(
            f"{argument}: its config.json has a transform_config: weights were rotated before they "
            "were quantized, which blockscale does not undo; take a checkpoint without"
        )
    for name in tensors:
        if _SMOOTHED.search(name):
            raise ValueError(
                f"{argument}: {show(name)} changes what its layer computes, which blockscale does "
                "not undo (AWQ, SmoothQuant, SVDQuant); take a checkpoint without"
            )


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
    name = _unclaimed(tensors, claimed)
    if name is not None:
        raise ValueError(
            f"{argument}: {show(name)} ({tensors[name].dtype} {list(tensors[name].shape)}) belongs "
            f"to no tensor of a format that blockscale reads from {convention.title} "
            f"({', '.join(convention.storages)}): parts are missing, or it is of another format"
        )
