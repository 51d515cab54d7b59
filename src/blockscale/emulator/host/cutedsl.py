"""Functions compiled by CuTe DSL, called as on a GPU: their launches go to an emulated device.

Written against nvidia-cutlass-dsl 4.8.1. It replaces some of the DSL's methods for the time of a
``with`` block; what the compiled functions' host code then does is in ``hostcode``.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from ..launches.device import Device
from ..observe.report import Report
from .hostcode import HostCode, landing, settings
from .runtime import device_attributes

__all__ = ["cutedsl"]

Named = tuple[str, np.ndarray]
Methods = dict[str, Any]


@contextmanager
def cutedsl(
    device: Device,
    *,
    buffers: Sequence[Any] | Mapping[str, Any] = (),
    profile: bool = False,
) -> Iterator[list[Report]]:
    """Calls of functions compiled by CuTe DSL land in ``device`` while the block runs.

    Inside, ``cute.compile`` compiles for the device's target and keeps the PTX, and a CPU tensor
    given to ``from_dlpack`` counts as one of the GPU, so that the code is the one a GPU would get.
    A function compiled elsewhere works too if it was compiled with ``--keep-ptx``; one compiled
    here can be called in such a block only, or exported. Streams are ignored: a launch is over when
    it returns, unless ``capture`` keeps it. ``HardwareInfo()`` describes the device.

    Kernels may touch the tensors among a call's arguments, also those in tuples, lists and
    dataclasses. A pointer made by ``make_ptr`` does not say how long its memory is, and a function
    called without ``cute.compile`` hides its arguments: name their tensors in ``buffers``.

    Args:
        device: where the launches go.
        buffers: further arrays or CPU tensors that kernels may touch, in a sequence or by name;
            read at each call, so it may grow.
        profile: of each launch, as of ``Device.launch``: reports memory traffic, bank conflicts,
            products and waits, too.

    Yields a list that grows by the Report of each launch.

    Raises from the call whatever ``Device.launch`` raises; ValueError for a function without PTX
    and for tensors of a GPU; ImportError without nvidia-cutlass-dsl. The block replaces methods of
    the DSL's classes and restores them: only one thread at a time may use the DSL.
    """
    compiled = import_module("cutlass.cutlass_dsl.cuda_jit_executor").CudaDialectJitCompiledFunction
    arguments = import_module("cutlass.base_dsl.jit_executor").ExecutionArgs
    tensor = import_module("cutlass.cute.runtime")._Tensor
    hardware = import_module("cutlass.utils.hardware_info").HardwareInfo
    dsl = import_module("cutlass.cutlass_dsl.cutlass").CutlassBaseDSL
    options = import_module("cutlass.base_dsl.compiler").CompileOptions
    session = _Session(device, buffers, profile)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        kept = {"_arch": device.target, "keep_ptx": True, "dump_dir": folder, "no_cache": True}
        replaced: list[tuple[Any, Methods]] = [
            (settings(), kept),
            # As for a GPU that is not here: HostCode compiles the host code, once is enough.
            (dsl, {"_runtime_can_run_compiled": lambda *_: False}),
            (options, _compile_options(options, stack)),
            (compiled, session.compiled(compiled)),
            (arguments, session.arguments(arguments)),
            (tensor, _tensor(tensor)),
            (hardware, _hardware_info(device.target)),
        ]
        if find_spec("tvm_ffi"):
            provider = import_module("cutlass.cutlass_dsl.tvm_ffi_provider")
            for name in ("TVMFFIJitCompiledFunction", "TVMFFIJitCompiledFunctionWithKwargs"):
                replaced.append((getattr(provider, name), session.foreign()))
            base = provider.TVMFFIJitCompiledFunctionBase
            replaced.append((base, {"_create_tvm_ffi_function": _placeholder}))
        for target, methods in replaced:
            stack.enter_context(patch.multiple(target, **methods))
        yield session.reports


class _Session:
    """One ``with`` block: the methods that the DSL has while it runs."""

    def __init__(
        self, device: Device, buffers: Sequence[Any] | Mapping[str, Any], profile: bool
    ) -> None:
        self.reports: list[Report] = []
        self._device, self._buffers, self._profile = device, buffers, profile
        self._packed: dict[int, tuple[Any, list[Named]]] = {}

    def _landing(self, host: HostCode, memory: list[Named]) -> Any:
        further = self._buffers
        named = further.items() if isinstance(further, Mapping) else _number("buffers", further)
        memory = memory + _memory(named)
        return landing(self._device, host, memory, self.reports, self._profile)

    def arguments(self, owner: Any) -> Methods:
        """Where the DSL packs a call's arguments: remember their memory."""
        original = owner.generate_execution_args

        def generate_execution_args(it: Any, args: Any, kwargs: Any) -> Any:
            packed, adapted = original(it, args, kwargs)
            self._packed[id(packed)] = packed, _memory(_named(args, kwargs))
            return packed, adapted

        return {"generate_execution_args": generate_execution_args}

    def compiled(self, owner: Any) -> Methods:
        """Functions that take packed arguments."""
        original = owner.__call__

        def call(it: Any, *args: Any, **kwargs: Any) -> Any:
            before, it._default_executor = it._default_executor, None  # a GPU's
            try:
                return original(it, *args, **kwargs)
            finally:
                it._default_executor = before

        def run_compiled_program(it: Any, packed: Any) -> Any:
            _, memory = self._packed.pop(id(packed), (None, []))
            host = _host(it)
            with self._landing(host, memory):
                return host.call(packed)

        def to(it: Any, device: Any = None) -> Any:
            return it

        return {"__call__": call, "run_compiled_program": run_compiled_program, "to": to}

    def foreign(self) -> Methods:
        """Functions that are called through TVM-FFI."""

        def call(it: Any, *args: Any, **kwargs: Any) -> Any:
            memory = _memory(_named(args, kwargs))
            if it.execution_args.has_pointer_address_arg_specs:
                convert = it.execution_args.convert_python_pointer_args_for_tvm_ffi
                args, kwargs = convert(args, kwargs)
            host = _host(it)
            if host.wants_gpu_tensors:
                args = tuple(map(_on_gpu, args))
                kwargs = {name: _on_gpu(arg) for name, arg in kwargs.items()}
            function = host.foreign(getattr(it, "_kwargs_wrapper", None))
            with self._landing(host, memory):
                return function(*args, **kwargs)

        return {"__call__": call}


