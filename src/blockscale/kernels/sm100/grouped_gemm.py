"""Products of groups on Blackwell, of rows, each by its own matrix, or of columns: one launch."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from torch import Tensor

from ...dtypes import from_torch
from ...layouts import Grouped, get_layout
from ..common.calls import (
    CompiledGemm,
    GemmCall,
    Groups,
    Operand,
    below_each_other,
    check_apart,
    multiply,
)
from ..common.gpu import Unsupported
from ..common.template import template
from .config import MOST_GROUPS, choose_grouped, supergroup, why_not
from .plan import Operands, views

__all__ = ["check_groups", "grouped_gemm", "plan_groups", "rows_of_groups"]


@lru_cache(maxsize=4096)
def plan_groups(call: GemmCall, ctas: int | None = None) -> CompiledGemm:
    """The plan of a call of ``grouped_gemm``; raises as it does."""
    formats = call.a.format, call.b.format
    gpu = call.supported(partial(why_not, *formats, from_torch(call.out_dtype)))
    groups = call.offsets[0][0] if call.offsets else 0
    of = _columns if call.grouping == "k" else rows_of_groups
    check_groups(groups)
    operands, rows, each = of(call, groups)
    n = each[1]
    call.check_rest((rows, n))
    like = template((rows, n), call.out_dtype, call.device)
    if 0 in (groups, rows, *operands.shape):
        return CompiledGemm(None, None, like, views)
    how: dict[str, Any] = {"grouping": call.grouping, "gpu": gpu, "ctas": ctas}
    config = choose_grouped(each, groups, formats, call.epilogue(n), **how)
    operands.check_loadable(config)
    rest = (supergroup(config, gpu),)
    return CompiledGemm(config, gpu.load(config), like, operands.views, rest)


def check_groups(groups: int) -> None:
    """Unsupported where there are too many."""
    if groups > MOST_GROUPS:
        raise Unsupported(f"offsets: {groups} groups; kernels take {MOST_GROUPS} at most")


def rows_of_groups(
    call: GemmCall, groups: int, b_halves: int = 1
) -> tuple[Operands, int, tuple[int, int, int]]:
    """Operands, the rows of the output, and the shape of a group's product. ``b_halves``: of each
    matrix of B, with tiles of their own."""
    if len(call.b.data[0]) != 3 or call.b.data[0][0] != groups:
        raise ValueError(
            f"b_data: has shape {tuple(call.b.data[0])}; expected (groups, N, K), {groups} groups"
        )
    b = below_each_other("b_data", call.b.data)
    given = call._replace(b=call.b._replace(data=b))
    m, masked = call.a.data[0][0], call.grouping == "masked"
    padded = None if masked else Grouped(get_layout("tcgen05")).padded_rows(m, groups)
    operands = Operands.of(given, (groups if masked else 1, groups * b_halves), padded)
    _check_majors(operands)
    _, n, k = operands.shape
    return operands, m, (-(-m // groups), n // groups, k)


def _columns(call: GemmCall, groups: int) -> tuple[Operands, int, tuple[int, int, int]]:
    """The same."""
    operands = Operands.of(call)
    _check_majors(operands)
    m, n, k = operands.shape
    check_apart(k, groups)
    return operands, groups * m, (m, n, -(-k // groups))


def _check_majors(operands: Operands) -> None:
    for name, major in zip("ab", operands.majors, strict=True):
        if major != "k":
            raise Unsupported(
                f"{name}: its contraction is not contiguous, and kernels take groups only so: "
                "quantize with k_major=True"
            )


def grouped_gemm(
    a: Operand, b: Operand, groups: Groups, *, ctas: int | None = None, **options: Any
) -> Tensor:
    """``A[start:end] @ B[i].mT`` of each group of rows: (M, N); zeros after the last one, unless
    groups are masked. Or ``A[:, start:end] @ B[:, start:end].mT`` of each group of columns:
    (groups * M, N).

    Args:
        a: as of ``calls.gemm``, K contiguous. Scales of each group of rows begin with a tile: as
            ``layouts.Grouped`` has them, or, masked, one group after another.
        b: data (groups, N, K), its matrices one after another, and scales likewise, each matrix's
            beginning with a tile. Where columns are grouped, as ``a``.
        groups: whose offsets are on the device of ``a``.
        ctas: as of ``calls.gemm``.
        options: of ``common.calls.multiply``.

    Raises as that does: Unsupported as ``calls.gemm``, and for matrices that do not lie together.
    """
    return multiply(partial(plan_groups, ctas=ctas), a, b, groups=groups, **options)
