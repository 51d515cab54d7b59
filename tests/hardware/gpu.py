"""Runs PTX on an NVIDIA GPU through the driver alone: ``em.Device.launch``, on hardware.

:class:`Gpu` keeps a worker process that owns the CUDA context. A launch that fails or hangs costs
that worker, which is replaced, and raises GpuError.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

_ARENA = 64 << 20  # bytes of device memory, from which every launch takes its buffers
_STACK = 64 << 10  # bytes of a thread, for tests that recurse
_LIMIT = 10.0  # seconds that a launch may take


class GpuError(RuntimeError):
    """A call of the driver failed, or a kernel did not end."""


@dataclass(frozen=True)
class Map:
    """A tiled tensor map of an array: box and swizzle in the order of the array's dimensions."""

    array: np.ndarray
    box: tuple[int, ...]
    swizzle: str = "none"  # or 32B, 64B, 128B
    nan_fill: bool = False


@dataclass(frozen=True)
class Pointer:
    """``offset`` bytes into a region, as a kernel's argument."""

    region: int
    offset: int


@dataclass(frozen=True)
class Tiled:
    """A tensor map for the driver to encode; dimensions innermost first."""

    at: Pointer
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str
    nan_fill: bool


@dataclass(frozen=True)
class Encoded:
    """The 128 bytes of a tensor map without its address."""

    at: Pointer
    raw: bytes


@dataclass(frozen=True)
class Request:
    """A launch with copies of its memory, independent of this process."""

    ptx: str
    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...] | None
    shared: int
    args: tuple[Any, ...]
    regions: tuple[bytes, ...]
    leads: tuple[int, ...]  # addresses modulo 1024
    image: bytes = b""  # what ptxas made of the PTX; without it the driver compiles

    def key(self) -> str:
        """Names what is run on what, wherever its memory lies."""
        text = repr((self.ptx, self.name, self.grid, self.block, self.cluster, self.shared))
        digest = hashlib.sha256(text.encode())
        digest.update(repr(self.args).encode())
        digest.update(content(self.regions).encode())
        return digest.hexdigest()[:16]


def content(regions: Sequence[bytes]) -> str:
    """A hash of memory."""
    digest = hashlib.sha256()
    for region in regions:
        digest.update(len(region).to_bytes(8, "little") + region)
    return digest.hexdigest()[:16]


def _three(value: int | Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*(value if isinstance(value, Sequence) else (value,)), 1, 1)[:3]
    return int(x), int(y), int(z)


class Memory:
    """The host memory behind arguments: arrays that overlap are one region."""

    def __init__(self, args: Sequence[Any]) -> None:
        arrays = [a for a in map(_array, args) if a is not None and a.nbytes]
        spans = sorted(map(_bounds, arrays))
        self.spans: list[tuple[int, int]] = []
        for low, high in spans:
            if self.spans and low < self.spans[-1][1]:
                self.spans[-1] = (self.spans[-1][0], max(high, self.spans[-1][1]))
            else:
                self.spans.append((low, high))
        order = {self._span(a.ctypes.data): None for a in arrays}  # that of the arguments
        self.spans = [self.spans[i] for i in order]

    def _span(self, address: int) -> int:
        return next(i for i, (low, high) in enumerate(self.spans) if low <= address < high)

    def pointer(self, address: int) -> Pointer:
        index = self._span(address)
        return Pointer(index, address - self.spans[index][0])

    def read(self) -> tuple[bytes, ...]:
        return tuple(ctypes.string_at(low, high - low) for low, high in self.spans)

    def write(self, regions: Sequence[bytes]) -> None:
        for (low, _), data in zip(self.spans, regions, strict=True):
            ctypes.memmove(low, data, len(data))


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """First address of an array, and the one behind its last."""
    last = sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
    return array.ctypes.data, array.ctypes.data + last + array.itemsize


def _array(arg: Any) -> np.ndarray | None:
    """The memory an argument points to, if any."""
    if isinstance(arg, Map):
        return arg.array
    if hasattr(arg, "detach"):  # a torch tensor
        import torch

        arg = arg.detach().flatten().view(torch.uint8).numpy()
    if hasattr(arg, "encode") and isinstance(getattr(arg, "array", None), np.ndarray):
        return arg.array
    return arg if isinstance(arg, np.ndarray) else None


