"""Collectives of quantized tensors over processes: bytes of the whole tensor quantized at once."""

from __future__ import annotations

import gather_ranks
import pytest
import torch
from processes import gather

import blockscale as bs
from blockscale.distributed import all_gather


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    return gather(gather_ranks.run, request.param, tmp_path_factory.mktemp("ranks"))


def test_bytes_of_the_whole(found):
    for gathered, _ in found:
        assert gathered
        assert all(equal for equal, _ in gathered.values()), gathered


def test_bytes_that_travel(found):
    """Of bf16's two of an element, scales and what says what it is included."""
    for name, (_, each) in found[0][0].items():
        if "mxfp8" in name or "fp8_1" in name:
            assert each / 2 <= 0.52, name


def test_bad_input(found):
    for _, told in found:
        assert "this rank has dim=0, (128, 128)" in told["format"], told
        assert "this rank has dim=0, (128, 128)" in told["axis"], told
        assert "which ends inside a block of 32" in told["block"], told
        assert "expected a ScaledTensor" in told["plain"], told
        assert "call to_layout('compact')" in told["layout"], told
        assert told["global scales"] == "True"


def test_one_process():
    q = bs.quantize(torch.randn(32, 64), "mxfp8")
    assert all_gather(q) is q
