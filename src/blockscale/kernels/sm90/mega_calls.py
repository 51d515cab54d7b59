"""A mega MoE on Hopper, of torch's tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...dtypes import BFLOAT16, from_torch
from ..common.gpu import Gpu
from ..common.runtime import gpu_of, require_gpu
from ..mega.buffers import Sizes, why_not_sizes
from ..mega.memory import Experts, Launch, Memory, require_kernel
from .mega_config import choose_mega
from .product_config import why_not

__all__ = ["mega_moe", "why_not_mega"]

_FORMATS = ("fp8_1x128", "fp8_128x128")  # of activations, of weights


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
    """Launch a rank's part, as ``sm100.mega_calls`` has it. Scales of experts are fp32 (experts,
    rows / 128, columns / 128), with any strides."""
    device = memory.buffer.device
    known = require_gpu("memory", device, gpu or gpu_of(device))
    types = ids.dtype.itemsize, out.dtype
    run = _plan(memory.buffers.sizes, str(experts.up.format), *types, known)
    matrices, rings = [], []
    for (data, scale, _), name in ((experts.up, "up"), (experts.down, "down")):
        rows = data.shape[0] * data.shape[1]
        matrices.append((data.view(torch.uint8).view(rows, -1), scale))
        tiles = memory.region(f"{name}_ring_scale", torch.float32)
        rings.append((memory.region(f"{name}_ring"), tiles.view(-1, 128)))
    run(
        *(memory.start, memory.peers, memory.rank),
        *(ids, weights, out, *matrices, tuple(rings)),
        *(round(how.limit * 1e9), how.clusters or known.multiprocessors),
    )


@lru_cache(maxsize=4096)
def _plan(
    sizes: Sizes, weights: str, id_bytes: int, out: torch.dtype, gpu: Gpu
) -> Callable[..., Any]:
    require_kernel(why_not_mega(sizes, weights, gpu.arch), out)
    how: dict[str, Any] = {"id_bytes": id_bytes, "out_dtype": from_torch(out), "arch": gpu.arch}
    return gpu.load(choose_mega(sizes, **how))


def why_not_mega(sizes: Sizes, weights: str, arch: str) -> str:
    """Why there is no kernel; empty where there is one."""
    reason = why_not(BFLOAT16, arch)
    if not reason and (sizes.activations, weights) != _FORMATS:
        reason = (
            f"formats {sizes.activations} and {weights}: there is a kernel for "
            f"{' and '.join(_FORMATS)}"
        )
    return reason or why_not_sizes(sizes)
