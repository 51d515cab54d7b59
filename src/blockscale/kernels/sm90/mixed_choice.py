"""Which kernels multiply by a weight that is widened, for one shape, of any framework's arrays."""

from __future__ import annotations

from typing import NamedTuple

from ...formats import get_format
from ..common.epilogue import Epilogue
from ..common.gpu import GPUS, Gpu
from . import mixed_config, skinny_config
from .mixed_config import BF16, BLOCK_K, SUPERGROUP, promotes
from .permute_config import PermuteConfig

__all__ = ["ANY_ROWS", "MixedKernels", "choose_kernels", "widens"]

#: Rows of A up to which products that widen B are faster however B and A lie.
ANY_ROWS = 128
_ROWS_FOR_ONE = 2  # of A for each of B, at most: with more it takes longer to write A, as measured
# Of A, at most: with more the tensor cores run at the limit of power, and cool down while both are
# written, as measured (docs/lab/products-h200.md).
_MOST_ROWS = 4096


class MixedKernels(NamedTuple):
    """What multiplies.

    Attributes:
        multiply: the product.
        widen: writes A in bf16, with K padded to whole K blocks, before; None where the product
            reads A as it is.
        partials: words of what ``stream_reduce.StreamReduce`` takes, which ``widen`` clears.
        decodes: the product is that of ``skinny``, which takes no partials.
        promotes: scales of A go to the product.
    """

    multiply: mixed_config.Config | skinny_config.Config
    widen: PermuteConfig | None
    partials: int
    decodes: bool
    promotes: bool

    def rest(self, multiprocessors: int) -> tuple[int | None, ...]:
        """What the product takes last: after offsets of groups, if there are any, else after
        alpha."""
        if self.decodes:
            return (multiprocessors,)
        grouped = isinstance(self.multiply, mixed_config.Config) and self.multiply.grouped
        return (SUPERGROUP, multiprocessors) if grouped else (None, None, multiprocessors)


def widens(m: int, n: int) -> bool:
    """Whether it is faster to widen B in the product than to write both operands in bf16 before
    it, for ``m`` rows of A and ``n`` of B."""
    return m <= ANY_ROWS or m <= min(_MOST_ROWS, _ROWS_FOR_ONE * n)


def choose_kernels(
    shape: tuple[int, int, int],
    formats: tuple[str | None, str],
    epilogue: Epilogue,
    *,
    scales_apart: int = 16,
    groups: int = 0,
    grouping: str = "m",
    gpu: Gpu = GPUS["sm_90a"],
) -> MixedKernels:
    """The kernels for a product of ``shape`` (M, N, K).

    Args:
        formats: of A, None if it is bf16, and of B.
        scales_apart: bytes; rows of B's scales start at multiples of them.
        groups: of rows of A, as ``grouping`` says; 0 if they are not grouped.
    """
    (m, n, k), (a_format, b_format) = shape, formats
    promoted = promotes(a_format or BF16)
    if (
        not groups
        and m <= skinny_config.MAX_SKINNY_M
        and not promoted
        and (a_format is None or skinny_config.fills_gpu(n, gpu.multiprocessors))
    ):
        tma_scales = scales_apart % skinny_config.SCALE_ROW == 0
        multiply = skinny_config.choose_config(
            m, n, k, b_format, epilogue, tma_scales=tma_scales, gpu=gpu
        )
        widen = None if a_format is None else PermuteConfig(a_format, 0)
        return MixedKernels(multiply, widen, 0, decodes=True, promotes=False)
    whole = k % BLOCK_K == 0 and scales_apart % (BLOCK_K // get_format(b_format).block_size) == 0
    config = (
        mixed_config.choose_grouped(
            shape, groups, b_format, epilogue,
            grouping=grouping, async_scales=whole, promotes=promoted, gpu=gpu,
        )
        if groups
        else mixed_config.choose_config(
            shape, b_format, epilogue, async_scales=whole, promotes=promoted, gpu=gpu
        )
    )  # fmt: skip
    words = config.partials(gpu.multiprocessors)
    widen = PermuteConfig(a_format or BF16, config.block_k, clears=words > 0)
    return MixedKernels(config, widen, words, decodes=False, promotes=promoted)
