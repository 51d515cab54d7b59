"""Scales of blocks that are chosen by more than the largest element, by arithmetic in fp64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.hadamard import transformed

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def random(*shape, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp(spread * torch.randn(shape, generator=generator))


def nearest(x, dtype, largest):
    return np.clip(x, -largest, largest).astype(np.float32).astype(dtype).astype(np.float64)


def squared_error(block, scale):
    """In units of the global scale; of values that the scale stands for."""
    if not scale:
        return np.square(block).sum()
    return np.square(nearest(block / scale, E2M1, 6) * scale - block).sum()


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("square", [False, True])
def test_four_over_six_takes_the_better_scale(axis, square):
    x = random(128, 192)
    if square:  # of random numbers nearly all have so many small ones that 6 is better
        x = x.sign() * (1 - 0.4 * torch.rand(x.shape, generator=torch.Generator().manual_seed(1)))
        x[:, ::7] *= 0.1
    q = bs.quantize(x, "nvfp4", axis, square=square, scaling="four_over_six")
    assert float(q.global_scale) == pytest.approx(float(x.abs().max()) / (6 * 256), rel=1e-6)
    given = x.double().numpy() / float(q.global_scale)
    scales = q.scale.float().double().numpy()
    given, scales = (given, scales) if axis == -1 else (given.T, scales.T)
    rows = 16 if square else 1
    fours = 0
    for i in range(0, given.shape[0], rows):
        for j in range(given.shape[1] // 16):
            block = given[i : i + rows, 16 * j :][:, :16]
            six, four = (nearest(np.abs(block).max() / n, E4M3, 448) for n in (6, 4))
            errors = squared_error(block, six), squared_error(block, four)
            if np.isclose(*errors, rtol=1e-4):
                continue  # fp32 may see it otherwise
            assert (scales[i : i + rows, j] == (four if errors[1] < errors[0] else six)).all()
            fours += errors[1] < errors[0]
    assert fours > 5


@pytest.mark.parametrize(("seed", "power"), [(3, 1086877867), (7, 1082417253), (12, 1084650590)])
def test_both_axes_of_a_square_agree(seed, power):
    """Also where errors are alike but for the last bits of their sums; ``power`` is fp32 bits."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.rand(16, 16, generator=generator).double()
    sign = torch.randn(16, 16, generator=generator).sign()
    magnitude[0, 0] = 1
    near = torch.arange(power - 40, power + 40, dtype=torch.int32).view(torch.float32)
    x = torch.cat([sign * magnitude ** float(each) for each in near], -1).float()
    given = {"square": True, "scaling": "four_over_six", "global_scale": 1 / 256}
    rows, columns = (bs.quantize(x, "nvfp4", axis, **given) for axis in (-1, -2))
    assert torch.equal(rows.dequantize(), columns.dequantize())
    assert rows.qscale[0].view(torch.uint8).unique().numel() == 2


def test_four_over_six_loses_less():
    x = random(256, 512)
    lost = [
        float((bs.quantize(x, "nvfp4", scaling=scaling).dequantize() - x).square().sum())
        for scaling in ("amax", "four_over_six")
    ]
    assert lost[1] < 0.96 * lost[0]


def ms_eden(x, seed, size=128):
    how = {"hadamard": bs.Hadamard.random(seed, size), "seed": seed, "scaling": "ms_eden"}
    return bs.quantize(x, "nvfp4", **how)


