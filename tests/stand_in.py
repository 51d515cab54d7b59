"""A GPU that is not there: CPU tensors count as its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from blockscale import emulator as em
from blockscale import gemm_launch
from blockscale.kernels import sm90, sm100
from blockscale.kernels.common import calls
from blockscale.kernels.common.runtime import get_kernel
from blockscale.kernels.quantizers import dequantize_plan
from blockscale.kernels.sm90 import dequantized_plan
from blockscale.ops import backends, gemm_kernels

__all__ = ["emulated", "gpu", "matrix"]

_PLANS = (
    sm90.plan,
    sm90.widened_plan,
    sm90.plain_plan,
    sm100.plan,
    sm100.quantizing_gemm,
    dequantize_plan,
)
_REMEMBERED = (
    sm90.plan.plan_gemm,
    sm90.widened_plan.plan_widened,
    sm90.plain_plan.plan_plain,
    dequantized_plan.plan_dequantized,
    sm100.plan.plan_gemm,
    sm100.quantizing_gemm._plan,
    dequantize_plan.plan_dequantize,
    gemm_launch._kind,
)


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random normal numbers in bf16."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@contextmanager
def gpu(
    monkeypatch: pytest.MonkeyPatch, arch: str, kernel: Callable[[Any, torch.device], Any]
) -> Iterator[None]:
    """A machine with a GPU of ``arch``, whose kernels ``kernel`` makes of a configuration."""
    products = gemm_kernels.PRODUCTS[arch]
    for module in (gemm_kernels, gemm_launch, backends):
        monkeypatch.setattr(module, "products_on", lambda device: products)
    monkeypatch.setattr(gemm_launch, "_launches", {})
    monkeypatch.setattr(backends, "_warned", set())
    monkeypatch.setattr(backends, "on_gpu", lambda x: True)
    for module in _PLANS:
        monkeypatch.setattr(module, "get_kernel", kernel)
    for module in (calls, dequantize_plan):
        monkeypatch.setattr(module, "architecture", lambda index: arch)
    _forget()
    yield
    _forget()


def _forget() -> None:
    for function in _REMEMBERED:
        function.cache_clear()


@contextmanager
def emulated(monkeypatch: pytest.MonkeyPatch, arch: str) -> Iterator[list[Any]]:
    """A GPU of ``arch`` that is the emulator; the configurations of kernels that it ran."""
    launched: list[Any] = []

    def counted(config: Any, device: torch.device) -> Callable[..., None]:
        kernel = get_kernel(config, device)

        def run(*args: Any) -> None:
            launched.append(config)
            kernel(*args)

        return run

    with gpu(monkeypatch, arch, counted), em.cutedsl(em.Device(arch, check="all")):
        yield launched