def _compile_options(owner: Any, stack: ExitStack) -> Methods:
    """Settings that go into a set of options would otherwise stay there after the block."""
    original = owner.apply_envar_settings

    def apply_envar_settings(it: Any, *args: Any) -> None:
        stack.callback(setattr, it, "options", copy.deepcopy(it.options))
        original(it, *args)

    return {"apply_envar_settings": apply_envar_settings}


def _host(compiled: Any) -> HostCode:
    """Made at the first call; it stays with the compiled function."""
    host = compiled.__dict__.get("_emulated_host")
    if host is None:
        host = compiled._emulated_host = HostCode(compiled)
    return host


def _placeholder(compiled: Any) -> Any:
    """The TVM-FFI function of one that is compiled in the block; outside of one, it is called."""
    name = compiled.function_name

    def call(*_: Any) -> None:
        raise RuntimeError(
            f"{name}: was compiled for the emulator; call it in `with cutedsl(device)`, or compile "
            "it outside"
        )

    return import_module("tvm_ffi").convert(call)


def _hardware_info(target: str) -> Methods:
    """cutlass.utils.HardwareInfo, which otherwise asks the driver."""
    known = device_attributes(target)

    def init(it: Any, device_id: int = 0) -> None:
        it.device_id = device_id

    def get_max_active_clusters(it: Any, cluster_size: int, stream: Any = None) -> int:
        return known[16] // cluster_size

    return {
        "__init__": init,
        "get_max_active_clusters": get_max_active_clusters,
        "get_device_multiprocessor_count": lambda it: known[16],
        "get_l2_cache_size_in_bytes": lambda it: known[38],
    }


def _number(name: str, values: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(f"{name}[{i}]", value) for i, value in enumerate(values)]


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [*_number("args", args), *kwargs.items()]


def _memory(values: Iterable[tuple[str, Any]]) -> list[Named]:
    return [piece for name, value in values for piece in _pieces(name, value)]


def _pieces(name: str, value: Any) -> Iterator[Named]:
    """The bytes of the tensors in an argument, each from its first to its last element."""
    if isinstance(value, list | tuple):
        yield from _memory(_number(name, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value)]
        yield from _memory((f"{name}.{f}", getattr(value, f)) for f in fields)
    elif isinstance(value, np.ndarray):
        bits = [8 * s for s in value.strides]
        yield name, _span(value.ctypes.data, value.shape, bits, 8 * value.itemsize)
    elif hasattr(value, "load_dltensor"):  # of the DSL
        value.load_dltensor()
        if not getattr(value, "_on_cpu", value.memspace.name == "generic"):
            raise ValueError(f"{name}: is on a GPU; the emulator takes CPU tensors")
        # Where the DSL was told another type, the tensor has the memory of its first one.
        types = value.element_type, value._dltensor_wrapper.dtype
        size = max(8 if t.width == 1 else t.width for t in types)
        yield name, _span(value.data_ptr, value.shape, [s * size for s in value.stride], size)
    elif hasattr(value, "untyped_storage"):  # of torch
        if value.device.type != "cpu":
            raise ValueError(f"{name}: is on {value.device}; the emulator takes CPU tensors")
        size = 8 * value.element_size()
        yield name, _span(value.data_ptr(), value.shape, [s * size for s in value.stride()], size)


def _span(address: int, shape: Sequence[int], strides: Sequence[int], size: int) -> np.ndarray:
    """The memory of a tensor whose elements have ``size`` bits and lie ``strides`` bits apart."""
    if math.prod(shape) == 0:
        return np.zeros(0, np.uint8)
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    first, last = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + size
    memory = (ctypes.c_uint8 * -(-(last - first) // 8)).from_address(address + first // 8)
    return np.ctypeslib.as_array(memory)


def _tensor(owner: Any) -> Methods:
    """The class behind from_dlpack: tensors of the CPU become tensors of the GPU."""
    original = owner.__init__

    def init(it: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        on_cpu = _is_cpu(tensor)
        original(it, _GpuView(tensor) if on_cpu else tensor, *args, **kwargs)
        it._on_cpu = on_cpu

    return {"__init__": init}


class _GpuView:
    """A CPU tensor that says that it is on GPU 0."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._tensor.__dlpack__()
        contents = ctypes.pythonapi.PyCapsule_GetPointer
        contents.restype, contents.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # struct DLTensor: the address of the data, then the kind of device
        ctypes.c_int32.from_address(contents(capsule, b"dltensor") + 8).value = 2
        return capsule


def _is_cpu(value: Any) -> bool:
    return hasattr(value, "__dlpack__") and int(value.__dlpack_device__()[0]) == 1


def _on_gpu(value: Any) -> Any:
    """An argument for a TVM-FFI function that was compiled for tensors of the GPU."""
    if isinstance(value, list | tuple):
        return type(value)(map(_on_gpu, value))
    return import_module("tvm_ffi").from_dlpack(_GpuView(value)) if _is_cpu(value) else value
