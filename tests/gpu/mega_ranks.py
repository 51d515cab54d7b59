"""What each of several GPUs does in the tests of a mega MoE over ranks: a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from started import run_task
from torch import Tensor

import blockscale as bs
from blockscale.distributed import MegaMoE, PeerError, mega_launch

EXPERTS, HIDDEN, INTERMEDIATE, TOPK, TOKENS = 16, 1024, 512, 4, 8192
#: Of weights, and of activations.
FORMATS = ("fp8_128x128", "fp8_1x128")


def weights(experts: int) -> list[bs.ScaledTensor]:
    """Of all ranks."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (experts, 2 * INTERMEDIATE, HIDDEN), (experts, HIDDEN, INTERMEDIATE)
    made = [torch.randn(shape, device="cuda", generator=generator) / 16 for shape in shapes]
    return [bs.quantize(w.bfloat16(), FORMATS[0]) for w in made]


def tokens_of(count: int, experts: int, seed: int, *, only: int | None = None) -> tuple:
    """x, weights, and expert numbers: at random, or of one expert alone."""
    generator = torch.Generator("cuda").manual_seed(seed)
    make = partial(torch.rand, device="cuda", generator=generator)
    ids = make(count, experts).argsort(1)[:, :TOPK].contiguous()
    if only is not None:
        ids = torch.full_like(ids, -1)
        ids[:, seed % TOPK] = only
    x = torch.randn(count, HIDDEN, device="cuda", generator=generator).bfloat16()
    return x, make(count, TOPK), ids


class Rank:
    """A rank, with the kernel over all of them, and all experts alone, whose steps run one after
    another."""

    def __init__(self, tokens: int = TOKENS):
        self.number, self.ranks = dist.get_rank(), dist.get_world_size()
        self.experts = EXPERTS * self.ranks
        every = weights(self.experts)
        own = slice(self.number * EXPERTS, (self.number + 1) * EXPERTS)
        how: dict[str, Any] = {"tokens": tokens, "topk": TOPK, "activations": FORMATS[1]}
        self.kernel = MegaMoE(*(w[own] for w in every), **how, backend="kernel")
        groups = [dist.new_group([i]) for i in range(self.ranks)]
        alone = groups[self.number]
        self.alone = MegaMoE(*every, **how, group=alone, backend="steps")

    def tokens(self, count: int, seed: int, only: int | None = None) -> tuple:
        return tokens_of(count, self.experts, seed * self.ranks + self.number, only=only)

    def check(self, what: object, got: Tensor, given: tuple) -> None:
        want = self.alone(*given)
        assert torch.equal(got, want), (self.number, what, int((got != want).any(1).sum()))


def sizes() -> None:
    """None to 8192 tokens, ranks without any, all to one expert."""
    rank = Rank()
    counts = (8192, 8192), (0, 8192), (1, 0), (0, 0), (7, 129), (1000, 37), (4000, 5000)
    for i, some in enumerate(counts):
        for only in (None, 0, rank.experts - 1):
            given = rank.tokens(some[rank.number % 2], i, only)
            rank.check((some, only), rank.kernel(*given), given)


def launches() -> None:
    """1,000 back to back, of other tokens each time; then as many replays of a graph of eight."""
    rank = Rank(512)
    given = [rank.tokens((37 * i + 200 * rank.number) % 513, i) for i in range(20)]
    found = [rank.kernel(*given[i % 20]) for i in range(1000)]
    for i, got in enumerate(found):
        rank.check(i, got, given[i % 20])
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = [rank.kernel(*each) for each in given[:8]]
    for _ in range(125):
        graph.replay()
    for i, got in enumerate(found):
        rank.check(i, got, given[i])


def late() -> None:
    """Ranks that come late are waited for."""
    rank = Rank(512)
    for i in range(4):
        given = rank.tokens(100, i)
        if rank.number == i % rank.ranks:
            time.sleep(1.5)
        rank.check(i, rank.kernel(*given), given)


def dying() -> None:
    """The last rank is killed between launches, or in one: the others are told which one it was."""
    mega_launch.Launch = partial(mega_launch.Launch, limit=3.0)  # type: ignore[misc, assignment]
    rank = Rank(512)
    given = rank.tokens(500, 1)
    rank.check("before", rank.kernel(*given), given)
    torch.cuda.synchronize()
    dist.barrier()
    if rank.number == rank.ranks - 1:
        for _ in range(50):
            rank.kernel(*given)
        os.kill(os.getpid(), signal.SIGKILL)
    start, told, got = time.perf_counter(), "", given[0]
    while not told and time.perf_counter() - start < 30:
        try:
            got = rank.kernel(*given)
            torch.cuda.synchronize()
        except PeerError as error:
            told = str(error)
    assert f"rank {rank.ranks - 1} did not come within 3 s" in told, told
    assert got.isnan().all()
    assert torch.ones(3, device="cuda").sum() == 3  # the context lives


TASKS = {each.__name__: each for each in (sizes, launches, late, dying)}

if __name__ == "__main__":
    FORMATS = sys.argv[5], sys.argv[6]
    run_task(TASKS)
