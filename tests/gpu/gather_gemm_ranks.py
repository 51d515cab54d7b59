"""What each of several GPUs does in the tests of gathered products: a process of its own."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from started import run_task
from torch import Tensor

import blockscale as bs
from blockscale.distributed import PeerError, all_gather_gemm, gather_gemm


def given(rows: int, k: int, n: int, seed: int = 0) -> tuple[Any, Any, Tensor]:
    """This rank's rows, a matrix, and the product of all rows."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(ranks * rows, k, device="cuda", generator=generator).bfloat16()
    w = torch.randn(n, k, device="cuda", generator=generator).bfloat16()
    b: Any = bs.quantize(w, "fp8_128x128").mT
    a = bs.quantize(x.chunk(ranks)[rank].contiguous(), "fp8_1x128", layout="sm90")
    return a, b, bs.gemm(bs.quantize(x, "fp8_1x128", layout="sm90"), b)


def assert_near(what: object, got: Tensor, want: Tensor) -> None:
    """The same sums, perhaps in another order: few elements are rounded otherwise."""
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < 1e-3, (dist.get_rank(), what, error.item())


def sizes() -> None:
    """One after another, in the same memory."""
    for i, (rows, k, n) in enumerate(
        [(64, 128, 64), (2048, 7168, 2048), (192, 256, 7168), (64, 7168, 8), (1024, 512, 1000)]
    ):
        a, b, want = given(rows, k, n, i)
        for _ in range(3):
            assert_near((rows, k, n), all_gather_gemm(a, b, backend="kernel"), want)


def launches() -> None:
    """1,000 back to back, of two sizes; then as many replays of a graph."""
    each = [given(64 * (1 + i % 3), 1024, 512, i) for i in range(6)]
    found = [all_gather_gemm(*each[i % 6][:2], backend="kernel") for i in range(1000)]
    for i, got in enumerate(found):
        assert_near(i, got, each[i % 6][2])
        assert torch.equal(got, found[i % 6])
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = [all_gather_gemm(*some[:2], backend="kernel") for some in each]
    for _ in range(170):
        graph.replay()
    for got, want in zip(captured, found, strict=False):
        assert torch.equal(got, want)


def late() -> None:
    """Ranks that come late are waited for."""
    a, b, want = given(256, 1024, 512)
    for i in range(4):
        if dist.get_rank() == i % dist.get_world_size():
            time.sleep(1.5)
        assert_near(i, all_gather_gemm(a, b, backend="kernel"), want)


def dying() -> None:
    """The last rank is killed: the others are told which one it was."""
    gather_gemm._LIMIT = 3.0
    a, b, want = given(256, 1024, 512)
    got = all_gather_gemm(a, b, backend="kernel")
    assert_near("before", got, want)
    torch.cuda.synchronize()
    dist.barrier()
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        for _ in range(50):
            all_gather_gemm(a, b, backend="kernel")
        os.kill(os.getpid(), signal.SIGKILL)
    start, told = time.perf_counter(), ""
    while not told and time.perf_counter() - start < 30:
        try:
            got = all_gather_gemm(a, b, backend="kernel")
            torch.cuda.synchronize()
        except PeerError as error:
            told = str(error)
    assert f"rank {last} did not come within 3 s" in told, told
    assert got[256 * last :].isnan().all()
    assert torch.ones(3, device="cuda").sum() == 3  # the context lives


TASKS = {each.__name__: each for each in (sizes, launches, late, dying)}

if __name__ == "__main__":
    run_task(TASKS)
