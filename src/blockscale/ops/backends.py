"""Which backend runs an operation: a kernel where there is one, else the reference."""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ..fallback import FallbackWarning
from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import gpu_of
from ..kernels.cpu.calls import MAX_SKINNY_M
from ..kernels.quantizers import calls as quantizers
from .gemm_kernels import products_on

__all__ = [
    "BACKENDS",
    "OPERATIONS",
    "FallbackWarning",
    "backend",
    "cpu_backend",
    "fall_back",
    "no_cpu_kernels",
    "on_cpu",
    "require_cpu_kernels",
]

_PRODUCTS = ("gemm", "grouped_gemm")
_NORMS = ("rmsnorm_quantize", "layernorm_quantize")
_FUSED = ("swiglu_quantize", "swiglu_backward_quantize", *_NORMS)

OPERATIONS = (
    "quantize",
    "quantize_both",
    *_FUSED,
    "global_scale",
    "dequantize",
    "gemm",
    "gemm_quantize",
    "grouped_gemm",
)

#: What ``backend=`` may be: the best that there is, a kernel or an error, or the reference.
BACKENDS = ("auto", "kernel", "reference")

# What is said of those with GPU kernels.
_QUANTIZE = "reference where a 6-bit format is asked for, or seed= with offsets= or gather="
_SWIGLU = "reference where a 6-bit format is asked for"
_NORM = "reference for 6 bits, and rows that shared memory cannot hold"
_ON_GPU = {
    "quantize": _QUANTIZE,
    "quantize_both": _QUANTIZE,
    "swiglu_quantize": _SWIGLU,
    "swiglu_backward_quantize": _SWIGLU,
    "rmsnorm_quantize": _NORM,
    "layernorm_quantize": _NORM,
    "global_scale": "compiled kernel, same bytes as the reference",
    "dequantize": "reference for 6-bit formats and groups along the contraction",
}

_warned: set[tuple[str, str]] = set()  # operation and reason


@lru_cache
def cpu_backend() -> str:
    """ "numba" where the compiled CPU kernels can be used, else "reference"."""
    return "numba" if find_spec("numba") else "reference"


def on_cpu(x: Tensor) -> bool:
    """Whether the compiled CPU kernels are those for ``x``."""
    return x.device.type == "cpu" and gpu_of(x.device) is None


def no_cpu_kernels() -> str:
    """Why the CPU kernels cannot be used; empty where they can."""
    return "" if cpu_backend() == "numba" else "numba is not installed: pip install numba"


def require_cpu_kernels() -> None:
    """Unsupported where they cannot be used."""
    reason = no_cpu_kernels()
    if reason:
        raise Unsupported(reason)


def backend(operation: str, device: str) -> tuple[str, str]:
    """(name, reason) of what runs ``operation`` on a device type, "cpu" or "cuda"."""
    if device == "cpu":
        return _on_cpu(operation)
    if operation == "gemm":
        return _products(torch.empty(0, device=device).device)
    if operation == "gemm_quantize":
        return _quantized_products(torch.empty(0, device=device).device)
    if operation == "grouped_gemm":
        return _grouped_products(torch.empty(0, device=device).device)
    probe = torch.empty(128, 128, dtype=torch.bfloat16, device=device)
    reason = quantizers.unsupported(probe, quantizers.Request("mxfp8"))
    if reason:
        return "reference", reason
    return "CuTe DSL", _ON_GPU[operation]


def _products(device: torch.device) -> tuple[str, str]:
    found = products_on(device)
    if isinstance(found, str):
        return "reference", found
    return "CuTe DSL", "; ".join(filter(None, (found.formats, "reference for others", found.proof)))


def _grouped_products(device: torch.device) -> tuple[str, str]:
    found = products_on(device)
    if isinstance(found, str):
        return "reference", found
    if found.grouped is None or found.k_grouped is None:
        return "reference", f"plain torch on the device: no kernel multiplies groups on {found.gpu}"
    rows, columns = found.grouped.formats, found.k_grouped.formats
    return "CuTe DSL", f"groups of rows: {rows}; along K: {columns}; reference for others"


def _quantized_products(device: torch.device) -> tuple[str, str]:
    name, why = _products(device)
    found = products_on(device)
    if isinstance(found, str):
        return name, why
    one = "one kernel to block-scaled formats of 8 and 4 bits, or " if found.quantize else ""
    return name, f"{one}gemm to fp32 and the quantizer: {why}"


def _on_cpu(operation: str) -> tuple[str, str]:
    reason = no_cpu_kernels()
    if reason:
        return "reference", f"{reason} for compiled kernels"
    if operation == "gemm":
        few = f"up to {MAX_SKINNY_M} rows of a by one kernel"
        from ..kernels.cpu import bf16  # imports numba

        torch_multiplies = "by torch, dequantized to fp32 by a kernel"
        if not bf16.available():
            return "numba + torch", f"{few}; more {torch_multiplies}"
        exact = "more by one with AVX512_BF16 where bfloat16 holds operands"
        return "numba + torch", f"{few}; {exact}, else {torch_multiplies}"
    if operation == "grouped_gemm":
        return "numba + torch", "each group of rows as gemm; groups along K by torch"
    if operation == "gemm_quantize":
        return "numba + torch", "as gemm to fp32, SwiGLU by torch, then quantized by a kernel"
    if operation in _NORMS:
        return "torch + numba", "values made by torch, quantized by a kernel"
    if operation in _FUSED:
        return "numba", "values made by one kernel, quantized by another"
    if operation in ("quantize", "quantize_both"):
        return "numba", "reference where groups along the contraction are rounded at random"
    return "numba", "compiled kernel, same bytes as the reference"


def fall_back(operation: str, x: Tensor, backend: str, reason: str) -> None:
    """Let the reference run ``operation``; ValueError where ``backend`` asks for a kernel.

    On a GPU the reference is many times slower: its use is said once for each operation and reason.
    """
    result = "sums in fp32" if operation in _PRODUCTS else "the same bytes"
    if backend == "kernel":
        raise ValueError(
            f"backend: no kernel can run {operation} as asked for: {reason}. Change that, or pass "
            f"backend='auto' to run plain torch instead, with {result}"
        )
    said = operation, reason
    if gpu_of(x.device) is not None and said not in _warned:
        warnings.warn(
            f"{operation} on {x.device} runs as plain torch, with {result} but many times "
            f"slower: {reason}. Change that for a kernel, or pass backend='reference' if it is "
            "meant. (Said once for each operation and reason.)",
            FallbackWarning,
            stacklevel=2,
        )
        _warned.add(said)  # where the warning is made an error, it is one each time
