"""Every operation of the library as a torch.library op: schema, fake and choice of the backend.

The ops take and return plain tensors; the user functions wrap them in ScaledTensor. One-byte scales
go in and out as uint8, and so does data going in: much of torch (its compiler, opcheck) cannot work
with float8_e8m0fnu. Kernels run where there are some (``backends`` decides), the reference
elsewhere. Both give the same bytes.
"""

from .backends import BACKENDS, OPERATIONS, FallbackWarning, backend, cpu_backend
from .combine import combine
from .dequantize import dequantize
from .fused import swiglu, swiglu_backward, swiglu_quantize
from .gemm import gemm, gemm_out
from .gemm_quantize import gemm_quantize, grouped_gemm_quantize
from .grouped_gemm import grouped_gemm, grouped_gemm_out
from .grouped_values import grouped_values
from .norms import norm, norm_backward, norm_quantize
from .quantize import global_scale, quantize, quantize_both
from .route import route

__all__ = [
    "BACKENDS",
    "OPERATIONS",
    "FallbackWarning",
    "backend",
    "combine",
    "cpu_backend",
    "dequantize",
    "gemm",
    "gemm_out",
    "gemm_quantize",
    "global_scale",
    "grouped_gemm",
    "grouped_gemm_out",
    "grouped_gemm_quantize",
    "grouped_values",
    "norm",
    "norm_backward",
    "norm_quantize",
    "quantize",
    "quantize_both",
    "route",
    "swiglu",
    "swiglu_backward",
    "swiglu_quantize",
]
