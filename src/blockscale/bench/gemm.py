"""What ``bench gemm`` measures: our products beside others', as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..gemm import gemm
from ..ops.operand_layout import operand_layout
from ..quantize import quantize
from ..tensor import ScaledTensor
from . import peers_gemm
from .contest import BASELINE, OURS, Call, Contest, Where

__all__ = ["DECODE", "FORMATS", "GROUPS", "SHAPES", "Case", "Group", "contests"]

Prepare = Callable[[Tensor, Tensor], Call]  # of x (M, K) and w (N, K), bf16

SHAPES = (
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (4096, 7168, 2048),
    (4096, 4096, 7168),
    (16384, 4096, 7168),
    (128, 7168, 16384),
)
DECODE = tuple((m, n, k) for n, k in ((7168, 16384), (8192, 8192)) for m in (1, 16, 64))


@dataclass(frozen=True, slots=True)
class Operands:
    """How a product's operands are quantized: the scales lie as the GPU's kernel reads them."""

    activations: str
    weights: str

    def quantize(self, x: Tensor) -> ScaledTensor:
        return _placed(x, self.activations)

    def weight(self, w: Tensor) -> ScaledTensor:
        return _placed(w, self.weights).mT


def _placed(x: Tensor, format: str) -> ScaledTensor:
    return quantize(x, format, layout=operand_layout(format, x.device).layout, backend="kernel")


FORMATS = {
    "fp8_block": Operands("fp8_1x128", "fp8_128x128"),
    "mxfp8": Operands("mxfp8", "mxfp8"),
    "nvfp4": Operands("nvfp4", "nvfp4"),
}


def _product(name: str, x: Tensor, w: Tensor) -> Call:
    """Both quantized beforehand."""
    a, b = FORMATS[name].quantize(x), FORMATS[name].weight(w)
    return lambda: gemm(a, b, backend="kernel")


def _both(name: str, x: Tensor, w: Tensor) -> Call:
    """The activations are quantized in each call."""
    operands = FORMATS[name]
    b = operands.weight(w)
    return lambda: gemm(operands.quantize(x), b, backend="kernel")


def _weight_only(name: str, x: Tensor, w: Tensor) -> Call:
    b = FORMATS[name].weight(w)
    return lambda: gemm(x, b, backend="kernel")


def _added(x: Tensor, w: Tensor) -> Call:
    """1x128 x 1x128, added to fp32."""
    a, b = (_placed(t, "fp8_1x128") for t in (x, w))
    out = torch.zeros(x.shape[0], w.shape[0], device=x.device)
    return lambda: gemm(a, b.mT, out=out, accumulate=True, backend="kernel")


@dataclass(frozen=True, slots=True)
class Case:
    """A product of ours in one of ``FORMATS``, and who does the same."""

    name: str
    format: str
    ours: Prepare
    peers: dict[str, Prepare] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """Cases shown in one table."""

    name: str
    cases: tuple[Case, ...]
    shapes: tuple[tuple[int, int, int], ...] = SHAPES


_LT = "cuBLASLt blockwise"
_MX = "torchao emulated, torch.compile"

GROUPS = (
    Group(
        "Operands quantized beforehand",
        (
            Case(
                "fp8_block",
                "fp8_block",
                partial(_product, "fp8_block"),
                {_LT: peers_gemm.cublaslt, "DeepGEMM": peers_gemm.deep_gemm},
            ),
            Case("mxfp8", "mxfp8", partial(_product, "mxfp8"), {_MX: peers_gemm.torchao_mx}),
            Case("nvfp4", "nvfp4", partial(_product, "nvfp4")),
        ),
    ),
    Group(
        "1x128 by 1x128, added to fp32",
        (
            Case(
                "fp8_1x128",
                "fp8_block",
                _added,
                {
                    f"{_LT}, to bf16": peers_gemm.cublaslt_1x128,
                    "DeepGEMM": peers_gemm.deep_gemm_added,
                },
            ),
        ),
    ),
    Group(
        "Activations quantized in the call, bf16 in and out",
        (
            Case(
                "fp8_block",
                "fp8_block",
                partial(_both, "fp8_block"),
                {
                    f"torchao's cast, {_LT}": peers_gemm.torchao_and_cublaslt,
                    f"torch.compile's cast, {_LT}": peers_gemm.compiled_and_cublaslt,
                    f"our cast, {_LT}": peers_gemm.blockscale_and_cublaslt,
                },
            ),
            Case("mxfp8", "mxfp8", partial(_both, "mxfp8"), {_MX: peers_gemm.torchao_mx_both}),
            Case("nvfp4", "nvfp4", partial(_both, "nvfp4")),
        ),
    ),
    Group(
        "Decoding: bf16 activations, quantized weights",
        tuple(
            Case(f"{name} weights", name, partial(_weight_only, name))
            for name in ("mxfp8", "nvfp4")
        ),
        DECODE,
    ),
)


def contests(
    groups: Sequence[Group],
    *,
    formats: Sequence[str] = tuple(FORMATS),
    shapes: Sequence[tuple[int, int, int]] | None = None,
    peers: bool = False,
    device: str = "cuda",
) -> Iterator[Contest]:
    """Each case of ``formats`` at each shape of its group, on random normal numbers; beside torch's
    bf16 product, and beside the peers if they are asked for."""
    for group in groups:
        for case in group.cases:
            for m, n, k in shapes or group.shapes:
                if case.format in formats:
                    yield _contest(group.name, case, m, n, k, peers, device)


def _contest(group: str, case: Case, m: int, n: int, k: int, peers: bool, device: str) -> Contest:
    x, w = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    all_of_them = {OURS: case.ours, BASELINE: peers_gemm.bf16, **(case.peers if peers else {})}
    contestants = {who: partial(prepare, x, w) for who, prepare in all_of_them.items()}
    return Contest(Where(group, case.name, m, n, k), contestants)
