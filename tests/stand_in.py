"""A GPU that is not there: CPU tensors count as its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from blockscale import emulator as em
from blockscale import gemm_launch
from blockscale.kernels.common import compile_cache, runtime
from blockscale.kernels.common.gpu import GPUS, Gpu
from blockscale.ops import backends

__all__ = ["chip", "emulated", "gpu", "matrix"]

_CPU = torch.device("cpu")
_QUANTIZING = [sys.modules[f"blockscale.ops.{name}"] for name in ("quantize", "fused", "norms")]


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random normal numbers in bf16."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@cache
def chip(arch: str, multiprocessors: int | None = None) -> Gpu:
    """A GPU that kernels are chosen and compiled for, to run in the emulator."""
    usual = GPUS.get(arch, Gpu(arch, 1, 1.0))
    return usual if multiprocessors is None else replace(usual, multiprocessors=multiprocessors)


@contextmanager
def gpu(
    arch: str,
    kernel: Callable[[Any], Any] = compile_cache.build,
    *,
    multiprocessors: int | None = None,
    quantizes: bool = False,
) -> Iterator[None]:
    """A machine with a GPU of ``arch``, whose kernels ``kernel`` makes of a configuration; without
    ``quantizes``, tensors are quantized as on a CPU, with the same bytes."""
    # another GPU each time, for which no plan was made
    found = replace(chip(arch, multiprocessors), load=kernel)
    with ExitStack() as stack:
        stack.enter_context(runtime.standing_in({_CPU: found}.get))
        stack.enter_context(patch.object(backends, "_warned", set()))
        stack.enter_context(patch.object(gemm_launch, "_launches", {}))
        for module in () if quantizes else _QUANTIZING:
            stack.enter_context(patch.object(module, "gpu_of", lambda device: None))
        yield


@contextmanager
def emulated(
    arch: str, *, quantizes: bool = False, multiprocessors: int | None = 8
) -> Iterator[list[Any]]:
    """A GPU of ``arch`` that is the emulator; the configurations of kernels that it ran.

    It has few ``multiprocessors``: persistent kernels have a CTA on each, and one that finds no
    tile takes as long as any other.
    """
    launched: list[Any] = []

    def counted(config: Any) -> Callable[..., None]:
        kernel = compile_cache.build(config)

        def run(*args: Any) -> None:
            launched.append(config)
            kernel(*args)

        return run

    with (
        gpu(arch, counted, multiprocessors=multiprocessors, quantizes=quantizes),
        em.cutedsl(em.Device(arch, check="all,exit_stores")),
    ):
        yield launched
