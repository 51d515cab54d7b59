"""A GPU that is not there: kernels that JAX calls run in the emulator, in callbacks on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch

from blockscale import emulator as em
from blockscale.dtypes import to_torch
from blockscale.jax.launch import InPlace, arguments_of
from blockscale.jax.target import Target, standing_in
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.builders import describe_kernel
from blockscale.kernels.common.gpu import GPUS

__all__ = ["emulated"]

# XLA's threads flush subnormals to zero, and those that they start do, too: this one was before.
_THREAD = ThreadPoolExecutor(1)
_THREAD.submit(int).result()


@contextmanager
def emulated(arch: str, multiprocessors: int = 8) -> Iterator[list[Any]]:
    """What is traced inside is for a GPU of ``arch`` that is the emulator; the configurations of
    kernels that it ran, which found their outputs poisoned."""
    launched: list[Any] = []

    def launch(config: Any, *arguments: Any) -> list[jax.Array]:
        leaves, tree = arguments_of(arguments)
        arrays = [getattr(x, "array", x) for x in leaves if isinstance(x, InPlace | jax.Array)]
        structs = [
            jax.ShapeDtypeStruct(each.shape, each.dtype)
            for x in leaves
            if isinstance(x, InPlace | jax.ShapeDtypeStruct)
            for each in [getattr(x, "array", x)]
        ]
        kinds = [type(x) if isinstance(x, InPlace | jax.ShapeDtypeStruct) else x for x in leaves]
        kinds = [jax.Array if isinstance(x, jax.Array) else x for x in kinds]

        def run(*given: Any) -> list[np.ndarray]:
            launched.append(config)
            inputs, found, outputs = iter(given), [], []
            for kind, fake in zip(
                kinds, tree.flatten_up_to(describe_kernel(config).arguments), strict=True
            ):
                x = kind
                if kind in (jax.Array, InPlace):
                    x = tensor(np.array(next(inputs)))
                elif kind is jax.ShapeDtypeStruct:
                    x = poisoned(structs[len(outputs)])
                if kind in (InPlace, jax.ShapeDtypeStruct):
                    outputs.append(x)
                found.append(as_kernel_takes(x, fake))
            call = jax.tree.unflatten(tree, found)
            _THREAD.submit(lambda: compile_cache.build(config)(*call)).result()
            return [array(x, each.dtype) for x, each in zip(outputs, structs, strict=True)]

        return list(jax.pure_callback(run, structs, *arrays, vmap_method="sequential"))

    gpu = replace(GPUS[arch], multiprocessors=multiprocessors)
    with (
        standing_in(Target(gpu, launch, "cpu")),
        em.cutedsl(em.Device(arch, check="all,exit_stores")),
    ):
        yield launched


def as_kernel_takes(given: Any, fake: Any) -> Any:
    """With items of several bytes where it takes those, bytes where it takes these."""
    if not isinstance(given, torch.Tensor):
        return given
    bits = fake.element_type.width
    if bits > 8 * given.itemsize:
        wide = given.view({32: torch.int32, 64: torch.int64}[bits])
        return wide if fake.shape else wide.view(())
    return given.view(torch.uint8) if str(fake.element_type) == "Uint8" else given


def tensor(x: np.ndarray) -> torch.Tensor:
    octets = np.frombuffer(x.tobytes(), np.uint8).copy()
    # as XLA's buffers are
    place = torch.empty(len(octets) + 256, dtype=torch.uint8)
    place = place[-place.data_ptr() % 256 :][: len(octets)]
    place.copy_(torch.from_numpy(octets))
    return place.view(to_torch(x.dtype)).view(x.shape)


def poisoned(struct: jax.ShapeDtypeStruct) -> torch.Tensor:
    count = int(np.prod(struct.shape)) * struct.dtype.itemsize
    return tensor(np.full(count, 0xA5, np.uint8)).view(to_torch(struct.dtype)).view(struct.shape)


def array(x: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    return x.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(x.shape)
