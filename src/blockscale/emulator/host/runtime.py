"""What host code asks of the CUDA runtime: attributes of a device, launches, functions of C.

Structures and numbers are those of the CUDA runtime API (driver_types.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from ..ptx.parse import parse_once
from ..ptx.program import PtxError

__all__ = [
    "c_function",
    "device_attribute",
    "device_attributes",
    "does_nothing",
    "read_launch",
    "read_parameters",
    "writes",
]

_FAILED = 719  # cudaErrorLaunchFailure: makes host code return; what went wrong is raised after

# What cudaDeviceGetAttribute answers: number of the attribute (CUDA runtime API, enum
# cudaDeviceAttr) and value; first of all devices, then of an H200, a B200 and a B300.
_ATTRIBUTES = {
    1: 1024,  # threads in a block
    8: 48 * 1024,  # shared memory of a block that does not ask for more
    10: 32,  # threads in a warp
    12: 65536,  # registers of a block
    39: 2048,  # threads on an SM
    81: 228 * 1024,  # shared memory of an SM
    82: 65536,  # registers of an SM
    95: 1,  # cooperative launches
    97: 227 * 1024,  # shared memory of a block that asks
    106: 32,  # blocks on an SM
    111: 1024,  # shared memory of a block that belongs to the system
}
# 16: SMs; 38: bytes of L2 cache; 75, 76: compute capability
_TARGETS = {
    "sm_90a": {16: 132, 38: 50 << 20, 75: 9, 76: 0},
    "sm_100a": {16: 148, 38: 126 << 20, 75: 10, 76: 0},
    "sm_103a": {16: 148, 38: 126 << 20, 75: 10, 76: 3},
}

# Launch attributes (enum cudaLaunchAttributeID): the cluster, leave to overlap the launch before,
# and those that change no result here, hints and priorities.
_CLUSTER = 4
_PROGRAMMATIC = 6
_HINTS = {0, 1, 2, 3, 5, 8, 9, 10, 11}

_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_uint64}


def device_attributes(target: str) -> Mapping[int, int]:
    """Numbers of CUDA device attributes to their values."""
    return _ATTRIBUTES | _TARGETS[target]


def device_attribute(target: str, attribute: int) -> int:
    """One of them; PtxError where the emulated devices have none."""
    known = device_attributes(target)
    if attribute not in known:
        raise PtxError(f"device attribute {attribute}: the emulated devices have no value for it")
    return known[attribute]


class _Config(ctypes.Structure):
    """cudaLaunchConfig_t"""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    ]


class _Attribute(ctypes.Structure):
    """cudaLaunchAttribute"""

    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


def read_launch(address: int) -> dict[str, Any]:
    """What a cudaLaunchConfig_t says, as named arguments of ``Device.launch``.

    Raises PtxError for a launch attribute that is neither supported nor a hint.
    """
    c = _Config.from_address(address)
    said = {"grid": tuple(c.grid), "block": tuple(c.block), "shared": c.shared}
    for attribute in (_Attribute * c.count).from_address(c.attributes) if c.count else ():
        if attribute.id == _CLUSTER:
            said["cluster"] = tuple(attribute.value[:3])
        elif attribute.id == _PROGRAMMATIC:
            said["programmatic"] = attribute.value[0] != 0
        elif attribute.id not in _HINTS:
            raise PtxError(f"launch attribute {attribute.id}: not supported")
    return said


def read_parameters(ptx: str, name: str, address: int) -> list[bytes]:
    """The arguments of a kernel from an array of pointers to them, one for each parameter."""
    wanted = parse_once(ptx, name).functions[name].parameters
    places = (ctypes.c_void_p * len(wanted)).from_address(address) if wanted else ()
    return [ctypes.string_at(at, p.nbytes) for at, p in zip(places, wanted, strict=True)]


def does_nothing(current: Any, *_: int) -> None:
    """Limits that Device.launch checks itself; modules that are known already; waits for streams,
    which have nothing left to do."""


def writes(value: int) -> Callable[..., None]:
    """A function whose one argument is the place of an int, which gets the value."""

    def function(current: Any, out: int) -> None:
        ctypes.c_int32.from_address(out).value = value

    return function


def c_function(function: Callable[..., int | None], kinds: str, current: Callable[[], Any]) -> Any:
    """A C function that calls ``function(current(), *arguments)``; None is success.

    No exception can pass through host code: the first one waits in ``current().failure``, and the
    caller gets an error code.

    Args:
        function: takes arguments as integers.
        kinds: of its arguments: p a pointer, i an int, l 64 bits.
    """

    def body(*args: int | None) -> int:
        call = current()
        try:
            return function(call, *(arg or 0 for arg in args)) or 0
        except BaseException as error:
            call.failure = call.failure or error
            return _FAILED

    # An int is the low half of the 64 bits.
    return ctypes.CFUNCTYPE(ctypes.c_int64, *(_KINDS[kind] for kind in kinds))(body)
