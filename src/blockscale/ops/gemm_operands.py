"""Operands of a product, and what is known of the products of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..formats import Format, get_format, padded_groups
from ..kernels.common.calls import Alpha, CompiledGemm, GemmCall, Groups, Operand
from ..kernels.common.gpu import Unsupported
from ..layouts import Grouped, get_layout

__all__ = [
    "GROUPED_TILES",
    "GroupedProducts",
    "Products",
    "Quantization",
    "Reading",
    "Side",
    "Take",
    "detached",
    "global_scales",
    "inside",
    "scale_matrix",
]

#: Of scales in layout "tcgen05" that :class:`layouts.Grouped` has moved apart.
GROUPED_TILES = "tcgen05+grouped"

T = TypeVar("T", Tensor, Tensor | None)


class Side(NamedTuple):
    """An operand: see ``gemm``. A batch whose matrices have global scales of their own has as many;
    so have rows of equal groups."""

    data: Tensor
    scale: Tensor | None
    global_scale: Tensor | None
    format: str | None
    layout: str
    shape: Sequence[int]

    @property
    def kind(self) -> Format:
        """Of a quantized operand; ValueError of a plain one."""
        return get_format(self.format or "none")


Take = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Reading(NamedTuple):
    """How a quantized matrix lies that a kernel reads where it is.

    Attributes:
        layout: of its scales.
        taken: given its shape and the strides of its data, what makes of its data, as bytes, and of
            its scales what the kernel takes, by views; None where views do not do.
        data_apart, scale_apart: bytes; it starts at multiples of them.
        scale_stride: of its scales, if only one will do.
    """

    layout: str
    taken: Callable[[torch.Size, tuple[int, ...]], Take | None]
    data_apart: int = 16
    scale_apart: int = 16
    scale_stride: tuple[int, ...] | None = None


class Quantization(NamedTuple):
    """What becomes of a product that is quantized: see ``gemm_quantize``; ``rounded`` to bfloat16
    before, of groups."""

    format: str
    swiglu: bool
    scale_rounding: str
    nonfinite: str
    global_scale: Tensor | None
    rounded: bool = False


class GroupedProducts(NamedTuple):
    """What multiplies groups: see ``grouped_gemm``.

    Attributes:
        formats, pairs, plan: as of ``Products``; where rows are grouped, B is (groups, N, K).
        lay: the same, given the groups, too.
        readings: of B, and of a batch of rows.
    """

    formats: str
    pairs: Collection[tuple[str | None, str | None]]
    lay: Callable[[Side, Side, Groups], tuple[Operand, Operand]]
    plan: Callable[[GemmCall], CompiledGemm]
    readings: Mapping[tuple[str, int], Reading]


@dataclass(frozen=True, slots=True)
class Products:
    """What multiplies on the GPUs of an architecture.

    Attributes:
        gpu: its name.
        formats: those that there are kernels for, for a person.
        pairs: of formats of ``a`` and ``b`` that are multiplied; None is bf16.
        lay: gives A (M, K) and B (N, K) as kernels read them; copies where they lie otherwise, or
            Unsupported.
        plan: finds the kernel for operands that lie so; or Unsupported.
        readings: of format and axis of a quantized operand that a launch takes as it is.
        k_major: 8-bit operands are multiplied only where the contraction is contiguous.
        proof: where they have run, if not on such a GPU.
        quantize: multiplies and quantizes by one kernel, also groups of rows: gives data, and
            scales in layout "tcgen05", or Unsupported.
        grouped, k_grouped: what multiplies groups of rows, and along K, if anything does.
    """

    gpu: str
    formats: str
    pairs: Collection[tuple[str | None, str | None]]
    lay: Callable[[Side, Side], tuple[Operand, Operand]]
    plan: Callable[[GemmCall], CompiledGemm]
    readings: Mapping[tuple[str, int], Reading]
    k_major: bool
    proof: str = ""
    quantize: (
        Callable[[Side, Side, Tensor | None, Quantization, Groups | None], tuple[Tensor, Tensor]]
        | None
    ) = None
    grouped: GroupedProducts | None = None
    k_grouped: GroupedProducts | None = None

    def of_groups(self, grouping: str) -> GroupedProducts:
        """What multiplies groups; Unsupported if nothing does."""
        found = self.k_grouped if grouping == "k" else self.grouped
        if found is None:
            along = " along K" if grouping == "k" else ""
            raise Unsupported(f"no kernel multiplies groups{along} on {self.gpu} yet")
        return found

    def scale_layout(self, format: str) -> str:
        """In which scales of ``format`` are read as they are."""
        found = (self.readings.get((format, axis)) for axis in (-1, -2))
        return next((reading.layout for reading in found if reading is not None), "compact")


def detached(x: T) -> T:
    """Kernels take no tensors that require gradients, whatever the mode."""
    return x.detach() if x is not None and x.requires_grad else x


def scale_matrix(side: Side, axis: int, groups: Groups | None = None) -> Tensor:
    """Scales (rows, blocks) of an operand, the contraction last; a view where they lie in rows.
    Groups of rows may be moved apart, in layout ``GROUPED_TILES``; those along K are."""
    if side.scale is None:
        raise TypeError("scale_matrix: a plain matrix has no scales")
    if side.layout == "compact":
        return side.scale if axis == -1 else side.scale.mT
    rows, k = (side.shape[i] for i in (-3 - axis, axis))
    if groups is not None and groups.grouping == "k":
        k = padded_groups(k, len(groups.offsets))
    rows, blocks = (-(-x // extent) for x, extent in zip((rows, k), side.kind.block, strict=True))
    if side.layout == "sm90":
        return side.scale.mT[:rows]
    if side.layout == GROUPED_TILES and groups is not None:
        apart = Grouped(get_layout("tcgen05"))
        return apart.unswizzle(side.scale, (rows, blocks), side.scale.dtype, groups.offsets)
    return get_layout(side.layout).unswizzle(side.scale, (rows, blocks), side.scale.dtype)


def inside(offsets: Tensor, rows: int) -> Tensor:
    """Ends of groups as kernels take them, whatever the device has: each for the nearest that is no
    less than the one before, nor more than there are rows."""
    return offsets.clamp(0, rows).cummax(0).values


def global_scales(a: Tensor | None, b: Tensor | None) -> Alpha:
    """What a sum of unscaled products is to be multiplied by: what kernels take as alpha."""
    return b if a is None else a if b is None else (a, b)
