"""Help for tests of the GPU quantizers: inputs, and a call in the emulator beside the reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from blockscale import emulator as em
from blockscale import reference
from blockscale.emulator.report import Report
from blockscale.formats import get_format
from blockscale.kernels import gpu
from blockscale.layouts import as_bytes, get_layout


class Profiled(em.Device):
    """A device whose launches are profiled."""

    def launch(self, *args: Any, **kwargs: Any) -> Report:
        return super().launch(*args, **kwargs, profile=True)


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch.empty_like returns has every byte 0xA5."""
    original = torch.empty_like

    def empty_like(*args: Any, **kwargs: Any) -> Tensor:
        out = original(*args, **kwargs)
        assert out.is_contiguous()
        out.view(torch.uint8).fill_(0xA5)
        return out

    with patch.object(torch, "empty_like", empty_like):
        yield


def emulated(
    x: Tensor,
    format: str,
    arch: str,
    axes: tuple[int, ...] = (-1,),
    *,
    completion: str = "late",
    device: em.Device | None = None,
    **kwargs: Any,
) -> tuple[list[tuple[Tensor, Tensor]], list[Report]]:
    """What the kernel gives in the emulator, and the reports of its launches."""
    device = device or em.Device(arch, completion=completion, check="all")
    with em.cutedsl(device) as reports, poisoned():
        results = gpu.quantize(x, get_format(format), axes=axes, arch=arch, **kwargs)
    return results, reports


def expected(
    x: Tensor, format: str, axis: int, layout: str, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    fmt = get_format(format)
    kwargs.setdefault("scale_rounding", fmt.default_scale_rounding)
    data, scale = reference.quantize(x, fmt, axis=axis, **kwargs)
    scale = as_bytes(scale)
    if layout != "compact":
        scale = get_layout(layout).swizzle(scale if axis == -1 else scale.mT)
    return data, scale


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
    layout: str = "compact",
    completion: str = "late",
    device: em.Device | None = None,
    **kwargs: Any,
) -> list[Report]:
    """Assert that the kernel's bytes are the reference's."""
    results, reports = emulated(
        x, format, arch, axes, layout=layout, completion=completion, device=device, **kwargs
    )
    for axis, (data, scale) in zip(axes, results, strict=True):
        want_data, want_scale = expected(x, format, axis, layout, **kwargs)
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
