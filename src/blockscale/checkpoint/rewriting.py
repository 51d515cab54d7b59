"""Tasks that turn quantized tensors of one convention into those of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..measure import amax
from ..quantize import quantize
from ..tensor import ScaledTensor
from .files import Files
from .fused import GlobalScales
from .header import TORCH_DTYPES, Stored, show
from .reader import PIECE
from .statistics import ErrorStatistics
from .storage import Description, Place, dtype_name, parts_of
from .tasks import Source, Task, has_scale_of, pieces, writer_of
from .writer import Part, tensor_bytes

__all__ = ["Dequantize", "Requantize", "Rewrite", "quantized_amax"]


@dataclass(frozen=True)
class _Quantized(Task):
    """A task that reads a quantized tensor; ``tensor`` is its data, ``parts`` are all of it."""

    description: Description
    parts: Mapping[str, Stored]

    @property
    def _needs(self) -> tuple[str, ...]:
        """Parts that are read."""
        return self.description.parts

    @property
    def reads(self) -> tuple[str, ...]:
        names = self.description.names(self.name)
        return tuple(names[part] for part in self._needs)

    def _values(self, source: Source) -> Iterator[ScaledTensor]:
        stored = self.parts.__getitem__
        for _, _, q in pieces(self.name, self.description, stored, source.elements):
            yield q


@dataclass(frozen=True)
class Rewrite(_Quantized):
    """The same codes and scales under other names."""

    made: Description
    input_scale: float  # where there was none
    # a global scale that divides goes through its reciprocal, as those of a repaired group do
    by_reciprocal: bool = False

    @property
    def _needs(self) -> tuple[str, ...]:
        return _without_input_scale(self.description, not self.made.has_input_scale)

    def is_current(self, record: Mapping[str, Any]) -> bool:
        """Whether it was not quantized again, for what others of its group were then."""
        return "rounded_again" not in record

    @property
    def _adds_input_scale(self) -> bool:
        return self.made.has_input_scale and not self.description.has_input_scale

    @property
    def stored(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        out = {}
        names, places = self.description.names(self.name), self.made.storage.places
        for part in self._needs:
            before, after = self.description.storage.places[part], places[part]
            shape = after.shapes.stored(before.shapes.part(self.parts[names[part]].shape))
            out[after.of(self.name)] = after.dtypes[0], shape
        if self._adds_input_scale:
            place = places["input_scale"]
            out[place.of(self.name)] = place.dtypes[0], place.shapes.stored(())
        return out

    def run(self, source: Source, parts: Mapping[str, Part]) -> dict[str, Any]:
        names = self.description.names(self.name)
        record: dict[str, Any] = {"format": self.made.format.name}
        dtypes = parts_of(self.description.format, self.description.shape)
        for part in self._needs:
            before, after = self.description.storage.places[part], self.made.storage.places[part]
            turned = before.divides != after.divides or (before.divides and self.by_reciprocal)
            if not turned:
                before, after = replace(before, divides=False), replace(after, divides=False)
            stored, out = self.parts[names[part]], parts[after.of(self.name)]
            step = PIECE // TORCH_DTYPES[stored.dtype].itemsize
            for start in range(0, stored.numel, step):
                piece = source.elements(names[part], start, min(step, stored.numel - start))
                values = before.decode(piece, dtypes[part][0])
                out.write(tensor_bytes(self._encoded(after, part, values)))
                if turned and part == "global_scale":
                    # only of a power of two is the reciprocal exact
                    record["rounded_reciprocal"] = bool((values.frexp().mantissa != 0.5).any())
        if self._adds_input_scale:
            place = self.made.storage.places["input_scale"]
            value = place.encode(torch.tensor([self.input_scale]))
            parts[place.of(self.name)].write(tensor_bytes(value))
        return record

    def _encoded(self, place: Place, part: str, values: Tensor) -> Tensor:
        try:
            return place.encode(values)
        except ValueError as error:
            raise ValueError(
                f"to: {part} of {show(self.name)} cannot be {place.dtypes[0]} ({error}); give "
                f"format {self.made.format.name!r}, which quantizes again, or choose another "
                "convention"
            ) from None


@dataclass(frozen=True)
class Requantize(_Quantized):
    """Its values quantized again: to another format, or with another global scale."""

    made: Description
    scales: Mapping[str, Tensor] | GlobalScales | None  # of formats that have them
    input_scale: float  # where there was none

    @property
    def _needs(self) -> tuple[str, ...]:
        return _without_input_scale(self.description, not self.made.has_input_scale)

    @property
    def stored(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return self.made.stored(self.name)

    def run(self, source: Source, parts: Mapping[str, Part]) -> dict[str, Any]:
        format, rounding = self.made.format, self.made.storage.scale_rounding
        write, statistics = writer_of(self.made, self.name, parts), ErrorStatistics()
        scalar, record = None, dict[str, Any](format=format.name)
        if self.scales is not None:
            scalar = self.scales[self.name]
            write("global_scale", scalar)
            record["global_scale"] = scalar.item()
        for before in self._values(source):
            x = before.dequantize(torch.float32)
            q = quantize(x, format, global_scale=scalar, scale_rounding=rounding)
            write("data", q.qdata)
            write("scale", q.scale)
            statistics.add(x, q)
        if self.made.has_input_scale:
            value = torch.tensor([self.input_scale])
            if self.description.has_input_scale:
                place = self.description.storage.places["input_scale"]
                stored = source.elements(place.of(self.name), 0, 1)
                value = place.decode(stored, torch.float32)
            write("input_scale", value)
        return {
            **record,
            "rounded_again": statistics.noise > 0,
            "error": statistics.to_json(),
        }

    def is_current(self, record: Mapping[str, Any]) -> bool:
        """Its global scale may depend on other tensors."""
        return has_scale_of(self.scales, self.name, record)


@dataclass(frozen=True)
class Dequantize(_Quantized):
    """Its values, in the dtype that they had."""

    @property
    def _needs(self) -> tuple[str, ...]:
        return _without_input_scale(self.description, True)

    @property
    def stored(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {self.name: (dtype_name(self.description.dtype), self.description.shape)}

    def run(self, source: Source, parts: Mapping[str, Part]) -> dict[str, Any]:
        for q in self._values(source):
            parts[self.name].write(tensor_bytes(q.dequantize(self.description.dtype)))
        return {"dequantized": self.description.format.name}


def _without_input_scale(description: Description, without: bool) -> tuple[str, ...]:
    return tuple(part for part in description.parts if not (without and part == "input_scale"))


def quantized_amax(files: Files, name: str, description: Description) -> Tensor:
    """The largest magnitude of a quantized tensor's values."""
    largest = torch.zeros(())
    for _, _, q in pieces(name, description, files.stored, files.elements):
        largest = torch.maximum(largest, amax(q.dequantize(torch.float32)))
    return largest
