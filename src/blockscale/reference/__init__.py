"""The definition of right: every operation in short, obvious torch. Kernels must equal it."""

from .combine import combine
from .compare import amax, error_sums
from .fused import (
    swiglu,
    swiglu_backward,
    weight_gradient,
    weighted,
    weighted_swiglu,
    weighted_swiglu_backward,
)
from .gemm import bounds, epilogue, gemm, grouped_gemm
from .norms import layernorm, layernorm_backward, rmsnorm, rmsnorm_backward
from .quantize import dequantize, global_scale, quantize
from .route import route

__all__ = [
    "amax",
    "bounds",
    "combine",
    "dequantize",
    "epilogue",
    "error_sums",
    "gemm",
    "global_scale",
    "grouped_gemm",
    "layernorm",
    "layernorm_backward",
    "quantize",
    "rmsnorm",
    "rmsnorm_backward",
    "route",
    "swiglu",
    "swiglu_backward",
    "weight_gradient",
    "weighted",
    "weighted_swiglu",
    "weighted_swiglu_backward",
]
