"""DTensors whose shards are ScaledTensors: their bytes are those of the whole quantized at once."""

from __future__ import annotations

import dtensor_ranks
import pytest
import torch
import torch.distributed as dist
from processes import gather
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import blockscale as bs
import blockscale.distributed


@pytest.mark.parametrize("ranks", [2, 4])
def test_placements(ranks, tmp_path):
    for found in gather(dtensor_ranks.task, ranks, tmp_path):
        assert len(found) == 131
        assert [name for name, same in found.items() if not same] == []


@pytest.fixture
def mesh(tmp_path):
    where = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_products_take_the_local_tensor(mesh):
    w, x = torch.randn(64, 128), torch.randn(8, 128)
    whole = DTensor.from_local(bs.quantize(w, "mxfp8"), mesh, (Shard(0),)).full_tensor()
    a = bs.quantize(x, "mxfp8")
    assert torch.equal(bs.gemm(a, whole.mT), bs.gemm(a, bs.quantize(w, "mxfp8").mT))
