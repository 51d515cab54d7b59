"""The host code of a function compiled by CuTe DSL, linked against an emulated CUDA runtime.

Host code builds TMA descriptors and parameters and asks the CUDA runtime for launches. The DSL
keeps it as MLIR; here its own engine compiles it once more, with the C functions of this module in
place of the CUDA runtime's. They are found before those of any library, so neither a GPU nor a
driver is needed, and none is touched.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from ..launches.calls import Call
from ..launches.device import Device
from ..observe.report import Report
from ..ptx.program import PtxError
from .runtime import (
    c_function,
    device_attribute,
    does_nothing,
    read_launch,
    read_parameters,
    writes,
)

__all__ = ["HostCode", "capture", "landing", "settings"]


def settings() -> Any:
    """The DSL's settings, as its environment variables set them."""
    return _dsl().envar


def _dsl() -> Any:
    return import_module("cutlass.cutlass_dsl").CuTeDSL._get_dsl()


class HostCode:
    """Host code and kernels of a compiled function.

    Args:
        compiled: what ``cute.compile`` returned.

    Raises ValueError if the DSL did not keep the PTX.
    """

    def __init__(self, compiled: Any) -> None:
        self.ptx = _ptx(compiled)
        self.kernels: list[str] = []  # a kernel's handle is its place here, counted from one
        self._name = compiled.function_name
        self._loaded = not compiled.has_gpu_module
        operations = list(compiled.ir_module.body.operations)
        constants = [
            str(op.attributes["value"])
            for op in operations
            if op.name == "llvm.mlir.global" and _symbol(op).startswith("__tvm_ffi__str")
        ]
        self.wants_gpu_tensors = any("expected device_type=cuda" in text for text in constants)
        self._functions = dict(_functions())  # C functions live as long as their object here
        for name in (_symbol(op) for op in operations if op.name == "llvm.func"):
            if name.startswith("_cu") and name not in self._functions:
                self._functions[name] = _missing(name)
        engine = import_module("cutlass._mlir.execution_engine").ExecutionEngine
        self._engine = engine(compiled.ir_module, shared_libs=_dsl().get_shared_libs())
        for name, function in self._functions.items():
            self._engine.raw_register_runtime(name, ctypes.cast(function, ctypes.c_void_p))

    def call(self, packed: Sequence[Any]) -> int:
        """Call with the addresses of the arguments; returns a CUDA error code."""
        if not self._loaded:
            library, ordinal = ctypes.c_void_p(1), ctypes.c_int32(0)
            place = ctypes.c_void_p(ctypes.addressof(library))
            load = self._engine.raw_lookup("cuda_load_to_device")
            _invoke(load, [ctypes.addressof(place), ctypes.addressof(ordinal)])
            self._loaded = True
        return _invoke(self._engine.raw_lookup("_mlir_ciface_" + self._name), packed)

    def foreign(self, wrapper: types.FunctionType | None) -> Callable[..., Any]:
        """The TVM-FFI function; ``wrapper`` is the DSL's, which sorts keyword arguments."""
        entry = self._engine.raw_lookup("__tvm_ffi_" + self._name)

        @_SafeCall
        def safe_call(*args: int | None) -> int:
            cells = [kind(arg) for kind, arg in zip(_SafeCall._argtypes_, args, strict=True)]
            return _invoke(entry, [ctypes.addressof(cell) for cell in cells])

        kind = import_module("tvm_ffi").Function
        address = ctypes.cast(safe_call, ctypes.c_void_p).value
        function = kind.__from_extern_c__(address, keep_alive_object=safe_call)
        if wrapper is None:
            return function
        scope = {k: function if isinstance(v, kind) else v for k, v in wrapper.__globals__.items()}
        again = types.FunctionType(wrapper.__code__, scope, argdefs=wrapper.__defaults__)
        again.__kwdefaults__ = wrapper.__kwdefaults__
        return again


# TVMFFISafeCallType: the function itself, arguments, their number, the result; an error code.
_SafeCall: Any = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p
)


def _ptx(compiled: Any) -> str:
    text = compiled.__ptx__ if compiled.ir_module is not None else None
    if not text or ".version" not in text:  # the DSL gives a path where it could not write the file
        raise ValueError(
            f"{compiled.function_name}: the DSL kept no PTX of it; call cute.compile inside "
            "`with cutedsl(device)`, or with options='--keep-ptx' and an existing dump folder"
        )
    return str(text)


def _symbol(operation: Any) -> str:
    return str(operation.attributes["sym_name"].value)


def _invoke(address: int, packed: Sequence[Any]) -> int:
    """Call through MLIR's packed interface: addresses of the arguments, then of the result."""
    result = ctypes.c_int32(0)
    cells = (ctypes.c_void_p * (len(packed) + 1))(*packed, ctypes.addressof(result))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(cells)
    return result.value


@dataclass
class _Call:
    """A call under way."""

    device: Device
    host: HostCode
    buffers: Sequence[tuple[str, np.ndarray]]
    reports: list[Report]
    profile: bool
    failure: BaseException | None = None


