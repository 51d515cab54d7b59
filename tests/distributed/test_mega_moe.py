"""Experts over ranks: what one rank has alone, errors that reach every rank, and what travels."""

from __future__ import annotations

import copy
from unittest.mock import patch

import expert_ranks
import pytest
import torch
from expert_ranks import EXPERTS, FORMATS, HIDDEN, TOPK
from processes import gather

import blockscale as bs
from blockscale.distributed import MegaMoE
from blockscale.distributed.token_dispatch import dispatch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def alone():
    return expert_ranks.results(0, 1, CPU)


@pytest.fixture(scope="module", params=[2, 4])
def together(request, tmp_path_factory):
    """What each of so many ranks has found."""
    return gather(expert_ranks.run, request.param, tmp_path_factory.mktemp("ranks"))


def values(format: str, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor):
    """In fp64, of weights as they are quantized."""
    up, down = (w.dequantize(torch.float64) for w in expert_ranks.weights_of(format))
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for t in range(len(x)):
        for e, weight in zip(experts[t].tolist(), weights[t].double(), strict=True):
            if 0 <= e < EXPERTS:
                gate, rise = (up[e] @ x[t].double()).chunk(2)
                out[t] += weight * (down[e] @ (torch.nn.functional.silu(gate) * rise))
    return out


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(("format", "activations"), FORMATS)
def test_one_rank(alone, format, activations, skewed):
    given = expert_ranks.tokens_of(sum(expert_ranks.SHARES), skewed=skewed)
    want = values(format, *given)
    error = (alone[f"{format} {activations} {skewed}"].double() - want).norm() / want.norm()
    assert error < (0.2 if activations == "nvfp4" else 0.05)


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(("format", "activations"), FORMATS)
def test_ranks_have_what_one_has(alone, together, format, activations, skewed):
    """Of 0 to 57 tokens each, and all to one expert."""
    name = f"{format} {activations} {skewed}"
    assert torch.equal(torch.cat([rank["results"][name] for rank in together]), alone[name])


def test_every_rank_is_told(together):
    last = len(together) - 1
    for rank, found in enumerate(together):
        told = found["wrong"]
        assert told["tokens"] == (
            f"ValueError: tokens: rank 0 has 100, rank {last} 101; all ranks make it alike"
        )
        assert told["topk"].startswith(f"ValueError: topk: rank 0 has 2, rank {last} 3")
        assert told["format"].startswith(
            f"ValueError: weights: rank 0 has 'mxfp8', rank {last} 'mxfp4'"
        )
        cases = {
            "construction": (
                f"ValueError: topk: got 99; all ranks together have {EXPERTS} experts",
                f"PeerError: rank {last} cannot go on: topk: got 99",
            ),
            "too many": (
                "ValueError: x: has 5 tokens, more than tokens=4 of each rank",
                f"PeerError: rank {last} cannot go on and says why; rank {rank} stopped with it",
            ),
            "experts": (
                "TypeError: experts, weights: got torch.float32",
                f"PeerError: rank {last}",
            ),
        }
        for name, (mine, theirs) in cases.items():
            assert told[name].startswith(mine if rank == last else theirs), told[name]
        assert {told[each] for each in ("strides", "outside", "empty", "after that")} == {"nothing"}
        not_in_it = f"ValueError: group: rank {rank} is not in it"
        assert told["copy"] == "nothing"
        assert told["group"].startswith(not_in_it if rank else "nothing")


def test_a_token_travels_once(together):
    """To a rank that has several of its experts, and not to one that has none."""
    x, _, experts = expert_ranks.tokens_of(sum(expert_ranks.SHARES))
    own = EXPERTS // len(together)
    for rank, found in enumerate(together):
        mine = ((experts >= rank * own) & (experts < (rank + 1) * own)).any(1)
        assert torch.equal(found["rows"], x[mine])


