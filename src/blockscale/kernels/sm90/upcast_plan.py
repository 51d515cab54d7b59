"""What a call of FP8 by MXFP4 needs, found once for all calls alike, of one matrix or of groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...dtypes import from_torch
from ...formats import get_format
from ..common.calls import CompiledGemm, GemmCall, below_each_other, check_loadable, check_matrix
from ..common.gpu import Gpu
from ..common.template import template
from .config import BLOCK_K
from .grouped_config import supergroup
from .plan import BYTES, below, check_bytes, check_rows
from .upcast_config import (
    B_ROWS,
    SCALE_WORDS,
    KBlocksConfig,
    UpcastConfig,
    list_length,
    upcast_candidates,
    why_not,
)

__all__ = ["plan_upcast", "upcast_of"]


@dataclass(frozen=True, slots=True)
class _Upcast:
    """A product whose K blocks of B are listed first.

    Attributes:
        list_k_blocks: writes scales in tiles, and lists.
        multiply: the product.
        n: rows of B, of a group.
        tiles, entries: templates of what is written.
    """

    list_k_blocks: Callable[..., Any]
    multiply: Callable[..., Any]
    n: int
    tiles: Tensor
    entries: Tensor

    def __call__(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: Any) -> None:
        tiles, entries = torch.empty_like(self.tiles), torch.empty_like(self.entries)
        self.list_k_blocks(b, b_scale, self.n, tiles, entries)
        self.multiply(a, a_scale, b, tiles, entries, *rest)


def upcast_of(
    config: UpcastConfig,
    n: int,
    k: int,
    groups: int,
    gpu: Gpu,
    device: torch.device,
    whole: bool,
) -> _Upcast:
    """A kernel with what lists K blocks for it; ``whole`` as of ``KBlocksConfig``."""
    lists, blocks = groups * -(-n // B_ROWS), -(-k // BLOCK_K)
    return _Upcast(
        gpu.load(KBlocksConfig(whole)),
        gpu.load(config),
        n,
        template((lists, blocks * SCALE_WORDS), torch.int32, device),
        template((lists, list_length(k)), torch.int32, device),
    )


@lru_cache(maxsize=4096)
def plan_upcast(call: GemmCall) -> CompiledGemm:
    """The plan of a call of ``gemm``, or of ``grouped_gemm`` whose rows are grouped, of fp8_1x128
    by mxfp4; raises as it does."""
    a, b, groups = call.a, call.b, 1
    check_matrix("a_data", a.data, BYTES)
    b_data, b_scale, lead = b.data, b.scale, ()
    if call.offsets is not None:
        groups = b.data[0][0]
        lead = (groups,)
        b_data, b_scale = (
            below_each_other(n, x) for n, x in (("b_data", b.data), ("b_scale", b.scale))
        )
    check_matrix("b_data", b_data, (torch.uint8, torch.float4_e2m1fn_x2))
    (m, k), rows = a.data[0], b_data[0][0]
    n, blocks = b.data[0][-2], -(-k // BLOCK_K)
    block, own = get_format("mxfp4").block_size, 2 * b_data[0][1]
    if own % block or -(-own // BLOCK_K) != blocks or own > k:
        raise ValueError(
            f"a_data, b_data: got {(m, k)} and {(*lead, n, own)} elements; expected (M, K) and "
            f"{'(groups, N, K)' if lead else '(N, K)'}, padded to blocks of {BLOCK_K} and {block}"
        )
    gpu = call.supported(partial(why_not, own, from_torch(call.out_dtype), b.format))
    check_rows("a_scale", a.scale, (blocks, -(-m // 4) * 4))
    check_bytes("b_scale", b_scale, (rows, own // block), get_format("mxfp4"))
    call.check_rest((m, n))
    like = template((m, n), call.out_dtype, call.device)
    if 0 in (m, n, k):
        return CompiledGemm(None, None, like, below)
    check_loadable(a_data=a.data, b_data=b_data)
    config = upcast_candidates(
        (m, n, k), call.epilogue(n), groups=groups, grouping=call.grouping, gpu=gpu
    )[0]
    whole = own % BLOCK_K == 0 and not (b_scale[1][0] % 4 or b_scale[3] % 4)
    run = upcast_of(config, n, k, groups, gpu, call.device, whole)
    rest: tuple[Any, ...] = None, None, gpu.multiprocessors
    if call.offsets is not None:
        rest = supergroup(config.tile, k, gpu.multiprocessors), gpu.multiprocessors
    return CompiledGemm(config, run, like, below, rest)
