"""The arguments of a launch: buffers, tensor maps and numbers, as the kernel sees them; and the
variables of its module."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..memory.buffers import Buffer, GlobalMemory
from ..memory.tensormap import TensorMap
from ..ptx.program import Function, Module, Parameter, PtxError, Variable

__all__ = ["add_memory", "lay_out", "place_variables", "place_workspace"]


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
        flat = add_memory(arg, name, memory)
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


def add_memory(array: Any, name: str, memory: GlobalMemory) -> np.ndarray:
    """Make the memory of an array or tensor known; its bytes."""
    flat = _flat(array, name)
    if len(flat):
        memory.add(Buffer(name, flat.ctypes.data, flat, flat.flags.writeable))
    return flat


def _flat(array: Any, name: str) -> np.ndarray:
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


def place_variables(
    module: Module, memory: GlobalMemory, given: Mapping[str, Any]
) -> dict[str, Buffer]:
    """Memory for the .global and .const variables of a module: arrays that are given, others with
    their initial values."""
    wanted = {v.name: v for v in module.variables.values() if v.space in ("global", "const")}
    for name in given:
        if name not in wanted:
            raise ValueError(
                f"variables: the kernel reaches no {name!r} in global or constant memory; what it "
                f"reaches is {', '.join(wanted) or 'none'}"
            )
    places: dict[str, Buffer] = {}
    for variable in wanted.values():
        if variable.name in given:
            places[variable.name] = _given(variable, given[variable.name], memory)
            continue
        data = np.zeros(max(variable.nbytes, 1) + variable.align, np.uint8)
        lead = -data.ctypes.data % variable.align
        data = data[lead : lead + max(variable.nbytes, 1)]
        if variable.data:
            data[: len(variable.data)] = np.frombuffer(variable.data, np.uint8)
        places[variable.name] = memory.add(
            Buffer(variable.name, data.ctypes.data, data, variable.space == "global")
        )
    for name, place in places.items():
        for link in () if name in given else wanted[name].links:
            if link.symbol not in places:
                raise PtxError(
                    f"the initial value of {name} is the address of {link.symbol}, which is in "
                    "neither global nor constant memory"
                )
            lowest = (link.mask & -link.mask).bit_length() - 1
            value = ((places[link.symbol].base + link.addend) & link.mask) >> lowest
            value &= (1 << 8 * link.size) - 1
            where = slice(link.at, link.at + link.size)
            place.data[where] = np.frombuffer(value.to_bytes(link.size, "little"), np.uint8)
    return places


def _given(variable: Variable, array: Any, memory: GlobalMemory) -> Buffer:
    name = f"variables: {variable.name}"
    flat = _flat(array, name)
    if len(flat) != variable.nbytes:
        raise ValueError(f"{name}: got {len(flat)} bytes; it has {variable.nbytes}")
    if flat.ctypes.data % variable.align:
        raise ValueError(f"{name}: the array begins at no multiple of {variable.align} bytes")
    writable = variable.space == "global" and flat.flags.writeable
    return memory.add(Buffer(variable.name, flat.ctypes.data, flat, writable))


def place_workspace(ptx: str, memory: GlobalMemory) -> Buffer | None:
    """Memory behind %envreg1 and %envreg2, if the module has them: there cooperative groups keep
    the barrier of the grid."""
    if "%envreg" not in ptx:
        return None
    data = np.zeros(1, np.uint64).view(np.uint8)
    return memory.add(Buffer("the grid's workspace", data.ctypes.data, data))
