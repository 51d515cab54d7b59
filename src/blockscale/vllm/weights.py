"""The parameters of a layer as a checkpoint has them, and what is made of them.

What nobody wrote is found: parameters begin as codes that no quantizer makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.storage import Place, parts_of
from ..formats import Format, get_format
from ..tensor import ScaledTensor

__all__ = ["Experts", "Kind", "Slot", "Weight", "assemble", "assemble_experts"]

_NEGATIVE_ZEROS = 0x88  # two of E2M1
_E4M3_NAN = 0x7F
_E8M0_NAN = 0xFF


@dataclass(frozen=True)
class Slot:
    """A parameter of a layer.

    Attributes:
        part: of a quantized weight: data, scale, global_scale or input_scale.
        name: as it ends in the checkpoint.
        dtype: that is stored.
        columns: of a matrix; None for one number a matrix.
    """

    part: str
    name: str
    dtype: torch.dtype
    columns: int | None


@dataclass(frozen=True)
class Kind:
    """How a weight is quantized and stored.

    Attributes:
        format_name: of the weight.
        places: part -> where it lies.
        dtypes: part -> what is stored there.
    """

    format_name: str
    places: Mapping[str, Place]
    dtypes: Mapping[str, torch.dtype]

    @property
    def format(self) -> Format:
        return get_format(self.format_name)

    @property
    def names(self) -> dict[str, str]:
        """Part -> how its name ends in the checkpoint, after that of the layer."""
        return {part: place.of("weight") for part, place in self.places.items()}

    def slots(self, k: int, layer: str) -> Iterator[Slot]:
        """The parameters of a matrix of ``k`` columns. ValueError where blocks do not fit it."""
        size = self.format.block_size
        if k % size:
            raise ValueError(
                f"{layer}: K = {k} of a rank is no multiple of {size}, the block of "
                f"{self.format_name}; choose another tensor_parallel_size"
            )
        shapes = parts_of(self.format, (1, k))
        for part, name in self.names.items():
            shape = shapes[part][1]
            columns = shape[-1] if shape else None
            yield Slot(part, name, self.dtypes[part], columns)

    def poison(self, part: str, x: Tensor) -> None:
        """Fill a parameter with what no checkpoint has."""
        if x.dtype.itemsize > 1:
            x.fill_(torch.nan)
        else:
            x.view(torch.uint8).fill_(self._poison(part))

    def is_unwritten(self, part: str, x: Tensor) -> bool:
        """Whether part of a parameter, or all of four-bit data, is what it was filled with."""
        if x.dtype.itemsize > 1:
            return bool(x.isnan().any())
        code = self._poison(part)
        found = (x.view(torch.uint8) & code if code == _E4M3_NAN else x.view(torch.uint8)) == code
        return bool(found.all() if code == _NEGATIVE_ZEROS else found.any())

    def _poison(self, part: str) -> int:
        if part == "data" and self.format.element.bits == 4:
            return _NEGATIVE_ZEROS  # all codes have a meaning; a whole matrix of these has none
        dtype = self.format.element.dtype if part == "data" else self.format.scale.dtype
        return _E8M0_NAN if dtype == torch.float8_e8m0fnu else _E4M3_NAN

    def decode(self, part: str, x: Tensor) -> Tensor:
        """A parameter as a ScaledTensor has it."""
        dtype = parts_of(self.format, (1, self.format.block_size))[part][0]
        return self.places[part].decode(x, dtype).reshape(x.shape)


@dataclass(frozen=True)
class Weight:
    """A weight, and the global scale of what it is multiplied with, if the checkpoint has it."""

    q: ScaledTensor
    input_scale: Tensor | None


@dataclass(frozen=True)
class Experts:
    """Stacks of matrices of experts: (E, 2I, H), gates first, or, with ``gate``, two of (E, I, H);
    and (E, H, I). Their inputs have one global scale, the largest of the experts'."""

    up: ScaledTensor
    down: ScaledTensor
    gate: ScaledTensor | None = None
    up_input_scale: Tensor | None = None
    down_input_scale: Tensor | None = None


def assemble(
    kind: Kind, parameters: Mapping[str, Tensor], rows: Sequence[int], layer: str
) -> list[Weight]:
    """The weights of a linear layer, one below the other: one, where parts that vLLM fused have one
    global scale; else each, with its own.

    Args:
        kind: of the weight.
        parameters: part -> parameter: (N, ...), or a number for each part.
        rows: of each part.
        layer: its name, for messages.

    Raises ValueError where nobody wrote a parameter.
    """
    for part, x in parameters.items():
        _check_written(kind, part, [x] if x.dim() == 1 else x.split(list(rows)), layer)
    parts = {part: kind.decode(part, x) for part, x in parameters.items()}
    numbers = [parts[part] for part in ("global_scale", "input_scale") if part in parts]
    if all((x == x[0]).all() for x in numbers):
        rows = [sum(rows)]
    data, scale = (parts[part].split(list(rows)) for part in ("data", "scale"))
    made = []
    for i in range(len(rows)):
        scalar, of_input = (
            parts[part][i].clone() if part in parts else None
            for part in ("global_scale", "input_scale")
        )
        made.append(Weight(_tensor(kind, data[i], scale[i], scalar), of_input))
    return made


def assemble_experts(
    kind: Kind, up: Mapping[str, Tensor], down: Mapping[str, Tensor], layer: str
) -> Experts:
    """The stacks of a layer of experts. Gate and up are one, if their global scales are the same.

    Args:
        kind: of the weights.
        up: part -> parameter: (E, 2I, ...), or two numbers for each expert.
        down: (E, H, ...), or a number for each expert.
        layer: its name, for messages.

    Raises ValueError where nobody wrote a parameter.
    """
    for part, x in (*up.items(), *down.items()):
        halves = 2 if x is up.get(part) else 1
        pieces = [half for each in x for half in each.chunk(halves)] if x.dim() > 2 else [x]
        _check_written(kind, part, pieces, layer)
    up, down = ({part: kind.decode(part, x) for part, x in each.items()} for each in (up, down))
    inputs = [each["input_scale"].max() if "input_scale" in each else None for each in (up, down)]
    stacks = up["data"], up["scale"]
    of_down = _tensor(kind, down["data"], down["scale"], down.get("global_scale"))
    scalars = up.get("global_scale")
    if scalars is None or (scalars[:, 0] == scalars[:, 1]).all():
        one = None if scalars is None else scalars[:, 0].clone()
        return Experts(_tensor(kind, *stacks, one), of_down, None, *inputs)
    gate, rest = (
        _tensor(kind, data.contiguous(), scale.contiguous(), scalar.clone())
        for data, scale, scalar in zip(*(x.chunk(2, 1) for x in stacks), scalars.T, strict=True)
    )
    return Experts(rest, of_down, gate, *inputs)


def _tensor(kind: Kind, data: Tensor, scale: Tensor, global_scale: Tensor | None) -> ScaledTensor:
    shape = *data.shape[:-1], kind.format.element.elements(data.shape[-1])
    return ScaledTensor(data, scale, format=kind.format, shape=shape, global_scale=global_scale)


def _check_written(kind: Kind, part: str, pieces: Iterable[Tensor], layer: str) -> None:
    """ValueError where one of the pieces of a parameter is what it was filled with."""
    if any(kind.is_unwritten(part, each) for each in pieces):
        raise ValueError(
            f"{layer}: {kind.names[part]} was not read from the checkpoint, all of "
            "it, or has NaN in it; fetch the checkpoint again, or serve it without "
            "quantization='blockscale'"
        )
