"""Experts that ranks share for training: the bits of one layer that has the tokens of all ranks."""

from __future__ import annotations

import expert_parallel_ranks as ranks
import pytest
import torch
from processes import gather
from torch import Tensor


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of four ranks, and of two, which load what those saved."""
    base = tmp_path_factory.mktemp("ranks")
    results = {}
    for name, count in (("four", 4), ("two", 2)):
        (base / name).mkdir()
        results[count] = gather(ranks.run, count, base / name)
    return results


def assert_same(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for alone, shared in pairs:
        assert shared.dtype == alone.dtype
        assert torch.equal(alone, shared)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", ranks.CASES)
def test_bits(found, name, count):
    """Outputs, and gradients of tokens, of weights and of each parameter."""
    case, by_rank = ranks.CASES[name], found[count]
    parameters = 4 if case.layer.get("bias") else 2
    for each in by_rank:
        pairs = each["compared"][name]
        assert len(pairs) == 3 + parameters - len(case.frozen)
        assert_same(pairs)
        assert case.experts == "none" or all(alone.count_nonzero() for alone, _ in pairs)


def test_training(found):
    for each in found[4]:
        assert_same(each["trained"][1:])
        alone, shared = each["trained"][0]
        torch.testing.assert_close(shared, alone)  # ranks add up their losses in another order
        assert alone[-1] < alone[0]


def test_checkpoint(found):
    """Two ranks, and one alone, load what four saved."""
    assert all(same for each in found[2] for same in each["loaded"])
    assert all(len(each["loaded"]) == 2 for each in found[2])


def test_fully_sharded(found):
    """FSDP2 over the other dimension of a mesh: gradients of tokens, and trained parameters."""
    for each in found[4]:
        for pairs in each["fsdp"].values():
            assert len(pairs) == 3
            assert_same(pairs)


def test_means(found):
    """Halves of the batch, and ranks, are added up in fp32 in other orders."""
    for each in found[4]:
        assert len(each["means"]) == 3
        for alone, shared in each["means"]:
            torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("count", [2, 4])
def test_shards_of_a_sequence(found, count):
    """Sums over ranks alone have another order: of the router's gradient, and what the second
    product of shared experts is."""
    for each in found[count]:
        assert len(each["in sequence"]) == 9
        for name, (alone, shared) in each["in sequence"].items():
            if name.startswith(("load", "experts")):
                assert torch.equal(alone, shared), name
            torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("count", [2, 4])
def test_other_uses(found, count):
    for each in found[count]:
        assert all(each["used"].values()), each["used"]


@pytest.mark.parametrize("count", [2, 4])
def test_bytes_that_travel(found, count):
    """Tokens quantized, and results; then the gradient, tokens again, and gradients of tokens."""
    for each in found[count]:
        low, high = pytest.approx(1.04, abs=0.02), pytest.approx(2)
        assert each["bytes"]["mxfp8 torch.bfloat16"] == [low, high, 0, high, high, high]
        low = pytest.approx(0.57, abs=0.02)
        assert each["bytes"]["frozen"] == [low, high, 0, low, high]


@pytest.mark.parametrize("count", [2, 4])
def test_one_rank_does_something_else(found, count):
    """It says why, the others name it, and none waits."""
    last = count - 1
    for rank, each in enumerate(found[count]):
        told = each["wrong"]
        assert told["operands"].startswith("ValueError: up" if rank == last else "PeerError")
        assert rank == last or f"rank {last} cannot go on" in told["operands"]
        for name in ("dtype", "gradients"):
            others = ", ".join(map(str, range(last))) if rank == last else str(last)
            assert f"rank {others} does something else than rank {rank}" in told[name], told[name]
        assert told["after that"] == "nothing"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("routing", "is of 4 groups, the weights of 8"),
        ("uneven", "give the mesh a number of ranks that divides it"),
        ("twice", "apply ExpertParallel once"),
        ("moe", 'name its experts in the plan: {"experts": ExpertParallel()}'),
        ("gate", 'name it in the plan: {"gate": GateParallel()}'),
        ("gate twice", "takes the gate of a blockscale.nn.MoE, once"),
        ("gate again", "cannot be differentiated again"),
        ("gate's mesh", 'give one of them, as mesh["tp"]'),
        ("linear", "got Linear; ExpertParallel takes the experts of"),
        ("mesh", 'give one of them, as mesh["ep"]'),
        ("main_grad", "delete main_grad"),
    ],
)
def test_bad_input(found, name, said):
    for each in found[2]:
        assert said in each["wrong"][name], each["wrong"][name]
