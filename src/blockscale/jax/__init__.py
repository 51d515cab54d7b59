"""Block-scaled low precision for JAX: the bytes of the torch side, without torch.

>>> import blockscale.jax as bsj
>>> q = bsj.quantize(x, "mxfp8")  # ScaledArray, a pytree
>>> y = bsj.gemm(q, bsj.quantize(w, "mxfp8").mT)  # (M, K) @ (K, N)
"""

from ..seed import Seed
from .array import ScaledArray
from .dot_general import dot_general, scaled_dot_general, scaled_matmul
from .gather import all_gather, global_scale
from .gemm import gemm
from .grouped_gemm import grouped_gemm
from .interop import from_torch, to_torch
from .linear import linear
from .quantize import dequantize, quantize, quantize_both

__all__ = [
    "ScaledArray",
    "Seed",
    "all_gather",
    "dequantize",
    "dot_general",
    "from_torch",
    "gemm",
    "global_scale",
    "grouped_gemm",
    "linear",
    "quantize",
    "quantize_both",
    "scaled_dot_general",
    "scaled_matmul",
    "to_torch",
]
