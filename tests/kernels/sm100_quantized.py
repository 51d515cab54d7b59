"""Help for the tests of Blackwell's products that are quantized: a kernel in the emulator, and what
the reference makes of the same sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from guarded import guarded
from sm100_inputs import FP32, Operand, rounded
from torch import Tensor

from blockscale import emulator as em
from blockscale import reference
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.calls import Alpha
from blockscale.kernels.sm100.config import Config
from blockscale.kernels.sm100.quantizing_config import Quantizing
from blockscale.layouts import as_bytes, get_layout

__all__ = ["emulated", "expected", "halved_scale"]


def halved_scale(b: Operand) -> Tensor:
    """Tiles of the scales of the first half of the rows, then of the others'."""
    layout, half = get_layout("tcgen05"), len(b.scales) // 2
    return torch.cat([layout.swizzle(part) for part in b.scales.split(half)])


def emulated(
    config: Config,
    a: Operand,
    b: Operand,
    *,
    bias: Tensor | None = None,
    alpha: Alpha = None,
    global_scale: Tensor | None = None,
    completion: str = "late",
    seed: int = 0,
    resident: int = 1,
) -> tuple[Tensor, Tensor]:
    """Data and scales that the kernel leaves in poisoned memory; nothing beside may change.
    ``resident``: clusters that take tiles, one all of them."""
    quantizing = config.quantizing
    assert quantizing is not None
    format = quantizing.stored
    shape = len(a.codes), len(b.codes) // quantizing.b_halves
    b_scale = halved_scale(b) if quantizing.swiglu else b.scale
    scales = [x.view(torch.int64).view(-1, _along(a)) for x in (a.scale, b_scale)]
    orders: dict[str, Any] = {"completion": completion, "seed": seed, "resident": resident}
    device = em.Device(config.arch, check="all,exit_stores,global", **orders)
    pairs = zip((a.data, b.data), config.majors, strict=True)
    data = [x if major == "k" else x.T.contiguous() for x, major in pairs]
    stored = get_layout("tcgen05").stored_shape((shape[0], shape[1] // format.block_size))[0]
    bytes_of = format.data_shape(shape, -1)
    assert (bytes_of[1] % 16, stored % 512) == (0, 0)
    with (
        guarded(bytes_of, torch.uint8, None) as out,
        guarded((1, stored), torch.uint8, None) as scale,
    ):
        with em.cutedsl(device):
            kernel = compile_cache.build(config)
            outputs = out, scale[0], global_scale
            kernel(data[0], scales[0], data[1], scales[1], outputs, bias, alpha, None, None)
        return out.clone(), scale[0].clone()


def _along(x: Operand) -> int:
    """Words of 8 bytes, of scales of 128 rows."""
    return -(-x.scales.shape[1] // 4) * 64


def expected(
    quantizing: Quantizing,
    sums: np.ndarray,
    *,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Data and scales of the reference, from sums that ``product`` gives."""
    values = rounded(sums, FP32, alpha, bias)
    if quantizing.swiglu:
        values = reference.swiglu(values)
    format = quantizing.stored
    data, scale = reference.quantize(
        values,
        format,
        scale_rounding=quantizing.scale_rounding or format.default_scale_rounding,
        nonfinite=quantizing.nonfinite,
        global_scale=global_scale,
    )
    return as_bytes(data), get_layout("tcgen05").swizzle(as_bytes(scale))
