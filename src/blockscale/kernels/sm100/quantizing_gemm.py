"""A product whose result is quantized for the next one, by a single kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...checks import choose
from ...formats import NONFINITE, get_format
from ...layouts import get_layout
from ..common.calls import Alpha, check_rest, describe_alpha
from ..common.runtime import Described, Unsupported, architecture, describe, get_kernel, missing
from ..common.template import template
from .config import choose_config, why_not
from .plan import Operands, views
from .quantizing_config import FORMATS, STEP, Quantizing

__all__ = ["gemm_quantize"]


def gemm_quantize(
    a_data: Tensor,
    a_scale: Tensor,
    a_format: str,
    b_data: Tensor,
    b_scale: Tensor,
    b_format: str,
    format: str = "mxfp8",
    *,
    swiglu: bool = False,
    alpha: Alpha = None,
    bias: Tensor | None = None,
    scale_rounding: str | None = None,
    nonfinite: str = "propagate",
    global_scale: Tensor | None = None,
    arch: str | None = None,
    ctas: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``alpha * A @ B.mT + bias``, or SwiGLU of it, quantized along its rows.

    The bytes are those of ``reference.quantize`` of the product in fp32 (of ``reference.swiglu`` of
    it): nothing is rounded in between. They are the ``a_data`` and ``a_scale`` of another product.

    Args:
        a_data, a_scale, a_format, b_data, b_scale, b_format, alpha, bias, arch, ctas: as
            :func:`gemm` has them.
        format: of the result: "mxfp8", "mxfp8_e5m2", "mxfp4" or "nvfp4".
        swiglu: the result is ``silu(gate) * up`` (M, N / 2), where the first N / 2 rows of B make
            the gate. ``b_scale`` then has the tiles of these, and after them those of the others:
            where N / 2 is a multiple of 128, the tiles of all rows; else each half is quantized by
            itself.
        scale_rounding, nonfinite: as in :func:`blockscale.quantize`.
        global_scale: () fp32, of the result; for "nvfp4" alone, which has no default here: it would
            depend on all of the result.

    Returns:
        Data (M, columns), of 4-bit elements (M, columns / 2) bytes; scales as bytes, in layout
        "tcgen05".

    Raises Unsupported as :func:`gemm`, and where the result's columns are no multiple of 32.
    ValueError or TypeError where arguments do not belong together.
    """
    plan = _plan(
        describe(a_data),
        describe(a_scale),
        a_format,
        describe(b_data),
        describe(b_scale),
        b_format,
        (a_data.data_ptr() % 32, b_data.data_ptr() % 32),
        describe(bias),
        describe_alpha(alpha),
        describe(global_scale),
        Quantizing(format, swiglu, scale_rounding, nonfinite),
        a_data.device,
        arch,
        ctas,
    )
    data, scale = torch.empty_like(plan.data), torch.empty_like(plan.scale)
    if plan.run is not None:
        operands = views((a_data, b_data), (a_scale, b_scale), plan.majors, plan.scale_rows)
        plan.run(*operands, (data, scale, global_scale), bias, alpha)
    return data.view(get_format(format).element.dtype), scale


@dataclass(frozen=True, slots=True)
class _Plan:
    """``run`` takes operands as ``Plan`` has them, and ``data`` and ``scale`` like these, each one
    item, expanded. None where there is nothing to write."""

    run: Callable[..., Any] | None
    majors: tuple[str, str]
    scale_rows: tuple[int, int]
    data: Tensor
    scale: Tensor


@lru_cache(maxsize=4096)
def _plan(
    a: Described,
    a_scale: Described,
    a_format: str,
    b: Described,
    b_scale: Described,
    b_format: str,
    addresses: tuple[int, int],
    bias: Described | None,
    alpha: tuple[Described, ...],
    global_scale: Described | None,
    quantizing: Quantizing,
    device: torch.device,
    arch: str | None,
    ctas: int | None,
) -> _Plan:
    arch = arch or architecture(device.index)
    reason = missing() or why_not(a_format, b_format, torch.bfloat16, arch)
    if reason:
        raise Unsupported(reason)
    _check_names(quantizing)
    operands = Operands.of(a, a_scale, a_format, b, b_scale, b_format, quantizing.parts)
    m, n, k = operands.shape
    check_rest((m, n), None, bias, alpha, torch.bfloat16, False)
    columns = _columns(quantizing, n)
    _check_global_scale(quantizing, global_scale)
    format = quantizing.stored
    shape = format.data_shape((m, columns), -1)
    tiles = get_layout("tcgen05").stored_shape((m, columns // format.block_size))
    bytes_of = torch.uint8
    outputs = template(shape, bytes_of, device), template(tiles, bytes_of, device)
    if 0 in (m, n):
        return _Plan(None, operands.majors, (0, 0), *outputs)
    if k == 0:
        raise Unsupported(f"a_data, b_data: got {tuple(a[0])} and {tuple(b[0])}: K is 0")
    config = choose_config(
        (m, n, k),
        (a_format, b_format),
        torch.uint8,
        majors=operands.majors,
        bias=None if bias is None else bias[2],
        alpha=len(alpha),
        arch=arch,
        quantizing=quantizing,
        ctas=ctas,
    )
    operands.check_loadable(addresses, config)
    parts = quantizing.parts
    rows = -(-m // 128), -(-n // parts // 128) * parts
    return _Plan(get_kernel(config, device), operands.majors, rows, *outputs)


def _check_names(quantizing: Quantizing) -> None:
    format = choose("format", quantizing.format, {name: get_format(name) for name in FORMATS})
    if quantizing.scale_rounding is not None:
        known = dict.fromkeys(format.scale.roundings)
        choose(f"scale_rounding (of format {format.name!r})", quantizing.scale_rounding, known)
    choose("nonfinite", quantizing.nonfinite, dict.fromkeys(NONFINITE))


def _columns(quantizing: Quantizing, n: int) -> int:
    """Of the result, from ``n`` rows of B."""
    columns = n // quantizing.parts
    if columns % STEP:
        raise Unsupported(
            f"b_data: has {n} rows, so {columns} columns are quantized; TMA and blocks want a "
            f"multiple of {STEP}: pad with rows of zeros" + ", each half" * quantizing.swiglu
        )
    return columns


def _check_global_scale(quantizing: Quantizing, x: Described | None) -> None:
    name = quantizing.format
    if quantizing.has_table and x is None:
        raise ValueError(f"global_scale: {name} needs one, an fp32 scalar known beforehand")
    if not quantizing.has_table and x is not None:
        raise ValueError(f"global_scale: format {name!r} has none; leave it out")
    if x is not None and (x[2] != torch.float32 or tuple(x[0]) != ()):
        raise TypeError(
            f"global_scale: got {x[2]} of shape {tuple(x[0])}; expected torch.float32, ()"
        )
