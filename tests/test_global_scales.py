"""Batches whose matrices have global scales of their own, as experts in checkpoints have."""

import io

import pytest
import torch

import blockscale as bs
from blockscale.checkpoint.statistics import ErrorStatistics
from blockscale.measure import error_sums

FACTORS = (1.0, 1e-4, 300.0)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Matrices of which each has another amax."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x * torch.tensor(FACTORS).view(-1, 1, 1)


def each_of(x: torch.Tensor, axis: int = -1, **how: object) -> list[bs.ScaledTensor]:
    return [bs.quantize(matrix, "nvfp4", axis, **how) for matrix in x]


def experts(*shape: int, seed: int = 0) -> bs.ScaledTensor:
    return torch.stack(each_of(values(*shape, seed=seed)))


def scales_of(tensors: list[bs.ScaledTensor]) -> torch.Tensor:
    return torch.stack([q.global_scale for q in tensors])


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_quantized_as_each_alone(axis, backend):
    x = values(3, 48, 80)
    each = each_of(x, axis, pad=True)
    how = {"pad": True, "backend": backend}
    q = bs.quantize(x, "nvfp4", axis, global_scale=scales_of(each), **how)
    one = bs.quantize(x, "nvfp4", axis, **how)
    assert (q.qdata.stride(), q.qscale.stride()) == (one.qdata.stride(), one.qscale.stride())
    assert torch.equal(q, torch.stack(each))
    for mine, alone in zip(q, each, strict=True):
        assert torch.equal(mine, alone)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        want = torch.stack([matrix.dequantize(dtype) for matrix in each])
        assert torch.equal(q.dequantize(dtype), want)
    assert torch.equal(q.mT.dequantize(), q.dequantize().mT)


def test_both_directions():
    x = values(3, 32, 64)
    scales = scales_of(each_of(x))
    for axis, q in zip((-1, -2), bs.quantize_both(x, "nvfp4", global_scale=scales), strict=True):
        assert torch.equal(q, torch.stack(each_of(x, axis)))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_noise_is_that_of_the_batch(backend):
    """Of seed and logical index: with the same scale for all, as with one."""
    x = values(3, 32, 64)
    scalar = bs.quantize(x, "nvfp4").global_scale
    how = {"seed": 7, "backend": backend}
    want = bs.quantize(x, "nvfp4", global_scale=scalar, **how)
    q = bs.quantize(x, "nvfp4", global_scale=scalar.expand(3).clone(), **how)
    assert torch.equal(q.qdata, want.qdata)
    assert torch.equal(q.qscale, want.qscale)
    with pytest.raises(ValueError, match="one global scale where they round stochastically"):
        bs.quantize(x, "nvfp4", global_scale=scalar.expand(3), seed=7, backend="kernel")


def test_indexed_cut_and_joined():
    each = each_of(values(3, 32, 64))
    q = torch.stack(each)
    assert q.global_scale.shape == (3,)
    assert torch.equal(q[1:], torch.stack(each[1:]))
    assert torch.equal(torch.cat([q[:1], q[1:]]), q)
    assert torch.equal(torch.cat([q[2:], q[:1]]), torch.stack([each[2], each[0]]))
    assert torch.equal(torch.cat([q[..., :32], q[..., 32:]], -1), q)
    assert torch.equal(q[:, 16:], torch.stack([m[16:] for m in each]))
    one = torch.stack(each[:1])  # nothing tells it from one for all
    assert torch.equal(torch.cat([one, q[1:]]).dequantize(), q.dequantize())
    wide = q.unsqueeze(1)
    assert wide.global_scale.shape == (3, 1)
    assert torch.equal(wide.squeeze(1), q)
    assert torch.equal(torch.stack([q, q], 1)[:, 1], q)
    assert torch.equal(wide.flatten(0, 1), q)
    assert torch.equal(q.view(1, 3, 32, 64)[0], q)
    assert torch.stack([each[0], each[0]]).global_scale.shape == ()
    whole = bs.quantize(values(3, 32, 64), "nvfp4")
    assert torch.cat([whole[:1].detach(), whole[1:]]).global_scale.shape == ()
    # values do not decide: experts of zeros take those of a checkpoint
    zeros = torch.stack([bs.quantize(torch.zeros(32, 64), "nvfp4") for _ in range(3)])
    assert torch.equal(zeros.copy_(q), q)
    with pytest.raises(TypeError, match="global scales of their own"):
        q.flatten(0, 1)


