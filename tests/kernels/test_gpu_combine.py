"""What tokens get of their experts, by a GPU kernel in the emulator: the reference's bits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import ARCHITECTURES, nasty, poisoned

from blockscale import emulator as em
from blockscale import reference
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.experts import calls
from stand_in import chip

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def run(y, slots, weights, dtype, arch="sm_90a", completion="late"):
    device = em.Device(arch, completion=completion, check="all,exit_stores,global")
    with em.cutedsl(device), poisoned():
        return calls.combine(y, slots, weights, dtype, gpu=chip(arch, 132))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Which NaN a NaN is stays open."""
    number = ~(a.isnan() & b.isnan())
    bits = torch.int32 if a.dtype == FP32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a[number].view(bits), b[number].view(bits))


# tokens, top_k, columns, dtypes, whether there are weights, type of slots: each another kernel
CASES = [
    (5, 8, 264, BF16, BF16, True, torch.int64),
    (3, 3, 64, FP32, BF16, False, torch.int32),
    (1, 12, 140, FP32, FP32, False, torch.int64),
    (4, 2, 2056, FP16, FP32, True, torch.int64),
    (4, 6, 136, BF16, BF16, False, torch.int64),
]


@pytest.mark.parametrize("i", range(len(CASES)))
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bits(i, arch):
    tokens, top_k, columns, dtype, out, weighted, index = CASES[i]
    generator = torch.Generator().manual_seed(i)
    y = nasty(tokens * top_k, columns, dtype, seed=i)
    slots = torch.randperm(tokens * top_k, generator=generator).view(tokens, top_k).to(index)
    weights = torch.randn(tokens, top_k, generator=generator) if weighted else None
    got = run(y, slots, weights, out, arch, ("late", "eager", "random")[i % 3])
    assert same(got, reference.combine(y, slots, weights, out))


def test_slots_that_are_none_give_nan():
    y, slots = torch.randn(4, 64), torch.tensor([[0, 4], [1, 2**32 + 1], [-1, 2], [3, 0]])
    got = run(y, slots, None, FP32)
    assert got[:3].isnan().all()
    assert torch.equal(got[3], y[3] + y[0])


def test_rows_apart_and_what_is_not_aligned():
    whole, slots = torch.randn(6, 96), torch.tensor([[0, 2], [4, 5]])
    assert torch.equal(
        run(whole[:, 8:72], slots, None, FP32), reference.combine(whole[:, 8:72], slots)
    )
    for y in (whole[:, 1:65], whole[:, :62], whole.mT):
        with pytest.raises(Unsupported, match="the kernel wants rows of multiples of 16 bytes"):
            run(y, slots % 2, None, FP32)
