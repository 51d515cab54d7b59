"""What has bitten users of other libraries, one test each, as far as it applies on a CPU.

Group sizes: test_gemm.py. Values that survive requantizing while 4% of the scales move:
test_properties.py. NaN semantics: test_numerics_table.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import blockscale as bs
from blockscale import ScaledTensor
from blockscale.layouts import layouts


def matrix(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("k", [2880, 96, 160])
@pytest.mark.parametrize("layout", ["compact", "tcgen05", "packed"])
def test_padding_scales_that_turn_into_nan(backend, k, layout):
    """TransformerEngine #3070 (K = 2880, 90 blocks in tiles of 4), #2547, #1945."""
    x = bs.quantize(matrix(130, k), layout=layout)
    w = bs.quantize(matrix(70, k, seed=1), layout=layout)
    used = 130 * (k // 32)
    stored = x.scale.flatten().view(torch.uint8)
    assert (stored == 0xFF).sum() == 0
    assert (stored != 0).sum() == used
    assert bs.gemm(x, w.mT).isfinite().all()


def test_one_nan_makes_one_row_nan(backend):
    """torchao #4725, TransformerEngine #3262: neither lost nor spread."""
    for bad in (torch.nan, torch.inf):
        x, w = matrix(64, 128), matrix(32, 128, seed=1)
        x[5, 40] = bad
        y = bs.gemm(bs.quantize(x, layout="tcgen05"), bs.quantize(w).mT)
        assert y[5].isnan().all()
        assert y[torch.arange(64) != 5].isfinite().all()


def test_shards_of_128_rows_are_slices_of_the_swizzled_scales(backend):
    """FSDP with swizzled scales (TransformerEngine #1188, #2370): other shards travel compact."""
    q = bs.quantize(matrix(512, 416))
    whole = q.to_layout("tcgen05").scale.view(torch.uint8)
    per_shard = layouts["tcgen05"].nbytes((128, 13))
    for i in range(4):
        shard = q[128 * i : 128 * (i + 1)].to_layout("tcgen05").scale.view(torch.uint8)
        assert torch.equal(shard, whole[i * per_shard : (i + 1) * per_shard])
    with pytest.raises(TypeError, match=r"use \.to_layout\('compact'\)"):
        q.to_layout("tcgen05")[:100]
    shards = [q[rows : rows + 100] for rows in range(0, 512, 100)]
    assert torch.equal(torch.cat([s.scale.view(torch.uint8) for s in shards]),
                       q.scale.view(torch.uint8))  # fmt: skip


def test_packed_scales_hold_exponents_only(backend):
    """sglang #25733: a pack that shifts fp32 scales lets mantissa bits into the next byte."""
    x = matrix(7, 256) * 1.37
    words = bs.quantize(x, layout="packed").scale
    scale = bs.quantize(x).scale.view(torch.uint8)
    for row in range(7):
        for block in range(8):
            word = words[block // 4, row].item() & 0xFFFFFFFF
            assert word >> 8 * (block % 4) & 0xFF == scale[row, block]


def test_unswizzled_scales_are_not_taken_for_swizzled_ones():
    """vllm #49335: scales left row-major after expert parallelism. Their shape tells them apart."""
    q = bs.quantize(matrix(128, 128))
    swizzled = q.to_layout("tcgen05")
    assert q.scale.numel() == swizzled.scale.numel() == 512
    for scale, layout in ((q.scale, "tcgen05"), (swizzled.scale, "compact")):
        with pytest.raises(ValueError, match=f"scale: got .* in layout '{layout}'"):
            ScaledTensor(q.qdata, scale, format="mxfp8", shape=(128, 128), layout=layout)


def test_masters_stay_in_high_precision():
    """Megatron-LM #6666: nothing that quantizes writes to what it quantized."""
    module = nn.Linear(64, 32, dtype=torch.bfloat16)
    master = copy.deepcopy(module.weight)
    for axis in (-1, -2):
        bs.quantize(module.weight, axis=axis)
    bs.quantize_both(module.weight)
    assert torch.equal(module.weight, master)
    assert module.weight.requires_grad
