"""Help for the tests of Blackwell's product: operands, their product in the tensor cores' own
arithmetic, a kernel in the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from guarded import guarded
from torch import Tensor

from blockscale import emulator as em
from blockscale.dtypes import to_torch
from blockscale.emulator.tensorcore.arithmetic import Instruction, multiply
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.calls import Alpha
from blockscale.kernels.sm100.config import Config
from blockscale.layouts import get_layout

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

ELEMENTS = {"mxfp8": "e4m3", "mxfp8_e5m2": "e5m2", "mxfp4": "e2m1", "nvfp4": "e2m1"}
FINITE = {"e4m3": 0x7E, "e5m2": 0x7B, "e2m1": 7}  # the largest magnitude's code


@dataclass(frozen=True)
class Operand:
    """Codes (rows, K), one a byte, and codes of their scales (rows, blocks)."""

    format: str
    codes: Tensor
    scales: Tensor

    @property
    def data(self) -> Tensor:
        """As stored."""
        if ELEMENTS[self.format] != "e2m1":
            return self.codes
        return self.codes[:, ::2] | self.codes[:, 1::2] << 4

    @property
    def scale(self) -> Tensor:
        """As stored, in layout "tcgen05"."""
        return get_layout("tcgen05").swizzle(self.scales)


def operand(format: str, rows: int, k: int, seed: int) -> Operand:
    """Any codes but infinities and NaNs; scales between 2^-8 and 2^8, those of NVFP4 any."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(torch.uint8)

    element = ELEMENTS[format]
    sign = 8 if element == "e2m1" else 128
    codes = integers(0, FINITE[element] + 1, rows, k) | integers(0, 2, rows, k) * sign
    if format == "nvfp4":
        return Operand(format, codes, integers(1, 0x7F, rows, -(-k // 16)))
    return Operand(format, codes, integers(119, 136, rows, -(-k // 32)))


def product(a: Operand, b: Operand) -> np.ndarray:
    """fp32 sums as instruction after instruction along K leaves them."""
    packed = ELEMENTS[a.format] == ELEMENTS[b.format] == "e2m1"
    step, vector = 64 if packed else 32, 16 if a.format == "nvfp4" else 32
    scaling = "ue4m3" if a.format == "nvfp4" else "ue8m0", vector
    types = Instruction("tcgen05", ELEMENTS[a.format], ELEMENTS[b.format], "f32", *scaling)
    sums = None
    for first in range(0, a.codes.shape[1], step):
        codes = [_padded(x.codes[:, first : first + step], step) for x in (a, b)]
        at = slice(first // vector, (first + step) // vector)
        scales = [_padded(x.scales[:, at], step // vector) for x in (a, b)]
        sums = multiply(types, *codes, sums, sfa=scales[0], sfb=scales[1])
    assert sums is not None
    return sums


def _padded(x: Tensor, columns: int) -> np.ndarray:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1])).numpy()


def rounded(
    sums: np.ndarray,
    dtype: torch.dtype,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """What the epilogue makes of sums: each operation in fp32, then the output's type."""
    values = torch.from_numpy(sums)
    if alpha is not None:
        values = values * alpha
    if bias is not None:
        values = values + bias.float()
    if start is not None:
        values = values + start.float()
    return values.to(dtype)


def emulated(config: Config, a: Operand, b: Operand, *start: Tensor, **options: Any) -> Tensor:
    """What the kernel leaves of two operands; arguments of ``launched``."""
    pairs = zip((a.data, b.data), config.majors, strict=True)
    data = [x if major == "k" else x.T.contiguous() for x, major in pairs]
    scales = [tiles(x.scale, len(x.codes)) for x in (a, b)]
    return launched(config, (len(a.codes), len(b.codes)), data, scales, *start, **options)


def launched(
    config: Config,
    shape: tuple[int, int],
    data: Sequence[Tensor],
    scales: Sequence[Tensor],
    start: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    alpha: Alpha = None,
    completion: str = "late",
    seed: int = 0,
    resident: int | None = None,
    groups: tuple[Tensor | None, int | None] = (None, None),
) -> Tensor:
    """What the kernel leaves in poisoned memory, or in a copy of ``start``, its rows apart; nothing
    between them may change. ``groups``: their offsets and supergroup."""
    device = em.Device(
        config.arch,
        completion=completion,
        seed=seed,
        resident=resident,
        check="all,exit_stores,tcgen05_order,mbarrier_proxy,cp_async_proxy,proxy_reads,global",
    )
    with guarded(shape, to_torch(config.out_dtype), start) as out:
        with em.cutedsl(device):
            operands = data[0], scales[0], data[1], scales[1]
            compile_cache.build(config)(*operands, out, bias, alpha, *groups)
        return out.clone()


def tiles(scale: Tensor, rows: int) -> Tensor:
    """Scales as kernels take them: tiles down and along K, in words of 8 bytes."""
    return scale.view(torch.int64).view(-(-rows // 128), -1)
