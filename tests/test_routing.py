"""Which rows experts have, and what tokens get of them."""

from __future__ import annotations

import pytest
import torch

import blockscale as bs


def some(tokens: int, top_k: int, experts: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(1, 1, 1), (7, 2, 5), (130, 8, 64), (40, 4, 4), (0, 2, 3), (5, 0, 3)],
)
def test_rows_of_experts(tokens, top_k, experts):
    """Sorted by expert, then by token; slots are the inverse."""
    ids = some(tokens, top_k, experts)
    routing = bs.route(ids.int(), experts)
    pairs = [(int(e), t, j) for t in range(tokens) for j, e in enumerate(ids[t])]
    want = sorted(pairs)
    assert routing.tokens.tolist() == [t for _, t, _ in want]
    assert routing.pairs.tolist() == [t * top_k + j for _, t, j in want]
    assert routing.offsets.dtype == torch.int32
    assert routing.offsets.tolist() == [sum(e <= n for e, _, _ in want) for n in range(experts)]
    assert torch.equal(routing.pairs[routing.slots.flatten()], torch.arange(tokens * top_k))


def test_pairs_of_no_expert():
    """They come last, and give their token nothing."""
    routing = bs.route(torch.tensor([[1, 3], [-1, 0], [7, 1]]), 3)
    assert routing.offsets.tolist() == [1, 3, 3]
    assert routing.tokens.tolist() == [1, 0, 2, 0, 1, 2]
    y = torch.ones(6, 4)
    y[3:] = 0
    assert bs.combine(y, routing.slots)[:, 0].tolist() == [1, 1, 1]


def test_vmap():
    ids = torch.stack([some(9, 2, 4, seed) for seed in range(3)])
    mapped = torch.vmap(lambda x: tuple(bs.route(x, 4)))(ids)
    for i, each in enumerate(ids):
        for a, b in zip(bs.route(each, 4), mapped, strict=True):
            assert torch.equal(a, b[i])


def test_combine_has_one_order():
    """Of the experts that a token names, in fp32, rounded once."""
    ids, y = some(50, 4, 6), torch.randn(200, 16).bfloat16()
    weights, routing = torch.rand(50, 4), bs.route(ids, 6)
    total = torch.zeros(50, 16)
    for j in range(4):
        total = total + y[routing.slots[:, j]].float() * weights[:, j, None]
    assert torch.equal(bs.combine(y, routing.slots, weights), total.bfloat16())
    assert torch.equal(bs.combine(y, routing.slots, weights, torch.float32), total)
    assert bs.combine(y[:0], routing.slots[:0]).shape == (0, 16)


@pytest.mark.parametrize(
    ("experts", "error"),
    [(torch.zeros(3, 2), TypeError), (torch.zeros(3, dtype=torch.int64), TypeError),
     ([[0, 1]], TypeError)],
)  # fmt: skip
def test_experts_that_are_none(experts, error):
    with pytest.raises(error, match="experts: "):
        bs.route(experts, 4)


@pytest.mark.parametrize("count", [0, -1, True, 2.0])
def test_number_of_experts(count):
    with pytest.raises(ValueError, match="num_experts: got"):
        bs.route(torch.zeros(3, 2, dtype=torch.int64), count)
