"""Kernels in a function that JAX traces, by ``cutlass.jax.cutlass_call``: XLA launches them."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax

from ..fallback import FallbackWarning
from ..kernels.common.builders import describe_kernel
from ..kernels.common.gpu import GPUS, Gpu, arch_of, dram_rate, no_kernels

__all__ = ["InPlace", "Target", "current_target", "fall_back", "standing_in"]

#: The architecture that the CuTe DSL compiles for, if not that of the GPU which is here.
_ARCH = "CUTE_DSL_ARCH"


class InPlace(NamedTuple):
    """An array that a kernel reads and writes; what it has then is among its outputs."""

    array: jax.Array


_LEAVES = (InPlace, jax.Array, jax.ShapeDtypeStruct)


class Target(NamedTuple):
    """Where kernels run.

    Attributes:
        gpu: what they are chosen for.
        launch: given a configuration and what its kernel's ``__call__`` takes but the stream:
            arrays, which are read; ``jax.ShapeDtypeStruct``, which are written; ``InPlace``;
            numbers; tuples of these; and None. Returns the arrays that were written, in this order.
        platform: JAX's name of it.
    """

    gpu: Gpu
    launch: Callable[..., list[jax.Array]]
    platform: str = "cuda"


_standing_in: Target | None = None
_warned: set[str] = set()


def current_target() -> Target | None:
    """The GPU that is here, or that ``CUTE_DSL_ARCH`` names (sm_90a, sm_100a); None where neither
    has kernels."""
    if _standing_in is not None:
        return _standing_in
    named = os.environ.get(_ARCH, "")
    return _named(named) if named else _found()


@contextmanager
def standing_in(other: Target) -> Iterator[None]:
    """Inside, in all threads, what is traced is for another target."""
    global _standing_in
    before, _standing_in = _standing_in, other
    try:
        yield
    finally:
        _standing_in = before


def fall_back(operation: str, reason: str) -> None:
    """Say, once, that XLA computes for lack of a kernel."""
    message = f"{operation}: {reason}; XLA computes it, which is slower"
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, FallbackWarning, stacklevel=3)


@cache
def _named(arch: str) -> Target | None:
    return Target(GPUS[arch], launch) if _has_kernels(arch, f"{_ARCH}={arch}") else None


@cache
def _found() -> Target | None:
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return None
    arch = arch_of(*map(int, device.compute_capability.split(".")))
    if not _has_kernels(arch, f"architecture {arch}"):
        return None
    rate = dram_rate(device.local_hardware_id)
    gpu = replace(GPUS[arch], multiprocessors=device.core_count, dram_rate=rate)
    return Target(gpu, launch)


def _has_kernels(arch: str, name: str) -> bool:
    """Whether there are kernels for ``arch``, by whose ``name`` it is said if not."""
    if arch not in GPUS:
        fall_back("blockscale.jax", f"{name}: {no_kernels(arch, GPUS)}")
    elif find_spec("cutlass") is None:
        fall_back("blockscale.jax", "the CuTe DSL is not installed: pip install 'blockscale[cuda]'")
    else:
        return True
    return False


# --- by the CuTe DSL ------------------------------------------------------------------------------


def launch(config: Any, *arguments: Any) -> list[jax.Array]:
    """As ``Target.launch``: compiled for these shapes when it is lowered, which takes seconds."""
    from cutlass.jax import cutlass_call

    _load_runtime()
    leaves = list(_leaves(arguments))
    read = [i for i, each in enumerate(leaves) if not isinstance(each, jax.ShapeDtypeStruct)]
    written = [i for i, each in enumerate(leaves) if not isinstance(each, jax.Array)]
    both = [i for i in read if i in written]
    shapes = _shapes(arguments)  # all that is kept of them

    def run(stream: Any, *tensors: Any) -> None:
        order = [*read, *(i for i in written if i not in both)]
        of = dict(zip(order, tensors, strict=True))
        host, given = describe_kernel(config), iter([of[i] for i in range(len(leaves))])
        host.function(*_described(host.arguments, shapes, given), stream)

    call = cutlass_call(
        run,
        output_shape_dtype=tuple(_struct(_array(leaves[i])) for i in written),
        input_output_aliases={read.index(i): written.index(i) for i in both},
        compile_options=f"--gpu-arch {config.arch}",
        compile_key=(type(config), config, shapes),
    )
    return list(call(*(_array(leaves[i]) for i in read)))


@cache
def _load_runtime() -> None:
    """Compiled host code finds the DSL's runtime among what the process has loaded."""
    from cutlass.jax import find_cute_dsl_runtime_library

    path = find_cute_dsl_runtime_library()
    if path is not None:
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)


class _Shape(NamedTuple):
    """Of an array among arguments."""

    sizes: tuple[int, ...]
    dtype: str


def _leaves(given: Any) -> Iterator[Any]:
    """Arrays, and what becomes of them, in order."""
    if isinstance(given, _LEAVES):
        yield given
    elif isinstance(given, tuple):
        for each in given:
            yield from _leaves(each)


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _array(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, InPlace) else leaf


def _shapes(given: Any) -> Any:
    """The same with shapes for arrays: what decides what is compiled."""
    if isinstance(given, _LEAVES):
        array = _array(given)
        return _Shape(tuple(array.shape), str(array.dtype))
    return tuple(map(_shapes, given)) if isinstance(given, tuple) else given


def _described(fake: Any, given: Any, tensors: Iterator[Any]) -> Any:
    """Arguments as the kernel was written for them: as ``fake`` ones are."""
    if isinstance(given, _Shape):
        return _tensor(fake, next(tensors), given.sizes)
    if isinstance(given, tuple):
        return tuple(_described(f, g, tensors) for f, g in zip(fake, given, strict=True))
    return given if given is None else type(fake)(given)


def _tensor(fake: Any, tensor: Any, shape: Sequence[int]) -> Any:
    """The memory of a tensor, with what is known of ``fake``: numbers of the same width, strides
    that are multiples of the same; its items, several of the tensor's where these are smaller."""
    from cutlass import Int32, Int64, cute

    ratio = fake.element_type.width // tensor.element_type.width
    if ratio > 1:
        shape = (*shape[:-1], shape[-1] // ratio)[: len(fake.shape)]
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)

    def number(known: Any, value: int) -> Any:
        if isinstance(known, int):
            return known
        found = (Int64 if known.width == 64 else Int32)(value)
        return cute.assume(found, divby=known.divisibility) if known.divisibility > 1 else found

    sizes, steps = (
        tuple(number(f, g) for f, g in zip(known, values, strict=True))
        for known, values in ((fake.shape, shape), (fake.stride, strides[: len(shape)]))
    )
    pointer = cute.recast_ptr(tensor.iterator, dtype=fake.element_type)
    return cute.make_tensor(pointer, cute.make_layout(sizes, stride=steps))
