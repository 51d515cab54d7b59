"""Rows of experts, by a GPU kernel in the emulator: the reference's."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import ARCHITECTURES, poisoned

import blockscale as bs
from blockscale import emulator as em
from blockscale import reference
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.experts import calls
from blockscale.kernels.experts.route_config import choose_route
from stand_in import chip, emulated

INT64, INT32 = torch.int64, torch.int32


def run(experts: torch.Tensor, count: int, arch: str = "sm_90a", completion: str = "late"):
    device = em.Device(arch, completion=completion, check="all,exit_stores,global")
    with em.cutedsl(device), poisoned():
        return calls.route(experts, count, gpu=chip(arch, 132))


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def drawn(tokens: int, top_k: int, experts: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Some of no expert: negative, too large, and such that only the upper half says so."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(-2, experts + 3, (tokens, top_k), generator=generator).to(dtype)
    if dtype == INT64:
        found[0, 0], found[-1, -1] = 2**32, -(2**32)
    return found


# tokens, top_k, experts: a chunk, some, one pair, the most experts
CASES = [(5, 3, 4), (300, 8, 7), (1030, 2, 128), (1, 1, 1), (700, 4, 1023)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("i", range(len(CASES)))
def test_route(i, arch):
    tokens, top_k, count = CASES[i]
    experts = drawn(tokens, top_k, count, (INT64, INT32)[i % 2], seed=i)
    got = run(experts, count, arch, ("late", "eager", "random")[i % 3])
    assert same(got, reference.route(experts, count))


def test_many_pairs():
    """Threads have several."""
    experts = drawn(70000, 4, 5, INT64, seed=0)
    assert choose_route(experts.numel(), 5, 8, chip("sm_90a", 132)).rounds > 1
    assert same(run(experts, 5), reference.route(experts, 5))


@pytest.mark.parametrize("expert", [0, 2, 3, -1])
def test_all_to_one(expert):
    experts = torch.full((40, 30), expert)
    assert same(run(experts, 3), reference.route(experts, 3))


def test_rows_apart():
    experts = torch.randint(9, (50, 16))[:, ::2]
    assert same(run(experts, 9), reference.route(experts, 9))


def test_what_has_no_kernel():
    with pytest.raises(Unsupported, match="takes up to 1023"):
        run(torch.zeros(2, 2, dtype=INT64), 1024)
    with emulated("sm_90a"), pytest.warns(bs.FallbackWarning, match="1024"):
        assert bs.route(torch.zeros(2, 2, dtype=INT64), 1024).slots.tolist() == [[0, 1], [2, 3]]


def test_user_function():
    """By the kernel, without a warning; of no tokens without one."""
    experts = drawn(40, 4, 6, INT64, seed=1)
    with emulated("sm_90a"), warnings.catch_warnings():
        warnings.simplefilter("error", bs.FallbackWarning)
        got = bs.route(experts, 6)
        assert bs.route(experts[:0], 6).offsets.tolist() == [0] * 6
    assert same(list(got), reference.route(experts, 6))
