"""``convert_folder``: a quantized checkpoint from one convention into another."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import choose
from ..formats import Format, get_format
from ..fused_names import fused_with
from .conventions import CONVENTIONS, Convention, Scheme
from .conventions.convention import KV_CACHE_KEYS
from .files import Files
from .folders import layer_names, make_folder, read_config
from .fused import GlobalScales
from .header import show
from .jobs import Job, Progress, job_of
from .ours import INPUT_SCALE, KEY, metadata_for
from .reading import convention_of, descriptions_of
from .rewriting import Dequantize, Requantize, Rewrite, quantized_amax
from .storage import Description, part_names
from .tasks import Copy, Task

__all__ = ["HIGH_PRECISION", "convert_folder"]

#: What ``to`` is for weights that are not quantized.
HIGH_PRECISION = "bf16"


def convert_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    format: str | Format | None = None,
    repair: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Write a quantized folder as others write it, with the same codes and scales where possible.

    >>> checkpoint.convert_folder("DeepSeek-V3", "DeepSeek-V3-ct", "compressed-tensors")["to"]
    'compressed-tensors'

    Nothing is rounded a second time but what has to be: a tensor whose ``format`` changes, one of a
    fused group that gets the global scale of the others (``repair``), and by one unit of fp32 a
    global scale of which the reciprocal is stored. The manifests of files say so of each tensor
    (``rounded_again``, with what was lost, and ``rounded_reciprocal``).

    Args:
        source: a folder that one of :data:`~blockscale.checkpoint.CONVENTIONS` describes.
        target: folder to be made, as by :func:`quantize_folder`.
        to: a name of a convention; or "bf16", for values in the dtype of the model.
        format: of quantized tensors, instead of the one that they have.
        repair: give NVFP4 weights what servers need and their file lacks: an ``input_scale`` (of 1,
            not calibrated), and one global scale for weights that are fused.
        progress: called at each step, by one thread at a time.

    Returns:
        The manifest of the folder, ``blockscale.manifest.json`` in it.

    Raises:
        ValueError: a folder that is not quantized, or in an unknown way; a convention that lacks a
            format of the source; NVFP4 weights that need a repair; ``target`` is in the way.
        OSError: no such folder, no room, or the source changed while it was read.
    """
    convention = None
    if to != HIGH_PRECISION:
        convention = choose("to", to, {**CONVENTIONS, HIGH_PRECISION: None})
    fmt = None if format is None else get_format(format)
    with Files(source, "source") as files:
        if not files.is_folder:
            raise NotADirectoryError(f"source: {source} is a file; name the folder with it")
        config = read_config(files, "source")
        if convention is not None:
            convention.check_model(config, "to")
        found = descriptions_of(files, config, "source")
        if not found:
            raise ValueError(
                f"source: nothing in {files.folder} is quantized; `blockscale quantize` does that"
            )
        before = convention_of(config, "source")
        quantization = config.get("quantization_config") or {}
        plan = _Plan(
            *(files, found, convention, fmt, repair),
            weight_only=before is not None and before.is_weight_only(quantization),
            has_cache=any(quantization.get(key) for key in KV_CACHE_KEYS),
        )
        plan.check()
        return make_folder(
            files,
            Path(target),
            config,
            plan.job,
            convention.configure(plan.scheme) if convention else {},
            plan.about,
            progress or (lambda event: None),
        )


