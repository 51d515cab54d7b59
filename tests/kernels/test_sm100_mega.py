"""A mega MoE on Blackwell in the emulator: the bits of its steps, on ranks that run at once, in any
order, without a race."""

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from blockscale.cli.emulate_ranks import Case, Ranks, steps
from blockscale.kernels.common.gpu import Unsupported

MXFP8 = {"format": "mxfp8", "activations": "mxfp8"}
MIXED = {"format": "mxfp4", "activations": "mxfp8"}
SMALL = {"hidden": 128, "experts": 2}


def check(case: Case, **how: object) -> Ranks:
    ranks = Ranks(case, **how)
    for got, want in zip(ranks.launch(), steps(case), strict=True):
        assert torch.equal(got, want)
    assert [each.missing_rank for each in ranks.ranks] == [None] * case.sizes.ranks
    return ranks


@pytest.mark.parametrize(("tokens", "ctas", "completion"), [
    ((20,), 1, "late"), ((20,), 2, "eager"), ((20, 13), 1, "eager"), ((20, 13), 2, "late"),
    ((20, 13), 2, "random"),
])  # fmt: skip
def test_ranks(tokens, ctas, completion):
    case = Case(tokens, topk=1 + len(tokens), **SMALL)
    check(case, ctas=ctas, clusters=3 - ctas, completion=completion)


def test_four_ranks():
    """One of them without tokens."""
    check(Case((9, 0, 17, 4), hidden=128, experts=1), clusters=1, completion="random")


@pytest.mark.parametrize(("formats", "hidden", "intermediate"), [
    ({}, 512, 384), (MIXED, 128, 384), (MXFP8, 384, 256),
], ids=str)  # fmt: skip
def test_formats_and_sizes(formats, hidden, intermediate):
    """Sizes that are no multiple of a tile, and more than one K block."""
    check(Case((19, 6), experts=3, hidden=hidden, intermediate=intermediate, **formats))


@pytest.mark.parametrize("ctas", [1, 2])
def test_rings_that_are_used_again(ctas):
    """Six units of 128 rows, or of 256, in rings of four."""
    case = Case((300 * ctas,), ring=4 * ctas, **SMALL)
    check(case, ctas=ctas, clusters=3 - ctas, completion="late")


@pytest.mark.parametrize("seed", [0, 1])
def test_seeds(seed):
    case = Case((5, 3), hidden=128, experts=2, seed=seed, skewed=seed == 1)
    check(case, completion="random")


def test_launches_one_after_another():
    """Each counts in the set that the one before cleared; numbers of tokens and experts change."""
    cases = [
        Case(tokens, room=12, seed=seed, skewed=seed == 2, **SMALL)
        for seed, tokens in enumerate([(5, 3), (0, 12), (0, 0), (1, 9)])
    ]
    ranks = Ranks(cases[0])
    for case in cases:
        for got, want in zip(ranks.launch(case), steps(case), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come(absent):
    """The other one ends, and says who is missing; so does one that comes after that."""
    ranks = Ranks(Case((5, 3), **SMALL), limit=1e-4)
    got = ranks.launch(absent=[absent])
    assert ranks.ranks[1 - absent].missing_rank == absent
    assert got[1 - absent].isnan().all()
    got = ranks.launch(absent=[1 - absent])  # too late
    assert ranks.ranks[absent].missing_rank == 1 - absent
    assert got[absent].isnan().all()


def test_sizes_without_a_kernel():
    with pytest.raises(Unsupported, match="intermediate size 64: tiles and their scales want"):
        Ranks(Case(intermediate=64)).launch()
