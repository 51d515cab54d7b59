"""A mega MoE on a GPU, of one rank: the bits of its steps, launch after launch. (On several GPUs:
``torchrun --nproc-per-node 2 tests/distributed/expert_ranks.py nccl``.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_inputs import DEVICE, normal

import blockscale as bs
from blockscale.distributed import MegaMoE
from blockscale.kernels.sm90 import fp8_by_weights

EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 32, 1024, 512, 4
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
#: Of weights, and of activations.
FORMATS = [("mxfp4", "mxfp8"), ("nvfp4", "nvfp4")]
if HOPPER:
    FORMATS = [(weights, "fp8_1x128") for weights in ("fp8_128x128", "mxfp4", "nvfp4")]


@pytest.fixture(autouse=True)
def widened(monkeypatch):
    """Products of FP8 by MXFP4 have the bits of those that widen, however many rows they have."""
    monkeypatch.setattr(fp8_by_weights, "_UPCAST_ROWS", 1 << 60)


def weights(format: str, experts: int = EXPERTS) -> list[bs.ScaledTensor]:
    shapes = (experts, 2 * INTERMEDIATE, HIDDEN), (experts, HIDDEN, INTERMEDIATE)
    made = [normal(*shape, seed=i) / 16 for i, shape in enumerate(shapes)]
    each = [[bs.quantize(w, format) for w in some] for some in made]
    return [torch.stack(some) for some in each]


def modules(tokens: int, formats: tuple[str, str], experts: int = EXPERTS) -> list[MegaMoE]:
    made = weights(formats[0], experts)
    how: dict[str, Any] = {"tokens": tokens, "topk": TOPK, "activations": formats[1]}
    return [MegaMoE(*made, backend=backend, **how) for backend in ("kernel", "steps")]


def tokens_of(count: int, experts: int = EXPERTS, *, seed: int = 0, skewed: bool = False):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    ids = torch.rand(count, experts, device=DEVICE, generator=generator).argsort(1)[:, :TOPK]
    if skewed:
        ids = torch.full_like(ids, -1)
        ids[:, 0] = experts - 1
    part = torch.rand(count, TOPK, device=DEVICE, generator=generator)
    return normal(count, HIDDEN, seed=seed), part, ids.contiguous()


@torch.no_grad()
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("experts", [4, 32, 100])
def test_bits_of_steps(formats, experts):
    kernel, steps = modules(8192, formats, experts)
    for i, count in enumerate((1, 7, 128, 129, 1000, 0, 8192, 4000)):
        given = tokens_of(count, experts, seed=i, skewed=count == 1000)
        assert torch.equal(kernel(*given), steps(*given)), count


@torch.no_grad()
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_a_thousand_launches(formats):
    """Back to back, with other tokens each time, and nothing between them."""
    kernel, steps = modules(512, formats)
    given = [tokens_of(37 * i % 500 + 1, seed=i) for i in range(20)]
    want = [steps(*each) for each in given]
    found = [kernel(*given[i % 20]) for i in range(1000)]
    for i, got in enumerate(found):
        assert torch.equal(got, want[i % 20]), i


@torch.no_grad()
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_graph(formats):
    kernel, steps = modules(512, formats)
    x, part, ids = tokens_of(300)
    kernel(x, part, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = kernel(x, part, ids)
    for seed in range(5):
        others = tokens_of(300, seed=seed, skewed=seed == 3)
        for held, new in zip((x, part, ids), others, strict=True):
            held.copy_(new)
        graph.replay()
        assert torch.equal(got, steps(*others)), seed
