"""What quantizes operands that more is done to than rounding to nearest, found once for operands
alike: squares, a transform, stochastic rounding."""

from __future__ import annotations

from torch import Tensor

from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import Described, describe
from ..kernels.quantizers import calls as quantizers
from ..quantization import Quantization
from ..tensor import ScaledTensor
from .quantize_launches import Asked, MatrixLaunch, Parts, QuantizeLaunch, parts_of_axis
from .seeds import OperandSeed, needed, transform_of

__all__ = ["OperandLaunch", "operand_launch"]


class _MethodLaunch(QuantizeLaunch):
    """Quantizes matrices that lie as ``x``, along axes that all are quantized by ``how``.

    Raises Unsupported where no kernel does it, or zeros have to fill the blocks of a transform.
    """

    def __init__(self, x: Described, asked: Asked, how: Quantization) -> None:
        shape = tuple(x[0])
        size = 0 if how.hadamard is None else how.hadamard.size
        if len(shape) != 2:
            raise Unsupported("quantization: of matrices alone")
        if size and any(shape[axis] % size for axis in asked.axes):
            raise Unsupported(f"hadamard: {shape} is filled with zeros first")
        if how.is_random and shape[1] % 4:
            raise Unsupported("seed: rows do not begin with numbers that four elements share")
        self._how = how
        super().__init__((x,), shape, asked, asked.layout)

    def _request(
        self, request: quantizers.Request
    ) -> tuple[quantizers.Request, int | None, int | None]:
        how = self._how
        size = 0 if how.hadamard is None else how.hadamard.size
        request = request._replace(
            square=how.square,
            stochastic=how.draws,
            scaling=how.scaling,
            hadamard=size,
            draws_signs=how.random_signs,
        )
        return request, None, None

    def is_transformed(self, axis: int) -> bool:
        return self._how.hadamard is not None

    def _amax_request(self, request: quantizers.Request) -> quantizers.Request:
        plain = super()._amax_request(request)
        if not request.hadamard:
            return plain
        return plain._replace(
            axes=request.axes, hadamard=request.hadamard, draws_signs=request.draws_signs
        )

    def __call__(
        self, x: Tensor, global_scale: Tensor | None = None, seed: OperandSeed | None = None
    ) -> tuple[Parts | None, Parts | None]:
        """As :class:`MatrixLaunch`."""
        how, numbers = self._how, None
        hadamard = transform_of(how, self._call.axes[0], seed)
        if how.draws:
            numbers = needed(seed).of(x.shape).numbers(x.shape)
        plan, amax = self._find(describe(x))
        if amax is not None and global_scale is None:
            transform = quantizers.Further(None, hadamard)
            global_scale = amax.global_scale((x,), None, transform)
        further = quantizers.Further(numbers, hadamard)
        row, row_scale, column, column_scale = plan.quantize((x,), global_scale, further=further)
        rows = parts_of_axis(row, row_scale, global_scale)
        return rows, parts_of_axis(column, column_scale, global_scale)


class _ApartLaunch:
    """Quantizes matrices along each axis by itself, as both are quantized otherwise."""

    is_grouped = False

    def __init__(self, launches: dict[int, OperandLaunch]) -> None:
        self._launches = launches

    def __call__(
        self, x: Tensor, global_scale: Tensor | None = None, seed: OperandSeed | None = None
    ) -> tuple[Parts | None, Parts | None]:
        rows, _ = self._launches[-1](x, global_scale, seed)
        _, columns = self._launches[-2](x, global_scale, seed)
        return rows, columns

    def unwritten(self, axis: int) -> Parts:
        return self._launches[axis].unwritten(axis)

    def is_transformed(self, axis: int) -> bool:
        return self._launches[axis].is_transformed(axis)

    def is_turned(self, axis: int) -> bool:
        return self._launches[axis].is_turned(axis)

    def form(self, parts: Parts, axis: int, offsets: Tensor | None = None) -> ScaledTensor:
        return self._launches[axis].form(parts, axis, offsets)

    def parts_of(
        self, qdata: Tensor, qscale: Tensor, global_scale: Tensor | None, axis: int
    ) -> Parts:
        return self._launches[axis].parts_of(qdata, qscale, global_scale, axis)

    def restored(self, parts: Parts, axis: int) -> Parts:
        return self._launches[axis].restored(parts, axis)


OperandLaunch = MatrixLaunch | _MethodLaunch | _ApartLaunch


def operand_launch(x: Described, asked: Asked) -> OperandLaunch:
    """What quantizes operands that lie as ``x``, as it is asked for.

    Raises Unsupported where no kernel does it.
    """
    if asked.is_plain:
        return MatrixLaunch(x, asked)
    if asked.alike:
        return _MethodLaunch(x, asked, asked.quantization(asked.axes[0]))
    return _ApartLaunch({axis: operand_launch(x, asked.along(axis)) for axis in asked.axes})
