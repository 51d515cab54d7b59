"""Weights of experts as a mega MoE kernel reads them: codes as they are in a checkpoint, scales as
tensor memory wants them.

Source: DeepGEMM's mega MoE, whose layout of FP8 x FP4 weights this is, with blocks of 16 and UE4M3
scales for NVFP4.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import choose
from ..formats import E4M3, Format, get_format
from ..layouts import get_layout
from ..layouts.base import ceil_to
from ..layouts.tcgen05 import TILE_BLOCKS, TILE_ROWS
from ..tensor import ScaledTensor
from ..tensor_checks import check_is_tensor

__all__ = ["FoldError", "MegaWeights", "check_mega_weights", "transform_weights"]

FORMATS = {name: get_format(name) for name in ("nvfp4", "mxfp4")}
INTERLEAVE = 8  # rows of gate, then as many of up: columns that a lane of the epilogue has together


class FoldError(NamedTuple):
    """What the second rounding of scales does: relative errors of blocks' scales.

    Attributes:
        rms, worst: over blocks whose scale was not zero.
        zeros: blocks whose scale became zero.
        clipped: blocks whose scale is more than the largest.
    """

    rms: float
    worst: float
    zeros: int
    clipped: int


class MegaWeights(NamedTuple):
    """The weights (E, N, K) of one product of all experts of a rank.

    Attributes:
        data: int8 (E, N, K / 2), contiguous: two E2M1 codes a byte, the first in the lower half.
        sf: int32 (E, rows, K / (4 * gran_k)), four scales a word, with strides (.., 1, rows):
            MN-major. ``rows`` is N padded to a multiple of 128. 128 of them are a tile of layout
            "tcgen05": row ``r`` is word ``r % 32 * 4 + r // 32``.
        alpha: fp32 (E, parts): what the epilogue multiplies sums by, those of gate and of up where
            there are two ``parts``.
        format: "nvfp4" or "mxfp4".
        interleaved: rows are of gate and up, eight of each in turn.
        fold: what folding did, or None.
    """

    data: Tensor
    sf: Tensor
    alpha: Tensor
    format: str
    interleaved: bool
    fold: FoldError | None = None

    @property
    def gran_k(self) -> int:
        """Elements of a block: 16 or 32."""
        return get_format(self.format).block_size

    @property
    def recipe(self) -> tuple[int, int, int]:
        """As DeepGEMM has it: rows of A and of B, and elements along K, that share a scale."""
        return 1, 1, self.gran_k

    def dequantize(self) -> Tensor:
        """fp32 (E, N, K), gate's rows before up's: for tests, and to look at."""
        experts, n, half = self.data.shape
        scale = _words_to_bytes(self.sf)[:, :n, : 2 * half // self.gran_k]
        data, alpha = self.data.view(torch.uint8), _alpha_of_rows(self.alpha, n)
        if self.interleaved:
            data, scale = (_interleaved(x, back=True) for x in (data, scale))
        format = get_format(self.format)
        scalar = torch.ones((), device=data.device) if format.has_global_scale else None
        shape = experts, n, 2 * half
        scale = scale.contiguous().view(format.scale.dtype)
        values = ScaledTensor(data, scale, format=format, shape=shape, global_scale=scalar)
        return values.dequantize(torch.float32) * alpha


def transform_weights(
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor | None = None,
    *,
    interleave: bool = False,
    fold: bool = False,
) -> MegaWeights:
    """A checkpoint's FP4 weights of experts, as a mega MoE kernel reads them.

    >>> q = torch.stack([bs.quantize(torch.randn(256, 128), "nvfp4") for _ in range(2)])
    >>> l1 = bs.distributed.transform_weights(q.data, q.scale, q.global_scale, interleave=True)
    >>> l1.data.shape, l1.sf.shape, l1.sf.stride(), l1.recipe
    (torch.Size([2, 256, 64]), torch.Size([2, 256, 2]), (512, 1, 256), (1, 1, 16))
    >>> torch.equal(l1.dequantize(), q.dequantize(torch.float32))
    True

    Args:
        weight: uint8 or int8 (E, N, K / 2): two E2M1 codes a byte. They are not changed.
        weight_scale: float8_e4m3fn (E, N, K / 16): NVFP4. float8_e8m0fnu or uint8 (E, N, K / 32):
            MXFP4.
        weight_scale_2: fp32 (), (E,) or (E, 1), or (E, 2) of gate and up, none negative: NVFP4's
            global scales, the multipliers that dequantize. They become ``alpha``.
        interleave: N is gate's rows, then up's (the first product); they take turns in the result.
        fold: multiply the block scales by ``weight_scale_2``, round them to UE4M3 once more, and
            have ones for ``alpha``; ``.fold`` says what that did.

    Results share memory with the arguments where nothing changes.

    Raises TypeError or ValueError where these are something else, or do not fit each other.
    """
    weight, weight_scale = (
        x.detach() if isinstance(x, Tensor) else x for x in (weight, weight_scale)
    )
    format = _check_checkpoint(weight, weight_scale, weight_scale_2, interleave, fold)
    experts, n = weight.shape[:2]
    if weight_scale_2 is None:
        alpha = torch.ones(experts, 1, device=weight.device)
    else:
        parts = weight_scale_2.shape[1] if weight_scale_2.dim() == 2 else 1
        alpha = weight_scale_2.detach().reshape(-1, parts).expand(experts, -1).contiguous()
    scale, report = weight_scale.view(torch.uint8), None
    if fold:
        wide = weight_scale.float() * _alpha_of_rows(alpha, n)
        folded = wide.clamp(max=E4M3.max).to(torch.float8_e4m3fn)
        report = _fold_error(wide, folded.float())
        scale, alpha = folded.view(torch.uint8), torch.ones_like(alpha)
    data = weight.view(torch.int8)
    if interleave:
        data, scale = (_interleaved(x) for x in (data, scale))
    words = _bytes_to_words(scale)
    return MegaWeights(data.contiguous(), words, alpha, format.name, interleave, report)


def check_mega_weights(name: str, weights: MegaWeights) -> None:
    """TypeError or ValueError unless a kernel can read them; says which step is missing."""
    if not isinstance(weights, MegaWeights):
        raise TypeError(
            f"{name}: got {type(weights).__name__}; expected a MegaWeights: transform_weights("
            "weight, weight_scale, weight_scale_2) makes it"
        )
    data, sf, alpha, format, interleaved, _ = weights
    check_is_tensor(f"{name}.data", data)
    choose("format", format, FORMATS)
    remedy = "; transform_weights(weight, weight_scale, weight_scale_2) makes it"
    if data.dtype != torch.int8:
        view = ", .view(torch.int8)" if data.dtype == torch.uint8 else ""
        raise TypeError(f"{name}.data: got {data.dtype}; expected int8, two E2M1 a byte{view}")
    if data.dim() != 3 or not data.is_contiguous() or not data.numel():
        raise ValueError(
            f"{name}.data: got {tuple(data.shape)} with strides {data.stride()}; expected "
            "(experts, N, K / 2), contiguous"
        )
    experts, n, half = data.shape
    if 2 * half % weights.gran_k or (interleaved and n % (2 * INTERLEAVE)):
        raise ValueError(
            f"{name}.data: is of N = {n}, K = {2 * half}; expected multiples of "
            f"{2 * INTERLEAVE if interleaved else 1} and of {weights.gran_k}"
        )
    for part, each in (("sf", sf), ("alpha", alpha)):
        check_is_tensor(f"{name}.{part}", each)
        if each.device != data.device:
            raise ValueError(f"{name}.{part}: is on {each.device}, data on {data.device}; move it")
    rows, words = ceil_to(n, TILE_ROWS), -(-2 * half // (weights.gran_k * TILE_BLOCKS))
    if sf.dtype != torch.int32:
        raise TypeError(
            f"{name}.sf: got {sf.dtype}: scales are not packed; expected int32, four a word{remedy}"
        )
    if tuple(sf.shape) != (experts, rows, words):
        (other,) = (each.block_size for each in FORMATS.values() if each.name != format)
        of_other = sf.shape[-1:] == (words * weights.gran_k // other,)
        block = f" (blocks of {other}?)" if of_other else ""
        raise ValueError(
            f"{name}.sf: got {tuple(sf.shape)}{block}; {format} has blocks of {weights.gran_k}: "
            f"expected {(experts, rows, words)}{remedy}"
        )
    if sf.stride()[1:] != (1, rows) or (experts > 1 and sf.stride(0) != rows * words):
        wrong = "K-major" if sf.stride(-1) == 1 and words > 1 else "not aligned as TMA wants it"
        raise ValueError(
            f"{name}.sf: has strides {sf.stride()}: {wrong}; expected ({rows * words}, 1, {rows}), "
            f"MN-major in columns of {rows} words{remedy}"
        )
    parts = alpha.shape[-1] if alpha.dim() == 2 else 0
    fits = parts in (1, 1 + interleaved) and len(alpha) == experts and alpha.is_contiguous()
    if alpha.dtype != torch.float32 or not fits:
        raise ValueError(
            f"{name}.alpha: got {alpha.dtype} {tuple(alpha.shape)} with strides {alpha.stride()}; "
            f"expected float32 ({experts}, 1){f' or ({experts}, 2)' if interleaved else ''}, "
            "contiguous"
        )


def _check_checkpoint(
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor | None,
    interleave: bool,
    fold: bool,
) -> Format:
    for name, each in (("weight", weight), ("weight_scale", weight_scale)):
        check_is_tensor(name, each)
    if weight_scale_2 is not None:
        check_is_tensor("weight_scale_2", weight_scale_2)
    if isinstance(weight, ScaledTensor):
        raise TypeError(
            "weight: is a ScaledTensor; pass its parts: weight.qdata, weight.scale, "
            "weight.global_scale"
        )
    if weight.dtype not in (torch.uint8, torch.int8) or weight.dim() != 3:
        raise TypeError(
            f"weight: got {weight.dtype} {tuple(weight.shape)}; expected uint8 (experts, N, K / 2),"
            " two E2M1 codes a byte; quantize others by blockscale.quantize(weight, 'nvfp4')"
        )
    if weight_scale.dtype == torch.float8_e4m3fn:
        format = get_format("nvfp4")
    elif weight_scale.dtype in (torch.float8_e8m0fnu, torch.uint8):
        format = get_format("mxfp4")
    else:
        raise TypeError(
            f"weight_scale: got {weight_scale.dtype}; expected float8_e4m3fn of blocks of 16 "
            "(NVFP4), or float8_e8m0fnu or uint8 of blocks of 32 (MXFP4), as checkpoints have them"
        )
    if not weight.numel():
        raise ValueError(f"weight: got {tuple(weight.shape)}; expected some weights")
    experts, n, half = weight.shape
    want = experts, n, 2 * half // format.block_size
    if tuple(weight_scale.shape) != want or 2 * half % format.block_size:
        raise ValueError(
            f"weight_scale: got {tuple(weight_scale.shape)}; {format.name} weights {weight.dtype} "
            f"{tuple(weight.shape)} have blocks of {format.block_size}: expected {want}"
            + (
                "; NVFP4's of blocks of 16 are .view(torch.float8_e4m3fn)"
                if weight_scale.dtype == torch.uint8
                else ""
            )
        )
    if format.name == "nvfp4" and bool((weight_scale.view(torch.uint8) > 0x7F).any()):
        raise ValueError("weight_scale: has the sign bit set; UE4M3 has no sign")
    if interleave and n % (2 * INTERLEAVE):
        raise ValueError(
            f"interleave: N is {n}, gate's rows and up's; expected a multiple of {2 * INTERLEAVE}"
        )
    scales = {(), (experts,), (experts, 1)} | ({(experts, 2)} if interleave else set())
    if format.has_global_scale and (
        weight_scale_2 is None or tuple(weight_scale_2.shape) not in scales
    ):
        given = "None" if weight_scale_2 is None else str(tuple(weight_scale_2.shape))
        raise ValueError(
            f"weight_scale_2: got {given}; NVFP4 has a global scale: expected () or ({experts},)"
            + (f", or ({experts}, 2) of gate and up" if interleave else "")
        )
    if weight_scale_2 is not None and format.has_global_scale:
        if weight_scale_2.dtype != torch.float32 or weight_scale_2.device != weight.device:
            raise TypeError(
                f"weight_scale_2: got {weight_scale_2.dtype} on {weight_scale_2.device}; expected "
                f"float32 on {weight.device}"
            )
        if not bool((weight_scale_2.isfinite() & (weight_scale_2 >= 0)).all()):
            raise ValueError("weight_scale_2: has a negative number, an infinity or NaN")
    if not format.has_global_scale and (weight_scale_2 is not None or fold):
        raise ValueError(
            f"{'fold' if weight_scale_2 is None else 'weight_scale_2'}: {format.name} has no "
            "global scale; leave it out"
        )
    return format


def _alpha_of_rows(alpha: Tensor, n: int) -> Tensor:
    """(E, N, 1), of rows of gate and then of up."""
    return alpha.repeat_interleave(n // alpha.shape[1], 1)[..., None]


def _interleaved(x: Tensor, *, back: bool = False) -> Tensor:
    """Rows of gate and up in turn, of rows of gate and then of up; ``back``: the other way."""
    split = (-1, 2, INTERLEAVE) if back else (2, -1, INTERLEAVE)
    return x.unflatten(1, split).transpose(1, 2).flatten(1, 3)


def _bytes_to_words(scale: Tensor) -> Tensor:
    """int32 (E, rows, words), MN-major, of uint8 (E, N, blocks): tiles of layout "tcgen05", one
    after the other down each column of words."""
    experts, n, blocks = scale.shape
    rows, words = ceil_to(n, TILE_ROWS), -(-blocks // TILE_BLOCKS)
    padded = torch.nn.functional.pad(scale, (0, 0, 0, rows - n))
    tiles = get_layout("tcgen05").swizzle(padded.flatten(0, 1)).view(torch.int32)
    by_column = tiles.view(experts, -1, words, TILE_ROWS).transpose(1, 2)
    return tiles.new_empty(experts, words, rows).copy_(by_column.flatten(2)).mT


def _words_to_bytes(sf: Tensor) -> Tensor:
    """The other way: uint8 (E, rows, 4 * words)."""
    experts, rows, words = sf.shape
    tiles = sf.mT.unflatten(2, (-1, TILE_ROWS)).transpose(1, 2).contiguous()
    shape = experts * rows, words * TILE_BLOCKS
    octets = get_layout("tcgen05").unswizzle(tiles.flatten().view(torch.uint8), shape, torch.uint8)
    return octets.view(experts, rows, -1)


def _fold_error(want: Tensor, got: Tensor) -> FoldError:
    used = want > 0
    relative = ((got - want) / want)[used].double()
    worst = float(relative.abs().max()) if relative.numel() else 0.0
    rms = math.sqrt(float(relative.square().mean())) if relative.numel() else 0.0
    zeros, clipped = int((used & (got == 0)).sum()), int((want > E4M3.max).sum())
    return FoldError(rms, worst, zeros, clipped)
