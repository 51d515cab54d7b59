"""What a product of bf16 matrices needs on Hopper, found once for all calls alike."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...dtypes import from_torch
from ..common.calls import CompiledGemm, GemmCall, check_apart, check_loadable, check_matrix
from ..common.groupings import square
from ..common.runtime import Described
from ..common.template import template
from .bf16_config import choose_config, k_grouped_candidates
from .product_config import why_not

__all__ = ["plan_bf16"]


@lru_cache(maxsize=4096)
def plan_bf16(call: GemmCall) -> CompiledGemm:
    """The plan of ``alpha * A @ B.mT + bias``: (M, N), added up in fp32, rounded once. The same
    bits in every run. Where columns are grouped, as ``calls.Groups`` says, (groups * M, N). ``run``
    takes A (M, K) and B (N, K), transposed where not K but the other dimension is contiguous, the
    output, bias, alpha, and the ``rest``.

    Raises Unsupported, a ValueError, where there is no kernel: rows (columns, where these are
    contiguous) that do not start at a multiple of 16 bytes, other architectures. ValueError or
    TypeError where shapes, strides or dtypes do not belong together.
    """
    a, b = call.a.data, call.b.data
    rows = {"a": _by_rows(a), "b": _by_rows(b)}
    for name, data in rows.items():
        check_matrix(name, data, (torch.bfloat16,))
    if a[0][1] != b[0][1]:
        raise ValueError(f"a, b: got {tuple(a[0])} and {tuple(b[0])}; expected (M, K) and (N, K)")
    gpu = call.supported(partial(why_not, from_torch(call.out_dtype)))
    (m, k), n = a[0], b[0][0]
    groups = 1 if call.offsets is None else call.offsets[0][0]
    call.check_rest((groups * m, n))
    like = template((groups * m, n), call.out_dtype, call.device)
    if 0 in (groups, m, n, k):
        return CompiledGemm(None, None, like, _as_given)
    check_loadable(**rows)
    majors = "k" if rows["a"] is a else "mn", "k" if rows["b"] is b else "mn"
    rest: tuple[Any, ...] = (None, None)  # offsets, supergroup
    if call.offsets is None:
        config = choose_config((m, n, k), call.epilogue(n), majors=majors, gpu=gpu)
    else:
        check_apart(k, groups)
        config = k_grouped_candidates((m, n, k), groups, call.epilogue(n), majors, gpu)[0]
        rest = (square(config.tile, gpu.multiprocessors),)
    rest = (*rest, gpu.multiprocessors)
    return CompiledGemm(config, gpu.load(config), like, _as_given, rest)


def _as_given(*operands: Tensor | None) -> tuple[Tensor | None, ...]:
    return operands


def _by_rows(x: Described) -> Described:
    """The matrix, or its transpose where that is what has contiguous rows."""
    shape, stride, dtype, address = x
    if len(shape) != 2 or stride[1] == 1 or stride[0] != 1:
        return x
    return torch.Size(shape[::-1]), stride[::-1], dtype, address
