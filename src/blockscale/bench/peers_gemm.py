"""Other libraries' products. ``x`` (M, K) and ``w`` (N, K) are bf16; results are bf16 (M, N).

Each function makes what is needed and returns the call to time; it raises, or the call does, where
the library is missing or has nothing for this GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quantize import quantize
from .contest import Call

__all__ = [
    "bf16",
    "blockscale_and_cublaslt",
    "compiled_and_cublaslt",
    "cublaslt",
    "cublaslt_1x128",
    "deep_gemm",
    "deep_gemm_added",
    "torchao_and_cublaslt",
    "torchao_mx",
    "torchao_mx_both",
]

_FP8 = torch.float8_e4m3fn
_MX = "torchao.prototype.mx_formats"
_BLOCK = 128

Rows = tuple[Tensor, Tensor]  # data (M, K), scales (M, K / 128) that lie column after column


def bf16(x: Tensor, w: Tensor) -> Call:
    return lambda: x @ w.mT


# --- cuBLASLt, FP8 with scales of 128 -------------------------------------------------------------


def cublaslt(x: Tensor, w: Tensor) -> Call:
    """1x128 x 128x128, both quantized beforehand."""
    product, rows = _product(w), _rows(x)
    return lambda: product(*rows)


def blockscale_and_cublaslt(x: Tensor, w: Tensor) -> Call:
    """Our quantizer writes scales as cuBLASLt reads them, too."""
    product = _product(w)
    return lambda: product(*_rows(x))


def torchao_and_cublaslt(x: Tensor, w: Tensor) -> Call:
    kernels: Any = import_module("torchao.prototype.blockwise_fp8_training.kernels")
    product = _product(w)
    return lambda: product(*kernels.triton_fp8_blockwise_act_quant_lhs(x))


def compiled_and_cublaslt(x: Tensor, w: Tensor) -> Call:
    """The cast is plain torch, compiled."""
    product, cast = _product(w), torch.compile(_cast, dynamic=False)
    return lambda: product(*cast(x))


def cublaslt_1x128(x: Tensor, w: Tensor) -> Call:
    """1x128 x 1x128; overwrites, in bf16."""
    (a, a_scale), (b, b_scale) = _rows(x), _rows(w)
    kind = F.ScalingType.BlockWise1x128
    return lambda: F.scaled_mm(a, b.mT, a_scale, kind, b_scale, kind, output_dtype=torch.bfloat16)


def _rows(x: Tensor) -> Rows:
    q = quantize(x, "fp8_1x128", layout="sm90", backend="kernel")
    return q.qdata, q.scale[:, : x.shape[0]].T


def _cast(x: Tensor) -> Rows:
    blocks = x.unflatten(-1, (-1, _BLOCK)).float()
    scale = blocks.abs().amax(-1) / 448
    data = (blocks / scale.unsqueeze(-1)).to(_FP8).flatten(-2)
    return data, scale.T.contiguous().T


def _product(w: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    q = quantize(w, "fp8_128x128", backend="kernel")
    b = q.qdata.mT
    # it reads rows of scales that start at multiples of 16 bytes
    b_scale = F.pad(q.scale, (0, -q.scale.shape[1] % 4)).T
    a_kind, b_kind = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128

    def call(a: Tensor, a_scale: Tensor) -> Tensor:
        return F.scaled_mm(a, b, a_scale, a_kind, b_scale, b_kind, output_dtype=torch.bfloat16)

    return call


# --- DeepGEMM -------------------------------------------------------------------------------------


def deep_gemm(x: Tensor, w: Tensor) -> Call:
    """1x128 x 128x128."""
    library: Any = import_module("deep_gemm")
    a, q = _rows(x), quantize(w, "fp8_128x128", backend="kernel")
    d = torch.empty(x.shape[0], w.shape[0], dtype=torch.bfloat16, device=x.device)
    return lambda: library.fp8_gemm_nt(a, (q.qdata, q.scale), d)


def deep_gemm_added(x: Tensor, w: Tensor) -> Call:
    """1x128 x 1x128, added to fp32."""
    library: Any = import_module("deep_gemm")
    a, b = _rows(x), _rows(w)
    d = torch.zeros(x.shape[0], w.shape[0], device=x.device)
    return lambda: library.fp8_gemm_nt(a, b, d, c=d, recipe=(1, 1, _BLOCK))


# --- torchao, MXFP8 emulated: dequantized, then bf16 ----------------------------------------------


def torchao_mx(x: Tensor, w: Tensor) -> Call:
    """Both quantized beforehand; compiled."""
    mx = _Mx()
    a, b = mx.quantize(x), mx.quantize(w)
    product = torch.compile(mx.product, dynamic=False)
    return lambda: product(*a, *b)


def torchao_mx_both(x: Tensor, w: Tensor) -> Call:
    """``x`` quantized and dequantized in each call; compiled."""
    mx = _Mx()
    b = mx.quantize(w)

    def both(x: Tensor, data: Tensor, scale: Tensor) -> Tensor:
        return mx.product(*mx.quantize(x), data, scale)

    product = torch.compile(both, dynamic=False)
    return lambda: product(x, *b)


class _Mx:
    """What torchao's own emulation of a product calls (``MXTensor``), without the subclass."""

    def __init__(self) -> None:
        module: Any = import_module(f"{_MX}.mx_tensor")
        self._to_mx, self._to_dtype = module.to_mx, module.to_dtype
        self._mode = import_module(f"{_MX}.config").ScaleCalculationMode.RCEIL

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale, data = self._to_mx(x, _FP8, 32, scaling_mode=self._mode)
        return data, scale.view(torch.uint8)  # as `_to_dtype` reads it

    def product(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
        wide = [
            self._to_dtype(*each, _FP8, 32, torch.bfloat16) for each in ((a, a_scale), (b, b_scale))
        ]
        return wide[0] @ wide[1].mT
