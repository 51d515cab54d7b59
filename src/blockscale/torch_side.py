"""The package's names that need torch, and what is registered with torch when they are imported.

``__init__`` has the same imports for type checkers; :mod:`arrival` says when these run.
"""

from . import tensor_join  # noqa: F401 (fills the table of operations)
from .calibration import calibrate
from .fused import (
    layernorm_quantize,
    rmsnorm_quantize,
    swiglu_backward_quantize,
    swiglu_quantize,
)
from .gemm import gemm, grouped_gemm
from .gemm_quantize import gemm_quantize, grouped_gemm_quantize
from .gptq import gptq
from .nn import Recipe, autocast, convert, quantize_, reuse_weights
from .ops import FallbackWarning
from .quantize import quantize, quantize_both
from .routing import Routing, combine, route
from .tensor import ScaledTensor
from .warm import warm

__all__ = [
    "FallbackWarning",
    "Recipe",
    "Routing",
    "ScaledTensor",
    "autocast",
    "calibrate",
    "combine",
    "convert",
    "gemm",
    "gemm_quantize",
    "gptq",
    "grouped_gemm",
    "grouped_gemm_quantize",
    "layernorm_quantize",
    "quantize",
    "quantize_",
    "quantize_both",
    "reuse_weights",
    "rmsnorm_quantize",
    "route",
    "swiglu_backward_quantize",
    "swiglu_quantize",
    "warm",
]
