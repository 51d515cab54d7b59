"""The compiled loops under ``jax.jit``: the bytes that torch's tensors have of them."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.formats import Format, formats
from blockscale.kernels.cpu import calls
from oracles.patterns import every_half, random_bits

pytest.importorskip("jax.numpy")  # this folder is a "jax", too
import jax
import jax.numpy as jnp

from blockscale.kernels.cpu import xla

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = [name for name in formats if xla.supported(formats[name])]
SHAPES = ((64, 256), (1, 1), (5,), (300,), (2, 3, 40, 70), (33, 1000), (129, 130), (3, 128, 256))
EMPTY = ((0, 64), (64, 0), (2, 0, 32))
GLOBAL_SCALE = 3e-3


def to_jax(x: Tensor) -> jax.Array:
    x = x.contiguous()
    if x.dtype == torch.bfloat16:
        return jnp.asarray(x.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return jnp.asarray(x.numpy())


def bits(x: Tensor | jax.Array) -> np.ndarray:
    """The bytes of each item of the last dimension."""
    if isinstance(x, Tensor):
        return x.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)


def hard(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits in half of the rows, numbers of every size in the others; NaN and infinities."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.from_numpy(random_bits(int(np.prod(shape)), seed).copy()).reshape(shape)
    sizes = torch.exp2(torch.randint(-150, 128, (*shape[:-1], 1), generator=g).double())
    x = (torch.randn(shape, generator=g, dtype=torch.float64) * sizes).float()
    x = torch.where(torch.rand((*shape[:-1], 1), generator=g) < 0.3, noise, x)
    x = torch.where(torch.rand(shape, generator=g) < 0.05, 0.0, x).to(dtype)
    for value in (float("nan"), float("inf"), -0.0):
        x = torch.where(torch.rand(shape, generator=g) < 3e-3, value, x)
    return x


def factor(format: Format) -> Tensor | None:
    return torch.tensor(GLOBAL_SCALE) if format.has_global_scale else None


def quantize(x: Tensor, format: Format, axis: int = -1, scalar: Tensor | None = None):
    """By torch's path, as users have it by default."""
    rounding = format.default_scale_rounding
    return calls.quantize(x, format, axis=axis, scale_rounding=rounding, global_scale=scalar)


def of(scale: Tensor | None) -> jax.Array | None:
    return None if scale is None else jnp.asarray(scale.numpy())


