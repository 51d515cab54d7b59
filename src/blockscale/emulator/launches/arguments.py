"""The arguments of a launch: buffers, tensor maps and numbers, as the kernel sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..memory.buffers import Buffer, GlobalMemory
from ..memory.tensormap import TensorMap
from ..ptx.program import Function, Parameter

__all__ = ["add_buffers", "flat_bytes", "lay_out"]


def lay_out(
    function: Function, args: Sequence[Any], memory: GlobalMemory, whose: str = ""
) -> tuple[Buffer, dict[str, int]]:
    """Lay out the kernel's parameters; buffers among them become global memory.

    ``whose``: what to add to their names.
    """
    wanted = function.parameters
    if len(args) != len(wanted):
        raise ValueError(f"args{whose}: got {len(args)}, {function.name} takes {len(wanted)}")
    offsets: dict[str, int] = {}
    alive: list[Any] = []  # an address stays an array's own while the array lives
    data = bytearray()
    for i, (arg, parameter) in enumerate(zip(args, wanted, strict=True)):
        data += b"\0" * (-len(data) % parameter.align)
        offsets[parameter.name] = len(data)
        data += _bytes(arg, parameter, f"args[{i}]{whose}", memory, alive)
    block = np.zeros(len(data) + 64, np.uint8)
    lead = -block.ctypes.data % 64
    block = block[lead : lead + len(data)]
    block[:] = np.frombuffer(bytes(data), np.uint8)
    buffer = Buffer(f"the parameters{whose}", block.ctypes.data, block, writable=False)
    return memory.add(buffer) if len(data) else buffer, offsets


def _bytes(
    arg: Any, parameter: Parameter, name: str, memory: GlobalMemory, alive: list[Any]
) -> bytes:
    """One argument as the kernel sees it."""
    size, kind = parameter.nbytes, parameter.type
    if isinstance(arg, TensorMap):
        if size != 128:
            raise ValueError(f"{name}: got a tensor map, of 128 bytes; {parameter.name} has {size}")
        if arg.array is not None:
            memory.add(_span(arg.array, name))
        return arg.encode()
    if hasattr(arg, "detach") or isinstance(arg, np.ndarray):
        if size != 8:
            raise ValueError(
                f"{name}: got an array; {parameter.name} has {size} bytes, a pointer has 8"
            )
        flat = _add_memory(arg, name, memory)
        alive.append(flat)
        return int(flat.ctypes.data).to_bytes(8, "little")
    if (
        isinstance(arg, np.number | np.bool_)
        and kind[0] != "b"
        and (arg.dtype.kind == "f") != (kind[0] == "f")
    ):
        arg = arg.item()  # its value counts: its bits mean something else there
    if isinstance(arg, bytes | bytearray | np.generic):
        raw = arg.tobytes() if isinstance(arg, np.generic) else bytes(arg)
        if len(raw) != size:
            what = arg.dtype if isinstance(arg, np.generic) else f"{len(raw)} bytes"
            raise ValueError(f"{name}: got {what}; {parameter.name} has {size} bytes")
        return raw
    if not isinstance(arg, bool | int | float):
        raise TypeError(
            f"{name}: got {type(arg).__name__}; expected an array, a tensor, a number or bytes"
        )
    if parameter.count != 1 or size > 8:
        raise ValueError(f"{name}: got a number; {parameter.name} has {size} bytes: pass bytes")
    if kind[0] == "f" or (isinstance(arg, float) and kind[0] == "b" and size > 1):
        return np.array(arg, f"<f{size}").tobytes()
    if isinstance(arg, float):
        raise TypeError(f"{name}: got a float; {parameter.name} is of type .{kind}")
    if not -(1 << 8 * size - 1) <= arg < 1 << 8 * size:
        raise ValueError(f"{name}: {arg} does not fit {parameter.name}, of type .{kind}")
    return (int(arg) & (1 << 8 * size) - 1).to_bytes(size, "little")


def add_buffers(
    buffers: Mapping[str, Any] | Sequence[tuple[str, Any]], memory: GlobalMemory, whose: str
) -> None:
    """Make the memory of named arrays known, which the kernel reaches by no argument."""
    pairs = list(buffers.items() if isinstance(buffers, Mapping) else buffers)
    for i, pair in enumerate(pairs):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(
                f"buffers[{i}]: got {type(pair).__name__}; expected a name and an array, as in "
                'buffers={"weights": array}'
            )
    for label, array in pairs:
        _add_memory(array, f"buffers: {label}{whose}", memory)


def _add_memory(array: Any, name: str, memory: GlobalMemory) -> np.ndarray:
    """Make the memory of an array or tensor known; its bytes."""
    flat = flat_bytes(array, name)
    if len(flat):
        memory.add(Buffer(name, flat.ctypes.data, flat, flat.flags.writeable))
    return flat


def flat_bytes(array: Any, name: str) -> np.ndarray:
    """The bytes of an array or tensor, in place."""
    if hasattr(array, "detach"):  # a torch tensor, without importing torch
        array = _tensor_bytes(array, name)
    if array.dtype.hasobject:
        raise TypeError(f"{name}: an array of Python objects has no bytes to pass")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: is not contiguous; make it so first")
    flat: np.ndarray = array.reshape(-1).view(np.uint8)
    return flat


def _span(array: Any, name: str) -> Buffer:
    """The memory from the first to the last element of a strided array."""
    if hasattr(array, "detach"):
        array = array.detach().view(_unsigned(array)).numpy()
    low, high = np.lib.array_utils.byte_bounds(array)
    data = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
    return Buffer(name, low, data, array.flags.writeable, (array,))


def _unsigned(tensor: Any) -> Any:
    """A dtype of torch of the same size that numpy has, too."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def _tensor_bytes(tensor: Any, name: str) -> np.ndarray:
    import torch

    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: is on {tensor.device}; the emulator takes CPU tensors")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: is not contiguous; make it so first")
    for lazy in ("neg", "conj"):  # its memory holds something else
        if getattr(tensor, f"is_{lazy}")():
            raise ValueError(
                f"{name}: is a view that torch reads as .{lazy}() of its memory; pass "
                f"tensor.resolve_{lazy}()"
            )
    return tensor.detach().flatten().view(torch.uint8).numpy()
