"""Help for the tests of the FP8 product: operands, their product, a kernel in the emulator."""

from __future__ import annotations

from typing import Any

import torch
from guarded import guarded
from kernel_code import built
from torch import Tensor

from blockscale import emulator as em
from blockscale.dtypes import BFLOAT16, to_torch
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.calls import Alpha
from blockscale.kernels.common.machine_code import usage
from blockscale.kernels.sm90.config import Config
from blockscale.layouts import get_layout

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WGMMA = 3e-4  # relative error of FP8 products, whose sums a Hopper GPU rounds below fp32
SQUARE = Config(BFLOAT16, tile=(128, 128), cluster=(1, 1), epilogue_stages=2)


def operands(
    m: int, n: int, k: int, b_block: tuple[int, int] = (128, 128), spread: float = 2.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Data and scales, random: exponents of scales have deviation ``spread``."""
    generator = torch.Generator().manual_seed(m + n + k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def scale(*shape: int) -> Tensor:
        return torch.exp2(normal(*shape) * spread)

    a, b = (100 * normal(rows, k) for rows in (m, n))
    a, b = (x.clamp(-448, 448).to(torch.float8_e4m3fn) for x in (a, b))
    blocks, layout = -(-k // 128), get_layout("sm90")
    a_scale = layout.swizzle(scale(m, blocks))
    b_scale = scale(-(-n // b_block[0]), blocks)
    return a, a_scale, b, layout.swizzle(b_scale) if b_block[0] == 1 else b_scale


def product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, b_block: tuple[int, int]
) -> Tensor:
    """In fp64, of dequantized operands."""
    (m, k), n = a.shape, b.shape[0]
    wide_a = a_scale.T[:m].repeat_interleave(128, 1)[:, :k]
    rows = b_scale.T[:n] if b_block[0] == 1 else b_scale.repeat_interleave(128, 0)[:n]
    wide_b = rows.repeat_interleave(128, 1)[:, :k]
    return (a.double() * wide_a.double()) @ (b.double() * wide_b.double()).T


def emulated(
    config: Config,
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    start: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    alpha: Alpha = None,
    completion: str = "late",
    seed: int = 0,
    multiprocessors: int = 2,
) -> Tensor:
    """What the kernel leaves in poisoned memory, or in a copy of ``start``, its rows apart; nothing
    between them may change."""
    a, a_scale, b, b_scale = given
    data = [x.view(torch.uint8) for x in (a, b)]
    operands = data[0], a_scale, data[1], b_scale
    shape, rest = (a.shape[0], b.shape[0]), (bias, alpha, None, None, multiprocessors)
    return launched(config, shape, operands, start, rest, completion, seed)


def launched(
    config: Any,
    shape: tuple[int, int],
    operands: tuple[Tensor | None, ...],
    start: Tensor | None,
    rest: tuple[Tensor | int | None, ...],
    completion: str,
    seed: int = 0,
) -> Tensor:
    """As ``emulated``: a kernel that takes ``operands``, the output, and the ``rest``."""
    with guarded(shape, to_torch(config.out_dtype), start) as out:
        with em.cutedsl(
            em.Device("sm_90a", completion=completion, seed=seed, check="all,exit_stores,global")
        ):
            compile_cache.build(config)(*operands, out, *rest)
        return out.clone()


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, sums: float = WGMMA) -> None:
    """The error is that of rounding, and of sums of products."""
    assert bool(torch.isfinite(got).all())
    rounding = (want.to(dtype).double() - want).norm() / want.norm()
    error = (got.double() - want).norm() / want.norm()
    assert error <= (rounding**2 + sums**2) ** 0.5


def frame_bytes(cubin: bytes) -> list[int]:
    """Of local memory, in the function that has most."""
    return [usage(cubin).frame_bytes]


def assert_no_spills(config: Any) -> None:
    """Of a kernel that has been run, with ``keep_cubin`` set."""
    assert frame_bytes(built(config).__cubin__) == [0]
