"""The definition of right: every operation in short, obvious torch. Kernels must equal it."""

from .fused import rmsnorm, swiglu, swiglu_backward
from .gemm import gemm, grouped_gemm
from .quantize import dequantize, global_scale, quantize

__all__ = [
    "dequantize",
    "gemm",
    "global_scale",
    "grouped_gemm",
    "quantize",
    "rmsnorm",
    "swiglu",
    "swiglu_backward",
]
