"""How a quantized tensor lies in files: names, dtypes and shapes of its parts, as data.

A convention (:mod:`~blockscale.checkpoint.conventions`) has a :class:`Storage` for each format that
it knows. A :class:`Description` is one tensor that is stored so: it makes a ScaledTensor of what
files have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import Format
from ..tensor import ScaledTensor
from .header import TORCH_DTYPES, Stored, show

__all__ = [
    "ONE",
    "Description",
    "Place",
    "Storage",
    "blocks",
    "check_names",
    "dtype_name",
    "layer_of",
    "part_names",
    "parts_of",
    "unpadded",
]

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a torch dtype in a file. TypeError where a file has none."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise TypeError(f"{dtype} cannot be stored in a safetensors file; cast it first") from None


def layer_of(name: str) -> str:
    """How the names of what else a layer has begin.

    >>> layer_of("a.q_proj.weight"), layer_of("a.experts")
    ('a.q_proj.', 'a.experts_')
    """
    stem, dot, last = name.rpartition(".")
    return f"{stem}{dot}" if last == "weight" else f"{name}_"


Shape = tuple[int, ...]


class Shapes(NamedTuple):
    """How the shape of a part becomes that of the stored tensor, and back."""

    stored: Callable[[Shape], Shape]
    part: Callable[[Shape], Shape]


SAME = Shapes(lambda shape: shape, lambda shape: shape)
#: One dimension for a scalar.
ONE = Shapes(lambda shape: (1,), lambda shape: ())


def blocks(size: int) -> Shapes:
    """The last dimension cut into blocks of so many stored elements."""
    return Shapes(
        lambda shape: (*shape[:-1], shape[-1] // size, size),
        lambda shape: (*shape[:-2], shape[-2] * shape[-1]),
    )


@dataclass(frozen=True)
class Place:
    """Where one part of a quantized tensor lies.

    Attributes:
        name: ``{name}`` stands for that of the tensor, ``{layer}`` for :func:`layer_of` it.
        dtypes: as files call them; the first is written, each of them is read.
        shapes: of the part, and of what is stored.
        divides: the stored value is the reciprocal of the part's.
    """

    name: str
    dtypes: tuple[str, ...]
    shapes: Shapes = SAME
    divides: bool = False

    def of(self, name: str) -> str:
        """The stored name of the part of tensor ``name``."""
        return self.name.format(name=name, layer=layer_of(name))

    def encode(self, part: Tensor) -> Tensor:
        """What is stored, as one dimension. ValueError where its dtype has not all values."""
        part = part.reshape(-1)
        return _cast(part.reciprocal() if self.divides else part, TORCH_DTYPES[self.dtypes[0]])

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of :meth:`encode`, for each of the dtypes."""
        part = _cast(stored.reshape(-1), dtype)
        return part.reciprocal() if self.divides else part


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same values, or for codes in an integer dtype the same bits, in another dtype."""
    if x.dtype == dtype:
        return x
    if x.element_size() == dtype.itemsize == 1:
        return x.view(dtype)
    if x.dtype in (torch.uint8, torch.int8):  # fp32 scales of which only the exponents are stored
        x = x.view(torch.float8_e8m0fnu)
    if not dtype.is_floating_point:
        x, dtype = _cast(x, torch.float8_e8m0fnu), torch.uint8
        return x.view(dtype)
    out = x.to(dtype)
    was, now = x.to(torch.float32), out.to(torch.float32)
    if not ((was == now) | (was.isnan() & now.isnan())).all():
        raise ValueError(f"its values are not those of {dtype}")
    return out


@dataclass(frozen=True)
class Storage:
    """How tensors of one format are stored: a place for each part.

    Parts are those of a ScaledTensor (data, scale, global_scale, offsets) and ``input_scale``, the
    global scale of what the tensor is multiplied with.

    Attributes:
        format: of the tensors.
        places: of the parts.
        scale_rounding: of block scales where not all values can be stored.
        axis: along which blocks run.
    """

    format: Format
    places: Mapping[str, Place]
    scale_rounding: str | None = None
    axis: int = -1

    @property
    def divides(self) -> bool:
        """Whether global scales are stored as reciprocals. Those of powers of two are exact."""
        place = self.places.get("global_scale")
        return place is not None and place.divides

    def names(self, name: str, parts: Sequence[str]) -> dict[str, str]:
        """Part -> its stored name, of tensor ``name``."""
        return {part: self.places[part].of(name) for part in parts}

    def tensor_name(self, stored: str) -> str | None:
        """Whose data is stored under this name; None if nobody's."""
        before, after = self.places["data"].name.split("{name}")
        fits = stored.startswith(before) and stored.endswith(after)
        return stored[len(before) : len(stored) - len(after)] if fits else None


