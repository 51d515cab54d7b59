"""What a ScaledTensor refuses: always with a sentence that names the remedy, never half done."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import blockscale as bs
from blockscale import ScaledTensor

REMEDY = r"call \.dequantize\(\) first \(and blockscale\.quantize the result\), or blockscale\.gemm"


def make(*shape, **kwargs):
    x = torch.randn(shape or (64, 128), generator=torch.Generator().manual_seed(0))
    return bs.quantize(x.to(torch.bfloat16), **kwargs)


def plain():
    return torch.ones(64, 128, dtype=torch.bfloat16)


ARITHMETIC = {
    "q + 1": lambda q: q + 1,
    "1 + q": lambda q: 1 + q,
    "q + q": lambda q: q + q,
    "q + tensor": lambda q: q + plain(),
    "tensor + q": lambda q: plain() + q,
    "q * 2": lambda q: q * 2,
    "-q": lambda q: -q,
    "q == q": lambda q: q == q,
    "abs": torch.abs,
    "sum": torch.sum,
    "mean": lambda q: q.mean(0),
    "amax": lambda q: q.amax(),
    "isnan": torch.isnan,
    "softmax": lambda q: q.softmax(-1),
    "q @ q.mT": lambda q: q @ q.mT,
    "tensor @ q": lambda q: plain().mT @ q,
    "F.linear": lambda q: F.linear(plain(), q),
    "where": lambda q: torch.where(plain() > 0, q, q),
    "index": lambda q: q[torch.tensor([0, 1])],
    "mask": lambda q: q[plain() > 0],
    "gather": lambda q: q.gather(0, torch.zeros(1, 128, dtype=torch.int64)),
    "expand": lambda q: q.expand(2, 64, 128),
    "roll": lambda q: q.roll(1),
    "zeros_like": torch.zeros_like,
    "view as int16": lambda q: q.view(torch.int16),
    "dropout": lambda q: F.dropout(q, 0.5),
    "norm": lambda q: q.norm(),
    "out= into it": lambda q: torch.add(plain(), 1, out=q),
    "ones_like": torch.ones_like,
    "new_empty": lambda q: q.new_empty(3),
    "new_zeros": lambda q: q.new_zeros(3),
    "embedding": lambda q: F.embedding(torch.tensor([0]), q),
}
IN_PLACE = {
    "add_": lambda q: q.add_(1),
    "mul_": lambda q: q.mul_(2),
    "zero_": lambda q: q.zero_(),
    "fill_": lambda q: q.fill_(1),
    "normal_": lambda q: q.normal_(),
    "clamp_": lambda q: q.clamp_(-1, 1),
    "q += 1": lambda q: q.__iadd__(1),
    "q[0:1] = 0": lambda q: q.__setitem__(slice(0, 1), 0),
    "resize_": lambda q: q.resize_(2, 2),
    "index_add_": lambda q: q.index_add_(0, torch.tensor([0]), plain()[:1]),
}


@pytest.mark.parametrize("what", ARITHMETIC)
def test_arithmetic(what):
    with pytest.raises(ValueError, match=REMEDY) as refused:
        ARITHMETIC[what](make())
    assert "behind" not in str(refused.value)  # most of these would write nothing
    assert "filter_fn of blockscale.quantize_" in str(refused.value)


@pytest.mark.parametrize("what", IN_PLACE)
def test_in_place(what):
    q, before = make(), make()
    with pytest.raises(ValueError, match=REMEDY):
        IN_PLACE[what](q)
    assert torch.equal(q, before)


def test_copying_values_into_it():
    q, before = make(), make()
    for source in (plain(), plain().float(), make(format="mxfp8_e5m2"), make(layout="tcgen05")):
        with pytest.raises(
            TypeError, match=r"copy_: .* can be overwritten as a whole by a ScaledT"
        ):
            q.copy_(source)
    assert torch.equal(q, before)
    q.copy_(make(64, 128))
    with pytest.raises(TypeError, match="copy_"):
        q[0:2].copy_(plain()[0:2])
    assert torch.equal(q, before)


def test_copying_it_into_a_plain_tensor():
    with pytest.raises(TypeError, match=r"copy_: .*dequantize\(\)"):
        plain().copy_(make())


@pytest.mark.parametrize("index", [
    (slice(None), slice(3, 5)), (slice(None), slice(0, 33)), (slice(None), slice(16, 48)),
    (slice(None), slice(-31, None)),
], ids=str)  # fmt: skip
def test_slicing_through_a_block(index):
    with pytest.raises(
        TypeError, match=r"slice: .* cuts through blocks of 32; slice at multiples of 32"
    ):
        make()[index]
    with pytest.raises(TypeError, match="cuts through blocks of 32"):
        make(axis=-2).mT[index]


def test_slicing_through_128_rows():
    q = make(256, 256, format="fp8_128x128")
    with pytest.raises(TypeError, match="cuts through blocks of 128"):
        q[0:64]


def test_slices_with_steps_or_of_swizzled_scales():
    with pytest.raises(TypeError, match=r"slice: .*step 1"):
        make()[::2]
    with pytest.raises(TypeError, match=r"slice: .*use \.to_layout\('compact'\)"):
        make(layout="tcgen05")[:32]


@pytest.mark.parametrize("index", [0, -1, (0, 0), (slice(None), 0), (Ellipsis, 5)], ids=str)
def test_one_row_or_column(index):
    with pytest.raises(TypeError, match=r"select: .*use \.dequantize\(\)\[\.\.\.\]"):
        make()[index]


@pytest.mark.parametrize("shape", [(128, 64), (-1,), (64, 4, 32), (32, 256)], ids=str)
def test_views_that_move_the_contraction(shape):
    with pytest.raises(TypeError, match=r"view: .*must stay 128: reshape before quantizing"):
        make().view(shape)


def test_a_flat_view_says_where_the_values_are():
    with pytest.raises(TypeError, match=r"\.dequantize\(\)\.flatten\(\)\. Where Distributed"):
        make().reshape(-1)


@pytest.mark.parametrize("kwargs", [
    {"axis": -2}, {"layout": "tcgen05"}, {"format": "fp8_128x128"},
    {"offsets": torch.tensor([64], dtype=torch.int32)},
], ids=str)  # fmt: skip
def test_views_of_what_cannot_be_reshaped(kwargs):
    with pytest.raises(TypeError, match=r"view: .*reshape before quantizing"):
        make(128, 128, **kwargs).view(2, 64, 128)


@pytest.mark.parametrize("shape", [(5, 128), (65, 128), (0, 128), (-1, -1, 128)], ids=str)
def test_views_of_the_wrong_size(shape):
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        make().view(shape)


def test_numpy_and_bool():
    for convert in (lambda q: q.numpy(), lambda q: q.tolist(), bool):
        with pytest.raises(RuntimeError):
            convert(make())


# --- the constructor ------------------------------------------------------------------------------


def rebuild(q, **changes):
    parts = {
        "data": q.qdata, "scale": q.scale, "format": q.format, "shape": q.shape, "axis": q.axis,
        "global_scale": q.global_scale, "layout": q.scale_layout,
    }  # fmt: skip
    return ScaledTensor(**{**parts, **changes})


def test_finished_parts():
    for q in (make(), make(format="nvfp4", layout="tcgen05"), make(128, 128, axis=-2)):
        assert torch.equal(rebuild(q), q)
        assert torch.equal(rebuild(q, shape=[np.int64(n) for n in q.shape]), q)


@pytest.mark.parametrize(("changes", "message"), [
    ({"shape": (64, 96)}, r"data: got \(64, 128\) .*stores \(64, 96\) along axis -1 as \(64, 96\)"),
    ({"data": torch.zeros(64, 128)}, r"data: got .*float32; 'mxfp8' stores"),
    ({"data": torch.zeros(64, 128, dtype=torch.float8_e5m2)}, "data: got .*float8_e5m2; "),
    ({"scale": torch.ones(64, 4)}, r"scale: got \(64, 4\) torch.float32; .* layout 'compact'"),
    ({"scale": torch.ones(64, 3).to(torch.float8_e8m0fnu)}, r"scale: got \(64, 3\)"),
    ({"scale": torch.ones(64, 3, dtype=torch.uint8)}, r"is \(64, 4\) .*e8m0fnu or torch.u"),
    ({"layout": "tcgen05"}, r"scale: got .* in layout 'tcgen05'"),
    ({"layout": "mine"}, r"layout: got 'mine'; choose one of 'compact'"),
    ({"format": "mxfp9"}, r"format: got 'mxfp9'; choose one of 'mxfp8'"),
    ({"format": "mxfp8_e5m2"}, "data: got .*float8_e4m3fn; 'mxfp8_e5m2' stores"),
    ({"format": "nvfp4"}, "global_scale: format 'nvfp4' needs global_scale"),
    ({"global_scale": torch.tensor(1.0)}, "global_scale: format 'mxfp8' has no global_scale"),
    ({"axis": 0}, r"axis .*: got '?0'?; choose one of '?-1'?, '?-2'?"),
    ({"axis": -2}, "scale: got"),
    ({"scale": torch.ones(64, 4, device="meta").to(torch.float8_e8m0fnu)}, "is on meta, data on"),
])  # fmt: skip
def test_parts_that_do_not_belong_together(changes, message):
    with pytest.raises(ValueError, match=message):
        rebuild(make(), **changes)


@pytest.mark.parametrize(("changes", "message"), [
    ({"dtype": torch.int32}, r"dtype: got torch\.int32, .*choose torch\.float32, bfloat16"),
    ({"dtype": "bfloat16"}, r"dtype: got bfloat16, .*choose torch\.float32, bfloat16"),
    ({"shape": "ab"}, r"shape: got 'ab'; expected the sizes of a tensor, as \(256, 512\)"),
    ({"shape": 64}, r"shape: got 64; expected the sizes"),
    ({"shape": (-64, 128)}, r"shape: got \(-64, 128\); expected the sizes"),
    ({"shape": (64, 128.0)}, r"shape: got \(64, 128\.0\); expected the sizes"),
    ({"data": [1.0]}, r"data: got list; expected a torch\.Tensor"),
    ({"scale": None}, r"scale: got NoneType; expected a torch\.Tensor"),
])  # fmt: skip
def test_parts_of_another_type(changes, message):
    q = make()
    parts = {"data": q.qdata, "scale": q.scale, "format": "mxfp8", "shape": q.shape}
    with pytest.raises(TypeError, match=message):
        ScaledTensor(**{**parts, **changes})


def test_global_scale_that_is_no_fp32_scalar():
    q = make(format="nvfp4")
    for wrong in (torch.ones(2), torch.tensor(1.0, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"global_scale: got .*; expected an fp32 scalar"):
            rebuild(q, global_scale=wrong)


def test_layouts_hold_one_matrix():
    q = make(2, 64, 128)
    with pytest.raises(ValueError, match="layout: 'tcgen05' stores the scales of one matrix"):
        q.to_layout("tcgen05")
    with pytest.raises(ValueError, match=r"layout: got 'blocked'; choose one of 'compact'"):
        q.to_layout("blocked")


def test_dequantize_to_no_float():
    for dtype in (torch.int32, torch.float8_e4m3fn, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match=r"dtype: got .*; choose torch\.float32, bfloat16"):
            make().dequantize(dtype)
