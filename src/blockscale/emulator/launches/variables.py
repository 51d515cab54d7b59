"""The variables of a module: where they lie in global, constant and shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..memory.buffers import SYSTEM_SHARED, Buffer, GlobalMemory
from ..memory.heap import Heap
from ..ptx.program import Address, Function, Module, PtxError, Symbol, Variable
from .arguments import flat_bytes

__all__ = ["place_heap", "place_shared", "place_variables", "place_workspace", "shared_start"]

_MOST_SHARED = 227 * 1024
_TILES_SHARED = 288  # bytes that CUDA promises to tiles of cooperative groups


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
    addresses = module.addresses | {name: place.base for name, place in places.items()}
    for name, place in places.items():
        for link in () if name in given else wanted[name].links:
            if link.symbol not in addresses:
                raise PtxError(
                    f"the initial value of {name} is the address of {link.symbol}, which is no "
                    "function and in neither global nor constant memory"
                )
            if link.generic and link.symbol in module.addresses:
                raise PtxError(
                    f"the initial value of {name} is generic({link.symbol}), and {link.symbol} is "
                    "a function: name it without generic()"
                )
            lowest = (link.mask & -link.mask).bit_length() - 1
            value = ((addresses[link.symbol] + link.addend) & link.mask) >> lowest
            value &= (1 << 8 * link.size) - 1
            where = slice(link.at, link.at + link.size)
            place.data[where] = np.frombuffer(value.to_bytes(link.size, "little"), np.uint8)
    return places


def _given(variable: Variable, array: Any, memory: GlobalMemory) -> Buffer:
    name = f"variables: {variable.name}"
    flat = flat_bytes(array, name)
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


def shared_start(ptx: str) -> int:
    """Where the shared memory that a kernel may reach starts: behind that of the system, in which
    cooperative groups keep what tiles of several warps share, at %reserved_smem_offset_1."""
    return SYSTEM_SHARED - (_TILES_SHARED if "%reserved_smem_offset_1" in ptx else 0)


def place_heap(module: Module, memory: GlobalMemory, whose: str) -> Heap | None:
    """A heap, if a function of the module asks for memory. ``whose``: what to add to its name."""
    calls = [
        ins for each in module.functions.values() for ins in each.instructions
        if ins.parts[0] == "call"
    ]  # fmt: skip
    called = {op.name for ins in calls for op in ins.operands if isinstance(op, Symbol)}
    return None if called.isdisjoint(("malloc", "free")) else Heap(memory, whose)


def place_shared(module: Module, entry: Function, dynamic: int) -> tuple[dict[str, int], int]:
    """Offsets in shared memory of the variables that a kernel uses, and the bytes in all.

    Args:
        dynamic: bytes of the launch, behind the static ones.
    """
    own = [v for function in _called(module, entry) for v in function.variables.values()]
    places: dict[str, int] = {}
    size = 0
    for variable in (*own, *module.variables.values()):
        if variable.space == "shared" and not variable.extern:
            size = -(-size // variable.align) * variable.align
            places[variable.name] = SYSTEM_SHARED + size
            size += variable.nbytes
    static = -(-size // 1024) * 1024 if dynamic else size
    if dynamic < 0 or static + dynamic > _MOST_SHARED:
        raise ValueError(
            f"shared: {size} bytes static and {dynamic} dynamic; at most {_MOST_SHARED} in all"
        )
    for variable in module.variables.values():
        if variable.space == "shared" and variable.extern:
            places[variable.name] = SYSTEM_SHARED + static
    return places, static + dynamic


def _called(module: Module, entry: Function) -> list[Function]:
    """A kernel and the functions of its module in the order in which it comes to name them, then
    those that are in tables alone: so their variables lie."""
    functions, named = [entry], set[str]()
    for function in functions:  # which grows meanwhile
        for ins in function.instructions:
            for op in ins.operands:
                op = op.base if isinstance(op, Address) else op
                if isinstance(op, Symbol) and op.name not in named:
                    named.add(op.name)
                    if op.name in module.functions:
                        functions.append(module.functions[op.name])
    known = {id(each) for each in functions}
    return functions + [each for each in module.functions.values() if id(each) not in known]