def test_results_return():
    experts = torch.tensor([[0, 1, 3], [5, 9, -1], [2, 2, 0]])
    x = torch.arange(6.0).view(3, 2)
    tokens = dispatch((x,), experts, 4)
    assert torch.equal(tokens.parts[0], x[[0, 2]])
    assert torch.equal(tokens.experts, experts[[0, 2]].int())
    assert tokens.results_sent == tokens.results_received == [6]
    results = tokens.return_results(torch.arange(6.0).view(6, 1))
    got = results[tokens.pairs.slots.flatten()].view(3, 3)
    assert torch.equal(got, torch.tensor([[0.0, 1, 2], [0, 0, 0], [3, 4, 5]]))


def test_scales_of_activations():
    """One an expert or one in all; the largest of the first product's."""
    up, down = expert_ranks.weights_of("nvfp4")
    x, weights, experts = expert_ranks.tokens_of(20)
    how = {"tokens": 20, "topk": TOPK}
    every = 2.0 ** -(torch.arange(EXPERTS) % 3 + 1.0)
    each = MegaMoE(up, down, **how, a1_scale=every, a2_scale=every)
    for expert in range(EXPERTS):
        one = MegaMoE(up, down, **how, a1_scale=0.5, a2_scale=float(every[expert]))
        alone = torch.where(experts == expert, experts, -1)
        assert torch.equal(each(x, weights, alone), one(x, weights, alone))
    assert MegaMoE(up, down, **how).a2_scale == 1


def test_refused():
    up, down = expert_ranks.weights_of("mxfp8")
    how = {"tokens": 4, "topk": TOPK}
    wrong = {
        "up: got Tensor; expected a ScaledTensor": (up.dequantize(), down),
        r"up, down: got .*expected \(experts, 2": (down, up),
        "one format and device": (up, bs.quantize(down.dequantize(), "mxfp4")),
        "blocked along -1": (bs.quantize(up.dequantize(), "mxfp8", -2), down),
    }
    for sentence, pair in wrong.items():
        with pytest.raises((TypeError, ValueError), match=sentence):
            MegaMoE(*pair, **how)
    with pytest.raises(ValueError, match=r"activations \(of mxfp8 weights\): got 'nvfp4'"):
        MegaMoE(up, down, **how, activations="nvfp4")
    with pytest.raises(ValueError, match="a1_scale: mxfp8 activations have none"):
        MegaMoE(up, down, **how, a1_scale=1.0)
    with pytest.raises(ValueError, match=r"a2_scale: got 0\.0; expected positive"):
        MegaMoE(*expert_ranks.weights_of("nvfp4"), **how, a2_scale=0.0)
    moe = MegaMoE(up, down, **how)
    x, weights, experts = expert_ranks.tokens_of(4)
    with pytest.raises(ValueError, match=r"x: got \(4, 64\); expected \(tokens, 128\)"):
        moe(x[:, :64], weights, experts)
    with pytest.raises(ValueError, match=r"expected \(4, 3\)"):
        moe(x, weights, experts[:, :2])
    for count in (EXPERTS - 1, EXPERTS + 1):
        with pytest.raises(ValueError, match=f"a routing of {count} experts, all ranks have 8"):
            moe(x, weights, bs.route(experts, count))
    assert torch.equal(moe(x, weights, bs.route(experts, EXPERTS)), moe(x, weights, experts))
    with pytest.raises(ValueError, match=r"activations .*got ''"):
        MegaMoE(up, down, **how, activations="")
    with pytest.raises(TypeError, match="a2_scale: got 'x'; expected a number"):
        MegaMoE(*expert_ranks.weights_of("nvfp4"), **how, a2_scale="x")
    with pytest.raises(TypeError, match="a gradient is asked for"):
        moe(x.requires_grad_(), weights, experts)


def test_in_a_layer():
    """In the place of the experts of a MoE, whose router and shared experts stay."""
    torch.manual_seed(0)
    layer = bs.nn.MoE(128, 64, 8, bs.nn.Router(top_k=2), shared_size=64, dtype=torch.bfloat16)
    layer.eval()
    x = torch.randn(4, 10, 128).bfloat16()
    with torch.no_grad():
        want = layer(x)
        held = layer.experts
        up, down = (bs.quantize(w.detach()) for w in (held.gate_up_proj, held.down_proj))
        layer.experts = MegaMoE(up, down, tokens=40, topk=2)
        got = layer(x)
    assert torch.equal(got, want)  # a recipe of mxfp8 quantizes the same


