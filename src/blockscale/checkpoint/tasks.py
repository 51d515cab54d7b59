"""What becomes of each tensor of a checkpoint: tasks that read some stored tensors and make others.

Nothing ever holds a whole tensor: tasks work in pieces. They run in any order, several at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor
from xxhash import xxh3_128

from ..formats import Format
from ..quantize import quantize
from ..tensor import ScaledTensor
from .files import Files
from .fused import GlobalScales
from .header import TORCH_DTYPES, Stored
from .reader import PIECE
from .statistics import ErrorStatistics
from .storage import Description, parts_of, unpadded
from .writer import Part, tensor_bytes

__all__ = [
    "CHUNK",
    "Copy",
    "Quantize",
    "Source",
    "Task",
    "chunks",
    "has_scale_of",
    "pieces",
    "writer_of",
]

# Elements: so many that Python's half a millisecond a chunk is little. The reference, which works
# where numba is missing, needs some 500 bytes for each.
CHUNK = 1 << 22 if find_spec("numba") else 1 << 20
_ROWS = 128  # chunks start at multiples of it: no block of any format is cut


class Source:
    """What one task reads, each stored tensor once from its first byte to its last.

    Args:
        files: of the checkpoint.
        names: of the stored tensors.
        seen: hears how many bytes were read.
    """

    def __init__(self, files: Files, names: Iterable[str], seen: Callable[[int], None]) -> None:
        self._files, self._seen = files, seen
        self._sums = {name: xxh3_128() for name in names}
        self._memory = dict.fromkeys(self._sums, torch.empty(0, dtype=torch.uint8))

    def bytes(self, name: str, start: int, count: int) -> bytearray:
        """``count`` bytes of a stored tensor."""
        file = self._files.holder(name)
        piece = file.bytes(file.header.tensors[name], start, count)
        self._add(name, piece)
        return piece

    def elements(self, name: str, start: int, count: int) -> Tensor:
        """``count`` of its elements, in memory that the next call for this tensor writes over."""
        file = self._files.holder(name)
        nbytes = count * TORCH_DTYPES[file.header.tensors[name].dtype].itemsize
        if len(self._memory[name]) < nbytes:  # pages that are new take as long as what is read
            self._memory[name] = torch.empty(nbytes, dtype=torch.uint8)
        piece = file.elements(name, start, count, self._memory[name])
        self._add(name, tensor_bytes(piece))
        return piece

    def _add(self, name: str, piece: bytearray | memoryview) -> None:
        self._sums[name].update(piece)
        self._seen(len(piece))

    def checksums(self) -> dict[str, str]:
        """The checksum of each stored tensor, as far as it was read."""
        return {name: digest.hexdigest() for name, digest in self._sums.items()}


@dataclass(frozen=True)
class Task(ABC):
    """One tensor of the result.

    Attributes:
        name: of the tensor.
        tensor: as which it lies in the source.
    """

    name: str
    tensor: Stored

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the stored tensors that it reads."""
        return (self.name,)

    @property
    @abstractmethod
    def stored(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Name -> dtype and shape, of what it writes."""

    @abstractmethod
    def run(self, source: Source, parts: Mapping[str, Part]) -> dict[str, Any]:
        """Read, and write each of ``stored`` to its end. Returns what the manifest says of it."""

    def is_current(self, record: Mapping[str, Any]) -> bool:
        """Whether a record of an earlier run is of this very task."""
        return True


@dataclass(frozen=True)
class Copy(Task):
    """The same bytes; ``why`` says why they are not quantized."""

    why: str

    @property
    def stored(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {self.name: (self.tensor.dtype, self.tensor.shape)}

    def run(self, source: Source, parts: Mapping[str, Part]) -> dict[str, Any]:
        for start in range(0, self.tensor.nbytes, PIECE):
            count = min(PIECE, self.tensor.nbytes - start)
            parts[self.name].write(source.bytes(self.name, start, count))
        return {"copied": self.why}


@dataclass(frozen=True)
class Quantize(Task):
    """Blocks along the last dimension.

    ``scales``: of formats that have global scales. ``input_scale``: a value that is stored, too.
    ``scaling``: how blocks get their scales. ``made``: the result, where somebody has it already.
    """

    description: Description
    scales: GlobalScales | None
    input_scale: float
    scaling: str
    made: ScaledTensor | None = None

    @property
    def stored(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return self.description.stored(self.name)

    def run(self, source: Source, parts: Mapping[str, Part]) -> dict[str, Any]:
        format, storage = self.description.format, self.description.storage
        write = writer_of(self.description, self.name, parts)
        how: dict[str, Any] = {
            "scale_rounding": storage.scale_rounding,
            "scaling": self.scaling,
        }
        scalar, statistics = None, ErrorStatistics()
        record: dict[str, Any] = {"format": format.name}
        if self.scales is not None:
            scalar = self.scales[self.name]
            write("global_scale", scalar)
            record["global_scale"] = scalar.item()
        if self.description.has_input_scale:
            write("input_scale", torch.tensor(self.input_scale, dtype=torch.float32))
        for start, shape in chunks(self.tensor.shape, format):
            x = source.elements(self.name, start, math.prod(shape)).view(shape)
            if self.made is None:
                q = quantize(x, format, global_scale=scalar, **how)
            else:
                first = start // shape[-1]
                x, q = x[0], cast(ScaledTensor, self.made[first : first + shape[1]])
            write("data", q.qdata)
            write("scale", q.scale)
            statistics.add(x, q)
        return {**record, "error": statistics.to_json()}

    def is_current(self, record: Mapping[str, Any]) -> bool:
        """Its global scale may depend on other tensors."""
        return has_scale_of(self.scales, self.name, record)


def has_scale_of(
    scales: Mapping[str, Tensor] | GlobalScales | None, name: str, record: Mapping[str, Any]
) -> bool:
    """Whether a record of a tensor has the global scale that it would get now."""
    return scales is None or record.get("global_scale") == scales[name].item()


def chunks(shape: Sequence[int], format: Format) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Cut (..., N, K) into pieces that follow each other in memory and cut no block.

    Yields the first element of each and its shape (matrices, rows, K), about :data:`CHUNK` elements
    of one or more matrices, or one row (of blocks) where that is more.
    """
    matrices, rows, k = math.prod(shape[:-2]), shape[-2], shape[-1]
    if not matrices * rows * k:
        return
    if format.block[0] == 1:  # then rows of several matrices may share a chunk
        matrices, rows = 1, matrices * rows
    if rows * k <= CHUNK:
        step = max(1, CHUNK // (rows * k))
        for first in range(0, matrices, step):
            yield first * rows * k, (min(step, matrices - first), rows, k)
        return
    step = CHUNK // (_ROWS * k) * _ROWS
    if not step:  # not even 128 rows
        step = max(CHUNK // k, 1) if format.block[0] == 1 else _ROWS
    for matrix in range(matrices):
        for row in range(0, rows, step):
            yield (matrix * rows + row) * k, (1, min(step, rows - row), k)


def writer_of(
    description: Description, name: str, parts: Mapping[str, Part]
) -> Callable[[str, Tensor], None]:
    """A function that writes the next piece of a part of the tensor as it is stored."""
    names, places = description.names(name), description.storage.places

    def write(part: str, piece: Tensor) -> None:
        parts[names[part]].write(tensor_bytes(places[part].encode(piece.contiguous())))

    return write


#: Reads elements of a stored tensor: name, first, count.
Elements = Callable[[str, int, int], Tensor]


def pieces(
    name: str, description: Description, stored: Callable[[str], Stored], elements: Elements
) -> Iterator[tuple[int, tuple[int, int, int], ScaledTensor]]:
    """A quantized tensor in the pieces of :func:`chunks`: first element, shape, quantized values.

    ``stored``: its parts, by name. Blocks run along rows. Where each matrix of a batch has a global
    scale of its own, no piece has parts of two.
    """
    format, names = description.format, description.names(name)
    is_padded = description.is_padded(stored(names["data"]))
    scalars = stored(names["global_scale"]).numel if format.has_global_scale else 1
    whole = description.shape if scalars == 1 else description.shape[-2:]
    read, done = {}, {"data": 0, "scale": 0}
    for matrix in range(scalars):
        if format.has_global_scale:
            read[names["global_scale"]] = elements(names["global_scale"], matrix, 1)
        for start, shape in chunks(whole, format):
            sizes = {part: size for part, (_, size) in parts_of(format, shape).items()}
            if not is_padded:
                sizes["data"] = unpadded(format, shape, -1)
            for part in done:
                count = math.prod(sizes[part])
                read[names[part]] = elements(names[part], done[part], count)
                done[part] += count
            q = replace(description, shape=shape).assemble(name, read.__getitem__)
            yield matrix * math.prod(whole) + start, shape, q
