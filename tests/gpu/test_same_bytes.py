"""The same bytes on a GPU as on a CPU, for every operation, whatever runs it there."""

import pytest
import torch
from gpu_inputs import nasty, same

import blockscale as bs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("format", list(bs.formats))
def test_quantize_and_dequantize(format, axis, dtype):
    x = nasty(dtype)
    for nonfinite in ("propagate", "te"):
        for rounding in bs.formats[format].scale.roundings:
            here = bs.quantize(x, format, axis, nonfinite=nonfinite, scale_rounding=rounding)
            there = bs.quantize(
                x.cuda(), format, axis, nonfinite=nonfinite, scale_rounding=rounding
            )
            assert same(here.data, there.data)
            assert same(here.scale, there.scale)
            assert same(here.dequantize(torch.float32), there.dequantize(torch.float32))


@pytest.mark.parametrize("layout", ["tcgen05", "packed"])
def test_layouts_and_groups(layout):
    x = nasty(torch.bfloat16)
    ends = torch.tensor([10, 10, 200, 250], dtype=torch.int32)
    here = bs.quantize(x, layout=layout, offsets=ends)
    there = bs.quantize(x.cuda(), layout=layout, offsets=ends.cuda())
    assert same(here.scale, there.scale)
    here = bs.quantize(x, axis=-2, offsets=ends)
    there = bs.quantize(x.cuda(), axis=-2, offsets=ends.cuda())
    assert same(here.data, there.data)
    assert same(here.scale, there.scale)


def test_stochastic_rounding_has_the_same_bits():
    x = nasty(torch.bfloat16)
    assert same(bs.quantize(x, seed=7).data, bs.quantize(x.cuda(), seed=7).data)


def test_gemm_and_training_step():
    x = torch.randn(96, 256, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    a, b = bs.quantize(x), bs.quantize(w)
    exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).mT
    error = (bs.gemm(a, b.mT, torch.float32) - exact).norm() / exact.norm()
    assert error < 1e-5
    model = bs.convert(torch.nn.Sequential(torch.nn.Linear(256, 64)).cuda(), bs.Recipe())
    model(x.float()).square().mean().backward()
    assert model[0].weight.grad.isfinite().all()


def test_moves_between_devices():
    q = bs.quantize(nasty(torch.bfloat16), "nvfp4")
    there = q.cuda()
    assert there.device.type == "cuda"
    assert all(part.device.type == "cuda" for part in (there.data, there.scale, there.global_scale))
    assert torch.equal(there.cpu(), q)
    with pytest.raises(ValueError, match="move"):
        bs.gemm(q, there.mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "fp8_1x128", "fp8_128x128"])
def test_norms(format, dtype):
    x = nasty(dtype)
    weight, bias = torch.randn(2, x.shape[1])
    for axes in ((-1,), (-2,), (-1, -2)):
        here = bs.rmsnorm_quantize(x, weight, format, axes=axes)
        there = bs.rmsnorm_quantize(x.cuda(), weight.cuda(), format, axes=axes)
        for added in (None, bias):
            given = None if added is None else added.cuda()
            here += bs.layernorm_quantize(x, weight, added, format, axes=axes)
            there += bs.layernorm_quantize(x.cuda(), weight.cuda(), given, format, axes=axes)
        for a, b in zip(here, there, strict=True):
            if isinstance(a, bs.ScaledTensor):
                assert same(a.data, b.data)
                assert same(a.scale, b.scale)
            else:
                assert same(a, b)


@pytest.mark.parametrize("name", ["RMSNormLinear", "LayerNormLinear", "MLP"])
@pytest.mark.filterwarnings("error::blockscale.FallbackWarning")
def test_fused_layers(name):
    """By kernels alone; sums of products have another order."""
    layer = getattr(bs.nn, name)(256, 512, dtype=torch.bfloat16, recipe=bs.Recipe())
    x, found = torch.randn(384, 256, dtype=torch.bfloat16), []
    grad = torch.randn(384, layer(x).shape[1], dtype=torch.bfloat16)
    for device in ("cpu", "cuda"):
        y = layer.to(device)(given := x.detach().to(device).requires_grad_())
        sources = [given, *layer.parameters()]
        made = [y.detach(), *torch.autograd.grad(y, sources, grad.to(device))]
        found.append([each.cpu() for each in made])
    for there, here in zip(*reversed(found), strict=True):
        assert (there - here).float().norm() < 0.01 * here.float().norm()
