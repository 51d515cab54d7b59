"""Layers whose weights ranks share, compiled: one graph, with the bits of layers as they are."""

from __future__ import annotations

import compiled_parallel_ranks as ranks
import pytest
import torch
import torch.distributed as dist
from processes import gather

import blockscale as bs
from blockscale.distributed import functional_collectives, shard_ops

OPS = torch.ops.blockscale


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return gather(ranks.task, 2, tmp_path_factory.mktemp("ranks"))


def same(pairs):
    return [torch.equal(*pair) for pair in pairs]


@pytest.mark.parametrize("name", ranks.CASES)
def test_one_graph_has_the_bits_of_none(found, name):
    """Outputs, and gradients of inputs and parameters, of steps between which weights change."""
    for blocks, *_ in found:
        pairs = blocks[name]
        assert all(same(pairs))
        first, second = pairs[0][1], pairs[len(pairs) // ranks.STEPS][1]
        assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ranks.BACKENDS)
def test_backends(found, name):
    """They have the same bits; rows of the input are gathered quantized in the forward, its columns
    and both of the gradient in the backward; and until then the shard's columns are kept."""
    size = ranks.BATCH * ranks.LENGTH * ranks.WIDE
    for _, layers, *_ in found:
        pairs, (forward, backward), kept = layers[name]
        assert all(same(pairs))
        assert (len(forward), len(backward)) == (1, 3)
        assert max(forward + backward) <= (0.52 if name == "mxfp8" else 0.29) * 2 * size
        plain = [count for dtype, count in kept if dtype == torch.float32 and count > 1]
        assert plain == 2 * [512 * ranks.WIDE // 2]  # weights
        packed = 2 if name == "nvfp4" else 1
        assert sorted(kept_of(kept))[-2:] == [size // packed, 2 * size // packed]


def kept_of(kept):
    return [count for dtype, count in kept if dtype != torch.float32]


@pytest.mark.parametrize("name", ["module", "layers", "broken"])
def test_graphs_that_end_between(found, name):
    """Layers in another graph than what they share: the sums have another order, no more."""
    for _, _, alone, *_ in found:
        for want, got in alone[name]:
            assert (want - got).norm() <= 1e-6 * want.norm()
        if name == "layers":  # called as they are
            assert all(same(alone[name]))


@pytest.mark.parametrize("name", ranks.WRITES)
def test_writes_to_what_layers_share(found, name):
    for *_, writes, _, _ in found:
        assert all(same(writes[name]))


def test_writes_to_what_a_backward_reads_are_refused(found):
    for *_, said, _ in found:
        assert len(said) == 2
        assert all("modified by an in-place operation; write to a copy" in each for each in said)


@pytest.mark.parametrize("name", ranks.SHARDED)
def test_fsdp_beside_it(found, name):
    for *_, losses in found:
        want, *graphs = losses[name]
        assert graphs == [want, want]
        assert len(set(want)) == len(want)


# --- ops, of one rank -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    where = f"file://{tmp_path_factory.mktemp('one')}/store"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield functional_collectives.name_of(None)
    dist.destroy_process_group()


def test_opcheck_plain(group):
    x = torch.randn(2, 6, 4)
    for dim in (0, 1):
        for op in (OPS.gather_shards, OPS.scatter_sum, OPS.take_shard):
            torch.library.opcheck(op.default, (x, dim, 1, group))
            assert torch.equal(op(x, dim, 1, group), x)
    for how in ("sum", "max"):
        torch.library.opcheck(OPS.reduce_over_ranks.default, (x.mT, how, group))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "compact") for name in ("mxfp8", "nvfp4", "fp8_1x128")] + [("mxfp8", "tcgen05")],
)
def test_opcheck_gather_scaled(group, name, layout, axis):
    q = bs.quantize(torch.randn(256, 128), name, axis, layout=layout)
    how = name, [256, 128], axis, layout, q.dtype
    given = q.qdata, q.qscale, q.global_scale, *how, 256, 1, group
    torch.library.opcheck(OPS.gather_scaled.default, given, test_utils="test_faketensor")
    whole = shard_ops.gather_operand(q, 256, 1, group)
    assert torch.equal(whole.dequantize(), q.dequantize())
