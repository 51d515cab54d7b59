"""Arrays that JAX quantizes have the bytes of tensors that torch does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp
from jax_cases import of_layouts

import blockscale as bs
import blockscale.jax as bsj

DTYPES = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}


def of_torch(x: torch.Tensor) -> jax.Array:
    """The same bits, NaN's too."""
    name = str(x.dtype).removeprefix("torch.")
    bits = x.contiguous().view(torch.int32 if name == "float32" else torch.int16).numpy()
    return jnp.asarray(bits.view(DTYPES[name])).view(name)


def octets(x: jax.Array | torch.Tensor) -> np.ndarray:
    """Bytes, as they lie in memory."""
    if isinstance(x, torch.Tensor):
        x = x.mT if x.dim() > 1 and x.stride(-1) != 1 else x
        return x.contiguous().reshape(-1, *x.shape[1:]).view(torch.uint8).numpy()
    return np.atleast_1d(np.asarray(x)).view(np.uint8)


def assert_same(found: bsj.ScaledArray, wanted: bs.ScaledTensor) -> None:
    assert np.array_equal(octets(found.data), octets(wanted.qdata))
    assert np.array_equal(octets(found.scale), octets(wanted.qscale))
    assert found.shape == tuple(wanted.shape)
    if wanted.global_scale is not None:
        assert np.array_equal(octets(found.global_scale), octets(wanted.global_scale))
    values = wanted.dequantize(torch.float32)
    bits = np.asarray(bsj.dequantize(found, jnp.float32)).view(np.uint32)
    same = bits == values.contiguous().view(torch.int32).numpy().view(np.uint32)
    assert bool((same | torch.isnan(values).numpy()).all())


def nasty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits of all kinds: subnormals, infinities and NaN among them, and a calm half."""
    generator = torch.Generator().manual_seed(sum(shape))
    wide = dtype == torch.float32
    kind = torch.int32 if wide else torch.int16
    low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
    bits = torch.randint(low, high, shape, generator=generator, dtype=torch.int64).to(kind)
    calm = torch.randn(shape, generator=generator).to(dtype)
    rows = torch.arange(shape[-2]) % 2 == 0
    return torch.where(rows[:, None], calm, bits.view(dtype))


#: Formulas of other dtypes with two formats alone: dtypes are told apart before formats are.
CASES = [
    (way, name, rounding, dtype)
    for name, f in bs.formats.items()
    for rounding in f.scale.roundings
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for way in ("loops", "formulas")
    if way == "loops" or dtype == torch.float32 or name in ("mxfp8", "nvfp4")
]


@pytest.mark.parametrize(("way", "name", "rounding", "dtype"), CASES, indirect=["way"])
@pytest.mark.usefixtures("way")
def test_bytes(name, rounding, dtype):
    for shape, axis, nonfinite in ((33, 96), -1, "propagate"), ((2, 130, 256), -2, "te"):
        x, how = nasty(dtype, *shape), {"scale_rounding": rounding, "nonfinite": nonfinite}
        wanted = bs.quantize(x, name, axis, pad=True, **how)
        assert_same(bsj.quantize(of_torch(x), name, axis, pad=True, **how), wanted)


@pytest.mark.parametrize("name", bs.formats)
@pytest.mark.usefixtures("way")
def test_every_bfloat16(name):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for each in (x.view(256, 256), x.view(256, 256).mT.contiguous()):
        assert_same(bsj.quantize(of_torch(each), name, -1), bs.quantize(each, name, -1))


@of_layouts
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.usefixtures("way")
def test_layouts(name, layout, axis):
    x = nasty(torch.float32, 200, 384)
    wanted = bs.quantize(x, name, axis, layout=layout, pad=True)
    found = bsj.quantize(of_torch(x), name, axis, layout=layout, pad=True)
    assert np.array_equal(octets(found.scale), octets(wanted.qscale))
    assert np.array_equal(
        np.asarray(found.dequantize()), wanted.dequantize().numpy(), equal_nan=True
    )
    assert np.array_equal(
        np.asarray(found.mT.dequantize()), wanted.dequantize().mT.numpy(), equal_nan=True
    )


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128"])
def test_stochastic(name):
    x = nasty(torch.float32, 64, 256)
    for axis in (-1, -2):
        wanted = bs.quantize(x, name, axis, seed=7, pad=True)
        assert_same(bsj.quantize(of_torch(x), name, axis, seed=7, pad=True), wanted)


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_traced_steps(dtype):
    """One compiled function rounds otherwise in each step, as torch's side does; and parts of an
    array as the whole."""
    x = nasty(torch.float32, 64, 256)
    quantize = jax.jit(lambda x, step: bsj.quantize(x, seed=bsj.Seed(5, step)))
    of_part = jax.jit(lambda x, step: bsj.quantize(x, seed=bsj.Seed(5, step, (16, 32), (64, 256))))
    for step in (0, 3, 2**31 - 1, -4 if dtype == "int32" else 2**32 - 1):
        seed = bs.Seed(5, step)
        wanted = bs.quantize(x, seed=seed)
        counter = jnp.asarray(step, dtype)
        assert_same(quantize(of_torch(x), counter), wanted)
        part = x[16:48, 32:96]
        wanted = bs.quantize(part, seed=bs.Seed(5, step, (16, 32), (64, 256)))
        assert_same(of_part(of_torch(part.contiguous()), counter), wanted)
    assert quantize._cache_size() == 1


@pytest.mark.usefixtures("way")
def test_k_major():
    x = nasty(torch.bfloat16, 64, 256)
    assert_same(
        bsj.quantize(of_torch(x), "mxfp8", -2, k_major=True),
        bs.quantize(x, "mxfp8", -2, k_major=True),
    )


def test_a_global_scale_that_is_given():
    x = torch.randn(32, 64)
    wanted = bs.quantize(x, "nvfp4", global_scale=0.003)
    assert_same(bsj.quantize(of_torch(x), "nvfp4", global_scale=0.003), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.usefixtures("way")
def test_many_fp32_patterns(name):
    """16 million, an odd step apart."""
    bits = torch.arange(1 << 24, dtype=torch.int64) * 257
    x = bits.to(torch.int32).view(torch.float32).view(4096, 4096)
    found, wanted = bsj.quantize(of_torch(x), name), bs.quantize(x, name)
    assert np.array_equal(octets(found.data), octets(wanted.qdata))
    assert np.array_equal(octets(found.scale), octets(wanted.qscale))
