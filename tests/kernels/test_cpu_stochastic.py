"""Stochastic rounding by the compiled CPU kernels against the reference: the same bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from test_cpu import (
    DTYPES,
    NAMES,
    SHAPES,
    check,
    flush_to_zero,
    given_options,
    hard,
    same_bytes,
    three_threads,
)

import blockscale as bs
from blockscale.formats import NONFINITE, Format, formats
from blockscale.kernels.cpu import calls as cpu
from blockscale.philox import random_bits
from blockscale.rounding import encode_magnitude
from blockscale.seed import Numbers

numba = pytest.importorskip("numba")

__all__ = ["flush_to_zero", "three_threads"]  # fixtures

SEEDS = (0, 1, -1, 2**32, 2**63 - 1, -(2**63), 0x0123456789ABCDEF)
ELEMENTS = {format.element.name: format.element for format in formats.values()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_hard_numbers(name: str, dtype: torch.dtype) -> None:
    format, seeds = formats[name], itertools.cycle(SEEDS)
    cases = itertools.product(SHAPES, (-1, -2), format.scale.roundings, NONFINITE)
    for i, (shape, axis, rounding, nonfinite) in enumerate(cases):
        if len(shape) == 1 and axis == -2:
            continue
        x, seed = hard(shape, dtype, i), next(seeds)
        check(x, format, axis=axis, scale_rounding=rounding, nonfinite=nonfinite, seed=seed)


@pytest.mark.parametrize("name", NAMES)
def test_elements_are_counted_as_the_tensor_is_read_whatever_its_strides(name: str) -> None:
    format = formats[name]
    x = hard((3, 4, 70, 203), torch.bfloat16, 5)
    views = (
        x[..., 8:136],
        x[:, :, ::2],
        x[1:, 1:3, 5:],
        x.mT,
        x[..., ::2],
        x[0, 0, :1].expand(40, -1),
    )
    for given, axis in itertools.product(views, (-1, -2)):
        check(given.contiguous(), format, axis=axis, seed=9)
        options = {**given_options(format, axis), "seed": 9}
        pairs = (cpu.quantize(each, format, **options) for each in (given, given.contiguous()))
        for a, b in zip(*pairs, strict=True):
            same_bytes(a, b, given.stride())


@pytest.mark.parametrize("name", NAMES)
def test_flush_to_zero_changes_nothing(name: str, flush_to_zero: None) -> None:
    """Random bits of zeros would round up what is left of subnormals; a block has many sizes."""
    g = torch.Generator().manual_seed(3)
    for top in range(1 << 23, 100 << 23, 7 << 23):
        bits = torch.randint(0, 1 << 23, (64, 256), generator=g, dtype=torch.int32)
        bits[:, ::32] = top
        check(bits.view(torch.float32), formats[name], seed=top)
    for dtype, axis in itertools.product(DTYPES, (-1, -2)):
        check(hard((128, 192), dtype, 2), formats[name], axis=axis, seed=5)


def test_threads(three_threads: None) -> None:
    for i, name in enumerate(("mxfp8", "nvfp4", "fp8_128x128", "mxfp6_e2m3")):
        for axis in (-1, -2):
            check(hard((700, 2051), torch.bfloat16, i), formats[name], axis=axis, seed=i)


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_every_part_cut_off_against_the_noise_beside_it(element: object) -> None:
    """Noise of one less, the same and one more than the part cut off, at every size of number."""
    from blockscale.kernels.cpu import stochastic

    g = torch.Generator().manual_seed(1)
    exponents = torch.arange(1, (128 + element.max_exponent)).repeat_interleave(64)
    bits = (exponents << 23) | torch.randint(0, 1 << 23, exponents.shape, generator=g)
    bits[::8] &= 0x7F000000 | 0x7C0000  # few bits set: ties, and what needs no rounding
    bits[1::8] |= 0x7FFFFF
    magnitude = torch.cat((torch.zeros(1, dtype=torch.int64), bits))
    # the part cut off, found by halving: the noise from which on numbers are rounded down
    low, high = torch.zeros_like(magnitude), torch.full_like(magnitude, 1 << 32)
    down = encode_magnitude(magnitude, element, torch.full_like(magnitude, 0xFFFFFFFF))
    for _ in range(33):
        middle = (low + high) >> 1
        up = encode_magnitude(magnitude, element, middle.clamp(max=0xFFFFFFFF)) > down
        low, high = torch.where(up, middle + 1, low), torch.where(up, high, middle)
    near = low[:, None] + torch.tensor([-2, -1, 0, 1])
    far = torch.tensor([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]).expand(len(low), -1)
    noise = torch.cat((near, far), 1)
    noise = noise.clamp(0, 0xFFFFFFFF)
    magnitude = magnitude[:, None].expand_as(noise)
    want = encode_magnitude(magnitude, element, noise)
    assert (want != down[:, None]).any()

    lowest, shift = np.int32((128 - element.bias) << 23), np.int32(23 - element.mantissa_bits)
    top = np.float32(element.max).view(np.int32)
    exact = element.mantissa_bits, element.bias, element.max_code

    @numba.njit(error_model="numpy")
    def both(magnitude, noise, codes, exact_codes):
        for i in range(magnitude.size):
            one = np.float32(1)
            codes[i] = stochastic.encode(magnitude[i], one, lowest, shift, top, noise[i])
            exact_codes[i] = stochastic.exact_encode(np.int64(magnitude[i]), *exact, noise[i])

    given = (np.ascontiguousarray(t.numpy().astype(np.int32)).ravel() for t in (magnitude, noise))
    codes = np.empty((2, want.numel()), np.int64)
    both(*given, *codes)
    for each in codes:
        assert torch.equal(torch.from_numpy(each).view_as(want), want)


def philox(seed: int, step: int, index: int) -> int:
    """The definition of numerics.md in Python's integers."""
    c, k = [index // 4, index // 4 >> 32, step, step >> 32], [seed, seed >> 32]
    c, k = ([each & 0xFFFFFFFF for each in some] for some in (c, k))
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[index % 4]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_bits(seed: int) -> None:
    """From any element on, also past the counters of 32 bits."""
    from blockscale.kernels.cpu import stochastic

    @numba.njit
    def draw(seed, first, n, out):
        return stochastic.draw(seed, first, n, out)

    pieces = (0, 37), (1, 16), (2, 5), (3, 1), (5, 100), (2**34 - 7, 15), (2**40 + 3, 9)
    for (first, n), step in itertools.product(pieces, (0, 3, -(2**62))):
        out = np.zeros(n + stochastic.ROOM, np.int32)
        begin = draw((seed, step), first, n, out)
        got = out.view(np.uint32)[begin : begin + n].tolist()
        assert got == [philox(seed, step, first + i) for i in range(n)]
        numbers = Numbers(seed, step, first, n, n)
        assert got == random_bits(numbers, torch.empty(n)).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_seeds_have_a_kernel(name: str) -> None:
    format: Format = formats[name]
    x, offsets = hard((192, 130), torch.float32, 1), torch.tensor([64, 192], dtype=torch.int32)
    for seed in SEEDS[1:4]:
        for axis in (-1, -2):
            for groups in (None, offsets) if axis == -1 and format.block[0] == 1 else (None,):
                given = {"axis": axis, "seed": seed, "offsets": groups, "pad": True}
                got = bs.quantize(x, name, backend="kernel", **given)
                want = bs.quantize(x, name, backend="reference", **given)
                same_bytes(got.data, want.data, given)
                same_bytes(got.scale, want.scale, given)
        kernel, plain = (
            bs.quantize_both(x, name, seed=seed, pad=True, backend=b)
            for b in ("kernel", "reference")
        )
        for got, want in zip(kernel, plain, strict=True):
            same_bytes(got.data, want.data, seed)
            same_bytes(got.scale, want.scale, seed)
    with pytest.raises(ValueError, match="axis=-2: no CPU kernel rounds stochastically"):
        bs.quantize(x, axis=-2, offsets=offsets, seed=1, backend="kernel")


def test_what_doctor_says_of_seeds() -> None:
    for operation in ("quantize", "quantize_both"):
        assert "seed" not in bs.ops.backend(operation, "cpu")[1]


def test_no_elements() -> None:
    for name, shape in itertools.product(NAMES, ((0, 64), (64, 0), (0, 3, 32))):
        options = given_options(formats[name], -1)
        data, scale = cpu.quantize(torch.zeros(shape), formats[name], seed=1, **options)
        assert data.shape == formats[name].data_shape(shape, -1)
        assert scale.shape == formats[name].scale_shape(shape, -1)
