"""torchao's Triton kernels for MXFP8: casts along both dimensions, the way back, scales in tiles.

In each block of 32 the largest is 255 times a power of two, and far from where a scale rounds.
"""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np

from .kernel import Foreign, Launch, allocated

VERSION = "36027d82d1ad9949597ea16002ff4940374b1b94"
MADE = (
    "{} of torchao/prototype/mx_formats/kernels.py, through the JIT of Triton 3.6.0 "
    "(JITFunction.warmup with GPUTarget('cuda', 100, 32), torch.cuda.is_available() and "
    "is_sm_at_least_100() true): {}; pointers and sizes multiples of 16 where they are"
)
TILES = "ROW_TILE_SIZE and COL_TILE_SIZE 128, blocks of 32, num_warps 4, num_stages 2"
BFLOAT16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
SIZE, TILE, BLOCK, THREADS = 256, 128, 32, 128


def cast(dim: int, mode: str, launch: Launch) -> bool:
    """To E4M3 with one scale for 32 elements of a row (dim 0), or of a column, transposed."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(-254, 255, (SIZE, SIZE // BLOCK, BLOCK)).astype(np.float64)
    blocks[..., 0] = 255
    powers = rng.integers(-20, 20, blocks.shape[:2])
    wide = np.ldexp(blocks, powers[..., None]).reshape(SIZE, SIZE)
    x = allocated((wide if dim == 0 else wide.T).astype(BFLOAT16))
    q = allocated(np.zeros((SIZE, SIZE), E4M3))
    scales = allocated(np.zeros(powers.shape, np.uint8))
    shared = 512 if dim == 0 else 16384
    launch((2, 2), THREADS, [x, q, scales, SIZE, SIZE, 0, 0], shared=shared)
    wanted = powers if mode == "rceil" else powers - 1  # up of 255 / 448; 255 has exponent 7
    factor = np.ldexp(1.0, powers - wanted)[..., None]
    values = np.clip(blocks * factor, -448, 448).reshape(SIZE, SIZE).astype(E4M3)
    same = q.view(np.uint8) == values.view(np.uint8)
    return bool((scales == wanted + 127).all() and same.all())


def dequantize(launch: Launch) -> bool:
    rng = np.random.default_rng(0)
    q = allocated(rng.integers(-16, 17, (SIZE, SIZE)).astype(E4M3))
    powers = rng.integers(-20, 20, (SIZE, SIZE // BLOCK))
    scales, x = allocated((powers + 127).astype(np.uint8)), allocated(np.zeros(q.shape, BFLOAT16))
    launch(
        (2, 2), THREADS, [q, scales, x, SIZE, SIZE, SIZE, SIZE // BLOCK, 0, 0], shared=4096
    )  # fmt: skip
    wanted = np.ldexp(q.astype(np.float64), np.repeat(powers, BLOCK, axis=1))
    return bool((x.astype(np.float64) == wanted).all())


def swizzle(launch: Launch) -> bool:
    """200 x 10 scales, padded with zeros to tiles of 128 x 4."""
    rows, columns, padded = 200, 10, 12
    rng = np.random.default_rng(0)
    scales = allocated(rng.integers(1, 255, (rows, columns), dtype=np.uint8))
    tiles = allocated(np.zeros((2, padded // 4, 32, 4, 4), np.uint8))
    stride = TILE * padded
    launch((2, padded // 4), THREADS, [scales, rows, columns, tiles, columns, stride, 0, 0])
    whole = np.pad(scales, ((0, 2 * TILE - rows), (0, padded - columns)))
    wanted = whole.reshape(2, 4, 32, padded // 4, 4).transpose(0, 3, 2, 1, 4)
    return bool((tiles == wanted).all())


KERNELS = [
    *(
        Foreign(
            f"to_mxfp8_dim{dim}_{mode}", "torchao", VERSION, "sm_100a", "to_mxfp8_dim",
            MADE.format(f"to_mxfp8_dim{dim}_kernel", f"SCALING_MODE {mode}, {TILES}"),
            partial(cast, dim, mode),
        )
        for dim in (0, 1)
        for mode in ("rceil", "floor")
    ),
    Foreign(
        "dequant_mxfp8", "torchao", VERSION, "sm_100a", "_dequant_mxfp8_kernel",
        MADE.format("_dequant_mxfp8_kernel", f"out_dtype bfloat16, {TILES}"),
        dequantize,
    ),
    Foreign(
        "scale_swizzle", "torchao", VERSION, "sm_100a", "triton_scale_swizzle",
        MADE.format("triton_scale_swizzle", "200 x 10 scales, BLOCK_ROWS 128, BLOCK_COLS 4"),
        swizzle,
    ),
]  # fmt: skip
