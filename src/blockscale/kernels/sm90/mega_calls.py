"""A mega MoE on Hopper, of torch's tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...dtypes import BFLOAT16, from_torch
from ...formats import get_format
from ...tensor import ScaledTensor
from ..common.calls import Operand
from ..common.gpu import Gpu
from ..common.runtime import gpu_of, require_gpu
from ..mega.buffers import TILE_ROWS, Sizes, needs_bf16_rings, why_not_sizes
from ..mega.memory import Experts, Launch, Memory, require_kernel
from .mega_config import choose_mega
from .product_config import why_not

__all__ = ["mega_moe", "operand_of", "why_not_mega"]

#: Of weights, that are multiplied with "fp8_1x128".
_WEIGHTS = ("fp8_128x128", "mxfp4", "nvfp4")


def mega_moe(
    memory: Memory,
    experts: Experts,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    how: Launch = Launch(),  # noqa: B008 - a value
    *,
    gpu: Gpu | None = None,
) -> None:
    """Launch a rank's part, as ``sm100.mega_calls`` has it; experts are as :func:`operand_of` has
    them."""
    device = memory.buffer.device
    known = require_gpu("memory", device, gpu or gpu_of(device))
    sizes, types = memory.buffers.sizes, (ids.dtype.itemsize, out.dtype)
    parts = ("up", experts.up, experts.up_alpha), ("down", experts.down, experts.down_alpha)
    alpha_ranks = tuple(() if alpha is None else (alpha.dim(),) for *_, alpha in parts)
    run = _plan(sizes, str(experts.up.format), alpha_ranks, *types, known)
    matrices, rings = list[Any](), []
    elements = torch.bfloat16 if sizes.bf16_rings else torch.uint8
    for name, (data, scale, _), alpha in parts:
        rows = data.shape[0] * data.shape[1]
        given = data.view(torch.uint8).view(rows, -1), scale
        matrices.append((*given, alpha) if sizes.bf16_rings else given)
        tiles = memory.region(f"{name}_ring_scale", torch.float32)
        rings.append((memory.region(f"{name}_ring", elements), tiles.view(-1, TILE_ROWS)))
    run(
        *(memory.start, memory.peers, memory.rank),
        *(ids, weights, out, *matrices, tuple(rings)),
        *(round(how.limit * 1e9), how.clusters or known.multiprocessors),
    )


@lru_cache(maxsize=4096)
def _plan(
    sizes: Sizes, weights: str, alphas: tuple[Any, Any], id_bytes: int, out: torch.dtype, gpu: Gpu
) -> Callable[..., Any]:
    require_kernel(why_not_mega(sizes, weights, gpu.arch), out)
    how: dict[str, Any] = {"id_bytes": id_bytes, "out_dtype": from_torch(out), "arch": gpu.arch}
    return gpu.load(choose_mega(sizes, weights, alphas=alphas, **how))


def operand_of(w: ScaledTensor) -> Operand:
    """Matrices (experts, rows, columns) as the kernel reads them: scales of 128 x 128 as they are;
    those of elements of four bits four a word, int32 (experts * words, rows), of each row those of
    neighbours along K."""
    data = w.qdata.contiguous()
    if get_format(w.format_name).element.bits > 4:
        return Operand(data, w.scale, w.format_name)
    words = w.qscale.contiguous().view(torch.int32)
    return Operand(data, words.mT.contiguous().flatten(0, 1), w.format_name)


def why_not_mega(sizes: Sizes, weights: str, arch: str) -> str:
    """Why there is no kernel; empty where there is one."""
    reason = why_not(BFLOAT16, arch)
    if not reason and (sizes.activations != "fp8_1x128" or weights not in _WEIGHTS):
        reason = (
            f"formats {sizes.activations} and {weights}: there are kernels for fp8_1x128 and "
            f"{', '.join(_WEIGHTS)}"
        )
    if not reason and sizes.bf16_rings != needs_bf16_rings(sizes.activations, weights):
        reason = f"sizes: bf16_rings is {sizes.bf16_rings}; {weights} takes {not sizes.bf16_rings}"
    return reason or why_not_sizes(sizes)
