"""Kernels in a function that JAX traces, by ``cutlass.jax.cutlass_call``: XLA launches them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import jax

from ..kernels.common.builders import describe_kernel

__all__ = ["InPlace", "arguments_of", "launch", "strides_of"]


class InPlace(NamedTuple):
    """An array that a kernel reads and writes; what it has then is among its outputs."""

    array: jax.Array


def launch(config: Any, *arguments: Any) -> list[jax.Array]:
    """Call the kernel of a configuration, compiled for these shapes when that is lowered.

    ``arguments`` are what its ``__call__`` takes but the stream: arrays, which are read;
    ``jax.ShapeDtypeStruct``, which are written; ``InPlace``; numbers; tuples of these; and None.
    Returns the arrays that were written, in this order.
    """
    from cutlass.jax import cutlass_call

    _load_runtime()
    leaves, tree = arguments_of(arguments)
    read = [i for i, each in enumerate(leaves) if isinstance(each, InPlace | jax.Array)]
    written = [
        i for i, each in enumerate(leaves) if isinstance(each, InPlace | jax.ShapeDtypeStruct)
    ]
    both = [i for i in read if i in written]
    arrays = {i: _array(leaves[i]) for i in {*read, *written}}
    shapes = {i: tuple(each.shape) for i, each in arrays.items()}
    numbers = {i: each for i, each in enumerate(leaves) if i not in arrays}

    def run(stream: Any, *tensors: Any) -> None:
        host = describe_kernel(config)
        fakes = tree.flatten_up_to(host.arguments)
        given: list[Any] = [None] * len(fakes)
        for i, tensor in zip([*read, *(i for i in written if i not in both)], tensors, strict=True):
            given[i] = _tensor(fakes[i], tensor, shapes[i])
        for i, number in numbers.items():
            given[i] = number if number is None else type(fakes[i])(number)
        host.function(*jax.tree.unflatten(tree, given), stream)

    call = cutlass_call(
        run,
        output_shape_dtype=tuple(
            jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in written
        ),
        input_output_aliases={read.index(i): written.index(i) for i in both},
        compile_options=f"--gpu-arch {config.arch}",
        compile_key=(type(config), config, tree, *read, *written, *numbers.items()),
    )
    return list(call(*(arrays[i] for i in read)))


def arguments_of(arguments: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """The arguments in tuples as a list, and JAX's description of these; None counts as one."""
    return jax.tree.flatten(
        arguments, is_leaf=lambda x: x is None or isinstance(x, InPlace | jax.ShapeDtypeStruct)
    )


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of an array, whose elements lie one after another."""
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


@cache
def _load_runtime() -> None:
    """Compiled host code finds the DSL's runtime among what the process has loaded."""
    from cutlass.jax import find_cute_dsl_runtime_library

    path = find_cute_dsl_runtime_library()
    if path is not None:
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)


def _array(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, InPlace) else leaf


def _tensor(fake: Any, tensor: Any, shape: Sequence[int]) -> Any:
    """The memory of a tensor, with what is known of ``fake``: numbers of the same width, strides
    that are multiples of the same; its items, several of the tensor's where these are smaller."""
    from cutlass import Int32, Int64, cute

    ratio = fake.element_type.width // tensor.element_type.width
    if ratio > 1:
        shape = (*shape[:-1], shape[-1] // ratio)[: len(fake.shape)]

    def number(known: Any, value: int) -> Any:
        if isinstance(known, int):
            return known
        found = (Int64 if known.width == 64 else Int32)(value)
        return cute.assume(found, divby=known.divisibility) if known.divisibility > 1 else found

    sizes, steps = (
        tuple(number(f, g) for f, g in zip(known, values, strict=True))
        for known, values in ((fake.shape, shape), (fake.stride, strides_of(shape)))
    )
    pointer = cute.recast_ptr(tensor.iterator, dtype=fake.element_type)
    made = cute.make_tensor(pointer, cute.make_layout(sizes, stride=steps))
    return type(made)(made.value, fake.element_type)  # a pointer does not know what is unsigned
