"""TransformerEngine's casts to MXFP8: one scale for 32 elements of a row, of a column, or both.

Codes and scales must be those that numpy computes, byte for byte. Matrices have several rows and
columns of blocks, an odd number of tiles, and last ones that are not full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import ml_dtypes
import numpy as np

from blockscale import emulator as em

from .kernel import Foreign, Launch, allocated

VERSION = "d0067d0da6cb01811b8072a7d304f0e00344ce2b"
MADE = (
    "transformer_engine/common/{} as it is, with the flags of its CMakeLists.txt (C++17, "
    "--expt-relaxed-constexpr -O3, sm_100a) and -lineinfo, nvcc 13.0.88, -ptx; for the host's "
    "code alone headers with the types of cuBLAS, cuDNN, NVRTC and NCCL that its logging.h names"
)
# Compact scales are padded to four a row. The padding of tiles that a CTA does not have is stored
# from shared memory where it wrote nothing; their later swizzle puts zeros in its place.
OFF = {
    "uninitialized": "PTX ISA 8.2.6: a byte without an initial value has an unknown but constant "
    "value, and the padding of the scales may have any"
}
BFLOAT16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
BLOCK, TILE = 32, 128  # elements of a scale; rows of data in a tile of swizzled scales
NO_MAP = bytes(128)  # what their host passes for an output that is not wanted


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def padded(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """With zeros, to multiples of ``rows`` and ``columns``."""
    height, width = array.shape
    return np.pad(array, ((0, up(height, rows) - height), (0, up(width, columns) - width)))


def exponents(largest: np.ndarray) -> np.ndarray:
    """Bytes of E8M0: the smallest powers of two that are at least ``largest`` / 448."""
    mantissa, power = np.frexp(largest)  # mantissa < 1, and 448 is 0.875 * 2**9
    found = np.where(largest > 0, power - 9 + (mantissa > 0.875), -127)
    return (found.clip(-127, 127) + 127).astype(np.uint8)


def quantized(x: np.ndarray, square: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of rows; with ``square`` all 32 rows of a block have one scale."""
    values = padded(x.astype(np.float64), BLOCK, BLOCK)
    blocks = values.reshape(len(values), -1, BLOCK)
    largest = abs(blocks).max(-1)
    if square:
        largest = np.repeat(largest.reshape(-1, BLOCK, largest.shape[1]).max(1), BLOCK, axis=0)
    scales = exponents(largest)
    scaled = np.ldexp(blocks, 127 - scales[..., None].astype(int)).clip(-448, 448)
    rows, columns = x.shape
    return scaled.astype(E4M3).view(np.uint8).reshape(values.shape)[:rows, :columns], scales[:rows]


