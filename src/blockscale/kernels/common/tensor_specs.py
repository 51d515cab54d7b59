# mypy: ignore-errors
"""What kernels are compiled for: tensors of any shape, as CuTe DSL wants them described."""

from __future__ import annotations

import cutlass
import numpy as np
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...dtypes import FLOAT8_E4M3FN, FLOAT8_E5M2, UINT8
from ...formats import Format
from .numeric import NUMERIC

__all__ = ["HostFunction", "any_outputs", "any_source", "any_strided", "any_tensor"]

_ELEMENTS = {
    FLOAT8_E4M3FN: cutlass.Float8E4M3FN,
    FLOAT8_E5M2: cutlass.Float8E5M2,
    UINT8: cutlass.Uint8,
}
_SCALES = {1: cutlass.Uint8, 4: cutlass.Float32}
_MATRICES = ("compact", "sm90", "packed")  # layouts whose scales are stored with two dimensions


def any_tensor(dtype, rank: int, align: int, spaced: bool = False):
    """A tensor of any shape, ``align`` bytes aligned; ``spaced``: each of its rows is, too."""
    sizes = tuple(cute.sym_int32() for _ in range(rank))
    unit = align * 8 // dtype.width if spaced else 1
    strides = (*(cute.sym_int64(divisibility=unit) for _ in range(rank - 1)), 1)[:rank]
    return make_fake_tensor(dtype, sizes, strides, assumed_align=align)


def any_strided(dtype, rank: int, align: int):
    """A tensor with any strides."""
    sizes = tuple(cute.sym_int32() for _ in range(rank))
    strides = tuple(cute.sym_int64() for _ in range(rank))
    return make_fake_tensor(dtype, sizes, strides, assumed_align=align)


def any_source(dtype: np.dtype, aligned: bool, batched: bool = False):
    """A matrix of values, or a batch of them; ``aligned``: each of its rows starts at a multiple of
    16 bytes."""
    return any_tensor(NUMERIC[dtype], 2 + batched, 16 if aligned else dtype.itemsize, aligned)


def any_outputs(format: Format, layout: str, batched: bool = False) -> list:
    """Data, and scales in ``layout``; of each matrix of a batch, if it is ``batched``."""
    scale = cutlass.Int32 if layout == "packed" else _SCALES[format.scale.nbytes]
    return [
        any_tensor(_ELEMENTS[format.element.numpy_dtype], 2 + batched, 16),
        any_tensor(scale, 1 + (layout in _MATRICES) + batched, 16),
    ]


class HostFunction:
    """The host code of a kernel, not compiled yet: ``function``, and what describes its
    ``arguments`` but the last one, which is the stream: fake tensors, numbers, tuples of them, and
    None."""

    def __init__(self, arch: str, function, *arguments):
        self.arch, self.function, self.arguments = arch, function, arguments

    def compile(self):
        """What takes tensors of any framework that TVM FFI knows, and launches on torch's stream;
        it takes about a second."""
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        options = f"--enable-tvm-ffi --gpu-arch {self.arch}"
        return cute.compile(self.function, *self.arguments, stream, options=options)
