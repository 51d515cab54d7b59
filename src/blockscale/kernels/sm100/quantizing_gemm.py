"""A product whose result is quantized for the next one, by a single kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...checks import choose
from ...dtypes import BFLOAT16, UINT8
from ...formats import NONFINITE, get_format
from ...layouts import Grouped, get_layout
from ..common.calls import GemmCall, Groups, Operand, describe_call
from ..common.gpu import Unsupported
from ..common.runtime import Described, describe
from ..common.template import template
from .config import choose_config, choose_grouped, supergroup, why_not
from .grouped_gemm import check_groups, rows_of_groups
from .plan import Operands, views
from .quantizing_config import FORMATS, SUBTILE_N, Quantizing

__all__ = ["gemm_quantize"]


def gemm_quantize(
    a: Operand,
    b: Operand,
    quantizing: Quantizing,
    *,
    global_scale: Tensor | None = None,
    groups: Groups | None = None,
    ctas: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """``alpha * A @ B.mT + bias``, or SwiGLU of it, quantized along its rows. With ``groups`` of
    rows of A, those of ``A[start:end] @ B[i].mT``.

    The bytes are those of ``reference.quantize`` of the product in fp32 (of ``reference.swiglu`` of
    it): nothing is rounded in between. They are the ``a`` of another product.

    Args:
        a, b, ctas: as :func:`gemm` has them.
        quantizing: format and rounding of the result; its format is "mxfp8", "mxfp8_e5m2", "mxfp4"
            or "nvfp4". With ``swiglu`` the result is ``silu(gate) * up`` (M, N / 2), where the
            first N / 2 rows of B make the gate. The scales of B then have the tiles of these, and
            after them those of the others: where N / 2 is a multiple of 128, the tiles of all rows;
            else each half is quantized by itself. Of groups, those of each.
        global_scale: () fp32, of the result; for "nvfp4" alone, which has no default here: it would
            depend on all of the result.
        groups: of rows of A, whose scales lie as ``grouped_gemm`` wants them; there is no bias.
        options: bias, alpha and gpu of ``common.calls.describe_call``.

    Returns:
        Data (M, columns), of 4-bit elements (M, columns / 2) bytes; scales as bytes, in layout
        "tcgen05"; of groups, as ``layouts.Grouped`` has them: the ``a`` of a grouped product.

    Raises Unsupported as :func:`gemm`, and where the result's columns are no multiple of 32.
    ValueError or TypeError where arguments do not belong together.
    """
    call = describe_call(a, b, **options).grouped(groups)
    plan = _plan(call, describe(global_scale), quantizing, ctas)
    data, scale = torch.empty_like(plan.data), torch.empty_like(plan.scale)
    if plan.run is not None:
        if groups is not None:  # tiles that no group has
            scale.zero_()
        given = plan.views(a.data, a.scale, b.data, b.scale)
        outputs, rest = (data, scale, global_scale), (None, None)
        if groups is not None:
            rest = groups.offsets, plan.supergroup
        plan.run(*given, outputs, options.get("bias"), options.get("alpha"), *rest)
    return data.view(quantizing.stored.element.dtype), scale


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan of a call. ``run`` takes operands as ``views`` makes them, and outputs like ``data``
    and ``scale``; it is None where there is nothing to write. ``supergroup``: of groups."""

    run: Callable[..., Any] | None
    views: Callable[..., list[Tensor]]
    data: Tensor
    scale: Tensor
    supergroup: int | None = None


@lru_cache(maxsize=4096)
def _plan(
    call: GemmCall, global_scale: Described | None, quantizing: Quantizing, ctas: int | None
) -> _Plan:
    formats, device = (call.a.format, call.b.format), call.device
    gpu = call.supported(partial(why_not, *formats, BFLOAT16))
    _check_names(quantizing)
    if (rows := call.b.data[0][-2]) % quantizing.b_halves:
        raise ValueError(f"b_data: has {rows} rows; expected as many for gate as for up")
    groups, each = 0, None
    if call.offsets is None:
        operands = Operands.of(call, (1, quantizing.b_halves))
        m, n, k = operands.shape
    else:
        groups = call.offsets[0][0]
        check_groups(groups)
        operands, m, each = rows_of_groups(call, groups, quantizing.b_halves)
        _, n, k = each
    call.check_rest((m, n))
    columns = _columns(quantizing, n)
    _check_global_scale(quantizing, global_scale)
    format = quantizing.stored
    shape = format.data_shape((m, columns), -1)
    stored = m if call.offsets is None else Grouped(get_layout("tcgen05")).padded_rows(m, groups)
    tiles = get_layout("tcgen05").stored_shape((stored, columns // format.block_size))
    bytes_of = torch.uint8
    outputs = template(shape, bytes_of, device), template(tiles, bytes_of, device)
    if 0 in (m, n):
        return _Plan(None, views, *outputs)
    if k == 0:
        shapes = f"{tuple(call.a.data[0])} and {tuple(call.b.data[0])}"
        raise Unsupported(f"a_data, b_data: got {shapes}: K is 0")
    epilogue = call.epilogue(n)._replace(out_dtype=UINT8)
    how: dict[str, Any] = {"quantizing": quantizing, "gpu": gpu, "ctas": ctas}
    if each is None:
        config = choose_config((m, n, k), formats, epilogue, majors=operands.majors, **how)
    else:
        config = choose_grouped(each, groups, formats, epilogue, **how)
    operands.check_loadable(config)
    square = supergroup(config, gpu) if groups else None
    return _Plan(gpu.load(config), operands.views, *outputs, square)


def _check_names(quantizing: Quantizing) -> None:
    format = choose("format", quantizing.format, {name: get_format(name) for name in FORMATS})
    if quantizing.scale_rounding is not None:
        known = dict.fromkeys(format.scale.roundings)
        choose(f"scale_rounding (of format {format.name!r})", quantizing.scale_rounding, known)
    choose("nonfinite", quantizing.nonfinite, dict.fromkeys(NONFINITE))


def _columns(quantizing: Quantizing, n: int) -> int:
    """The columns of the result, from ``n`` rows of B."""
    columns = n // quantizing.b_halves
    if columns % SUBTILE_N:
        raise Unsupported(
            f"b_data: has {n} rows, so {columns} columns are quantized; TMA and blocks want a "
            f"multiple of {SUBTILE_N}: pad with rows of zeros" + ", each half" * quantizing.swiglu
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