def swizzled(scales: np.ndarray) -> np.ndarray:
    """Scales of (rows, blocks) as tcgen05.cp wants them, with zeros to tiles of 128 x 4."""
    whole = padded(scales, TILE, 4)
    parts = whole.reshape(len(whole) // TILE, 4, 32, -1, 4)
    return parts.transpose(0, 3, 2, 1, 4)


def matrix(rows: int, columns: int) -> np.ndarray:
    """Blocks of all sizes, among them zeros, and some that just fit or just do not fit a scale."""
    rng = np.random.default_rng(rows * columns)
    powers = rng.integers(-40, 40, (up(rows, BLOCK) // BLOCK, up(columns, BLOCK) // BLOCK))
    powers = np.repeat(np.repeat(powers, BLOCK, 0), BLOCK, 1)[:rows, :columns]
    x = np.ldexp(rng.normal(size=(rows, columns)), powers)
    x[::7, ::5] = np.ldexp(448.0, powers[::7, ::5] - 5)
    x[3::7, 2::5] = np.ldexp(-450.0, powers[3::7, 2::5] - 4)
    x[:BLOCK, :BLOCK] = 0
    return allocated(x.astype(BFLOAT16))


@dataclass
class Output:
    """What one direction writes: codes, and scales as rows of blocks or in swizzled tiles.

    Attributes:
        x: what is quantized, as numpy computes it.
        column: blocks lie along columns, and a scale has the place of its block.
        swizzle: scales lie in tiles of 128 x 4, of columns for ``column``.
        square: one scale for 32 x 32.
    """

    x: np.ndarray
    column: bool
    swizzle: bool
    square: bool = False

    def __post_init__(self) -> None:
        self.codes = allocated(np.zeros(self.x.shape, np.uint8))
        rows, columns = self.x.shape if not self.column else self.x.shape[::-1]
        shape = (up(rows, TILE), up(-(-columns // BLOCK), 4))
        if self.column and not self.swizzle:
            shape = shape[::-1]
        self.scales = allocated(np.zeros(shape, np.uint8))

    def right(self) -> bool:
        x = self.x.T if self.column else self.x
        codes, scales = quantized(x, self.square)
        if self.swizzle:
            same = (self.scales.ravel() == swizzled(scales).ravel()).all()
        else:
            written = self.scales.T if self.column else self.scales
            same = (written[: scales.shape[0], : scales.shape[1]] == scales).all()
        return bool(same and ((self.codes.T if self.column else self.codes) == codes).all())


def cast_rows(swizzle: bool, launch: Launch) -> bool:
    """The kernel for rows alone: 4 x 1024 elements a CTA, columns in multiples of 128."""
    right = True
    for shape in ((70, 1152), (130, 128)):
        x = matrix(*shape)
        out = Output(x, False, swizzle)
        rows, columns = shape
        launch(
            (-(-columns // 1024), -(-rows // 4)), (32, 1, 4),
            [x, out.codes, out.scales, 0, rows, columns, out.scales.shape[1], 1], shared=128,
        )  # fmt: skip
        right &= out.right()
    return right


def cast_both(swizzle: bool, launch: Launch) -> bool:
    """The kernel for both: four tiles of 32 x 64 a CTA, through two stages; multiples of 32."""
    right = True
    for shape in ((96, 416), (64, 256), (32, 96)):
        x = matrix(*shape)
        row, column = Output(x, False, swizzle), Output(x, True, swizzle)
        rows, columns = shape
        box, each = (64, 32), 64 * 32 * 2  # elements; of bytes, codes of both stages
        shared = 2 * each + each + each + 1024 + 32 * 8 + 4 * 64 + (256 if swizzle else 0)
        launch(
            (-(-columns // 256), -(-rows // 32)), (32, 2),
            [em.TensorMap.of(x, box, swizzle="128B"),
             em.TensorMap.of(row.codes, box, swizzle="64B"),
             em.TensorMap.of(column.codes, box, swizzle="64B"),
             row.scales, column.scales, 0, rows, columns,
             row.scales.shape[1], column.scales.shape[1]],
            shared=shared, buffers=[("x", x), ("row", row.codes), ("column", column.codes)],
        )  # fmt: skip
        right &= row.right() and column.right()
    return right


@dataclass(frozen=True)
class Generic:
    """One instance of the kernel for everything else.

    Attributes:
        ways: "row", "column" or both.
        swizzle, square: as in ``Output``.
        bias: also sum columns, 128 rows at a time; a CTA then has 128 x 128 elements, not 64 x 64.
    """

    ways: tuple[str, ...]
    swizzle: bool = False
    square: bool = False
    bias: bool = False

    @property
    def chunk(self) -> int:
        """Rows and columns of a CTA; it has as many threads."""
        return 128 if self.bias else 64

    @property
    def entry(self) -> str:
        """The part of the mangled name that holds the arguments of the template."""
        flags = ("row" in self.ways, "column" in self.ways, self.swizzle)
        ends = "".join(f"Lb{flag:d}E" for flag in flags) + f"Lm{self.chunk}E" * 3
        start = f"quantize_mxfp8_kernelILb{self.bias:d}ELb0ELb0ENS_5EmptyELPFffRKS4_E0E"
        return f"{start}13__nv_bfloat1613__nv_fp8_e4m3{ends}Lb{self.square:d}E"


def generic(kernel: Generic, launch: Launch) -> bool:
    right = True
    chunk = kernel.chunk
    for rows, columns in ((3 * chunk, 2 * chunk), (2 * chunk + 40, chunk + 48)):
        x = matrix(rows, columns)
        if kernel.bias:  # whole numbers, whose sums are exact
            x[...] = np.random.default_rng(0).integers(-255, 256, x.shape)
        outs = [
            way in kernel.ways and Output(x, way == "column", kernel.swizzle, kernel.square)
            for way in ("row", "column")
        ]
        blocks = -(-rows // chunk)
        sums = allocated(np.zeros((blocks, columns), np.float32))
        box = (chunk, 32)
        maps = [em.TensorMap.of(out.codes, box) if out else NO_MAP for out in outs]
        there = [out for out in outs if out]
        launch(
            (-(-columns // chunk), blocks), chunk,
            [em.TensorMap.of(x, box), NO_MAP, *maps,
             *(out.scales if out else 0 for out in outs), 0, sums if kernel.bias else 0, 0,
             rows, columns, *(out.scales.shape[1] if out else 1 for out in outs)],
            shared=2 * 32 * chunk * (2 + len(there)) + 128,
            buffers=[("x", x), *(("codes", out.codes) for out in there)],
        )  # fmt: skip
        right &= all(out.right() for out in there)
        if kernel.bias:
            whole = padded(x.astype(np.float64), chunk, 1).reshape(blocks, chunk, columns)
            right &= bool((sums == whole.sum(1)).all())
    return right


def cast(name: str, traits: str, function: Callable[[Launch], bool]) -> Foreign:
    """One of those that only cast."""
    return Foreign(
        name, "TransformerEngine", VERSION, "sm_100a",
        f"cast_onlyINS3_{traits}", MADE.format("cast/cast.cu"), function,
    )  # fmt: skip


BOTH = ("row", "column")
GENERIC = {
    "te_mxfp8_generic_row": Generic(("row",)),
    "te_mxfp8_generic_column": Generic(("column",)),
    "te_mxfp8_generic_both": Generic(BOTH, swizzle=True),
    "te_mxfp8_generic_square": Generic(BOTH, square=True),
    "te_mxfp8_dbias_row": Generic(("row",), bias=True),
    "te_mxfp8_dbias_column": Generic(("column",), bias=True),
    "te_mxfp8_dbias_both": Generic(BOTH, swizzle=True, bias=True),
}
_ROW = "10CastTraitsI13__nv_bfloat1613__nv_fp8_e4m3Lb1ELb0E"
_TWO = "17CastTraitsSwizzleI13__nv_bfloat1613__nv_fp8_e4m3Li2ELi1ELi4E"
KERNELS = [
    cast("te_mxfp8_cast_row", f"{_ROW}Lb0E", partial(cast_rows, False)),
    cast("te_mxfp8_cast_row_swizzled", f"{_ROW}Lb1E", partial(cast_rows, True)),
    replace(cast("te_mxfp8_cast_both", f"{_TWO}Lb0ELb0E", partial(cast_both, False)), off=OFF),
    cast("te_mxfp8_cast_both_swizzled", f"{_TWO}Lb1ELb1E", partial(cast_both, True)),
    *(
        Foreign(
            name, "TransformerEngine", VERSION, "sm_100a", kernel.entry,
            MADE.format("cast/cast_dbias.cu" if kernel.bias else "cast/cast.cu"),
            partial(generic, kernel),
        )
        for name, kernel in GENERIC.items()
    ),
]  # fmt: skip
