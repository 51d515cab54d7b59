"""From a tensor to what is launched: what of it decides which kernel takes it, and the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .gpu import GPUS, Gpu, Unsupported, arch_of, dram_rate, no_kernels

__all__ = [
    "FLOATS",
    "Described",
    "beside_collectives",
    "describe",
    "gpu_of",
    "missing",
    "require_gpu",
    "standing_in",
]

#: What kernels read and write, beside quantized data.
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

#: Shape, strides, dtype, and the address modulo 32.
Described = tuple[torch.Size, tuple[int, ...], torch.dtype, int]


@overload
def describe(x: Tensor) -> Described: ...
@overload
def describe(x: None) -> None: ...
@overload
def describe(x: Tensor | None) -> Described | None: ...
def describe(x: Tensor | None) -> Described | None:
    """What of a tensor, if there is one, decides which kernel takes it."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 32)


def missing() -> str:
    """Which package kernels cannot do without; empty where all are here."""
    if find_spec("cutlass") is None or find_spec("tvm_ffi") is None:
        return "CuTe DSL is not installed: pip install 'blockscale[cuda]'"
    return ""


def beside_collectives() -> bool:
    """Whether this process is one of several ranks: their collectives, which run beside products,
    hold multiprocessors."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def require_gpu(name: str, device: torch.device, gpu: Gpu | None) -> Gpu:
    """``gpu``, that of argument ``name``'s device; Unsupported where it has no kernels."""
    if missing():
        raise Unsupported(missing())
    if gpu is None:
        raise Unsupported(f"{name} is on {device}: the kernels run on CUDA devices")
    if gpu.arch not in GPUS:
        raise Unsupported(f"architecture {gpu.arch}: {no_kernels(gpu.arch, GPUS)}")
    return gpu


def _ask(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    rate = 0.0 if missing() else dram_rate(ordinal)
    arch = arch_of(properties.major, properties.minor)
    return Gpu(arch, properties.multi_processor_count, rate, partial(_load, device))


_gpus: dict[torch.device, Gpu | None] = {}  # that were asked for
_find: Callable[[torch.device], Gpu | None] = _ask


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU that a device is; None of a device that kernels do not run on."""
    try:
        return _gpus[device]
    except KeyError:
        found = _gpus[device] = _find(device)
        return found


@contextmanager
def standing_in(find: Callable[[torch.device], Gpu | None]) -> Iterator[None]:
    """Inside, in all threads, a device is the GPU that ``find`` gives for it. Where that is another
    one than before, nothing that was planned for the one is found for the other."""
    global _gpus, _find
    before = _gpus, _find
    _gpus, _find = {}, find
    try:
        yield
    finally:
        _gpus, _find = before


def _load(device: torch.device, config: Any) -> Callable[..., Any]:
    from . import compile_cache

    kernel = compile_cache.load(config)
    return kernel if torch.cuda.device_count() == 1 else partial(_run_on, device, kernel)


def _run_on(device: torch.device, kernel: Callable[..., Any], *args: Any) -> None:
    """Launches go to the current device, which most often is this one: to change it takes as long
    as a launch does."""
    if torch.cuda.current_device() == device.index:
        kernel(*args)
        return
    with torch.cuda.device(device):
        kernel(*args)
