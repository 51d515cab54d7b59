"""Help for tests of the GPU quantizers: inputs, and a call in the emulator beside the reference."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from blockscale import emulator as em
from blockscale import reference
from blockscale.emulator.observe.report import Report
from blockscale.formats import get_format
from blockscale.hadamard import Hadamard, transformed
from blockscale.kernels.quantizers import calls as quantizers
from blockscale.layouts import Grouped, as_bytes, get_layout
from blockscale.seed import Seed, numbers_of
from stand_in import chip


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch.empty_like and Tensor.new_empty return has every byte 0xA5."""

    def poisoning(original: Any) -> Any:
        def empty(*args: Any, **kwargs: Any) -> Tensor:
            out = original(*args, **kwargs)
            assert out.is_contiguous()
            out.view(-1).view(torch.uint8).fill_(0xA5)
            return out

        return empty

    with (
        patch.object(torch, "empty_like", poisoning(torch.empty_like)),
        patch.object(Tensor, "new_empty", poisoning(Tensor.new_empty)),
    ):
        yield


def produced(
    x: Tensor,
    producer: str = "load",
    others: tuple[Tensor, ...] = (),
    gather: Tensor | None = None,
) -> Tensor:
    """What is quantized, by the reference."""
    if producer == "load":
        return x if gather is None else x[gather]
    if producer == "weighted_swiglu":
        return reference.weighted_swiglu(x, *others)
    if producer == "weighted_swiglu_backward":
        return reference.weighted_swiglu_backward(others[0], x, others[1])[0]
    return reference.swiglu_backward(*others, x) if others else reference.swiglu(x)


ARCHITECTURES = ("sm_90a", "sm_100a")


def in_turn(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each case with one of the architectures before it: their quantizers are one source, whose
    casts alone differ."""
    return [(ARCHITECTURES[i % 2], *case) for i, case in enumerate(cases)]


#: Arguments of these helpers that are fields of a Request.
NAMES = ("scale_rounding", "nonfinite", "producer", "k_major", "square", "scaling")


def emulated(
    x: Tensor,
    format: str,
    arch: str,
    axes: tuple[int, ...] = (-1,),
    *,
    layouts: tuple[str, ...] | None = None,
    completion: str = "late",
    profile: bool = False,
    multiprocessors: int | None = 0,
    seed: Seed | None = None,
    hadamard: Hadamard | None = None,
    **kwargs: Any,
) -> tuple[list[tuple[Tensor, Tensor]], list[Report]]:
    """What the kernel gives in the emulator, and the reports of its launches. On a GPU of no
    ``multiprocessors`` small tensors get the kernels of large ones."""
    numbers = None if seed is None else numbers_of(seed, x.shape)
    if numbers is not None or hadamard is not None:
        kwargs["further"] = quantizers.Further(numbers, hadamard)
    device = em.Device(arch, completion=completion, check="all,exit_stores,global")
    layouts = layouts or ("compact",) * len(axes)
    with em.cutedsl(device, profile=profile) as reports, poisoned():
        names = {name: kwargs.pop(name) for name in NAMES if name in kwargs}
        asked = quantizers.Request(format, axes, layouts, **names)
        results = quantizers.quantize(x, asked, gpu=chip(arch, multiprocessors), **kwargs)
    return results, reports


def expected(
    x: Tensor,
    format: str,
    axis: int,
    layout: str,
    offsets: Tensor | None = None,
    *,
    seed: Seed | None = None,
    hadamard: Hadamard | None = None,
    square: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    fmt = get_format(format)
    kwargs.setdefault("scale_rounding", fmt.default_scale_rounding)
    kwargs["seed"] = None if seed is None else numbers_of(seed, x.shape)
    kwargs["rotated"] = 0 if hadamard is None else hadamard.size
    x = x if hadamard is None else transformed(x, hadamard, axis)
    kind, cut = fmt.squared if square else fmt, offsets if axis == -2 else None
    data, scale = reference.quantize(x, kind, axis=axis, offsets=cut, **kwargs)
    scale = as_bytes(scale)
    if square:
        other = -3 - axis
        line = torch.arange(x.shape[other]) // fmt.block_size
        scale = scale.index_select(other, line)
    if layout == "compact":
        return data, scale
    matrix, where = scale if axis == -1 else scale.mT, get_layout(layout)
    if offsets is not None and axis == -1 and where.spreads:
        return data, Grouped(where).swizzle(matrix, offsets)
    return data, where.swizzle(matrix)


def assert_same(got: Tensor, want: Tensor, what: str) -> None:
    assert got.shape == want.shape, what
    assert got.dtype == want.dtype, what
    got, want = (t.contiguous().view(torch.uint8) for t in (got, want))
    differ = (got != want).nonzero()
    assert not len(differ), f"{what}: {len(differ)} bytes differ, first at {differ[0].tolist()}"


def check(
    x: Tensor,
    format: str,
    arch: str,
    axes: tuple[int, ...] = (-1,),
    *,
    layout: str | tuple[str, ...] = "compact",
    completion: str = "late",
    profile: bool = False,
    multiprocessors: int | None = 0,
    **kwargs: Any,
) -> list[Report]:
    """Assert that the kernel's bytes are the reference's; ``layout``: for all axes, or for each."""
    layouts = (layout,) * len(axes) if isinstance(layout, str) else layout
    results, reports = emulated(
        *(x, format, arch, axes),
        layouts=layouts,
        completion=completion,
        profile=profile,
        multiprocessors=multiprocessors,
        **kwargs,
    )
    given = {name: kwargs.pop(name) for name in ("producer", "others", "gather") if name in kwargs}
    values = produced(x, **given)
    for axis, layout, (data, scale) in zip(axes, layouts, results, strict=True):
        want_data, want_scale = expected(values, format, axis, layout, **kwargs)
        assert_same(data, want_data, f"data along {axis}")
        assert_same(scale, want_scale, f"scales along {axis}")
    return reports


def nasty(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every size of number, NaN, infinities, -0 and blocks of zeros."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    low, high = (-26, 15) if dtype == torch.float16 else (-140, 120)
    exponent = torch.floor(low + (high - low) * uniform(rows, -(-columns // 16)))
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(exponent).repeat_interleave(16, 1)[:, :columns]
    special = uniform(rows, columns)
    x[special < 0.002] = float("nan")
    x[(special > 0.002) & (special < 0.004)] = float("inf")
    x[(special > 0.004) & (special < 0.006)] = -float("inf")
    x[special > 0.95] = -0.0
    x[::3, :32] = 0.0
    return x.to(dtype)
