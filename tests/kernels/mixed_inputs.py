"""Operands of every kind for products of few rows, kernels run on them in the emulator, and what is
to come out, by plain torch in fp64."""

from __future__ import annotations

from typing import Any

import torch
from sm90_inputs import assert_no_spills, launched
from torch import Tensor

from blockscale.formats import get_format
from blockscale.kernels.common.calls import Alpha

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
Operand = tuple[Tensor, Tensor | None]


def operand(name: str, rows: int, k: int, seed: int) -> Operand:
    """Random bytes of all kinds but NaN and infinities, and scales over six binades."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    if name == "bf16":
        return torch.randn(rows, k, generator=generator).to(BF16), None
    format = get_format(name)
    data = integers(0, 256, rows, format.element.stored(k))
    if format.element.bits == 8:  # largest exponents become smallest
        data = torch.where(data & 0x78 == 0x78, data & 0x87, data)
    low, high = (124, 130) if format.scale.name == "E8M0" else (0, 0x7F)
    return data, integers(low, high, rows, k // format.block_size)


def dequantized(name: str, data: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return data.double()
    format = get_format(name)
    if format.element.bits == 4:
        codes = torch.stack((data & 15, data >> 4), -1).flatten(1).long()
        values = E2M1[codes]
    else:
        values = data.view(format.element.dtype).double()
    if format.scale.name == "E8M0":
        factors = torch.exp2(scale.double() - 127)
        factors[scale == 255] = float("nan")
    else:
        factors = scale.view(torch.float8_e4m3fn).double()
    return values * factors.repeat_interleave(format.block_size, 1)


def ordered(x: Tensor, block_k: int = 128) -> Tensor:
    """Rows of bf16, padded to blocks of 128 columns, and each 128 or 64 of these put in order: what
    four lanes have, 32 or 16 neighbours each, taken in turn, a pair at a time."""
    m, k = x.shape
    padded = x.new_zeros(m, -(-k // 128) * 128)
    padded[:, :k] = x
    seen = padded.view(m, -1, 4, block_k // 64, 2, 4, 2)
    return seen.permute(0, 1, 3, 4, 5, 2, 6).reshape(m, -1)


def emulated(
    config: Any,
    a: tuple[Tensor | None, ...],
    b: Operand,
    *,
    start: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: Alpha = None,
    completion: str = "late",
    multiprocessors: int = 2,
) -> Tensor:
    """What the kernel leaves in poisoned memory, or in a copy of ``start``, its rows apart; nothing
    between them may change."""
    groups = (None, None) if hasattr(config, "grouped") else ()  # kernels for decoding have none
    shape, rest = (len(a[0]), len(b[0])), (bias, alpha, *groups, multiprocessors)
    out = launched(config, shape, (*a, *b), start, rest, completion)
    assert_no_spills(config)
    return out


def assert_close(got: Tensor, a: Tensor, b: Tensor, added: Tensor | float = 0.0) -> None:
    """The error is that of one rounding and of fp32 sums: of 16 products each, truncated, in units
    of the last of the 24 bits of what may be as large as the sum of magnitudes."""
    want = a @ b.T + added
    slack = (a.shape[1] / 16 + 4) * 2.0**-23 * (a.abs() @ b.abs().T + abs(added))
    half = torch.finfo(got.dtype).eps / 2
    assert bool(((got.double() - want).abs() <= half * (want.abs() + slack) + slack).all())


COLUMNS = (0, 37, 74, 111)  # of all threads that share a row, in both halves of a stage
SCALES = {  # the last that bf16 can hold with what brings elements to their value, and the next
    "E4M3": [0, 126, 134, 135, 254, 255],
    "E5M2": [0, 126, 254, 255],
    "E2M1": [0, 126, 128, 129, 254, 255],
    "UE4M3": [0, 1, 7, 8, 0x38, 0x77, 0x7E, 0x7F],
}


def packed(codes: Tensor, bits: int) -> Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes


def spaced(data: Tensor, scale: Tensor) -> Operand:
    """The same operand, whose rows of scales start at multiples of 16 bytes, as TMA wants them."""
    rows, blocks = scale.shape
    apart = torch.full((rows, -(-blocks // 16) * 16), 0x7F, dtype=torch.uint8)
    apart[:, :blocks] = scale
    return data, apart[:, :blocks]


def every_code(name: str) -> Operand:
    """Each element with the first and the last finite one of some scales, and some with the others:
    rows of zeros but for four columns, two of which have each element."""
    format = get_format(name)
    bits = format.element.bits
    every = torch.arange(1 << bits, dtype=torch.uint8)
    some = every if bits == 4 else every[7::8]
    scales = SCALES[format.element.name if format.scale.name == "E8M0" else "UE4M3"]
    taken = [every if i in (0, len(scales) - 2) else some for i in range(len(scales))]
    lengths = torch.tensor([len(each) // 2 for each in taken])
    codes = torch.zeros(int(lengths.sum()), 128, dtype=torch.uint8)
    for i, column in enumerate(COLUMNS):
        turned = [each.roll(i * len(each) // 4) for each in taken]
        codes[:, column] = torch.cat([each[: len(each) // 2] for each in turned])
    scale = torch.tensor(scales, dtype=torch.uint8).repeat_interleave(lengths)
    return packed(codes, bits), scale[:, None].repeat(1, 128 // format.block_size)


def ones(name: str) -> Operand:
    """Rows that take one of these columns each."""
    format = get_format(name)
    one = {"E4M3": 0x38, "E5M2": 0x3C, "E2M1": 0x02}[format.element.name]
    codes = torch.zeros(len(COLUMNS), 128, dtype=torch.uint8)
    for i, column in enumerate(COLUMNS):
        codes[i, column] = one
    scale = torch.full((len(codes), 128 // format.block_size), 127, dtype=torch.uint8)
    if format.scale.name == "UE4M3":
        scale.fill_(0x38)
    return packed(codes, format.element.bits), scale


def in_range(x: Tensor) -> Tensor:
    step = 2.0**-133
    x = torch.where(x.abs() < 2.0**-126, (x / step).round() * step, x)
    return torch.where(x.abs() >= 2.0**128, x.sign() * float("inf"), x)


def assert_exact(got: Tensor, name: str, a: Tensor, b: Operand) -> None:
    """``got`` is the product of ``a``, in fp64, and an operand, of which bf16 holds what
    ``in_range`` says: exact, as no two products of a sum are far apart."""
    y = in_range(dequantized(name, *b))
    want = torch.stack([(row * y).sum(1) for row in a])
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0), want.float().nan_to_num(0.0))
