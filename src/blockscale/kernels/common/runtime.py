"""From a tensor to what is launched: what of it decides which kernel takes it, and the kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, overload

import torch
from torch import Tensor

__all__ = ["Described", "Unsupported", "architecture", "describe", "get_kernel", "missing"]

#: Shape, strides, dtype, and the address modulo 32.
Described = tuple[torch.Size, tuple[int, ...], torch.dtype, int]


class Unsupported(ValueError):
    """There is no kernel for a call, and why."""


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


@lru_cache
def architecture(index: int | None) -> str:
    """Target of a CUDA device: "sm_90a", "sm_100a", or another one's without a kernel."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}" + "a" * (major in (9, 10))


def get_kernel(config: Any, device: torch.device) -> Callable[..., Any]:
    """The kernel of a configuration, for tensors on ``device``."""
    from ..common import compile_cache

    if device.type != "cuda":
        return compile_cache.build(config)
    kernel = compile_cache.load(config)
    return kernel if torch.cuda.device_count() == 1 else partial(_run_on, device, kernel)


def _run_on(device: torch.device, kernel: Callable[..., Any], *args: Any) -> None:
    """Launches go to the current device."""
    with torch.cuda.device(device):
        kernel(*args)
