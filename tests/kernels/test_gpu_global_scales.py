"""Products of groups whose weights have global scales of their own, by the kernels in the
emulator: bits equal to a product of each group alone."""

import pytest
import torch

import blockscale as bs
from stand_in import emulated

FACTORS = (1.0, 1e-4, 300.0)
ENDS = (5, 5, 33)  # of 40 rows
COUNTS = (3, 0, 16)
LEFT = [("sm_90a", "nvfp4"), ("sm_90a", "bf16"), ("sm_90a", "fp8_1x128"), ("sm_100a", "nvfp4")]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def experts(*shape: int, seed: int = 0) -> bs.ScaledTensor:
    pairs = zip(values(*shape, seed=seed), FACTORS, strict=True)
    return torch.stack([bs.quantize(x * factor, "nvfp4") for x, factor in pairs])


def rows_of(x: torch.Tensor, name: str) -> torch.Tensor:
    if name == "bf16":
        return x.bfloat16()
    if name == "nvfp4":
        return bs.quantize(x, name, global_scale=2.0**-9)
    return bs.quantize(x, name, layout="sm90")


@pytest.mark.parametrize(("arch", "name"), LEFT)
def test_groups_of_rows(arch, name):
    x, w = values(40, 256), experts(3, 136, 256, seed=1)
    with emulated(arch) as ran:
        for _ in range(2):  # the second launch is found by how its operands lie
            got = bs.grouped_gemm(rows_of(x, name), w.mT, torch.tensor(ENDS).int(), torch.float32)
        assert {config.alpha[-1:] for config in ran if hasattr(config, "alpha")} == {(1,)}
        one = w._with(global_scale=torch.ones(()))
        plain = bs.grouped_gemm(rows_of(x, name), one.mT, torch.tensor(ENDS).int(), torch.float32)
    assert not got[ENDS[-1] :].any()
    a = 2.0**-9 if name == "nvfp4" else 1.0  # a power of two: both products are rounded once
    for i, (start, end) in {0: (0, 5), 2: (5, 33)}.items():
        assert torch.equal(got[start:end], plain[start:end] / a * (w.global_scale[i] * a))


@pytest.mark.parametrize(("arch", "name"), [x for x in LEFT if x[1] != "fp8_1x128"])
def test_masked(arch, name):
    w, counts = experts(3, 136, 256, seed=1), torch.tensor(COUNTS).int()
    a = values(3, 16, 256).bfloat16() if name == "bf16" else experts(3, 16, 256)
    with emulated(arch):
        for _ in range(2):
            got = bs.grouped_gemm(a, w.mT, counts=counts, out_dtype=torch.float32)
        one = torch.ones(())
        plain = [q if name == "bf16" and q is a else q._with(global_scale=one) for q in (a, w)]
        sums = bs.grouped_gemm(plain[0], plain[1].mT, counts=counts, out_dtype=torch.float32)
    for i, count in enumerate(COUNTS):
        factor = w.global_scale[i] * (1 if name == "bf16" else a.global_scale[i])
        assert torch.equal(got[i, :count], sums[i, :count] * factor)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_scale_reaches_its_expert_alone(arch):
    """Nor the rows after the last one."""
    w, ends = experts(3, 136, 256), torch.tensor([8, 20, 33]).int()
    a = bs.quantize(values(40, 256), "nvfp4")
    with emulated(arch):
        want = bs.grouped_gemm(a, w.mT, ends)
        for i, (start, end) in enumerate([(0, 8), (8, 20), (20, 33)]):
            scales = w.global_scale.clone()
            scales[i] = float("nan")
            got = bs.grouped_gemm(a, w._with(global_scale=scales).mT, ends)
            assert got[start:end].isnan().all()
            got[start:end] = want[start:end]
            assert torch.equal(got, want)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_scales_that_lie_apart(arch):
    w, ends = experts(3, 136, 256), torch.tensor(ENDS).int()
    apart = torch.zeros(6)
    apart[::2] = w.global_scale
    a = bs.quantize(values(40, 256), "nvfp4")
    with emulated(arch):
        want = bs.grouped_gemm(a, w.mT, ends)
        for _ in range(2):
            got = bs.grouped_gemm(a, w._with(global_scale=apart[::2]).mT, ends)
            assert torch.equal(got, want)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_values(arch):
    """Quantized and dequantized by kernels, one matrix after another."""
    x = values(3, 48, 128).bfloat16() * torch.tensor(FACTORS).view(3, 1, 1).bfloat16()
    each = [bs.quantize(matrix, "nvfp4") for matrix in x]
    scales = torch.stack([q.global_scale for q in each])
    with emulated(arch, quantizes=True) as ran:
        rows, columns = bs.quantize_both(x, "nvfp4", global_scale=scales)
        assert len(ran) == 3
        assert torch.equal(rows, torch.stack(each))
        assert torch.equal(rows.dequantize(), torch.stack([q.dequantize() for q in each]))
    assert torch.equal(columns, torch.stack([bs.quantize(matrix, "nvfp4", -2) for matrix in x]))
