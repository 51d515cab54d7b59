"""Block-scaled low precision for PyTorch: MXFP8, NVFP4 and FP8 1x128 / 128x128, exact everywhere.

>>> import blockscale as bs
>>> q = bs.quantize(x, "mxfp8")  # ScaledTensor
>>> y = bs.gemm(q, bs.quantize(w, "mxfp8").mT)  # (M, K) @ (K, N)
"""

from . import nn
from . import tensor_rules  # noqa: F401 (fills the table of operations)
from .formats import Format, formats
from .gemm import gemm, grouped_gemm
from .layouts import layouts
from .nn import Recipe, autocast, convert
from .quantize import quantize, quantize_both
from .tensor import ScaledTensor

__version__ = "0.1.0"

__all__ = [
    "Format",
    "Recipe",
    "ScaledTensor",
    "autocast",
    "convert",
    "formats",
    "gemm",
    "grouped_gemm",
    "layouts",
    "nn",
    "quantize",
    "quantize_both",
]