@dataclass(frozen=True)
class _Plan:
    """What will be made, known from headers and global scales alone."""

    files: Files
    found: Mapping[str, Description]
    convention: Convention | None  # None: high precision
    format: Format | None
    repair: bool
    weight_only: bool
    has_cache: bool  # whether that of keys and values is quantized, too
    # name -> the largest global scale of its fused group, of weights that have a smaller one
    repaired: dict[str, Tensor] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that decide which bytes are written."""
        return {
            "to": self.convention.name if self.convention else HIGH_PRECISION,
            "format": self.format.name if self.format else None,
            "repair": self.repair,
        }

    @property
    def about(self) -> dict[str, Any]:
        """What the manifest of the folder says of this conversion."""
        about = dict(self.options)
        if self._lacking:
            about["input_scale"] = INPUT_SCALE
        if self.repaired:
            about["repaired"] = sorted(self.repaired)
        return {**about, **({"warnings": self.warnings} if self.warnings else {})}

    @property
    def _lacking(self) -> list[str]:
        """Names of weights that get an ``input_scale`` and had none."""
        if self.convention is None:
            return []
        return [
            name
            for name, each in self.found.items()
            if self.made(name).has_input_scale and not each.has_input_scale
        ]

    def made(self, name: str) -> Description:
        """What a tensor becomes in a convention."""
        description = self.found[name]
        assert self.convention is not None
        storage = self.convention.storages[(self.format or description.format).name]
        has = storage.format.has_global_scale and not self.weight_only
        return replace(description, storage=storage, has_input_scale=has)

    @property
    def scheme(self) -> Scheme:
        """What the configuration of the target says is quantized."""
        layers: dict[str, list[str]] = {}
        for name in self.found:
            made = layers.setdefault(self.made(name).format.name, [])
            made.append(name.removesuffix(".weight"))
        left_alone = layer_names(self.files, self.files.tensors.keys() - self._parts)
        formats = {format: tuple(names) for format, names in layers.items()}
        return Scheme(formats, left_alone, self.weight_only)

    @cached_property
    def _owners(self) -> dict[str, str]:
        """Stored name of data -> whose it is."""
        return {each.names(name)["data"]: name for name, each in self.found.items()}

    @cached_property
    def _parts(self) -> set[str]:
        """Stored names of all that belongs to a quantized tensor."""
        return part_names(self.found)

    @cached_property
    def warnings(self) -> list[str]:
        """What servers will compute otherwise, although no weight changed, and what readers get
        wrong."""
        told = []
        if self.has_cache:
            told.append(
                "the source has its KV cache quantized, which its configuration says no more: "
                "servers keep that in high precision"
            )
        if self.convention is None:
            return told
        made = {name: self.made(name) for name in self.found}
        caveats = self.convention.caveats({n: (d.format.name, d.shape) for n, d in made.items()})
        if self.weight_only and not self.convention.describes_itself:
            formats = dict.fromkeys(each.format.name for each in made.values())
            told += [
                f"activations are in high precision in the source; {self.convention.title} has no "
                f"{each} of weights alone, and servers will quantize them"
                for each in formats
                if each not in self.convention.weight_only
            ]
        return told + caveats

    def check(self) -> None:
        """Raise ValueError for a tensor that cannot be converted as the caller asks."""
        for name, description in self.found.items():
            if not description.by_rows:
                raise ValueError(
                    f"source: blocks of {show(name)} do not run along its rows, as others need; "
                    "load it by checkpoint.load_file, and quantize what it dequantizes to"
                )
            if self.convention is None:
                continue
            if len(description.shape) > 2 and not self.convention.stacks:
                raise ValueError(
                    f"to: {show(name)} is a stack of {math.prod(description.shape[:-2])} matrices, "
                    f"and {self.convention.title} has each under a name of its own; choose "
                    "another convention, or 'bf16'"
                )
            format = self.format or description.format
            if format.name not in self.convention.storages:
                raise ValueError(
                    f"to: {self.convention.title} has no {format.name} ({show(name)}); it has "
                    f"{', '.join(self.convention.storages)}: choose one by format, which rounds a "
                    "second time, or another convention"
                )
            self._check_blocks(name, description)
        if self.convention is not None and self.convention.fuses:
            self._check_input_scales()
            self._check_groups()

    def _check_blocks(self, name: str, description: Description) -> None:
        format, k = self.format or description.format, description.shape[-1]
        if format != description.format and k % format.block_size:
            raise ValueError(
                f"format: rows of {show(name)} have {k} values, no multiple of {format.name}'s "
                f"block of {format.block_size}; choose another format, or convert to 'bf16'"
            )

    def _check_input_scales(self) -> None:
        missing = self._lacking
        if missing and not self.repair:
            raise ValueError(
                f"source: {len(missing)} weights ({show(missing[0])}, ...) have no input_scale, "
                "and servers would read memory that nobody wrote; with repair they get "
                f"{INPUT_SCALE:g}, which nothing calibrated"
            )

    def _check_groups(self) -> None:
        for name in self.found:
            if not self._keeps_scale(name):
                continue
            group = tuple(each for each in self._group(name) if self._keeps_scale(each))
            scales = {each: self._global_scale(each) for each in group}
            largest = max(scales.values())
            if scales[name] == largest:
                continue
            if not self.repair:
                raise ValueError(
                    f"source: servers fuse {', '.join(map(show, group))}, whose global scales "
                    f"differ ({', '.join(f'{s:.4g}' for s in scales.values())}); with repair the "
                    "smaller ones are quantized again with the largest"
                )
            self.repaired[name] = torch.tensor(largest)

    def _keeps_scale(self, name: str) -> bool:
        """Whether it has a global scale, and all that is fused with it the format that it had."""
        group = [self.found[each].format for each in self._group(name)]
        kept = self.format is None or all(each == self.format for each in group)
        return kept and self.found[name].format.has_global_scale

    def _group(self, name: str) -> tuple[str, ...]:
        """Names of the quantized tensors that servers fuse with this one, itself among them."""
        return tuple(each for each in fused_with(name) if each in self.found)

    def _global_scale(self, name: str) -> float:
        description = self.found[name]
        place = description.storage.places["global_scale"]
        value = self.files.holder(place.of(name)).tensor(place.of(name))
        bad = value[~((value > 0) & value.isfinite())]
        if bad.numel():
            raise ValueError(
                f"source: {show(place.of(name))} is {bad[0].item():g}, which is no scale; fetch or "
                "quantize it again"
            )
        if value.numel() != 1:
            raise ValueError(
                f"source: {show(name)} has {value.numel()} global scales, one for each matrix; "
                "others have one for a tensor: store each matrix under a name of its own"
            )
        return place.decode(value, torch.float32).item()

    def _task(self, name: str) -> Task:
        description = self.found[name]
        parts = {stored: self.files.stored(stored) for stored in description.names(name).values()}
        data = parts[description.names(name)["data"]]
        if self.convention is None:
            return Dequantize(name, data, description, parts)
        made = self.made(name)
        if name in self.repaired:
            return Requantize(name, data, description, parts, made, self.repaired, INPUT_SCALE)
        if self._keeps_codes(name, made):
            by_reciprocal = any(each in self.repaired for each in self._group(name))
            return Rewrite(name, data, description, parts, made, INPUT_SCALE, by_reciprocal)
        return Requantize(name, data, description, parts, made, self._scales, INPUT_SCALE)

    def _keeps_codes(self, name: str, made: Description) -> bool:
        """Whether the target has the codes and block scales that the source has."""
        assert self.convention is not None
        description = self.found[name]
        if made.format != description.format:
            return False
        rounding = made.storage.scale_rounding  # of scales that hold not all values
        if self.format is not None and rounding not in (None, description.storage.scale_rounding):
            return False
        has_scale = self.convention.fuses and made.format.has_global_scale
        return not has_scale or self._keeps_scale(name)

    @cached_property
    def _scales(self) -> GlobalScales | None:
        """Global scales of the tensors that get another format; None where that has none."""
        if self.convention is None or self.format is None or not self.format.has_global_scale:
            return None
        groups = {name: self._group(name) for name in self.found}
        return GlobalScales(
            groups,
            lambda name: quantized_amax(self.files, name, self.found[name]),
            self.format,
            self.convention.storages[self.format.name].divides,
        )

    def job(self, file: str, target: Path) -> Job:
        """The job that makes ``target`` of the tensors that have their data in one file."""
        reader, owners, parts = self.files.file(file), self._owners, self._parts
        tasks: list[Task] = []
        made: dict[str, Description] = {}
        for stored, tensor in reader.header.tensors.items():
            if stored in owners:
                tasks.append(self._task(owners[stored]))
                if self.convention is not None and self.convention.describes_itself:
                    made[owners[stored]] = self.made(owners[stored])
            elif stored not in parts:
                tasks.append(Copy(stored, tensor, "not quantized"))
        metadata = {key: text for key, text in reader.header.metadata.items() if key != KEY}
        return job_of(reader, target, tasks, metadata_for(made, metadata), self.options)