def parts_of(
    format: Format, shape: Sequence[int], axis: int = -1, groups: int = 0
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of the parts of a ScaledTensor quantized along ``axis``.

    ``groups`` is their number where they cut the contraction. Matrices of a batch may have global
    scales of their own: ``shape[:-2]``, then.
    """
    parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "data": (format.element.dtype, format.data_shape(shape, axis, groups, axis == -1)),
        "scale": (format.scale.dtype, format.scale_shape(shape, axis, groups)),
    }
    if format.has_global_scale:
        parts["global_scale"] = parts["input_scale"] = torch.float32, ()
    return parts


@dataclass(frozen=True)
class Description:
    """A quantized tensor of a file.

    Attributes:
        storage: how it is stored.
        shape: of the values, or of their transpose.
        dtype: of the values that were quantized.
        axis: along which blocks run.
        has_input_scale: whether that is stored, too.
        transposed: what is stored is the transpose of the tensor.
        groups: "rows" or "contraction", of a grouped tensor.
    """

    storage: Storage
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int = -1
    has_input_scale: bool = False
    transposed: bool = False
    groups: str = ""

    @property
    def format(self) -> Format:
        return self.storage.format

    @property
    def by_rows(self) -> bool:
        """Whether blocks run along the rows of what is stored, so that it can be read in pieces."""
        return self.axis == -1 and not self.transposed and not self.groups

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that it has."""
        has = {
            "global_scale": self.format.has_global_scale,
            "offsets": bool(self.groups),
            "input_scale": self.has_input_scale,
        }
        return ("data", "scale", *(part for part, there in has.items() if there))

    def names(self, name: str) -> dict[str, str]:
        """Part -> its stored name."""
        return self.storage.names(name, self.parts)

    def stored(self, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Stored name -> dtype and shape there, of one without groups."""
        parts = parts_of(self.format, self.shape, self.axis)
        places = self.storage.places
        return {
            places[part].of(name): (
                places[part].dtypes[0],
                places[part].shapes.stored(parts[part][1]),
            )
            for part in self.parts
        }

    def is_padded(self, data: Stored) -> bool:
        """Whether a last block that is cut short is stored whole."""
        _, shape = parts_of(self.format, self.shape)["data"]
        return data.shape == self.storage.places["data"].shapes.stored(shape)

    def check(self, name: str, tensors: Mapping[str, Stored]) -> None:
        """ValueError unless all of its parts are among ``tensors``, and are what they should be."""
        names = self.names(name)
        for stored in names.values():
            if stored not in tensors:
                raise ValueError(f"{show(name)} needs {show(stored)}, which is not there")
        groups = tensors[names["offsets"]].numel if self.groups == "contraction" else 0
        for part, (_, shape) in parts_of(self.format, self.shape, self.axis, groups).items():
            if part not in names:
                continue
            place, found = self.storage.places[part], tensors[names[part]]
            shapes = {place.shapes.stored(shape)}
            if part == "input_scale":
                shapes |= {(), (1,)}
            elif part == "global_scale":
                shapes |= {(), (1,), self.shape[:-2]}
            elif part == "data" and not groups:  # others do not pad
                shapes.add(place.shapes.stored(unpadded(self.format, self.shape, self.axis)))
            if found.dtype not in place.dtypes or found.shape not in shapes:
                raise ValueError(
                    f"{show(names[part])} is {found.dtype} {list(found.shape)}; "
                    f"{self.format.name} of {list(self.shape)} along axis {self.axis} has "
                    f"{' or '.join(place.dtypes)} "
                    f"{' or '.join(str(list(each)) for each in sorted(shapes))} there"
                )

    def assemble(self, name: str, read: Callable[[str], Tensor]) -> ScaledTensor:
        """The tensor, of the stored ones that ``read`` returns by name.

        Raises ValueError where they do not fit.
        """
        parts = {p: read(stored) for p, stored in self.names(name).items() if p != "input_scale"}
        groups = parts["offsets"].numel() if self.groups == "contraction" else 0
        try:
            for part, (dtype, shape) in parts_of(
                self.format, self.shape, self.axis, groups
            ).items():
                if part in parts:
                    if part == "global_scale" and parts[part].numel() > 1:
                        shape = self.shape[:-2]
                    found = self.storage.places[part].decode(parts[part], dtype)
                    if part == "data" and found.numel() < math.prod(shape):
                        found = _pad(found, self.format, self.shape, shape, self.axis)
                    parts[part] = found.reshape(shape)
                    if part == "data" and self.format.turned(self.axis, False):
                        parts[part] = parts[part].mT.contiguous().mT
            q = ScaledTensor(
                parts.pop("data"),
                parts.pop("scale"),
                **parts,  # type: ignore[arg-type]
                format=self.format,
                shape=self.shape,
                axis=self.axis,
                dtype=self.dtype,
                k_grouped=self.groups == "contraction",
            )
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{show(name)} is not what the file says of it: {error}") from None
        return q.mT if self.transposed else q


def unpadded(format: Format, shape: Shape, axis: int) -> Shape:
    """The shape of data as others store it: a last block that is cut short is not padded."""
    out = list(shape)
    out[axis] = format.element.stored(out[axis])
    return tuple(out)


def _pad(data: Tensor, format: Format, shape: Shape, padded: Shape, axis: int) -> Tensor:
    """The last block made whole with zeros."""
    short = unpadded(format, shape, axis)
    out = torch.zeros(padded, dtype=torch.uint8)
    out.narrow(axis, 0, short[axis]).copy_(data.view(torch.uint8).reshape(short))
    return out.view(data.dtype)


def part_names(descriptions: Mapping[str, Description]) -> set[str]:
    """Names of all that is stored of quantized tensors."""
    return {stored for name, each in descriptions.items() for stored in each.names(name).values()}


def check_names(names: Iterable[str], argument: str) -> None:
    """ValueError where two tensors would be stored under one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(
                f"{argument}: two tensors would be stored as {show(name)} (a quantized tensor "
                "takes names for its scales, too); rename one, or leave the quantized one out"
            )
        seen.add(name)
