"""Weights of experts for one kernel from tokens to tokens. Tests that are named after a row of the
NVFP4 mega MoE document hold what it says of weights."""

from __future__ import annotations

import pytest
import torch

import blockscale as bs
from blockscale.distributed import FoldError, check_mega_weights, transform_weights

E, N, K = 3, 256, 512


def checkpoint(format: str, n: int = N, k: int = K) -> list[torch.Tensor | None]:
    """Random codes and scales of experts, and NVFP4's global ones."""
    generator = torch.Generator().manual_seed(n + k)
    block = bs.formats[format].block_size
    weight = torch.randint(256, (E, n, k // 2), generator=generator, dtype=torch.uint8)
    low, high = (1, 127) if format == "nvfp4" else (100, 150)
    scale = torch.randint(low, high, (E, n, k // block), generator=generator, dtype=torch.uint8)
    if format == "nvfp4":
        scalars = torch.rand(E, generator=generator) + 0.5
        return [weight, scale.view(torch.float8_e4m3fn), scalars]
    return [weight, scale.view(torch.float8_e8m0fnu), None]


def word(format: str, sf: torch.Tensor, expert: int, row: int, k: int) -> int:
    """The byte of the scale of an element, by where ``tcgen05.cp`` puts it."""
    block = k // bs.formats[format].block_size
    place = row // 128 * 128 + row % 32 * 4 + row % 128 // 32
    return sf[expert, :, block // 4].tolist()[place] >> 8 * (block % 4) & 255


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_each_scale_is_in_its_place(format):
    weight, scale, scalars = checkpoint(format)
    got = transform_weights(weight, scale, scalars)
    assert torch.equal(got.data.view(torch.uint8), weight)
    octets = scale.view(torch.uint8)
    for expert, row, k in ((0, 0, 0), (2, 37, 200), (1, 127, 511), (1, 128, 64), (2, 255, 500)):
        want = int(octets[expert, row, k // got.gran_k])
        assert word(format, got.sf, expert, row, k) == want


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("n", "k"), [(N, K), (128, 64), (48, 96), (400, 1056)])
def test_dequantized(format, n, k):
    """Gate and up in turn, eight rows of each, any number of rows: the checkpoint's values."""
    weight, scale, scalars = checkpoint(format, n, k)
    whole = torch.ones(()) if format == "nvfp4" else None
    for expert in range(E):
        one = bs.ScaledTensor(
            weight[expert], scale[expert], format=format, shape=(n, k), global_scale=whole
        )
        want = one.dequantize(torch.float32)
        want = want if scalars is None else want * scalars[expert]
        for interleave in (False, True):
            got = transform_weights(weight, scale, scalars, interleave=interleave)
            check_mega_weights("l1", got)
            assert torch.equal(got.dequantize()[expert], want)


def test_gate_and_up_take_turns():
    weight, scale, scalars = checkpoint("nvfp4")
    got = transform_weights(weight, scale, scalars, interleave=True).data.view(torch.uint8)
    half = N // 2
    assert torch.equal(got[:, :8], weight[:, :8])
    assert torch.equal(got[:, 8:16], weight[:, half : half + 8])
    assert torch.equal(got[:, 16:24], weight[:, 8:16])


@pytest.mark.parametrize("experts", [1, 2, 3])
def test_scales_of_each_expert_have_any_shape(experts):
    weight, scale, scalars = (each[:experts] for each in checkpoint("nvfp4"))
    want = transform_weights(weight, scale, scalars, interleave=True)
    got = transform_weights(weight, scale, scalars[:, None], interleave=True)
    assert torch.equal(got.alpha, want.alpha)
    assert torch.equal(got.dequantize(), want.dequantize())
    one = transform_weights(weight, scale, torch.nn.Parameter(scalars[0]))
    assert one.alpha.tolist() == [[float(scalars[0])]] * experts
    assert not one.dequantize().requires_grad


def test_gate_and_up_with_scales_of_their_own():
    """Not the larger one for both."""
    weight, scale, scalars = checkpoint("nvfp4")
    both = torch.stack([scalars, 3 * scalars], 1)
    got = transform_weights(weight, scale, both, interleave=True)
    assert torch.equal(got.alpha, both)
    one = transform_weights(weight, scale, scalars).dequantize()
    assert torch.equal(got.dequantize()[:, : N // 2], one[:, : N // 2])
    assert torch.allclose(got.dequantize()[:, N // 2 :], 3 * one[:, N // 2 :])


# --- the document's rows --------------------------------------------------------------------------


def test_k_gran_k():
    """kGranK: 16, MXFP4's 32."""
    grans = [transform_weights(*checkpoint(name)).gran_k for name in ("nvfp4", "mxfp4")]
    assert grans == [16, 32]


def test_scale_factor_type():
    """UE4M3 and UE8M0: bytes that are not converted."""
    for name in ("nvfp4", "mxfp4"):
        weight, scale, scalars = checkpoint(name)
        words = transform_weights(weight, scale, scalars).sf.contiguous().view(torch.uint8)
        assert torch.equal(words.flatten().sort()[0], scale.view(torch.uint8).flatten().sort()[0])


def test_k_num_sf_uint32():
    """kNumSFUint32: K / 64, MXFP4's K / 128."""
    words = [transform_weights(*checkpoint(name)).sf.shape[-1] for name in ("nvfp4", "mxfp4")]
    assert words == [K // 64, K // 128]


def test_recipe():
    recipes = [transform_weights(*checkpoint(name)).recipe for name in ("nvfp4", "mxfp4")]
    assert recipes == [(1, 1, 16), (1, 1, 32)]


def test_weight_scale_2_folding():
    """An option, whose second rounding is said; by default the scale stays in fp32."""
    weight, scale, scalars = checkpoint("nvfp4")
    plain = transform_weights(weight, scale, scalars)
    assert plain.fold is None
    assert torch.equal(plain.alpha[:, 0], scalars)
    folded = transform_weights(weight, scale, scalars, fold=True)
    assert torch.equal(folded.alpha, torch.ones(E, 1))
    exact = scale.float() * scalars[:, None, None]
    rounded = exact.clamp(max=448).to(torch.float8_e4m3fn).float()
    relative = ((rounded - exact) / exact).double()
    assert folded.fold == FoldError(
        pytest.approx(float(relative.square().mean().sqrt())),
        pytest.approx(float(relative.abs().max())),
        0,
        int((exact > 448).sum()),
    )
    assert folded.fold.worst > 2.0**-5
    error = (folded.dequantize() - plain.dequantize()).norm() / plain.dequantize().norm()
    assert 0 < error < folded.fold.worst


def test_folding_says_what_is_lost():
    weight, scale, _ = checkpoint("nvfp4")
    small = transform_weights(weight, scale, torch.tensor(1e-6), fold=True).fold
    large = transform_weights(weight, scale, torch.tensor(1e3), fold=True).fold
    assert small.zeros > 0
    assert large.clipped > 0


def test_no_block16_to_block32_merge():
    """Remaining work, "Remove UE4M3->UE8M0 conversion and block16->block32 merge": neighbours that
    differ stay."""
    weight, scale, scalars = checkpoint("nvfp4")
    octets = scale.view(torch.uint8)
    octets[..., 0::2], octets[..., 1::2] = 40, 90
    got = transform_weights(weight, octets.view(torch.float8_e4m3fn), scalars)
    assert got.sf.unique().tolist() == [40 | 90 << 8 | 40 << 16 | 90 << 24]


# --- the build history, as errors -----------------------------------------------------------------


def kernel_form() -> bs.distributed.MegaWeights:
    return transform_weights(*checkpoint("nvfp4"))


def test_build_7_packed_fp4_type():
    made = kernel_form()
    with pytest.raises(TypeError, match=r"l1\.data: got torch\.uint8; .* \.view\(torch\.int8\)"):
        check_mega_weights("l1", made._replace(data=made.data.view(torch.uint8)))


def test_build_9_sf_stride():
    made = kernel_form()
    with pytest.raises(
        ValueError, match=r"l1\.sf: has strides .*: K-major; expected \(2048, 1, 256"
    ):
        check_mega_weights("l1", made._replace(sf=made.sf.contiguous()))
    apart = torch.zeros(E, K // 64, N + 4, dtype=torch.int32).mT[:, :N]
    with pytest.raises(ValueError, match="not aligned as TMA wants it"):
        check_mega_weights("l1", made._replace(sf=apart))


def test_build_10_gran_k():
    made = kernel_form()
    with pytest.raises(ValueError, match=r"\(blocks of 32\?\); nvfp4 has blocks of 16"):
        check_mega_weights("l1", made._replace(sf=made.sf[..., ::2]))


def test_build_11_sf_not_packed():
    made, (_, scale, _) = kernel_form(), checkpoint("nvfp4")
    with pytest.raises(TypeError, match=r"l1\.sf: got torch\.float8_e4m3fn: scales are not packed"):
        check_mega_weights("l1", made._replace(sf=scale))


def test_other_kernel_forms():
    made = kernel_form()
    cases = {
        r"l1\.alpha: got torch\.float32 \(3, 2\)": {"alpha": torch.ones(3, 2)},
        r"l1\.alpha: .* strides \(0, 1\)": {"alpha": torch.ones(1, 1).expand(3, 1)},
        r"l1\.alpha: is on meta": {"alpha": made.alpha.to("meta")},
        r"l1\.sf: has strides \(0, 1, 256\)": {"sf": made.sf[:1].expand(3, -1, -1)},
        r"l1\.sf: got \(\)": {"sf": torch.zeros((), dtype=torch.int32)},
        r"l1\.sf": {"sf": None},
        r"l1\.data: is of N = 250": {"data": made.data[:, :250].contiguous(), "interleaved": True},
        r"l1\.data: is of N = 256, K = 18": {"data": made.data[..., :9].contiguous()},
        r"l1\.data: got \(0, 256, 256\)": {"data": made.data[:0]},
    }
    for message, changed in cases.items():
        with pytest.raises((TypeError, ValueError), match=message):
            check_mega_weights("l1", made._replace(**changed))


def test_bad_checkpoints():
    weight, scale, scalars = checkpoint("nvfp4")
    cases = {
        "weight: got torch.bfloat16": (weight.bfloat16(), scale, scalars),
        "weight_scale: got torch.float32": (weight, scale.float(), scalars),
        r"weight_scale: got \(3, 256, 16\); nvfp4 .* blocks of 16": (
            weight,
            scale[..., ::2],
            scalars,
        ),
        r"weight_scale: got \(3, 256, 32\); mxfp4 .* blocks of 32": (
            weight,
            scale.view(torch.uint8),
            None,
        ),
        "weight_scale: has the sign bit": (weight, (-scale.float()).to(scale.dtype), scalars),
        "weight_scale_2: got None; NVFP4 has a global scale": (weight, scale, None),
        r"weight_scale_2: got \(4,\)": (weight, scale, torch.ones(4)),
        r"weight_scale_2: got \(3, 2\)": (weight, scale, torch.ones(3, 2)),
        r"weight_scale_2: got torch\.float64": (weight, scale, scalars.double()),
        r"weight_scale_2: got torch\.float32 on meta": (weight, scale, scalars.to("meta")),
        "weight_scale_2: has a negative": (weight, scale, -scalars),
        "weight_scale_2: has a negative number, an infinity": (weight, scale, scalars / 0),
        "weight_scale_2": (weight, scale, 1.0),
        "weight: got .* expected some weights": (weight[:, :0], scale[:, :0], scalars),
    }
    for message, given in cases.items():
        with pytest.raises((TypeError, ValueError), match=message):
            transform_weights(*given)
    with pytest.raises(ValueError, match="interleave: N is 24"):
        transform_weights(weight[:, :24], scale[:, :24], scalars, interleave=True)
    weight, scale, _ = checkpoint("mxfp4")
    with pytest.raises(ValueError, match="weight_scale_2: mxfp4 has no global scale"):
        transform_weights(weight, scale, scalars)
    with pytest.raises(ValueError, match="fold: mxfp4 has no global scale"):
        transform_weights(weight, scale, fold=True)


def test_what_is_passed_in_place_of_parts():
    q = torch.stack([bs.quantize(torch.randn(64, 128), "nvfp4") for _ in range(2)])
    with pytest.raises(TypeError, match=r"is a ScaledTensor; pass its parts: weight\.qdata"):
        transform_weights(q, q.scale, q.global_scale)
    octets = q.scale.view(torch.uint8)
    with pytest.raises(ValueError, match=r"NVFP4's .* are .view\(torch.float8_e4m3fn\)"):
        transform_weights(q.qdata, octets)
    with pytest.raises(TypeError, match="l1: got NoneType; expected a MegaWeights"):
        check_mega_weights("l1", None)