@pytest.mark.parametrize("size", [16, 128])
def test_ms_eden_has_the_length_along_what_it_was(size):
    """In the mean over how scales are rounded."""
    x, signs = random(8, 512), bs.Hadamard.random(3, size)
    exact = transformed(x, signs, -1).reshape(8, -1, size)
    along = torch.zeros(8, 512 // size)
    for seed in range(400):
        q = bs.quantize(x, "nvfp4", hadamard=signs, seed=seed, scaling="ms_eden")
        along += (q.dequantize().reshape(exact.shape) * exact).sum(-1) / 400
    assert torch.allclose(along, exact.square().sum(-1), rtol=1e-2)


def test_ms_eden_rounds_scales_up_or_down_by_one():
    x, signs = random(64, 512), bs.Hadamard.random(3, 128)
    found = [
        bs.quantize(x, "nvfp4", hadamard=signs, seed=seed, scaling="ms_eden") for seed in range(8)
    ]
    assert len({tuple(q.qdata.flatten().tolist()) for q in found}) == 1
    scales = torch.stack([q.qscale.view(torch.uint8).int() for q in found])
    spread = scales.amax(0) - scales.amin(0)
    assert spread.max() == 1
    assert spread.float().mean() > 0.5


def test_ms_eden_is_unbiased_and_loses_less_than_stochastic_rounding():
    x = random(64, 512)
    inverse, one, total = bs.Hadamard(128), [], {"ms_eden": 0, "amax": 0}
    for seed in range(64):
        signs = bs.Hadamard.random(seed, 128)
        sign = torch.tensor([-1.0 if signs.signs >> i & 1 else 1.0 for i in range(128)]).repeat(4)
        for scaling in total:
            q = bs.quantize(x, "nvfp4", hadamard=signs, seed=seed, scaling=scaling)
            back = transformed(q.dequantize(), inverse, -1) * sign
            one.append(float((back - x).norm()))
            total[scaling] = total[scaling] + back / 64
    eden, stochastic = one[::2], one[1::2]
    assert max(eden) < 0.8 * min(stochastic)
    assert float((total["ms_eden"] - x).norm()) < 1.3 * eden[0] / 8


@pytest.mark.parametrize("scaling", ["four_over_six", "ms_eden"])
def test_nasty_blocks(scaling):
    x = random(16, 256)
    x[0, 3], x[1, 130], x[2, :128] = float("nan"), float("inf"), 0
    x[3] *= 1e-30
    how = {"hadamard": bs.Hadamard(128), "seed": 1} if scaling == "ms_eden" else {}
    q = bs.quantize(x, "nvfp4", scaling=scaling, **how).dequantize()
    bad = 8 if scaling == "ms_eden" else 1  # blocks of a transform
    scale_nan = q.isnan()
    assert scale_nan[0].sum() == scale_nan[1].sum() == 16 * bad
    assert not scale_nan[2:].any()
    assert not q[2, :128].any()
    zeros = bs.quantize(torch.zeros(2, 128), "nvfp4", scaling=scaling, **how)
    assert not zeros.dequantize().any()


def test_columns_and_padding_are_those_of_rows():
    x = random(100, 64).contiguous()
    q = bs.quantize(x, "nvfp4", -2, scaling="four_over_six", pad=True)
    rows = bs.quantize(x.mT.contiguous(), "nvfp4", scaling="four_over_six", pad=True)
    assert torch.equal(q.dequantize(), rows.dequantize().mT)
    both = bs.quantize_both(x, "nvfp4", scaling="four_over_six", pad=True)
    assert torch.equal(both[1].dequantize(), q.dequantize())


def test_what_cannot_be():
    x = random(16, 128)
    with pytest.raises(
        ValueError, match=r"scaling: .*'amax', 'four_over_six', 'search', 'ms_eden'"
    ):
        bs.quantize(x, "nvfp4", scaling="mse")
    with pytest.raises(
        ValueError, match="scaling: 'four_over_six' is for scales of UE4M3, 'mxfp8'"
    ):
        bs.quantize(x, "mxfp8", scaling="four_over_six")
    with pytest.raises(ValueError, match="scaling: 'ms_eden' corrects blocks that are transformed"):
        bs.quantize(x, "nvfp4", scaling="ms_eden", seed=1)
    with pytest.raises(ValueError, match="seed: got None, and scaling='ms_eden' rounds scales"):
        bs.quantize(x, "nvfp4", scaling="ms_eden", hadamard=bs.Hadamard(128))
    given = {"scaling": "ms_eden", "hadamard": bs.Hadamard(128), "seed": 1, "square": True}
    with pytest.raises(ValueError, match="square, scaling: 'ms_eden' corrects blocks along one"):
        bs.quantize(x, "nvfp4", **given)
    with pytest.raises(ValueError, match="seed: is given, and scaling='four_over_six' rounds to"):
        bs.quantize(x, "nvfp4", scaling="four_over_six", seed=1)
    with pytest.raises(ValueError, match="scaling='four_over_six': CPU kernels know it of rows"):
        bs.quantize(x, "nvfp4", -2, scaling="four_over_six", backend="kernel")
    with pytest.raises(ValueError, match="scaling='search': blocks are not finite, or below"):
        bs.quantize(x * 1e-38, "nvfp4", scaling="search", backend="kernel")


NASTY = {
    "spread": lambda: random(33, 96, spread=3.0),
    "zeros among them": lambda: random(33, 96) * (random(33, 96, seed=1) > 0.5),
    "zeros": lambda: torch.zeros(16, 32),
    "not finite": lambda: random(16, 32).index_fill(1, torch.tensor([3]), float("inf")),
    "tiny": lambda: random(16, 32) * 1e-38,
    "a tiny row": lambda: random(16, 32) * torch.where(torch.arange(16) == 4, 1e-30, 1.0)[:, None],
    "ties": lambda: torch.randint(-24, 25, (64, 64)) / 4,
    "longer than a tile": lambda: random(3, 2 * 2048 + 48),
    "a batch": lambda: random(3, 5, 64),
}


@pytest.mark.filterwarnings("ignore::blockscale.FallbackWarning")
@pytest.mark.parametrize("scaling", ["four_over_six", "search"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", NASTY)
def test_compiled_loops_have_the_bytes_of_the_reference(case, dtype, scaling):
    x = NASTY[case]().to(dtype)
    for scale in (None, 0.003, 1e-30, 1e30):
        options = {"scaling": scaling, "global_scale": scale}
        q = bs.quantize(x, "nvfp4", **options)
        assert torch.equal(q, bs.quantize(x, "nvfp4", backend="reference", **options))


def test_loops_are_taken(monkeypatch):
    monkeypatch.setattr(bs.reference, "quantize", None)
    bs.quantize(random(16, 64), "nvfp4", scaling="search")


def test_search_loses_least():
    """Block by block not more than four over six, which tries two of its scales."""
    x = random(256, 512, spread=0)

    def lost(scaling):
        q = bs.quantize(x, "nvfp4", scaling=scaling).dequantize(torch.float32)
        return (q - x).square().reshape(-1, 16).sum(-1)

    amax, fours, search = (lost(each) for each in ("amax", "four_over_six", "search"))
    assert (search <= fours * (1 + 1e-5) + 1e-30).all()
    assert search.sum() < 0.9 * fours.sum()
    assert fours.sum() < 0.9 * amax.sum()