def pack(
    ptx: str,
    name: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    *,
    cluster: int | Sequence[int] | None = None,
    shared: int = 0,
) -> tuple[Request, Memory]:
    """A launch as a request, and the memory to which its results go."""
    memory = Memory(args)
    packed: list[Any] = []
    for arg in args:
        array = _array(arg)
        if isinstance(arg, Map):
            packed.append(
                Tiled(
                    memory.pointer(arg.array.ctypes.data),
                    str(arg.array.dtype),
                    arg.array.shape[::-1],
                    arg.array.strides[::-1][1:],
                    arg.box[::-1],
                    arg.swizzle,
                    arg.nan_fill,
                )
            )
        elif hasattr(arg, "encode") and not isinstance(arg, str):
            raw = bytes(arg.encode())
            packed.append(Encoded(memory.pointer(int.from_bytes(raw[:8], "little")), raw[8:]))
        elif array is not None:
            packed.append(memory.pointer(array.ctypes.data) if array.nbytes else 0)
        elif isinstance(arg, np.generic):
            packed.append(arg.tobytes())
        else:
            packed.append(arg)
    leads = tuple(low % 1024 for low, _ in memory.spans)
    dims = _three(grid), _three(block), None if cluster is None else _three(cluster)
    return Request(ptx, name, *dims, shared, tuple(packed), memory.read(), leads), memory


def assembled(requests: Sequence[Request]) -> list[Request]:
    """The requests with code from ptxas, in parallel; without where ptxas refuses the PTX."""

    def image(ptx: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder) / "in.ptx", Path(folder) / "out.cubin"
            source.write_text(ptx)
            command = ["ptxas", "-arch=sm_90a", str(source), "-o", str(out)]
            done = subprocess.run(command, capture_output=True, check=False)
            return b"" if done.returncode else out.read_bytes()

    texts = list({request.ptx: None for request in requests})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        images = dict(zip(texts, pool.map(image, texts), strict=True))
    return [replace(request, image=images[request.ptx]) for request in requests]


class Gpu:
    """A GPU; the first one. A context manager."""

    def __init__(self) -> None:
        self._worker: tuple[Any, Connection] | None = None

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._worker:
            process, pipe = self._worker
            process.kill()
            process.join()
            pipe.close()
            self._worker = None

    def ask(self, what: Any, limit: float) -> Any:
        if self._worker is None:
            context = multiprocessing.get_context("spawn")
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            self._worker = process, here
            limit += 30  # to start, and to make a context
        pipe = self._worker[1]
        try:
            pipe.send(what)
            if not pipe.poll(limit):
                raise GpuError(f"the kernel did not end within {limit:.0f} s")
            answer = pipe.recv()
        except (GpuError, EOFError, OSError) as error:
            self._stop()
            raise GpuError(str(error) or "the worker ended") from None
        if isinstance(answer, GpuError):
            self._stop()
            raise answer
        return answer

    def info(self) -> dict[str, str]:
        """Name of the device and versions."""
        return self.ask("info", _LIMIT)

    def run(self, request: Request) -> tuple[bytes, ...]:
        """The memory after a launch. GpuError if it fails or hangs."""
        return self.ask(request, _LIMIT)

    def launch(
        self,
        ptx: str,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        *,
        cluster: int | Sequence[int] | None = None,
        shared: int = 0,
    ) -> None:
        """Run a kernel; buffers among ``args`` are written in place. See ``em.Device.launch``."""
        request, memory = pack(ptx, name, grid, block, args, cluster=cluster, shared=shared)
        memory.write(self.run(request))


# --- the worker -----------------------------------------------------------------------------------


def _serve(pipe: Connection) -> None:
    driver = None
    while True:
        try:
            what = pipe.recv()
        except EOFError:
            return
        try:
            driver = driver or _Driver()
            pipe.send(driver.info() if what == "info" else driver.run(what))
        except GpuError as error:
            pipe.send(error)
        except Exception as error:  # a request that cannot be carried out
            pipe.send(GpuError(f"{type(error).__name__}: {error}"))


class _Attribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_uint),
        ("value", ctypes.c_uint * 16),
    ]


class _Config(ctypes.Structure):
    _fields_ = [
        ("dims", ctypes.c_uint * 6),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


# Enumerations of cuda.h.
_CLUSTER_DIMENSION = 4
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6
_STACK_SIZE = 0
_TYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5}
_TYPES |= {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}