_calls: ContextVar[_Call] = ContextVar("_calls")
_captured: ContextVar[list[Call] | None] = ContextVar("_captured", default=None)


@contextmanager
def capture() -> Iterator[list[Call]]:
    """Launches of functions compiled by CuTe DSL are kept while the block runs, not made.
    ``launch_together`` runs all of them at once then, whatever their order on a stream: keep one
    launch a rank, and none that needs the result of another.

    >>> with em.capture() as calls:  # doctest: +SKIP
    ...     for device, buffers in ranks:
    ...         with em.cutedsl(device):
    ...             compiled(*buffers, stream)
    >>> reports = em.launch_together(calls)  # doctest: +SKIP

    Yields the list of calls, in the order in which they were asked for; their tensors must live
    until they have run. Blocks of ``cutedsl`` report nothing of them.
    """
    calls: list[Call] = []
    token = _captured.set(calls)
    try:
        yield calls
    finally:
        _captured.reset(token)


@contextmanager
def landing(
    device: Device,
    host: HostCode,
    buffers: Sequence[tuple[str, np.ndarray]],
    reports: list[Report],
    profile: bool,
) -> Iterator[None]:
    """Launches that ``host`` asks for in the block go to ``device``.

    What a launch raises comes out of the block, whatever the host code made of its failure.

    Args:
        buffers: what the kernels may touch, with names.
        reports: gets the report of each launch.
        profile: of each launch, too.
    """
    call = _Call(device, host, buffers, reports, profile)
    token = _calls.set(call)
    try:
        yield
    finally:
        _calls.reset(token)
        if call.failure is not None:
            raise call.failure from None


def _launch(call: _Call, config: int, kernel: int, parameters: int) -> None:
    ptx, name = call.host.ptx, call.host.kernels[kernel - 1]
    given = {
        "args": read_parameters(ptx, name, parameters),
        "buffers": call.buffers,
        "profile": call.profile,
        **read_launch(config),
    }
    captured = _captured.get()
    if captured is None:
        call.reports.append(call.device.launch(ptx, name, **given))
    else:
        captured.append(Call(call.device, ptx, name, **given))


def _get_kernel(call: _Call, out: int, library: int, name: int) -> None:
    call.host.kernels.append(ctypes.string_at(name).decode())
    ctypes.c_void_p.from_address(out).value = len(call.host.kernels)


def _device_attribute(call: _Call, out: int, attribute: int, ordinal: int) -> None:
    ctypes.c_int32.from_address(out).value = device_attribute(call.device.target, attribute)


def _kernel_attribute(call: _Call, out: int, attribute: int, kernel: int, ordinal: int) -> None:
    """Host code asks for static shared memory, to set a limit that Device.launch checks itself."""
    ctypes.c_int32.from_address(out).value = 0


def _load_once(call: _Call, state: int, init: int, load: int, set_error: int) -> None:
    """The DSL's helper of TVM-FFI entries: load the kernels before the first launch."""
    loaded = ctypes.c_uint64.from_address(state)
    if not loaded.value:
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_int)(load)(state, 0)
        loaded.value = 1


_RUNTIME: dict[str, tuple[Callable[..., None], str]] = {  # kinds of c_function
    "_cudaLaunchKernelEx": (_launch, "ppp"),
    "_cudaLibraryLoadData": (does_nothing, "ppppippi"),
    "_cudaLibraryGetKernel": (_get_kernel, "ppp"),
    "_cudaDeviceGetAttribute": (_device_attribute, "pii"),
    "_cuKernelGetAttribute": (_kernel_attribute, "pipi"),
    "_cudaKernelSetAttributeForDevice": (does_nothing, "piii"),
    "_cudaFuncSetAttribute": (does_nothing, "pii"),
    "_cudaGetDevice": (writes(0), "p"),
    "_cudaGetDeviceCount": (writes(1), "p"),
    "_cudaSetDevice": (does_nothing, "i"),
    "_cudaDeviceSynchronize": (does_nothing, ""),
    "_cudaStreamSynchronize": (does_nothing, "p"),
    "cuda_dialect_init_library_once": (_load_once, "pppp"),
}


@lru_cache(maxsize=1)
def _functions() -> Mapping[str, Any]:
    """C functions by the name that host code calls."""
    functions: dict[str, Any] = {name: _exported(*entry) for name, entry in _RUNTIME.items()}
    # Called when an engine goes, perhaps after Python: a function of C that only looks.
    functions["cuda_dialect_unload_library_once"] = ctypes.pythonapi.Py_IsInitialized
    return functions


def _exported(function: Callable[..., None], kinds: str) -> Any:
    return c_function(function, kinds, _calls.get)


def _missing(name: str) -> Any:
    def function(call: _Call) -> None:
        raise PtxError(f"{name[1:]}: the host code calls it, the emulator does not have it")

    return _exported(function, "")