def check(x: Tensor, format: Format, axis: int, **options: str) -> None:
    """Quantize and dequantize by both."""
    options = {"scale_rounding": format.default_scale_rounding, **options}
    what, scalar = (format.name, axis, x.dtype, tuple(x.shape), options), factor(format)
    data, scale = calls.quantize(x, format, axis=axis, global_scale=scalar, **options)
    found = xla.quantize(to_jax(x), format, axis=axis, global_scale=of(scalar), **options)
    stored = data.mT if format.turned(axis, False) else data
    assert found[0].shape == stored.shape == xla.data_shape(x.shape, format, axis), what
    assert found[1].shape == scale.shape, what
    np.testing.assert_array_equal(bits(found[0]), bits(stored), err_msg=str(what))
    np.testing.assert_array_equal(bits(found[1]), bits(scale), err_msg=str(what))
    for dtype in DTYPES:
        given = {"shape": tuple(x.shape), "axis": axis}
        values = calls.dequantize(data, scale, format, **given, global_scale=scalar, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        given |= {"global_scale": of(scalar), "dtype": name}
        decoded = xla.dequantize(*found, format, **given)
        assert decoded.dtype.name == name
        assert decoded.shape == x.shape, what
        np.testing.assert_array_equal(bits(decoded), bits(values), err_msg=str((what, dtype)))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_torch(name, axis):
    format = formats[name]
    for seed, (shape, dtype) in enumerate(itertools.product(SHAPES, DTYPES)):
        if axis == -1 or len(shape) > 1:
            check(hard(shape, dtype, seed), format, axis)


@pytest.mark.parametrize("name", NAMES)
def test_options(name):
    format = formats[name]
    x = hard((40, 270), torch.float32, 1)
    for rounding, policy in itertools.product(format.scale.roundings, ("propagate", "te")):
        check(x, format, -1, scale_rounding=rounding, nonfinite=policy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_every_half(name, dtype):
    """Neighbours in one block, and each with numbers of other sizes."""
    x = every_half(dtype)
    for order in (x.reshape(256, 256), x.reshape(256, 256).T.contiguous()):
        for axis in (-1, -2):
            check(order, formats[name], axis)


@pytest.mark.parametrize("name", NAMES)
def test_subnormals(name):
    """XLA's threads flush them to zero; the loops do not."""
    g = np.random.default_rng(0)
    small = g.integers(0, 1 << 23, (64, 256), dtype=np.uint32) | g.integers(0, 2, (64, 256)) << 31
    x = torch.from_numpy(small.astype(np.uint32).view(np.float32))
    check(x, formats[name], -1)
    check(torch.where(torch.arange(64)[:, None] < 32, x, 2.0**-120), formats[name], -2)


@pytest.mark.parametrize("name", NAMES)
def test_empty(name):
    for shape, axis in itertools.product(EMPTY, (-1, -2)):
        check(torch.zeros(shape), formats[name], axis)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_the_front_door(name, axis):
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    q = bs.quantize(x, name, axis)
    given = xla.global_scale(to_jax(x), formats[name]) if formats[name].has_global_scale else None
    found = xla.quantize(to_jax(x), formats[name], axis=axis, global_scale=given)
    stored = q.qdata.mT if formats[name].turned(axis, False) else q.qdata
    np.testing.assert_array_equal(bits(found[0]), bits(stored))
    np.testing.assert_array_equal(bits(found[1]), bits(q.scale))


def test_under_jit_with_other_operations():
    """What XLA makes before and after is in order; the global scale is traced."""

    @jax.jit
    def both(x, global_scale):
        data, scale = xla.quantize(x * 2, formats["nvfp4"], global_scale=global_scale * 2)
        options = {"shape": x.shape, "global_scale": global_scale * 2}
        return data, scale, xla.dequantize(data, scale, formats["nvfp4"], **options) + 1

    x = hard((2048, 2048), torch.float32, 5)
    scalar = torch.tensor(0.25)
    data, scale, values = both(to_jax(x), jnp.float32(0.125))
    wanted = quantize(x * 2, formats["nvfp4"], scalar=scalar)
    decoded = calls.dequantize(*wanted, formats["nvfp4"], shape=x.shape, global_scale=scalar) + 1
    np.testing.assert_array_equal(bits(data), bits(wanted[0]))
    np.testing.assert_array_equal(bits(scale), bits(wanted[1]))
    np.testing.assert_array_equal(np.asarray(values), decoded.numpy())


@pytest.mark.parametrize("name", NAMES)
def test_vmap(name):
    format, x = formats[name], hard((3, 40, 70), torch.bfloat16, 6)
    scales = None
    if format.has_global_scale:
        scales = jnp.asarray([1e-3, 1.0, 30.0], jnp.float32)
    one = lambda x, s: xla.quantize(x, format, axis=-2, global_scale=s)  # noqa: E731
    data, scale = jax.vmap(one, in_axes=(0, None if scales is None else 0))(to_jax(x), scales)
    for i in range(3):
        given = None if scales is None else scales[i]
        wanted = one(to_jax(x[i]), given)
        np.testing.assert_array_equal(bits(data[i]), bits(wanted[0]))
        np.testing.assert_array_equal(bits(scale[i]), bits(wanted[1]))


@pytest.mark.parametrize("name", NAMES)
def test_several_threads_at_once(name):
    format, failures = formats[name], []
    scalar = factor(format)
    given = [hard((1024, 1024), torch.bfloat16, seed) for seed in range(4)]
    wanted = [quantize(x, format, -2, scalar) for x in given]
    arrays = [to_jax(x) for x in given]

    def work(i: int) -> None:
        for _ in range(5):
            data, scale = xla.quantize(arrays[i], format, axis=-2, global_scale=of(scalar))
            theirs = wanted[i][0].mT if format.turned(-2, False) else wanted[i][0]
            if not (
                np.array_equal(bits(data), bits(theirs))
                and np.array_equal(bits(scale), bits(wanted[i][1]))
            ):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("dtype", DTYPES)
def test_global_scale(dtype):
    """Of many amaxes: a product with a reciprocal would differ."""
    format = formats["nvfp4"]
    numbers = torch.from_numpy(random_bits(1000, 7).copy()).to(dtype)
    for x in (numbers[numbers.isfinite()][:, None], hard((1, 2048, 2048), dtype, 8)):
        found = jax.lax.map(lambda row: xla.global_scale(row, format), to_jax(x))
        wanted = torch.stack([calls.global_scale(row, format) for row in x])
        np.testing.assert_array_equal(bits(found), bits(wanted))
    for x in (torch.zeros(3, 64), torch.zeros(0, 64), torch.full((2, 64), 1e-45).to(dtype)):
        wanted = calls.global_scale(x.to(dtype), format)
        np.testing.assert_array_equal(
            bits(xla.global_scale(to_jax(x.to(dtype)), format)), bits(wanted)
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 256, 512), (3, 100, 70), (7, 129, 4100), (0, 4, 4)])
def test_multiply(name, shape):
    """Without subnormal products, which XLA flushes: the same sums, in the same order."""
    (m, n, k), format = shape, formats[name]
    g = torch.Generator().manual_seed(m)
    x, w = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g)
    scalar = factor(format)
    data, scale = quantize(w, format, scalar=scalar)
    wanted = calls.multiply(x, data, scale, format, global_scale=scalar)
    quantized = xla.quantize(to_jax(w), format, global_scale=of(scalar))
    found = xla.multiply(to_jax(x), *quantized, format, global_scale=of(scalar))
    assert found.shape == (m, n)
    np.testing.assert_array_equal(bits(found), bits(wanted))


def test_errors():
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        xla.quantize(jnp.zeros((2, 32), jnp.int32), formats["mxfp8"])
    with pytest.raises(ValueError, match="nvfp4 needs one"):
        xla.quantize(jnp.zeros((2, 32)), formats["nvfp4"])


WITHOUT_TORCH = f"""
import sys, types
sys.modules["torch"] = None
package = types.ModuleType("blockscale")
package.__path__ = [{str(Path(bs.__file__).parent)!r}]
sys.modules["blockscale"] = package
import jax.numpy as jnp
from blockscale.formats import formats
from blockscale.kernels.cpu import xla
data, scale = xla.quantize(jnp.arange(64.0), formats["mxfp8"])
assert scale.tolist() == [124, 125], scale  # 31 / 448 and 63 / 448, rounded up to powers of two
"""


def test_torch_is_not_needed():
    """In a process that has the loop from disk."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
