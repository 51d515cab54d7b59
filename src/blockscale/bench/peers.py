"""Other libraries' quantizers. Each is measured beside the case of ours whose bytes it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .cases import prepare as prepare_case

__all__ = ["PEERS", "Peer"]

_MX = "torchao.prototype.mx_formats"


@dataclass(frozen=True, slots=True)
class Peer:
    """``prepare(x)`` imports what is needed and returns the call that does ``case`` with ``x``.

    It raises, or the call does, where the library is missing or has nothing for this GPU.
    """

    name: str
    case: Case
    prepare: Callable[[Tensor], Callable[[], object]]


def _triton(*names: str) -> Callable[[Tensor], Callable[[], object]]:
    """MXFP8 by those of torchao's Triton kernels, one after another."""

    def prepare(x: Tensor) -> Callable[[], object]:
        kernels = import_module(f"{_MX}.kernels")
        if not getattr(kernels, "_triton_kernels_available", True):
            version = import_module("torchao").__version__
            raise RuntimeError(f"torchao {version} has these kernels from sm_100 on only")
        calls: list[Callable[..., object]] = [getattr(kernels, name) for name in names]
        return lambda: [call(x, 32, "rceil") for call in calls]

    return prepare


def _compiled(x: Tensor) -> Callable[[], object]:
    """MXFP8 by torch.compile of torchao's plain torch."""
    mode = import_module(f"{_MX}.config").ScaleCalculationMode.RCEIL
    to_mx: Any = import_module(f"{_MX}.mx_tensor").to_mx
    torch.compiler.reset()  # else the second shape is compiled for every shape, which is slower

    def quantize(t: Tensor) -> Any:
        return to_mx(t, torch.float8_e4m3fn, 32, scaling_mode=mode)

    compiled = torch.compile(quantize, dynamic=False)
    return lambda: compiled(x)


def _compiled_back(x: Tensor) -> Callable[[], object]:
    """MXFP8 to values by torch.compile of what it means, in plain torch."""
    data = x.to(torch.float8_e4m3fn)
    rows, columns = x.shape
    octets = torch.randint(100, 150, (rows, columns // 32), dtype=torch.uint8, device=x.device)
    torch.compiler.reset()  # as above

    def dequantize(data: Tensor, scale: Tensor) -> Tensor:
        factor = (scale.to(torch.int32) << 23).view(torch.float32)
        values = data.to(torch.float32).unflatten(-1, (-1, 32)) * factor.unsqueeze(-1)
        return values.flatten(-2).to(x.dtype)

    compiled = torch.compile(dequantize, dynamic=False)
    return lambda: compiled(data, octets)


def _packed(cast: Callable[[Tensor], Callable[[], object]]) -> Callable[[Tensor], Any]:
    """A cast with compact scales, and a kernel that puts these where tensor cores read them: what a
    library does whose quantizers do not write such tiles."""

    def prepare(x: Tensor) -> Callable[[], object]:
        kernels: Any = import_module(f"{_MX}.kernels")
        call: Callable[[], Any] = cast(x)

        def quantize() -> list[tuple[Tensor, Tensor]]:
            return [(q, kernels.triton_mx_block_rearrange(scale)) for q, scale in call()]

        return quantize

    return prepare


def _ours(case: Case) -> Callable[[Tensor], Callable[[], object]]:
    return lambda x: prepare_case(case, x.shape[0], x.shape[1], x.device.type)


def _blockwise(x: Tensor) -> Callable[[], object]:
    kernels: Any = import_module("torchao.prototype.blockwise_fp8_training.kernels")
    return lambda: kernels.triton_fp8_blockwise_act_quant_lhs(x)


_ROWS, _COLUMNS, _BOTH = (Case("mxfp8", axes, "compact") for axes in ((-1,), (-2,), (-1, -2)))
_TILES = Case("mxfp8", (-1,), "tcgen05")
PEERS = (
    Peer("torchao, Triton", _ROWS, _triton("triton_to_mxfp8_dim0")),
    Peer("torchao, torch.compile", _ROWS, _compiled),
    Peer("torchao, Triton", _COLUMNS, _triton("triton_to_mxfp8_dim1")),
    Peer("torchao, Triton twice", _BOTH, _triton("triton_to_mxfp8_dim0", "triton_to_mxfp8_dim1")),
    Peer("torchao, Triton, and its pack", _TILES, _packed(_triton("triton_to_mxfp8_dim0"))),
    Peer("ours compact, and torchao's pack", _TILES, _packed(_ours(_ROWS))),
    Peer(
        "ours compact, and torchao's pack",
        Case("nvfp4", (-1,), "tcgen05"),
        _packed(_ours(Case("nvfp4", (-1,), "compact"))),
    ),
    Peer("torchao, Triton", Case("fp8_1x128", (-1,), "sm90"), _blockwise),
    Peer("torch.compile", Case("mxfp8", (-1,), "compact", back=True), _compiled_back),
)
