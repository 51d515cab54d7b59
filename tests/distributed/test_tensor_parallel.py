"""Linear layers whose weights ranks share: the same bits but for the order of sums."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tensor_ranks
import torch
import torch.distributed as dist
from observed import WRITES
from processes import gather
from tensor_ranks import BATCH, CASES, WIDE, make_block, parallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwiseParallel
from torch.distributed.tensor.parallel import parallelize_module

import blockscale as bs
from blockscale.distributed import (
    ColwiseParallel,
    RowwiseParallel,
    gather_quantized,
)
from blockscale.distributed.gathered_input import gather_input


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return gather(tensor_ranks.task, request.param, folder)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_one_process(found, name):
    """Outputs and gradients of inputs are sums over ranks; weights of the first layers, which read
    and multiply what one process does, have gradients of the same bits."""
    case = CASES[name][1]
    for compared, *_ in found:
        pairs = compared[name]
        for alone, shared in pairs:
            assert alone.shape == shared.shape
            assert (alone - shared).norm() <= 1e-5 * alone.norm()  # fp32 sums of 1e5 terms
        if case not in ("frozen", "precise", "routed", "normed"):
            gate, _, up, down = pairs[4:8]
            assert all(torch.equal(*pair) for pair in (gate, up, down))


def test_weights_are_gathered_quantized_over_another_dimension(found):
    """FSDP2 beside tensor parallelism: the losses are the same, with and without."""
    for _, trained, *_ in found:
        for plain, quantized in trained.values():
            assert plain == quantized
            assert plain[-1] < plain[0]


def test_bytes(found):
    """An input of two layers is gathered by rows for each, or once; so is it by columns; the
    gradient of the output by both: each in at most 0.52 of bfloat16's bytes."""
    for _, _, sent, _ in found:
        assert len(sent["sequence"]) == 6
        assert len(sent["shared"]) == 4
        for each in (*sent["sequence"], *sent["shared"]):
            assert each <= 0.52 * 2 * BATCH * 128 * WIDE


def test_other_recipes_are_told(found):
    """On every rank, where the layer is shared, or in the first gather."""
    for rank, (*_, said) in enumerate(found):
        assert len(said) == 2
        other = "rank 1 has" if rank == 0 else "rank 0 has"
        for sentence, what in zip(said, ("recipe: rank", "recipe of a weight: rank"), strict=True):
            assert sentence.startswith(f"{what} {rank} has")
            assert other in sentence


# --- one rank -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    where = f"file://{tmp_path_factory.mktemp('one')}/store"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def converted(wide: int = 64, recipe: str = "mxfp8") -> nn.Module:
    torch.manual_seed(0)
    return bs.convert(
        nn.Sequential(nn.Linear(wide, wide), nn.Linear(wide, wide)), bs.Recipe(recipe)
    )


@pytest.mark.parametrize("case", ["replicated", "sequence", "shared", "scattered"])
def test_one_rank_has_the_bits_of_none(mesh, case):
    device = torch.device("cpu")
    alone = make_block("mxfp8", case, device)
    block = parallel(copy.deepcopy(alone), case, mesh["tp"])
    x = torch.randn(2, 64, WIDE)
    with torch.no_grad():
        assert torch.equal(block(x), alone(x))
    pairs = zip(tensor_ranks.step(alone, x, x), tensor_ranks.step(block, x, x), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_empty_batch(mesh):
    block = parallel(make_block("mxfp8", "shared", torch.device("cpu")), "shared", mesh["tp"])
    x = torch.zeros(2, 0, WIDE, requires_grad=True)
    block(x).sum().backward()
    assert x.grad.shape == x.shape
    weight = block.mlp.up_proj.weight.grad.to_local()
    assert torch.equal(weight, torch.zeros_like(weight))


def test_state_is_of_dtensors(mesh):
    """Others load it; it is what torch's styles leave."""
    model = converted()
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    shared = parallelize_module(copy.deepcopy(model), mesh["tp"], plan)
    for name, value in shared.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), model.state_dict()[name])
    placements = [p.placements for p in shared.parameters()]
    assert placements == [(Shard(0),), (Shard(0),), (Shard(1),), (Replicate(),)]
    assert isinstance(shared[0], nn.Linear)
    assert "ColwiseParallel of 1 ranks" in repr(shared[0])