def test_copied():
    q, other = experts(3, 32, 64), experts(3, 32, 64, seed=1)
    r = torch.empty_like(q)
    r.copy_(q)
    assert torch.equal(r, q)
    r[1:].copy_(q[1:])
    with pytest.raises(ValueError, match="part of a tensor and shares its global scale"):
        r[:2].copy_(other[:2])
    one = bs.quantize(values(3, 32, 64, seed=2), "nvfp4")
    r.copy_(one)
    assert torch.equal(r.dequantize(), one.dequantize())
    with pytest.raises(TypeError, match="global scales of their own, those of"):
        one.copy_(q)
    assert torch.equal(r.dequantize(), one.dequantize())
    half = torch.full((3,), 0.5)
    r = bs.quantize(values(3, 32, 64), "nvfp4", global_scale=half)
    one = bs.quantize(values(3, 32, 64), "nvfp4", global_scale=0.5)
    r[1:].copy_(one[1:])  # it is theirs, too
    r = bs.quantize(values(3, 32, 64), "nvfp4", global_scale=half[:1].expand(3))
    r.copy_(q)  # nothing of it shares memory
    assert torch.equal(r, q)
    r, before = q._with(global_scale=half[:1].expand(3)), q.clone()
    with pytest.raises(TypeError, match="share memory; copy to a clone"):
        r.copy_(other)
    assert torch.equal(q, before)


def test_what_is_joined_is_new():
    """No scale of it is that of a matrix that it was made of."""
    q, before = experts(3, 32, 64), experts(3, 32, 64)
    third = before[2]
    for made in (torch.stack([q[0], q[0]]), torch.cat([q[:1], q[:1]]), torch.cat([q[:1]])):
        assert made.global_scale.shape == ()
        made.copy_(torch.stack([third] * len(made)))
        assert torch.equal(q, before)
    cut = torch.cat([q[0][:, :32], q[0][:, 32:]], 1)
    cut.copy_(third)
    assert torch.equal(q, before)


def test_one_for_one_matrix():
    """It is a scalar, whose matrix may be cut."""
    q = bs.quantize(values(3, 32, 64)[:1], "nvfp4", global_scale=torch.tensor([0.01]))
    assert torch.equal(q.view(2, 16, 64)[0], q[0, :16])
    assert torch.equal(experts(3, 32, 64)[:1].flatten(0, 1), experts(3, 32, 64)[0])


def test_stored(tmp_path):
    q = experts(3, 32, 64)
    memory = io.BytesIO()
    torch.save(q, memory)
    memory.seek(0)
    assert torch.equal(torch.load(memory), q)
    given = {"rows": q, "columns": q.mT, "one": q[0], "batch": q.unsqueeze(0)}
    bs.checkpoint.save_file(given, tmp_path / "w.safetensors")
    loaded = bs.checkpoint.load_file(tmp_path / "w.safetensors")
    for name, each in given.items():
        assert torch.equal(loaded[name], each), name


