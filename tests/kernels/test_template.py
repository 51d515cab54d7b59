"""What plans keep: shapes to allocate from, no memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import pytest
import torch

import blockscale as bs
from blockscale.kernels.common.template import template
from stand_in import gpu, matrix

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "shape", [(3, 5), (7,), (1,), (1, 1), (1, 5), (5, 1), (1, 1, 1), (2, 1, 3)]
)
def test_it_is_like_what_is_allocated(shape):
    kept = template(shape, torch.bfloat16, CPU)
    made = torch.empty_like(kept)
    assert (made.shape, made.dtype) == (shape, torch.bfloat16)
    assert made.stride() == torch.empty(shape).stride()  # of sizes of 1, too: kernels read them
    made.zero_()
    assert kept.untyped_storage().nbytes() == 0


def tensors(x: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """All that ``x`` holds, however deep."""
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, partial):
        yield from tensors([x.func, *x.args], seen)
    elif isinstance(x, dict):
        yield from tensors(list(x.values()), seen)
    elif isinstance(x, list | tuple):
        for each in x:
            yield from tensors(each, seen)
    elif dataclasses.is_dataclass(x):
        yield from tensors([getattr(x, field.name) for field in dataclasses.fields(x)], seen)
    elif getattr(x, "__closure__", None):
        yield from tensors([cell.cell_contents for cell in x.__closure__], seen)


@pytest.mark.parametrize(
    ("arch", "a", "b", "layout"),
    [
        ("sm_90a", "fp8_1x128", "fp8_1x128", "sm90"),
        ("sm_90a", "mxfp8", "mxfp8", "compact"),
        ("sm_90a", None, "nvfp4", "compact"),
        ("sm_100a", "mxfp8", "mxfp8", "tcgen05"),
    ],
)
@pytest.mark.parametrize("m", [16, 1024])
@pytest.mark.filterwarnings("ignore::blockscale.FallbackWarning")
def test_calls_keep_no_memory(monkeypatch, arch, a, b, layout, m):
    """A graph that is captured while they are made would own it."""
    from blockscale import gemm_launch

    x, w = matrix(m, 256), matrix(512, 256, seed=1)
    left = x if a is None else bs.quantize(x, a, layout=layout)
    right = bs.quantize(w, b, layout=layout).mT
    with gpu(arch, lambda config: lambda *args: None):
        for _ in range(2):
            bs.gemm(left, right)
        assert gemm_launch._launches
        found = list(tensors(gemm_launch._launches, set()))
    assert found
    assert all(not x.untyped_storage().nbytes() for x in found)
