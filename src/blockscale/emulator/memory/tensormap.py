"""Tensor maps: what a cp.async.bulk.tensor copies, and where each byte of it goes.

PTX ISA 5.5 (tensors) and cuTensorMapEncodeTiled of the CUDA driver; where they leave a question,
an H200 answered it (tests/hardware/tensormap_dump.py):

- a box starts at a multiple of 16 bytes in the innermost dimension, else the copy faults;
- a store with a negative coordinate faults, a load fills;
- with a swizzle, a row of the box takes the whole span in shared memory, however short it is;
- element_strides[0] has no effect.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import tensormap_bits as bits
from .buffers import MemoryFault
from .tensormap_tile import SPANS, Tile

__all__ = ["TensorMap"]

_MOST_BOX = 228 * 1024  # bytes, what an SM has; the driver refuses more
_BITS = {"u8": 8, "u16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64}
_BITS |= {"f16": 16, "bf16": 16, "tf32": 32, "tf32_ftz": 32, "f32": 32, "f32_ftz": 32, "f64": 64}
_BITS |= {"b4x16_align8": 4, "b4x16_align16": 4, "b6x16_align16": 6}
_PAYLOAD = {"b4x16_align16": 8, "b6x16_align16": 12}  # of 16 bytes in shared memory
_FLIP = "128B_atom_32B_flip_8B"


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor in global memory and the box that a copy takes of it, checked as the driver does.

    Attributes:
        address: of the first element.
        element: u8, u16, u32, s32, u64, s64, f16, f32, f32_ftz, f64, bf16, tf32, tf32_ftz,
            b4x16_align8 (no gaps), b4x16_align16 and b6x16_align16 (16 elements in 16 bytes of
            shared memory); for these three sizes count single elements.
        shape: elements in each of 1 to 5 dimensions, the innermost first.
        strides: bytes between elements of dimensions 1 and up.
        box: elements that a copy spans in each dimension.
        element_strides: steps inside the box; the first is without effect.
        swizzle: none, 32B, 64B, 128B, 128B_atom_32B, 128B_atom_32B_flip_8B or 128B_atom_64B.
        interleave: none, 16B or 32B; copies of the last two are not supported.
        oob_fill: zeros or nan, what a load takes for what is out of bounds.
        l2_promotion: none, 64B, 128B or 256B; without effect here.
        array: kept alive, not compared.

    Raises ValueError, where the driver returns CUDA_ERROR_INVALID_VALUE.
    """

    address: int
    element: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: str = "none"
    interleave: str = "none"
    oob_fill: str = "zeros"
    l2_promotion: str = "none"
    array: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("shape", "strides", "box", "element_strides"):
            object.__setattr__(self, name, tuple(map(operator.index, getattr(self, name))))
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * len(self.shape))
        _check(self)

    @classmethod
    def of(
        cls,
        array: Any,
        box: Sequence[int],
        *,
        element: str | None = None,
        strides: Sequence[int] | None = None,
        element_strides: Sequence[int] = (),
        swizzle: str = "none",
        interleave: str = "none",
        oob_fill: str = "zeros",
        l2_promotion: str = "none",
    ) -> TensorMap:
        """The map of a numpy array or CPU torch tensor, whose last dimension is contiguous.

        Args:
            array: its dimensions become those of the map in reverse order.
            box: innermost first.
            element: by default what the dtype says, and unsigned integers for those that tensor
                maps lack; another one reinterprets the bytes of the last dimension.
            strides: bytes, of dimensions 1 and up, instead of the array's.
        """
        pointer, dtype, size, sizes, steps = _description(array)
        if element is None:
            element = _DTYPES.get(dtype, f"u{8 * size}")
        _choice("element", element, bits.ELEMENTS)
        if not sizes or 0 in sizes or (sizes[-1] > 1 and steps[-1] != size):
            raise ValueError(
                f"array: got shape {sizes}, strides {steps} bytes; "
                "needs elements, contiguous in the last dimension"
            )
        inner = sizes[-1] * size * 8 // _BITS[element]
        if strides is None:  # one that is never taken need not be a multiple of 16
            pairs = zip(sizes[-2::-1], steps[-2::-1], strict=True)
            strides = [step if n > 1 else -(-step // 32) * 32 for n, step in pairs]
        return cls(
            pointer,
            element,
            (inner, *sizes[-2::-1]),
            tuple(strides),
            tuple(box),
            tuple(element_strides),
            swizzle=swizzle,
            interleave=interleave,
            oob_fill=oob_fill,
            l2_promotion=l2_promotion,
            array=array,
        )

    @classmethod
    def decode(cls, raw: bytes) -> TensorMap:
        """The map of 128 bytes; ValueError for one that is not tiled or breaks a rule."""
        return cls(**bits.unpack(raw))

    def encode(self) -> bytes:
        """The 128 bytes, as the driver writes them."""
        alignment = 16 if self.swizzle == "none" else 8 * SPANS[self.swizzle]
        return bits.pack(
            self.address,
            self.shape,
            self.strides,
            self.box,
            self.element_strides,
            (_driver_bytes(self), alignment),
            element=self.element,
            interleave=self.interleave,
            swizzle=self.swizzle,
            oob_fill=self.oob_fill,
            l2_promotion=self.l2_promotion,
        )

    def tile(self, coordinates: Sequence[int], *, store: bool = False) -> Tile:
        """The box that starts at ``coordinates``, innermost first; they may be out of bounds.

        Raises MemoryFault for a start that the copy engine refuses, ValueError for a wrong number
        of coordinates or what is not supported.
        """
        starts = tuple(map(operator.index, coordinates))
        if len(starts) != len(self.shape):
            raise ValueError(f"coordinates: got {starts}; the map has {len(self.shape)} dimensions")
        axes = [
            np.arange(0, n, step) + start
            for n, step, start in zip(
                self.box[1:], self.element_strides[1:], starts[1:], strict=True
            )
        ]
        return self._tile(starts[0], axes, store)

    def tile4(self, coordinates: Sequence[int], *, store: bool = False) -> Tile:
        """The four rows of tile::gather4 or, with ``store``, tile::scatter4.

        Args:
            coordinates: where the rows start in dimension 0, then four of dimension 1.

        Raises as ``tile``.
        """
        starts = tuple(map(operator.index, coordinates))
        if len(starts) != 5 or len(self.shape) != 2 or self.box[1] != 1:
            raise ValueError(
                f"coordinates: got {starts} for a map of shape {self.shape} and box {self.box}; "
                "gather4 and scatter4 take five, two dimensions and a box of one row"
            )
        return self._tile(starts[0], [np.array(starts[1:])], store)

    def _tile(self, start: int, axes: list[np.ndarray], store: bool) -> Tile:
        """``start`` in dimension 0; ``axes``: the coordinates in the others."""
        _check_copy(self, start, axes, store)
        width = _BITS[self.element]
        unit = 8 if self.swizzle == _FLIP else _PAYLOAD.get(self.element, 16)
        place = 8 if self.swizzle == _FLIP else 16
        pieces = self.box[0] * width // 8 // unit
        begin = start * width // 8 + unit * np.arange(pieces)
        inside = np.where(begin >= 0, np.clip(self.shape[0] * width // 8 - begin, 0, unit), 0)

        rows = np.zeros(1, np.int64)  # bytes from the start of the tensor, dimension 0 aside
        whole = np.ones(1, bool)
        for axis, size, stride in zip(axes, self.shape[1:], self.strides, strict=True):
            rows = (axis[:, None] * stride + rows).reshape(-1)
            whole = (((axis >= 0) & (axis < size))[:, None] & whole).reshape(-1)
        pitch = max(pieces * place, SPANS[self.swizzle])
        offsets = np.arange(len(rows))[:, None] * pitch + place * np.arange(pieces)
        addresses = (rows[:, None] + begin).reshape(-1).astype(np.uint64) + np.uint64(self.address)
        return Tile(
            addresses,
            offsets.reshape(-1),
            (whole[:, None] * inside).reshape(-1),
            unit,
            len(rows) * pitch,
            self.swizzle,
            self.oob_fill,
            self.element,
        )


_DTYPES = {
    "int32": "s32",
    "int64": "s64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
}


def _description(array: Any) -> tuple[int, str, int, tuple[int, ...], tuple[int, ...]]:
    """Address, name of the dtype, bytes of an element, shape and strides in bytes."""
    if isinstance(array, np.ndarray):
        dtype = array.dtype
        return int(array.ctypes.data), dtype.name, dtype.itemsize, array.shape, array.strides
    if not hasattr(array, "data_ptr"):
        raise TypeError(f"array: got {type(array).__name__}; expected a numpy array or a tensor")
    if array.device.type != "cpu":
        raise ValueError(f"array: is on {array.device}; the emulator takes CPU tensors")
    size, name = array.element_size(), str(array.dtype).removeprefix("torch.")
    return array.data_ptr(), name, size, tuple(array.shape), tuple(n * size for n in array.stride())


def _choice(name: str, value: str, allowed: dict[str, int]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}; choose one of {', '.join(allowed)}")


def _check(tensor: TensorMap) -> None:
    """The rules of cuTensorMapEncodeTiled."""
    for name, allowed in (
        ("element", bits.ELEMENTS),
        ("swizzle", bits.SWIZZLES),
        ("interleave", bits.INTERLEAVES),
        ("oob_fill", bits.FILLS),
        ("l2_promotion", bits.PROMOTIONS),
    ):
        _choice(name, getattr(tensor, name), allowed)
    rank = len(tensor.shape)
    if not (1 if tensor.interleave == "none" else 3) <= rank <= 5:
        raise ValueError(f"shape: got {rank} dimensions; 1 to 5, and 3 or more to interleave")
    for name, count in {"strides": rank - 1, "box": rank, "element_strides": rank}.items():
        if len(getattr(tensor, name)) != count:
            raise ValueError(f"{name}: got {getattr(tensor, name)}; {rank} dimensions need {count}")
    for holds, name, must in _rules(tensor):
        if not holds:
            raise ValueError(f"{name}: got {getattr(tensor, name)!r}; must be {must}")
    if _driver_bytes(tensor) > _MOST_BOX:
        raise ValueError(f"box: got {tensor.box}; must be at most {_MOST_BOX} bytes in all")


def _rules(tensor: TensorMap) -> tuple[tuple[bool, str, str], ...]:
    """Of its numbers: whether each holds, of what it is, and what that must be."""
    padded, plain = tensor.element in _PAYLOAD, tensor.interleave == "none"
    align = 32 if padded or tensor.interleave == "32B" else 16
    multiple = {"b4x16_align8": 2}.get(tensor.element, 128 if padded else 1)
    width, inner = _BITS[tensor.element], tensor.box[0] * _BITS[tensor.element] // 8
    span = SPANS[tensor.swizzle]
    return (
        (0 <= tensor.address < 1 << 57, "address", "0 to 2**57 - 1"),
        (tensor.address % align == 0, "address", f"a multiple of {align}"),
        (all(1 <= n <= 1 << 32 for n in tensor.shape), "shape", "1 to 2**32 each"),
        (tensor.shape[0] % multiple == 0, "shape", f"a multiple of {multiple} in dimension 0"),
        (all(0 <= n < 1 << 40 for n in tensor.strides), "strides", "0 to 2**40 - 1 each"),
        (not any(n % align for n in tensor.strides), "strides", f"multiples of {align}"),
        (all(1 <= n <= 256 for n in tensor.box), "box", "1 to 256 each"),
        (tensor.box[0] == 128 or not padded, "box", f"128 {tensor.element} in dimension 0"),
        (
            not plain or tensor.box[0] * width % 128 == 0,
            "box",
            f"a multiple of 16 bytes in dimension 0, not {inner} bytes",
        ),
        (
            not plain or padded or not span or inner <= span,
            "box",
            f"at most {span} bytes in dimension 0 with swizzle {tensor.swizzle}, not {inner}",
        ),
        (all(1 <= n <= 8 for n in tensor.element_strides), "element_strides", "1 to 8 each"),
        (
            tensor.oob_fill == "zeros" or "f" in tensor.element,
            "oob_fill",
            f"zeros where elements are {tensor.element}",
        ),
        (
            not padded or tensor.swizzle in ("none", "128B", "128B_atom_32B", "128B_atom_64B"),
            "swizzle",
            f"none, 128B, 128B_atom_32B or 128B_atom_64B where elements are {tensor.element}",
        ),
        (
            plain or tensor.element != "b6x16_align16",
            "interleave",
            f"none where elements are {tensor.element}",
        ),
    )


def _driver_bytes(tensor: TensorMap) -> int:
    """What the driver takes for the bytes of a box: a copy rounds up where this rounds down."""
    steps = zip(tensor.box, tensor.element_strides, strict=True)
    return math.prod(n // step for n, step in steps) * _BITS[tensor.element] // 8


def _check_copy(tensor: TensorMap, start: int, axes: list[np.ndarray], store: bool) -> None:
    """What the copy engine refuses."""
    if tensor.interleave != "none":
        raise ValueError(f"interleave: {tensor.interleave} is not supported in copies, only none")
    if store and (tensor.element == "b4x16_align16" or tensor.swizzle == _FLIP):
        raise MemoryFault(
            f"store with elements {tensor.element} and swizzle {tensor.swizzle}: "
            f"b4x16_align16 and {_FLIP} are for loads alone"
        )
    if not store and tensor.element in _PAYLOAD and tensor.swizzle == "128B_atom_64B":
        raise MemoryFault(
            f"load with elements {tensor.element}: swizzle 128B_atom_64B is for stores alone"
        )
    first = [start, *(int(axis.min()) for axis in axes)]
    if store and min(first) < 0:
        raise MemoryFault(f"coordinates {first} of a store: negative ones are for loads alone")
    width = _BITS[tensor.element]
    step = 128 if tensor.element in _PAYLOAD else 128 // width
    if start % step:
        raise MemoryFault(
            f"coordinate {start} in dimension 0, elements {tensor.element}: "
            f"a box starts at a multiple of {step} elements"
        )