def test_measured():
    with pytest.raises(ValueError, match="nothing to compare"):
        error_sums(values(3, 32, 64)[:0], experts(3, 32, 64)[:0])
    x = values(3, 32, 64)
    each = each_of(x)
    q = torch.stack(each)
    parts = [error_sums(*pair) for pair in zip(x, each, strict=True)]
    total = error_sums(x, q)
    assert total.elements == x.numel()
    assert total.noise == sum(part.noise for part in parts)
    assert total.max_abs == max(part.max_abs for part in parts)
    assert total.bins == tuple(map(sum, zip(*(part.bins for part in parts), strict=True)))
    whole, merged = ErrorStatistics(), ErrorStatistics()
    whole.add(x, q)
    for pair in zip(x, each, strict=True):
        merged.add(*pair)
    assert whole.scales == merged.scales
    assert whole.error_bins == merged.error_bins


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_products_of_groups(backend):
    each = each_of(values(3, 40, 64))
    w = torch.stack(each).mT
    scalar = torch.tensor(2.0**-8)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    a, ends = bs.quantize(x, "nvfp4", global_scale=scalar), torch.tensor([5, 5, 37]).int()
    for left in (a, x.bfloat16()):
        y = bs.grouped_gemm(left, w, ends, torch.float32, backend=backend)
        for i, (start, end) in {0: (0, 5), 2: (5, 37)}.items():
            rows = x[start:end]
            alone = rows.bfloat16()
            if left is a:
                alone = bs.quantize(rows, "nvfp4", global_scale=scalar)
            want = bs.gemm(alone, each[i].mT, torch.float32, backend=backend)
            assert torch.equal(y[start:end], want)
        assert not y[37:].any()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_products_of_batches(backend):
    a, each = experts(3, 16, 64), each_of(values(3, 40, 64, seed=1))
    w = torch.stack(each).mT
    y = bs.gemm(a, w, torch.float32, backend=backend)
    counts = torch.tensor([3, 0, 16]).int()
    masked = bs.grouped_gemm(a, w, counts=counts, out_dtype=torch.float32, backend=backend)
    for i, count in enumerate(counts.tolist()):
        want = bs.gemm(a[i], each[i].mT, torch.float32, backend=backend)
        assert torch.equal(y[i], want)
        if count:  # another number of rows may be added in another order
            assert torch.allclose(masked[i, :count], want[:count], rtol=1e-5, atol=1e-6)
        assert not masked[i, count:].any()


def test_weight_only_gradient():
    w, x = experts(3, 32, 64), torch.randn(9, 64).bfloat16().requires_grad_()
    ends = torch.tensor([4, 4, 9]).int()
    grad = torch.randn(9, 32).bfloat16()
    bs.grouped_gemm(x, w.mT, ends).backward(grad)
    values = w.dequantize(torch.float32)
    want = torch.cat([grad[:4].float() @ values[0], grad[4:].float() @ values[2]])
    assert torch.allclose(x.grad.float(), want, rtol=2**-7, atol=1e-5)


def test_compiled():
    torch.compiler.reset()
    each = each_of(values(3, 32, 64))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(*tensors):
        q = torch.stack(tensors)
        return q, q[1:].dequantize()

    one = bs.quantize(values(3, 32, 64), "nvfp4")
    join = torch.compile(
        lambda q: torch.cat([q[:1], q[1:]]).flatten(0, 1), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(join(one), one.flatten(0, 1))
    q, dequantized = run(*each)
    assert torch.equal(q, torch.stack(each))
    assert torch.equal(dequantized, torch.stack(each)[1:].dequantize())


def test_refused():
    x = values(3, 32, 64)
    wrong = {
        r"got \(2,\) torch.float32; expected an fp32 scalar \(or \(3,\), one for each": torch.ones(
            2
        ),
        r"got \(3, 1\)": torch.ones(3, 1),
        r"got \(3,\) torch.float64": torch.ones(3).double(),
        "expected a positive finite number": torch.tensor([1.0, 0.0, 1.0]),
    }
    for sentence, scales in wrong.items():
        with pytest.raises(ValueError, match=sentence):
            bs.quantize(x, "nvfp4", global_scale=scales)
    with pytest.raises(ValueError, match=r"got \(32,\).*expected an fp32 scalar, the multiplier"):
        bs.quantize(x[0], "nvfp4", global_scale=torch.ones(32))
    with pytest.raises(ValueError, match=r"got \(3,\).*expected an fp32 scalar, the multiplier"):
        bs.swiglu_quantize(x, "nvfp4", global_scale=torch.ones(3))
    q = bs.quantize(x, "nvfp4")
    with pytest.raises(ValueError, match=r"got \(2,\).*\(3,\), one for each matrix"):
        bs.ScaledTensor(
            q.qdata, q.scale, format="nvfp4", shape=(3, 32, 64), global_scale=torch.ones(2)
        )
