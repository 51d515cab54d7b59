"""Block-scaled low precision for PyTorch: MXFP8, NVFP4 and FP8 1x128 / 128x128, exact everywhere.

>>> import blockscale as bs
>>> q = bs.quantize(x, "mxfp8")  # ScaledTensor
>>> y = bs.gemm(q, bs.quantize(w, "mxfp8").mT)  # (M, K) @ (K, N)
"""

from typing import TYPE_CHECKING, Any

from . import arrival
from .formats import Format, formats
from .hadamard import Hadamard
from .layouts import layouts
from .quantization import Quantization
from .seed import Seed

if TYPE_CHECKING:
    from . import checkpoint, debug, distributed, nn
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
    from .nn import Recipe, quantize_, reuse_weights
    from .nn.autocast import autocast
    from .nn.convert import convert
    from .ops import FallbackWarning
    from .quantize import quantize, quantize_both
    from .routing import Routing, combine, route
    from .tensor import ScaledTensor
    from .warm import warm

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


if not TYPE_CHECKING:  # a type checker would let each misspelled name pass

    def __getattr__(name: str) -> Any:
        """What needs torch comes when it is first used; ImportError where there is no torch."""
        if name in __all__:
            return arrival.find(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


arrival.defer()
