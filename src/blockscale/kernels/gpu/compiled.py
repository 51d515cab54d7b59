# mypy: ignore-errors
"""Compiled kernels."""

from __future__ import annotations

from functools import lru_cache

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .config import Config
from .quantize import NUMERIC, Quantizer

__all__ = ["build"]

OPTIONS = "--enable-tvm-ffi --gpu-arch {arch}"


def _tensor(dtype, rank: int, align: int, divisible: int = 1):
    """A tensor of any shape; of a matrix the rows may lie apart, by a multiple of ``divisible``."""
    sizes = tuple(cute.sym_int32() for _ in range(rank))
    strides = (cute.sym_int64(divisibility=divisible), 1) if rank == 2 else (1,)
    return make_fake_tensor(dtype, sizes, strides, assumed_align=align)


@lru_cache(maxsize=None)
def build(config: Config):
    """Compile a kernel: about a second."""
    item = config.dtype.itemsize
    x = _tensor(
        NUMERIC[config.dtype], 2, 16 if config.tma else item, 16 // item if config.tma else 1
    )
    scale = cutlass.Float32 if config.spec.shift or config.layout == "sm90" else cutlass.Uint8
    outputs = []
    for axis in (-1, -2):
        if axis in config.axes:
            outputs += [_tensor(cutlass.Uint8, 2, 16), _tensor(cutlass.Uint8, 1, 16)]
        else:
            outputs += [None, None]
    del scale
    needs_global = Quantizer(config).encoder.has_table
    global_scale = _tensor(cutlass.Float32, 1, 4) if needs_global else None
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = OPTIONS.format(arch=config.arch)
    return cute.compile(Quantizer(config), x, *outputs, global_scale, stream, options=options)
