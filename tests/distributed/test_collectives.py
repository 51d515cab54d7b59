"""Collectives of quantized tensors over processes: bytes of the whole tensor quantized at once."""

from __future__ import annotations

import collective_ranks
import pytest
import torch
from processes import gather

import blockscale as bs
from blockscale.distributed import all_gather, all_to_all
from blockscale.distributed.collectives import _or_nan


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    return gather(collective_ranks.run, request.param, tmp_path_factory.mktemp("ranks"))


def test_bytes_of_the_whole(found):
    for each in found:
        gathered = each["gathered"]
        assert len(gathered) == 4 * (6 + 2)
        assert all(equal for equal, _ in gathered.values()), gathered


def test_bytes_that_travel(found):
    """Of bf16's two of an element, scales and what says what it is included."""
    for name, (_, each) in found[0]["gathered"].items():
        if "mxfp8" in name or "fp8_1" in name:
            assert each / 2 <= 0.52, name


def test_bad_input(found):
    for told in (each["wrong"] for each in found):
        assert "this rank has dim=0, (128, 128)" in told["format"], told
        assert "this rank has dim=0, (128, 128)" in told["axis"], told
        assert all(f"128), {each} after {each}" in told["order"] for each in ("row", "column")), (
            told
        )
        assert "which ends inside a block of 32" in told["block"], told
        assert "expected a ScaledTensor" in told["plain"], told
        assert "call to_layout('compact')" in told["layout"], told
        assert told["global scales"] == "True"
        assert "first: (128, 128)" in told["name"], told
        assert "last: (128, 128)" in told["name"], told


def test_products_of_gathered_rows_and_their_tiles(found):
    for same in (each["multiplied"] for each in found):
        assert len(same) == 3 + 4
        assert all(same.values()), same


def test_bad_input_of_products(found):
    for told in (each["wrong"] for each in found):
        assert "a, b: rank" in told["product: rows"], told
        assert "has (128, 128, 'mxfp8', 'mxfp8'" in told["product: rows"], told
        assert "expected (M, K) @ (K, N)" in told["product: inner"], told
        assert "expected a ScaledTensor" in told["product: high precision"], told
        assert "a is on cpu: the kernel runs on CUDA devices" in told["product: kernel"], told


def test_rows_that_are_exchanged(found):
    for each in found:
        assert len(each["exchanged"]) == 5
        assert all(each["exchanged"].values()), each["exchanged"]


def test_bad_input_of_exchanges(found):
    for told in (each["wrong"] for each in found):
        assert "rows: this rank has 128 columns" in told["exchange: formats"], told
        assert "in all; rows has" in told["exchange: sizes"], told
        assert "quantize it with axis=-1" in told["exchange: columns"], told
        assert told["exchange: global scales"] == "True"


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "fp8_1x128", "fp8_128x128"])
def test_what_has_another_name_is_nan_on_a_gpu(format):
    """Where the host does not wait to tell."""
    q = bs.quantize(torch.randn(128, 128), format)
    same, other = (_or_nan(q, torch.tensor(known)) for known in (True, False))
    assert torch.equal(same.dequantize(), q.dequantize())
    assert other.dequantize().isnan().all()


def test_one_process():
    q = bs.quantize(torch.randn(32, 64), "mxfp8")
    assert all_gather(q) is q
    with pytest.raises(TypeError, match="dim: got 'tp'; expected an int"):
        all_gather(q, "tp")
    assert all_to_all(q, [32], [32]) is q
    with pytest.raises(TypeError, match="expected a ScaledTensor"):
        all_to_all(torch.randn(4, 64), [4], [4])
    with pytest.raises(ValueError, match="there are 1 ranks"):
        all_to_all(q, [16, 16], [16, 16])
