"""The CUDA runtime as programs that nvcc 13 compiled call it, with an emulated device behind it.

Device memory is memory of this process, and whatever was asked for is done when its function
returns. What is not in the table at the end is refused by name, ``cudaEventElapsedTime`` for
example: the emulator has no clock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale import emulator as em
from blockscale.emulator.host.runtime import (
    c_function,
    device_attribute,
    does_nothing,
    read_launch,
    read_parameters,
    writes,
)

__all__ = ["Runtime"]

_ALIGNMENT = 256  # of what cudaMalloc returns
_VERSION = 13000

# Members of the enumerations of cuTensorMapEncodeTiled (cuda.h), in order.
_ELEMENTS = (
    "u8 u16 u32 s32 u64 s64 f16 f32 f64 bf16 f32_ftz tf32 tf32_ftz "
    "b4x16_align8 b4x16_align16 b6x16_align16"
)
_CHOICES = {
    "interleave": "none 16B 32B",
    "swizzle": "none 32B 64B 128B 128B_atom_32B 128B_atom_32B_flip_8B 128B_atom_64B",
    "l2_promotion": "none 64B 128B 256B",
    "oob_fill": "zeros nan",
}


class _Properties(ctypes.Structure):
    """cudaDeviceProp, its first part."""

    _fields_ = [
        ("name", ctypes.c_char * 256), ("uuid", ctypes.c_char * 16), ("luid", ctypes.c_char * 8),
        ("luidDeviceNodeMask", ctypes.c_uint32), ("totalGlobalMem", ctypes.c_size_t),
        ("sharedMemPerBlock", ctypes.c_size_t), ("regsPerBlock", ctypes.c_int32),
        ("warpSize", ctypes.c_int32), ("memPitch", ctypes.c_size_t),
        ("maxThreadsPerBlock", ctypes.c_int32), ("maxThreadsDim", ctypes.c_int32 * 3),
        ("maxGridSize", ctypes.c_int32 * 3), ("totalConstMem", ctypes.c_size_t),
        ("major", ctypes.c_int32), ("minor", ctypes.c_int32),
        ("textureAlignment", ctypes.c_size_t), ("texturePitchAlignment", ctypes.c_size_t),
        ("multiProcessorCount", ctypes.c_int32),
    ]  # fmt: skip


_FILLED = {  # fields and the attributes that say the same
    "sharedMemPerBlock": 8, "regsPerBlock": 12, "warpSize": 10, "maxThreadsPerBlock": 1,
    "major": 75, "minor": 76, "multiProcessorCount": 16,
}  # fmt: skip


class Runtime:
    """The state of the CUDA runtime in one process.

    Args:
        device: where launches go.
        ptx: the module that has the kernels.
        tell: called with the report of each launch, and with what went wrong first.
    """

    def __init__(
        self, device: em.Device, ptx: str, tell: Callable[[em.Report | BaseException], None]
    ) -> None:
        self.device, self.ptx, self._tell = device, ptx, tell
        self._failure: BaseException | None = None
        self.kernels: dict[int, str] = {}  # by the address of the host's function
        self.memory: dict[int, np.ndarray] = {}  # by address
        self.pushed: list[tuple[int, ...]] = []  # between <<<...>>> and the call
        made = {**_RUNTIME, **_DRIVER}
        self._functions = {n: self.exported(*entry) for n, entry in made.items()}

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @failure.setter
    def failure(self, error: BaseException) -> None:
        if self._failure is None:  # at once: the program may never return
            self._tell(error)
        self._failure = error

    def exported(self, function: Callable[..., int | None], kinds: str) -> Any:
        return c_function(function, kinds, lambda: self)

    def address(self, name: str) -> int:
        """Of the C function ``name``; one that refuses to be called if there is none."""
        if name not in self._functions:
            self._functions[name] = self.exported(_refusal(name), "")
        return int(ctypes.cast(self._functions[name], ctypes.c_void_p).value or 0)

    def holds(self, address: int, size: int) -> bool:
        """Whether there are so many bytes of device memory."""
        return any(
            base <= address and address + size <= base + len(data)
            for base, data in self.memory.items()
        )

    def check(self, address: int, size: int) -> None:
        if not self.holds(address, size):
            raise em.MemoryFault(f"{size} bytes at {address:#x} are not all in device memory")

    def launch(self, name: str, parameters: int, **named: Any) -> None:
        args = read_parameters(self.ptx, name, parameters)
        buffers = [(f"allocation of {len(m)} bytes", m) for m in self.memory.values()]
        self._tell(self.device.launch(self.ptx, name, args=args, buffers=buffers, **named))


def _refusal(name: str) -> Callable[..., None]:
    def function(runtime: Runtime) -> None:
        raise em.PtxError(f"{name}: the program calls it, the emulated runtime does not have it")

    return function


def _put(address: int, value: int, kind: Any = ctypes.c_int32) -> None:
    kind.from_address(address).value = value


def _numbers(address: int, count: int, kind: Any) -> tuple[int, ...]:
    return tuple((kind * count).from_address(address))


def _dim3(low: int, high: int) -> tuple[int, int, int]:
    """A dim3 that came by value: 12 bytes in two registers."""
    return low & 0xFFFF_FFFF, low >> 32, high & 0xFFFF_FFFF


# Modules and launches -----------------------------------------------------------------------------


def _register_binary(runtime: Runtime, wrapper: int) -> int:
    return wrapper  # a handle


def _register_function(runtime: Runtime, binary: int, host: int, device: int, *_: int) -> None:
    runtime.kernels[host] = ctypes.string_at(device).decode()


def _get_kernel(runtime: Runtime, out: int, host: int) -> None:
    _put(out, host, ctypes.c_void_p)


def _push(runtime: Runtime, *call: int) -> None:
    runtime.pushed.append(call)


def _pop(runtime: Runtime, grid: int, block: int, shared: int, stream: int) -> None:
    call = runtime.pushed.pop()
    for at, half in ((grid, call[:2]), (block, call[2:4])):
        (ctypes.c_uint32 * 3).from_address(at)[:] = _dim3(*half)
    _put(shared, call[4], ctypes.c_size_t)
    _put(stream, call[5], ctypes.c_void_p)


def _launch(runtime: Runtime, kernel: int, *rest: int) -> None:
    grid, block, (parameters, shared, _) = rest[:2], rest[2:4], rest[4:]
    runtime.launch(
        runtime.kernels[kernel], parameters, grid=_dim3(*grid), block=_dim3(*block), shared=shared
    )


def _launch_config(runtime: Runtime, config: int, kernel: int, parameters: int) -> None:
    runtime.launch(runtime.kernels[kernel], parameters, **read_launch(config))


# Memory -------------------------------------------------------------------------------------------


def _malloc(runtime: Runtime, out: int, size: int) -> None:
    room = np.full(size + _ALIGNMENT, 0xFF, np.uint8)  # NaN in all formats that have one
    start = -room.ctypes.data % _ALIGNMENT
    data = room[start : start + size]
    if size:
        runtime.memory[data.ctypes.data] = data
    _put(out, data.ctypes.data if size else 0, ctypes.c_void_p)


def _free(runtime: Runtime, address: int) -> None:
    if address:
        del runtime.memory[address]


def _copy(runtime: Runtime, to: int, source: int, size: int, kind: int) -> None:
    """cudaMemcpyKind: bit 0 the device is written, bit 1 it is read, 4 the addresses say it."""
    if kind & 1:
        runtime.check(to, size)
    if kind & 2:
        runtime.check(source, size)
    ctypes.memmove(to, source, size)


def _set_words(runtime: Runtime, address: int, value: int, count: int, stream: int) -> None:
    runtime.check(address, 4 * count)
    (ctypes.c_int32 * count).from_address(address)[:] = [value] * count


# What the device is -------------------------------------------------------------------------------


def _properties(runtime: Runtime, out: int, ordinal: int) -> None:
    """Fields that are not in ``_FILLED`` stay as they are."""
    found = _Properties.from_address(out)
    found.name = f"emulated {runtime.device.target}".encode()
    for field, attribute in _FILLED.items():
        setattr(found, field, device_attribute(runtime.device.target, attribute))


def _last_error(runtime: Runtime) -> int:
    return 0 if runtime.failure is None else 719  # cudaErrorLaunchFailure


def _entry_point(
    runtime: Runtime, symbol: int, out: int, version: int, flags: int, status: int
) -> None:  # fmt: skip
    name = ctypes.string_at(symbol).decode()
    _put(out, runtime.address(name), ctypes.c_void_p)
    if status:
        _put(status, 0)  # cudaDriverEntryPointSuccess


def _encode_tiled(
    runtime: Runtime, out: int, element: int, rank: int, address: int, *rest: int
) -> None:  # fmt: skip
    shape, strides, box, steps, *chosen = rest
    choices = zip(_CHOICES.items(), chosen, strict=True)
    found = em.TensorMap(
        address,
        _ELEMENTS.split()[element],
        _numbers(shape, rank, ctypes.c_uint64),
        _numbers(strides, rank - 1, ctypes.c_uint64),
        _numbers(box, rank, ctypes.c_uint32),
        _numbers(steps, rank, ctypes.c_uint32),
        **{name: members.split()[number] for (name, members), number in choices},
    )
    ctypes.memmove(out, found.encode(), 128)


_Table = dict[str, tuple[Callable[..., Any], str]]  # a function and its kinds, as of c_function
_RUNTIME: _Table = {
    "__cudaRegisterFatBinary": (_register_binary, "p"),
    "__cudaRegisterFatBinaryEnd": (does_nothing, "p"),
    "__cudaUnregisterFatBinary": (does_nothing, "p"),
    "__cudaRegisterFunction": (_register_function, "ppppippppp"),
    "__cudaRegisterVar": (does_nothing, "ppppilii"),
    "__cudaGetKernel": (_get_kernel, "pp"),
    "__cudaPushCallConfiguration": (_push, "lllllp"),
    "__cudaPopCallConfiguration": (_pop, "pppp"),
    "__cudaLaunchKernel": (_launch, "pllllplp"),
    "cudaLaunchKernelExC": (_launch_config, "ppp"),
    "cudaFuncSetAttribute": (does_nothing, "pii"),
    "cudaMalloc": (_malloc, "pl"),
    "cudaFree": (_free, "p"),
    "cudaMemcpy": (_copy, "ppli"),
    "cudaGetDevice": (writes(0), "p"),
    "cudaDriverGetVersion": (writes(_VERSION), "p"),
    "cudaGetDeviceProperties": (_properties, "pi"),
    "cudaDeviceSynchronize": (does_nothing, ""),
    "cudaGetLastError": (_last_error, ""),
    "cudaGetDriverEntryPointByVersion": (_entry_point, "ppilp"),
}
_DRIVER: _Table = {
    "cuMemsetD32Async": (_set_words, "pilp"),
    "cuTensorMapEncodeTiled": (_encode_tiled, "piippppp" + "iiii"),
}
