"""What ``blockscale emulate gemm`` makes of sums: numbers, or the next product's operand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ..kernels.common.gpu import Gpu
    from ..tensor import ScaledTensor
    from .emulate_products import Kernel

__all__ = ["EPILOGUES", "Plain", "Quantized"]


@dataclass(frozen=True, slots=True)
class Plain:
    """The product in bf16."""

    dtype: str = "bfloat16"

    def exact(self, product: Tensor) -> Tensor:
        """What would be there without rounding, from the exact product."""
        return product

    def rounded(self, exact: Tensor) -> Any:
        """That, as the kernel should have it."""
        return exact.bfloat16()

    def run(
        self, kernel: Kernel, a: ScaledTensor, b: ScaledTensor, gpu: Gpu, ctas: int | None, _: Any
    ) -> Any:
        """What the kernel has."""
        return kernel.run(a, b, gpu, ctas)

    def wide(self, x: Tensor) -> Tensor:
        """In fp64."""
        return x.double()

    def allowed(self, floor: float, sums: float) -> float:
        """Relative error, where ``floor`` is that of rounding and ``sums`` that of sums."""
        return float((floor**2 + sums**2) ** 0.5)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Of ``dtype``, the name of a format. ``swiglu``: of SwiGLU of gate and up, which lie side by
    side in the product.

    The global scale of NVFP4 is that of the exact result: a kernel has to know it beforehand.
    """

    dtype: str
    swiglu: bool

    def exact(self, product: Tensor) -> Tensor:
        n, each = product.shape[1], 64 if self.swiglu else 32
        if n % each:
            raise ValueError(
                f"shape: N = {n}; to be quantized so it has to be a multiple of {each}"
            )
        if not self.swiglu:
            return product
        gate, up = product.chunk(2, 1)
        return gate * gate.sigmoid() * up

    def rounded(self, exact: Tensor) -> Any:
        from ..quantize import quantize

        return quantize(exact.float(), self.dtype, layout="tcgen05")

    def run(
        self,
        kernel: Kernel,
        a: ScaledTensor,
        b: ScaledTensor,
        gpu: Gpu,
        ctas: int | None,
        rounded: ScaledTensor,
    ) -> Any:
        import torch

        from ..kernels.common.calls import Operand
        from ..kernels.sm100 import calls as sm100
        from ..kernels.sm100.quantizing_config import Quantizing
        from ..layouts import get_layout
        from ..tensor import ScaledTensor
        from .emulate_products import alpha_of

        # tiles of scales of the gate's rows, then of the other ones
        rows = b.to_layout("compact").qscale.mT.contiguous().chunk(2 if self.swiglu else 1)
        scales = torch.cat([get_layout("tcgen05").swizzle(each) for each in rows])
        data, scale = sm100.gemm_quantize(
            Operand(a.qdata, a.qscale, a.format_name),
            Operand(b.qdata.mT, scales, b.format_name),
            Quantizing(self.dtype, self.swiglu),
            alpha=alpha_of(a, b),
            global_scale=rounded.global_scale,
            gpu=gpu,
            ctas=ctas,
        )
        return ScaledTensor(
            data.view(rounded.qdata.dtype),
            scale.view(rounded.qscale.dtype),
            format=rounded.format,
            shape=rounded.shape,
            axis=-1,
            dtype=rounded.dtype,
            layout="tcgen05",
            global_scale=rounded.global_scale,
        )

    def wide(self, x: ScaledTensor) -> Tensor:
        import torch

        return x.dequantize(torch.float64)

    def allowed(self, floor: float, sums: float) -> float:
        """SwiGLU at most doubles errors of sums; those of rounding may depend on them."""
        return floor + 2 * sums


#: By name.
EPILOGUES: dict[str, Plain | Quantized] = {
    "none": Plain(),
    **{
        f"{prefix}{format}": Quantized(format, swiglu=bool(prefix))
        for prefix in ("", "swiglu-")
        for format in ("mxfp8", "mxfp4", "nvfp4")
    },
}