REFUSED: dict[str, Any] = {
    "device_mesh: has dimensions": (lambda m: m, {"0": ColwiseParallel()}, converted),
    "takes layers of blockscale.convert": (
        lambda m: m["tp"],
        {"0": ColwiseParallel()},
        lambda: nn.Sequential(nn.Linear(64, 64)),
    ),
    "out_features: 48 over 1 ranks cuts blocks of 32": (
        lambda m: m["tp"],
        {"0": ColwiseParallel()},
        lambda: converted(48),
    ),
    "in_features: 64 over 1 ranks cuts blocks of 128": (
        lambda m: m["tp"],
        {"0": RowwiseParallel()},
        lambda: converted(64, "fp8_block"),
    ),
    r"input_layouts: got S\(-1\)|input_layouts: got Shard": (
        lambda m: m["tp"],
        {"0": ColwiseParallel(input_layouts=Shard(-1))},
        converted,
    ),
    r"output_layouts: got S\(-1\)|output_layouts: got Shard": (
        lambda m: m["tp"],
        {"0": RowwiseParallel(output_layouts=Shard(-1))},
        converted,
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_at_start(mesh, message):
    of, plan, make = REFUSED[message]
    with pytest.raises((TypeError, ValueError), match=message):
        parallelize_module(make(), of(mesh), plan)


def test_refused_inputs(mesh):
    model = parallelize_module(
        converted(), mesh["tp"], {"0": ColwiseParallel(input_layouts=Shard(0))}
    )
    with pytest.raises(ValueError, match=r"expected .*K.*input_layouts"):
        model[0](torch.randn(8, 32))
    with pytest.raises(ValueError, match="is a DTensor with placements"):
        model[0](DTensor.from_local(torch.randn(8, 64), mesh["tp"], (Replicate(),)))
    with pytest.raises(ValueError, match="is the last"):
        model[0](torch.randn(64))
    with pytest.raises(TypeError, match=r"x: got torch.float64"):
        model[0](torch.randn(8, 64).double())


def test_dtensors_of_other_meshes_are_refused(mesh):
    model = parallelize_module(
        converted(), mesh["tp"], {"0": ColwiseParallel(input_layouts=Shard(0))}
    )
    with pytest.raises(ValueError, match="the layer is shared by"):
        model[0](DTensor.from_local(torch.randn(8, 64), mesh["dp"], (Shard(0),)))


def test_computed_weights_are_refused(mesh):
    model = converted()
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(TypeError, match="computes its weight"):
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(3),
        lambda x: nn.functional.relu(x, inplace=True),
        lambda x: x.__setitem__(0, 0),
        lambda x: x.__iadd__(1),
        torch.relu_,
    ],
)
def test_shared_inputs_are_not_written_to(mesh, write):
    x = gather_input(torch.randn(32, 64), 0, mesh["tp"].get_group())
    with pytest.raises(ValueError, match=r"cannot be written to.*x.clone"):
        write(x)


def test_inputs_that_are_not_contiguous(mesh):
    plan = {"0": ColwiseParallel(input_layouts=Shard(0))}
    alone = converted()
    model = parallelize_module(copy.deepcopy(alone), mesh["tp"], plan)
    x = torch.randn(64, 64).mT
    assert torch.equal(model[0](x), alone[0](x))


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_seen_inside_of_reuse_weights(mesh, name):
    model = parallelize_module(converted(), mesh["tp"], {"0": ColwiseParallel()})
    x = torch.randn(32, 64)
    with bs.reuse_weights():
        model[0](x)
        for _ in range(2):
            with torch.no_grad():
                WRITES[name](model[0].weight)
            found = model[0](x)
            alone = converted()
            with torch.no_grad():
                alone[0].weight.copy_(model[0].weight.to_local())
            assert torch.equal(found, alone[0](x))


def test_main_grad_is_refused(mesh):
    """It would stay as it is, as gradients of DTensors go to .grad."""
    model = parallelize_module(converted(), mesh["tp"], {"0": ColwiseParallel()})
    model[0].weight.main_grad = torch.zeros(64, 64)
    with pytest.raises(ValueError, match=r"weight.main_grad"):
        model(torch.randn(32, 64))


def test_gathered_first_is_refused(mesh):
    model = gather_quantized(converted())
    with pytest.raises(TypeError, match=r"gather_quantized.*after parallelize_module"):
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})


def test_shared_once(mesh):
    model = parallelize_module(converted(), mesh["tp"], {"0": ColwiseParallel()})
    with pytest.raises(TypeError, match=r"is shared already; apply one style, once"):
        parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})


def test_styles_of_torch_are_refused(mesh):
    """Whoever did not change the import is told what to import."""
    model = parallelize_module(converted(), mesh["tp"], {"0": TorchColwiseParallel()})
    with pytest.raises(TypeError, match=r"ColwiseParallel and .* of blockscale\.distributed"):
        model(torch.randn(32, 64))


def test_conversions_leave_it(mesh):
    """Another recipe has other blocks, which were looked at when the layer was shared."""
    model = parallelize_module(converted(), mesh["tp"], {"0": ColwiseParallel()})
    report = bs.nn.ConversionReport()
    bs.convert(model, bs.Recipe("fp8_block"), report=report)
    assert [entry.name for entry in report.left] == ["0"]
    assert (model[0].recipe, model[1].recipe) == (bs.Recipe("mxfp8"), bs.Recipe("fp8_block"))
    bs.convert(model, None, report=report)
    assert [entry.name for entry in report.left] == ["0"]
    assert type(model[1]) is nn.Linear


def test_copies(mesh):
    model = parallelize_module(converted(), mesh["tp"], {"0": ColwiseParallel()})
    x = torch.randn(32, 64)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
