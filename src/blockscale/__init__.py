"""Block-scaled low precision for PyTorch: MXFP8, NVFP4 and FP8 1x128 / 128x128, exact everywhere.

>>> import blockscale as bs
>>> q = bs.quantize(x, "mxfp8")  # ScaledTensor
>>> y = bs.gemm(q, bs.quantize(w, "mxfp8").mT)  # (M, K) @ (K, N)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import (
    nn,
    tensor_join,  # noqa: F401 (fills the table of operations)
)
from .calibration import calibrate
from .formats import Format, formats
from .fused import (
    layernorm_quantize,
    rmsnorm_quantize,
    swiglu_backward_quantize,
    swiglu_quantize,
)
from .gemm import gemm, grouped_gemm
from .gemm_quantize import gemm_quantize, grouped_gemm_quantize
from .gptq import gptq
from .hadamard import Hadamard
from .layouts import layouts
from .nn import Recipe, autocast, convert, quantize_, reuse_weights
from .ops import FallbackWarning
from .quantization import Quantization
from .quantize import quantize, quantize_both
from .routing import Routing, combine, route
from .seed import Seed
from .tensor import ScaledTensor
from .warm import warm

if TYPE_CHECKING:
    from . import checkpoint, debug, distributed

__version__ = "0.1.0"

__all__ = [
    "FallbackWarning",
    "Format",
    "Hadamard",
    "Quantization",
    "Recipe",
    "Routing",
    "ScaledTensor",
    "Seed",
    "autocast",
    "calibrate",
    "checkpoint",
    "combine",
    "convert",
    "debug",
    "distributed",
    "formats",
    "gemm",
    "gemm_quantize",
    "gptq",
    "grouped_gemm",
    "grouped_gemm_quantize",
    "layernorm_quantize",
    "layouts",
    "nn",
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


def __getattr__(name: str) -> Any:
    """``blockscale.checkpoint``, ``debug`` and ``distributed`` are imported when first used."""
    if name in ("checkpoint", "debug", "distributed"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
