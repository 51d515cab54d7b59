"""A mega MoE on Blackwell, of torch's tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...dtypes import BFLOAT16, from_torch
from ...tensor import ScaledTensor
from ..common.calls import Alpha, Operand
from ..common.gpu import Gpu
from ..common.runtime import gpu_of, require_gpu
from ..mega.buffers import MULTIPLE, Sizes, why_not_sizes
from ..mega.memory import Experts, Launch, Memory, require_kernel
from .config import why_not
from .mega_config import MegaConfig, choose_mega

__all__ = ["mega_moe", "operand_of", "why_not_mega"]


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
    """Launch a rank's part. Others launch theirs; its tokens are in ``memory``.

    Args:
        experts: scales are in layout "tcgen05", those of an expert after another's.
        ids: int64 or int32 (tokens, topk), contiguous; those outside of all experts are of none.
        weights: fp32 (tokens, topk), contiguous.
        out: (tokens, H), which is written.
        gpu: to choose the kernel for where ``memory`` is on a CPU, for the emulator.

    Raises Unsupported, a ValueError, where there is no kernel.
    """
    device = memory.buffer.device
    known = require_gpu("memory", device, gpu or gpu_of(device))
    alphas = experts.up_alpha, experts.down_alpha
    ranks = tuple(tuple(each.dim() for each in _scalars(alpha)) for alpha in alphas)
    types = ids.dtype.itemsize, out.dtype
    format = str(experts.up.format)
    config, run = _plan(memory.buffers.sizes, format, ranks, *types, how.ctas, known)
    matrices, rings = [], []
    for (data, scale, _), name in ((experts.up, "up"), (experts.down, "down")):
        assert scale is not None
        rows = data.shape[0] * data.shape[1]
        tiles = scale.view(torch.int64).view(rows // MULTIPLE, -1)
        matrices.append((data.view(torch.uint8).view(rows, -1), tiles))
        tiles = memory.region(f"{name}_ring_scale", torch.int64)
        rings.append((memory.region(f"{name}_ring"), tiles))
    bytes_of = memory.region("down_ring_scale").view(-1)
    clusters = how.clusters or known.multiprocessors // config.ctas
    run(
        *(memory.start, memory.peers, memory.rank),
        *(ids, weights, out, *matrices, (*rings, bytes_of), *alphas, experts.global_scale),
        *(round(how.limit * 1e9), clusters * config.ctas),
    )


def why_not_mega(sizes: Sizes, weights: str, arch: str) -> str:
    """Why there is no kernel; empty where there is one."""
    return why_not(sizes.activations, weights, BFLOAT16, arch) or why_not_sizes(sizes)


def operand_of(w: ScaledTensor) -> Operand:
    """Matrices (experts, rows, columns) as the kernel reads them: data as it is, and scales of each
    in layout "tcgen05"."""
    each: list[Any] = list(w)
    tiles = torch.cat([matrix.to_layout("tcgen05").qscale.flatten() for matrix in each])
    return Operand(w.qdata.contiguous(), tiles, w.format_name)


def _scalars(alpha: Alpha) -> tuple[Tensor, ...]:
    if alpha is None:
        return ()
    return alpha if isinstance(alpha, tuple) else (alpha,)


@lru_cache(maxsize=4096)
def _plan(
    sizes: Sizes,
    weights: str,
    alphas: tuple[tuple[int, ...], tuple[int, ...]],
    id_bytes: int,
    out: torch.dtype,
    ctas: int | None,
    gpu: Gpu,
) -> tuple[MegaConfig, Callable[..., Any]]:
    require_kernel(why_not_mega(sizes, weights, gpu.arch), out)
    how: dict[str, Any] = {"id_bytes": id_bytes, "out_dtype": from_torch(out), "arch": gpu.arch}
    config = choose_mega(sizes, weights, alphas=alphas, ctas=ctas or 2, **how)
    return config, gpu.load(config)
