"""FP8 rows by weights of four bits on Hopper: which kernel multiplies them."""

from __future__ import annotations

from ..common.calls import CompiledGemm, GemmCall
from .mixed_plan import plan_mixed
from .upcast_plan import plan_upcast

__all__ = ["plan_fp8_by_weights"]

# Rows of A, of a group in the mean, from which plan_upcast is faster: it makes E4M3 of 128 rows of
# B for each tile, however few rows of A that has. As measured (docs/lab/products-h200.md).
_UPCAST_ROWS = 160


def plan_fp8_by_weights(call: GemmCall) -> CompiledGemm:
    """The plan of fp8_1x128 by mxfp4 or nvfp4, of one matrix or of groups of rows. E4M3 holds no
    element of NVFP4 times its scale; bf16 holds those of both. Raises as ``plan_mixed`` and
    ``plan_upcast`` do."""
    groups = 1 if call.offsets is None else call.b.data[0][0]
    many = call.a.data[0][0] >= _UPCAST_ROWS * groups
    return (plan_upcast if call.b.format == "mxfp4" and many else plan_mixed)(call)
