"""What ``blockscale emulate gemm --groups`` multiplies: rows of each group by its own matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from .emulate_epilogues import Plain
from .emulate_products import alpha_of, make_operands

if TYPE_CHECKING:
    from torch import Tensor

    from ..kernels.common.gpu import Gpu
    from ..tensor import ScaledTensor
    from .emulate_products import Kernel

__all__ = ["Groups", "parse_groups"]


@dataclass(frozen=True, slots=True)
class Groups(Plain):
    """The products in bf16. ``sizes``: rows of each group; those after them are zeros."""

    sizes: tuple[int, ...] = ()

    @property
    def ends(self) -> list[int]:
        return list(accumulate(self.sizes))

    def operands(
        self, kernel: Kernel, shape: tuple[int, int, int], seed: int
    ) -> tuple[ScaledTensor, ScaledTensor]:
        """A (M, K), and B (groups, K, N), whose scales are compact."""
        import torch

        from ..quantize import quantize

        _, n, k = shape
        a, _ = make_operands(kernel, shape, (False, False), seed)
        generator = torch.Generator().manual_seed(seed + 1)
        w = torch.randn(len(self.sizes), n, k, generator=generator).bfloat16()
        return a, quantize(w, kernel.weights, pad=True).mT

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Of dequantized operands."""
        out = a.new_zeros(a.shape[0], b.shape[2])
        for matrix, (start, end) in zip(b, pairwise([0, *self.ends]), strict=True):
            out[start:end] = a[start:end] @ matrix
        return out

    def run(
        self, kernel: Kernel, a: ScaledTensor, b: ScaledTensor, gpu: Gpu, ctas: int | None, _: Any
    ) -> Any:
        import torch

        from ..gemm import side
        from ..kernels.common import calls
        from ..ops.gemm_kernels import products_of
        from ..ops.gemm_operands import Side

        products = products_of(gpu)
        assert not isinstance(products, str)  # else it was refused
        grouped = products.of_groups("m")
        groups = calls.Groups(torch.tensor(self.ends, dtype=torch.int32))
        laid = grouped.lay(Side(*side(a)), Side(*side(b)), groups)
        plan: Any = grouped.plan
        plan = plan if ctas is None else partial(plan, ctas=ctas)
        return calls.multiply(plan, *laid, groups=groups, alpha=alpha_of(a, b), gpu=gpu)


def parse_groups(text: str, m: int) -> tuple[int, ...]:
    """Rows of each group, of ``m`` in all, from ``--groups``."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = (-1,)
    if min(sizes) < 0:
        raise ValueError(f"groups: got {text!r}; expected rows of each group, as in 0,1,129")
    if sum(sizes) > m:
        raise ValueError(
            f"groups: {text} are {sum(sizes)} rows, and shape has M = {m}; give shape as many"
        )
    return sizes
