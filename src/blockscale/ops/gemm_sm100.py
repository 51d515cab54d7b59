"""Products on Blackwell: its tensor cores take data and scales as they are stored."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from torch import Tensor

from ..formats import Format, formats
from ..kernels.common.calls import Groups, Operand
from ..kernels.common.gpu import Unsupported
from ..kernels.common.loadable import loadable
from ..kernels.sm100 import calls as sm100
from ..kernels.sm100.grouped_gemm import plan_groups
from ..kernels.sm100.kinds import find_kind
from ..kernels.sm100.plan import plan_gemm
from ..kernels.sm100.quantizing_config import FORMATS, Quantizing
from ..layouts import TILE_ROWS, Grouped, get_layout
from ..memory import as_bytes
from .gemm_operands import (
    GROUPED_TILES,
    GroupedProducts,
    Products,
    Quantization,
    Reading,
    Side,
    Take,
    global_scales,
    inside,
    scale_matrix,
)

__all__ = ["PRODUCTS"]

_SPREAD = 32  # bytes that rows start at multiples of, whose 4-bit elements TMA spreads
_ITEM = torch.int64  # as which kernels take scales


def _quantized(
    a: Side, b: Side, bias: Tensor | None, how: Quantization, groups: Groups | None
) -> tuple[Tensor, Tensor]:
    if how.format not in FORMATS:
        raise Unsupported(f"format: no product is quantized to {how.format}")
    if formats[how.format].has_global_scale and how.global_scale is None:
        raise Unsupported("global_scale: depends on all of the product; pass one")
    if groups is None:
        left, right = _lay(a, b, halved=how.swiglu)
    else:
        left, right = _lay_rows(a, b, groups, halved=how.swiglu)
    return sm100.gemm_quantize(
        left,
        right,
        Quantizing(how.format, how.swiglu, how.scale_rounding, how.nonfinite, how.rounded),
        alpha=global_scales(a.global_scale, b.global_scale),
        bias=bias,
        global_scale=how.global_scale,
        groups=groups,
    )


def _lay(a: Side, b: Side, halved: bool = False) -> tuple[Operand, Operand]:
    """``halved``: the first half of the columns of ``b`` and the others have tiles of their own."""
    left, right = _matrices(a, b)
    return (
        Operand(left, _tiles(a, -1), a.format),
        Operand(right, _tiles(b, -2, 1 + halved), b.format),
    )


def _lay_rows(a: Side, b: Side, groups: Groups, halved: bool = False) -> tuple[Operand, Operand]:
    """Of groups of rows; ``b`` (groups, K, N) has compact scales. ``halved``: as of ``_lay``."""
    if b.scale is None:
        raise TypeError("b: is not quantized")
    (m, _), (count, _, n) = a.shape, b.shape
    weights = b.data.mT
    _check_along_k(a.data, weights)
    left, right = _matrices(a, b._replace(data=weights.flatten(0, 1).mT))
    scale = a.scale
    if groups.grouping == "masked":
        scale = _tiles_of_parts(scale_matrix(a, -1, groups), m // max(count, 1))
    elif a.layout != GROUPED_TILES:
        ends = inside(groups.offsets, m)
        scale = Grouped(get_layout("tcgen05")).swizzle(scale_matrix(a, -1), ends)
    tiles = _tiles_of_parts(b.scale.mT.flatten(0, 1), n // (1 + halved))
    right = right.unflatten(0, (count, n))
    return Operand(left, scale, a.format), Operand(right, tiles, b.format)


def _lay_columns(a: Side, b: Side, groups: Groups) -> tuple[Operand, Operand]:
    """Of groups of columns."""
    _check_along_k(a.data, b.data.mT)
    return _lay(a, b)


def _check_along_k(a: Tensor, b: Tensor) -> None:
    for name, data in (("a", a), ("b", b)):
        if data.stride(-1) != 1 and data.shape[-1] > 1:
            raise Unsupported(
                f"{name}: its contraction is not contiguous, and kernels take groups only so: "
                "quantize columns (axis=-2) with k_major=True"
            )


def _matrices(a: Side, b: Side) -> tuple[Tensor, Tensor]:
    """Data of A and of B as TMA loads it."""
    a_format, b_format = a.kind, b.kind
    kind = find_kind(a_format.name, b_format.name)
    assert kind is not None
    # beside 8-bit elements those of 4 bits take a byte each in shared memory
    spread = [not kind.packed and each.element.bits < 8 for each in (a_format, b_format)]
    whole = kind.block_k if any(spread) else 1
    return (
        _matrix("a", a.data, a_format, whole, spread[0]),
        _matrix("b", b.data.mT, b_format, whole, spread[1]),
    )


def _tiles_of_parts(matrix: Tensor, rows: int) -> Tensor:
    """Scales (rows, blocks) in layout "tcgen05", where so many rows each begin with a tile."""
    parts = matrix.unflatten(0, (-1, rows)) if rows else matrix.reshape(0, 0, matrix.shape[1])
    apart = as_bytes(parts)
    apart = torch.nn.functional.pad(apart, (0, 0, 0, -rows % TILE_ROWS))
    return get_layout("tcgen05").swizzle(apart.flatten(0, 1)).view(matrix.dtype)


def _matrix(name: str, data: Tensor, format: Format, whole: int, spread: bool) -> Tensor:
    """Data (rows, K) as TMA loads it, with K padded to a multiple of ``whole`` elements."""
    element = format.element
    if element.bits < 8 and data.stride(1) != 1 and data.shape[1] > 1:
        raise Unsupported(
            f"{name}: its contraction is not contiguous, and tensor cores take elements of 4 bits "
            "only so: quantize stores them so along either axis, with k_major=True or without; "
            "quantize anew, or call contiguous() on the data (rows, K / 2)"
        )
    rest = -element.elements(data.shape[1]) % whole
    if rest:  # zeros; the tiles of scales have room for theirs
        data = torch.nn.functional.pad(data, (0, element.stored(rest)))
    return loadable(data, _SPREAD if spread else 16)


def _tiles(side: Side, axis: int, parts: int = 1) -> Tensor:
    """Scales in layout "tcgen05", where TMA loads them; of each of as many parts of the rows."""
    rows = side.shape[-3 - axis] // parts
    alike = parts == 1 or rows % TILE_ROWS == 0  # then no tile has rows of two parts
    if side.layout != "tcgen05" or side.scale is None or not alike:
        return _tiles_of_parts(scale_matrix(side, axis), rows)
    tiles = side.scale.contiguous()
    return tiles.clone() if tiles.data_ptr() % 16 else tiles


# --- calls alike ----------------------------------------------------------------------------------


def _taken(format: Format, axis: int, shape: torch.Size, stride: tuple[int, ...]) -> Take:
    """The order of data whose lines are contiguous, and scales as rows of tiles."""
    along_k = stride[axis] == 1
    turned = along_k != (axis == -1)
    down = -(-shape[-3 - axis] // TILE_ROWS)  # how many there are along K, groups decide, too

    def take(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return data.mT if turned else data, scale.view(_ITEM).view(down, -1)

    return take


_FORMATS = "mxfp8, mxfp8_e5m2 and mxfp4 in any pair; nvfp4 by nvfp4"
_PAIRS = [pair for pair in product(formats, formats) if find_kind(*pair) is not None]

PRODUCTS = Products(
    gpu="Blackwell",
    formats=_FORMATS,
    pairs=_PAIRS,
    lay=_lay,
    plan=plan_gemm,
    readings={
        (name, axis): Reading(
            "tcgen05",
            partial(_taken, formats[name], axis),
            data_apart=_SPREAD if formats[name].element.bits < 8 else 16,
            scale_stride=(1,),
        )
        for name in formats
        if find_kind(name, name) is not None
        for axis in (-1, -2)
    },
    k_major=False,
    grouped=GroupedProducts(_FORMATS, _PAIRS, _lay_rows, plan_groups, {}),
    k_grouped=GroupedProducts(
        f"{_FORMATS}, the contraction contiguous", _PAIRS, _lay_columns, plan_groups, {}
    ),
    proof="run in the emulator only, never on such a GPU",
    quantize=_quantized,
)