class _Driver:
    """libcuda with a context and one allocation."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context, base = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuCtxSetLimit", _STACK_SIZE, ctypes.c_size_t(_STACK))
        self.call("cuMemAlloc_v2", ctypes.byref(base), ctypes.c_size_t(_ARENA))
        self.device, self.base = device, -(-base.value // 1024) * 1024

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(code, ctypes.byref(text))
            raise GpuError(f"{name}: {(text.value or b'?').decode()} ({code})")

    def info(self) -> dict[str, str]:
        name, version = ctypes.create_string_buffer(100), ctypes.c_int()
        self.call("cuDeviceGetName", name, 100, self.device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return {"gpu": name.value.decode(), "cuda": cuda}

    def _load(self, code: bytes) -> ctypes.c_void_p:
        module, log = ctypes.c_void_p(), ctypes.create_string_buffer(4096)
        options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), len(log))
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), code, 2, options, values)
        except GpuError as error:
            raise GpuError(f"{error}: {log.value.decode(errors='replace')}") from None
        return module

    def run(self, request: Request) -> tuple[bytes, ...]:
        places, end = [], self.base
        for data, lead in zip(request.regions, request.leads, strict=True):
            places.append(end + lead)
            end = (-(-(end + lead + len(data)) // 1024) + 1) * 1024
        if end > self.base + _ARENA - 1024:
            raise GpuError(f"needs {end - self.base} bytes of buffers, {_ARENA} are there")
        for place, data in zip(places, request.regions, strict=True):
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(place), data, ctypes.c_size_t(len(data)))
        module = self._load(request.image or request.ptx.encode() + b"\0")
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, request.name.encode())
        self._launch(function, request, [self._bytes(a, places) for a in request.args])
        self.call("cuCtxSynchronize")
        out = []
        for place, data in zip(places, request.regions, strict=True):
            back = ctypes.create_string_buffer(len(data))
            self.call("cuMemcpyDtoH_v2", back, ctypes.c_uint64(place), ctypes.c_size_t(len(data)))
            out.append(back.raw)
        self.call("cuModuleUnload", module)
        return tuple(out)

    def _launch(self, function: ctypes.c_void_p, request: Request, args: list[Any]) -> None:
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        kept = []
        for i, arg in enumerate(args):
            self.call(
                "cuFuncGetParamInfo", function, ctypes.c_size_t(i),
                ctypes.byref(offset), ctypes.byref(size),
            )  # fmt: skip
            kept.append(ctypes.create_string_buffer(_sized(arg, size.value), size.value))
        pointers = (ctypes.c_void_p * max(len(kept), 1))(*map(ctypes.addressof, kept))
        if request.shared:
            self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, request.shared)
        config = _Config((ctypes.c_uint * 6)(*request.grid, *request.block), request.shared)
        if request.cluster:
            self.call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER, 1)
            value = (ctypes.c_uint * 16)(*request.cluster)
            config.attributes = ctypes.pointer(_Attribute(_CLUSTER_DIMENSION, 0, value))
            config.count = 1
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

    def _bytes(self, arg: Any, places: list[int]) -> Any:
        if isinstance(arg, Pointer):
            return (places[arg.region] + arg.offset).to_bytes(8, "little")
        if isinstance(arg, Encoded):
            return self._bytes(arg.at, places) + arg.raw
        if isinstance(arg, Tiled):
            return self._tensor_map(arg, self._bytes(arg.at, places))
        return arg

    def _tensor_map(self, tiled: Tiled, address: bytes) -> bytes:
        raw = ctypes.create_string_buffer(128 + 64)
        at = -(-ctypes.addressof(raw) // 64) * 64
        rank = len(tiled.dims)
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(at),
            _TYPES[tiled.dtype],
            rank,
            ctypes.c_uint64(int.from_bytes(address, "little")),
            (ctypes.c_uint64 * rank)(*tiled.dims),
            (ctypes.c_uint64 * rank)(*tiled.strides),
            (ctypes.c_uint32 * rank)(*tiled.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            _SWIZZLES[tiled.swizzle],
            0,
            int(tiled.nan_fill),
        )
        return ctypes.string_at(at, 128)


def _sized(arg: Any, size: int) -> bytes:
    """A number as a parameter of ``size`` bytes."""
    if isinstance(arg, float):
        return np.array(arg, f"<f{size}").tobytes()
    if isinstance(arg, int):
        return (arg & (1 << 8 * size) - 1).to_bytes(size, "little")
    if len(arg) != size:
        raise GpuError(f"an argument has {len(arg)} bytes, its parameter {size}")
    return bytes(arg)