def test_kept_and_moved(tmp_path):
    up, down = expert_ranks.weights_of("nvfp4")
    moe = MegaMoE(up, down, tokens=4, topk=TOPK, a1_scale=0.5)
    torch.save(moe.state_dict(), tmp_path / "moe.pt")
    other = MegaMoE(*(torch.empty_like(w) for w in (up, down)), tokens=4, topk=TOPK)
    other.load_state_dict(torch.load(tmp_path / "moe.pt"))
    given = expert_ranks.tokens_of(4)
    assert torch.equal(moe(*given), other(*given))
    assert "weights=nvfp4" in str(moe)
    want = moe(*given)
    half = copy.deepcopy(moe).half()
    assert torch.equal(half(*given), want)
    assert half.a1_scale.dtype == torch.float32
    meta = moe.to("meta")
    assert {each.device.type for each in (meta.up, meta.down, meta.a1_scale)} == {"meta"}
    again = meta.to_empty(device="cpu")
    again.load_state_dict(other.state_dict())
    assert torch.equal(again(*given), want)


def test_numbers_of_no_expert():
    """Also those whose low 32 bits are a number of one."""
    x, weights, experts = expert_ranks.tokens_of(3)
    moe = MegaMoE(*expert_ranks.weights_of("mxfp8"), tokens=3, topk=TOPK)
    want = moe(x, weights, experts.masked_fill(experts == experts[0, 0], -1))
    for outside in (2**32, 2**32 + 1, -(2**32), -(2**63), 2**31, EXPERTS):
        given = experts.masked_fill(experts == experts[0, 0], outside)
        assert torch.equal(moe(x, weights, given), want)


def test_scales_are_its_own():
    up, down = expert_ranks.weights_of("nvfp4")
    given, scale = expert_ranks.tokens_of(3), torch.tensor(0.25)
    moe = MegaMoE(up, down, tokens=3, topk=TOPK, a1_scale=scale, a2_scale=scale)
    want = moe(*given)
    scale.fill_(1e-6)
    assert torch.equal(moe(*given), want)
    torch.set_default_dtype(torch.bfloat16)
    try:
        other = MegaMoE(up, down, tokens=3, topk=TOPK, a1_scale=0.25, a2_scale=0.25)
        assert torch.equal(other(*given), want)
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_is_loaded_stays_apart():
    """Also where both weights were quantized with one tensor of a global scale."""
    up, down = (w.dequantize() for w in expert_ranks.weights_of("nvfp4"))
    one, how = torch.tensor(0.01), {"tokens": 4, "topk": TOPK}
    moe = MegaMoE(*(bs.quantize(w, "nvfp4", global_scale=one) for w in (up, down)), **how)
    other = MegaMoE(bs.quantize(up, "nvfp4"), bs.quantize(3 * down, "nvfp4"), **how)
    moe.load_state_dict(other.state_dict())
    given = expert_ranks.tokens_of(4)
    assert torch.equal(moe(*given), other(*given))


def small(format: str) -> tuple[MegaMoE, list[torch.Tensor]]:
    shapes = (4, 256, 128), (4, 128, 128)
    up, down = (bs.quantize(torch.randn(shape) / 8, format) for shape in shapes)
    given = [torch.randn(20, 128).bfloat16(), torch.rand(20, 2), torch.randint(4, (20, 2))]
    return MegaMoE(up, down, tokens=20, topk=2), given


def test_other_ranks_than_it_was_made_by():
    """Where a group is gone, or came later, its experts would be others."""
    moe, given = small("mxfp8")
    where = "blockscale.distributed.mega_moe.rank_and_ranks"
    with (
        patch(where, lambda group: (0, 2)),
        pytest.raises(ValueError, match="was made by 1 ranks, and there are 2 now"),
    ):
        moe(*given)


@pytest.mark.parametrize("format", ["fp8_128x128", "mxfp8", "nvfp4"])
@torch.no_grad()
def test_compiled(format):
    """It is called as it is, with any number of tokens."""
    moe, given = small(format)
    compiled = torch.compile(moe)
    for count in (20, 13, 1, 0):
        some = [each[:count] for each in given]
        assert torch.equal(compiled(*some), moe(*some))
