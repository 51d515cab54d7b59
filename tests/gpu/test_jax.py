"""JAX on a GPU, by our kernels: the bytes and bits of torch's side, and whatever JAX does."""

from functools import partial

import pytest
import torch
from gpu_inputs import DEVICE, only_on

import blockscale as bs
from blockscale.kernels.common.gpu import GPUS

jax = pytest.importorskip("jax")
only_on(*GPUS)

import jax.numpy as jnp  # noqa: E402

import blockscale.jax as bsj  # noqa: E402

if not any(each.platform == "gpu" for each in jax.devices()):
    pytest.skip("jax has no GPU", allow_module_level=True)

FORMATS = [name for name, fmt in bs.formats.items() if fmt.element.bits != 6]


def normal(*shape, dtype=torch.bfloat16, seed=0):
    """The same numbers for both."""
    made = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(shape, generator=made, device=DEVICE).to(dtype)
    return x, jnp.array(jnp.from_dlpack(x))


def octets(q):
    return q.contiguous().reshape(-1).view(torch.uint8).cpu()


def assert_same(got, expected):
    got = bsj.to_torch(got)
    for one, other in zip(
        (got.qdata, got.qscale, got.global_scale),
        (expected.qdata, expected.qscale, expected.global_scale),
        strict=True,
    ):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(octets(one), octets(other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", FORMATS)
def test_quantize(name, axis, dtype):
    for shape in ((136, 224), (3, 64, 96)):
        x, y = normal(*shape, dtype=dtype)
        got = jax.jit(partial(bsj.quantize, format=name, axis=axis, pad=True))(y)
        expected = bs.quantize(x, name, axis, pad=True)
        assert_same(got, expected)
        values = torch.from_dlpack(jax.jit(partial(bsj.dequantize))(got))
        assert torch.equal(octets(values), octets(expected.dequantize()))


EDEN = {"scaling": "ms_eden", "seed": 7}
FURTHER = [
    ("nvfp4", {"square": True, "seed": 3}),
    ("mxfp8", {"square": True, "axis": -2}),
    ("nvfp4", {"hadamard": bs.Hadamard(16, 0xACE1)}),
    ("mxfp4", {"hadamard": bs.Hadamard(128), "axis": -2, "seed": 5}),
    ("nvfp4", {"scaling": "four_over_six"}),
    ("nvfp4", {"scaling": "four_over_six", "square": True}),
    ("nvfp4", {"hadamard": bs.Hadamard(128, 5), **EDEN}),
]


@pytest.mark.parametrize(("name", "how"), FURTHER)
def test_squares_transforms_and_scalings(name, how):
    x, y = normal(256, 384)
    got = jax.jit(lambda y: bsj.quantize(y, name, **how))(y)
    assert_same(got, bs.quantize(x, name, **how))


def test_signs_of_a_traced_step():
    x, y = normal(256, 384)
    quantize = jax.jit(
        lambda y, step: bsj.quantize(y, "nvfp4", hadamard=bs.Hadamard(16, bsj.Seed(7, step)))
    )
    for step in (0, -5):
        expected = bs.quantize(x, "nvfp4", hadamard=bs.Hadamard(16, bs.Seed(7, step)))
        assert_same(quantize(y, jnp.int32(step)), expected)


def test_both_axes_from_one_read():
    x, y = normal(256, 512)
    for got, expected in zip(
        jax.jit(bsj.quantize_both)(y), bs.quantize_both(x, "mxfp8"), strict=True
    ):
        assert_same(got, expected)


@pytest.mark.parametrize("m", [1, 40, 700])
@pytest.mark.parametrize(
    "formats",
    [
        ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("mxfp8", "mxfp4"), ("fp8_1x128", "fp8_128x128"),
        ("fp8_1x128", "mxfp4"), (None, "mxfp8"), (None, "nvfp4"),
    ],
)  # fmt: skip
def test_gemm(formats, m):
    """Stream-K, split-K, and products of values that are written first, too."""
    left, right = formats
    for n, k in ((256, 512), (4096, 1024)):
        (a, c), (b, d) = normal(m, k, seed=1), normal(n, k, seed=2)
        if left is not None:
            a, c = bs.quantize(a, left), bsj.quantize(c, left)
        b, d = bs.quantize(b, right), bsj.quantize(d, right)
        product = jax.jit(lambda c, d: bsj.gemm(c, d.mT, jnp.float32))
        for _ in range(3):
            got = torch.from_dlpack(product(c, d))
            assert torch.equal(got, bs.gemm(a, b.mT, torch.float32))


@pytest.mark.parametrize(
    "formats", [("mxfp8", "mxfp8"), ("fp8_1x128", "fp8_128x128"), (None, "nvfp4")]
)
def test_grouped_gemm(formats):
    left, right = formats
    (a, c), (b, d) = normal(300, 512, seed=1), normal(4, 256, 512, seed=2)
    ends = torch.tensor([70, 70, 201, 290], dtype=torch.int32, device=DEVICE)
    if left is not None:
        a, c = bs.quantize(a, left), bsj.quantize(c, left)
    b, d = bs.quantize(b, right), bsj.quantize(d, right)
    got = jax.jit(lambda c, d, e: bsj.grouped_gemm(c, d.mT, e))(c, d, jnp.array(ends.cpu().numpy()))
    assert torch.equal(torch.from_dlpack(got), bs.grouped_gemm(a, b.mT, ends))


@pytest.mark.parametrize("k_major", [False, True], ids=["", "k_major"])
@pytest.mark.parametrize("name", [name for name in FORMATS if bs.formats[name].block[0] == 1])
def test_quantize_groups(name, k_major):
    """Along columns, and along both axes from one read."""
    x, y = normal(700, 224)
    for given in ([70, 70, 201, 690], [0, 0, 0, 700], [128, 256, 384, 385]):
        ends = torch.tensor(given, dtype=torch.int32, device=DEVICE)
        how = {"format": name, "k_major": k_major, "pad": True}
        both = jax.jit(lambda y, e, how=how: bsj.quantize_both(y, offsets=e, **how))
        pair = both(y, jnp.array(given, jnp.int32))
        for got, expected in zip(pair, bs.quantize_both(x, offsets=ends, **how), strict=True):
            assert_same(got, expected)
        alone = jax.jit(lambda y, e, how=how: bsj.quantize(y, axis=-2, offsets=e, **how))
        got = alone(y, jnp.array(given, jnp.int32))
        assert_same(got, bs.quantize(x, axis=-2, offsets=ends, **how))
        values = torch.from_dlpack(jax.jit(partial(bsj.dequantize))(got))
        assert torch.equal(octets(values), octets(bsj.to_torch(got).dequantize()))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128"])
def test_grouped_gemm_along_k(name):
    (g, c), (x, d) = normal(700, 384, seed=1), normal(700, 512, seed=2)
    ends = torch.tensor([70, 70, 201, 690], dtype=torch.int32, device=DEVICE)
    a, b = (bs.quantize(each, name, -2, offsets=ends, k_major=True) for each in (g, x))

    def wgrad(c, d, e):
        left, right = (
            bsj.quantize(each, name, axis=-2, offsets=e, k_major=True) for each in (c, d)
        )
        return bsj.grouped_gemm(left.mT, right, e, jnp.float32)

    got = torch.from_dlpack(jax.jit(wgrad)(c, d, jnp.array(ends.cpu().numpy())))
    assert torch.equal(got, bs.grouped_gemm(a.mT, b, ends, torch.float32))


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "fp8_block"])
def test_linear_trains(format):
    """Gradients by kernels are near those of plain products, under jit, vmap and shard_map."""
    _, x = normal(128, 256, seed=1)
    _, w = normal(256, 384, seed=2)

    def loss(w, x):
        return (bsj.linear(x, w, format=format).astype(jnp.float32) ** 2).mean()

    def plain(w, x):
        return ((x.astype(jnp.float32) @ w.astype(jnp.float32)) ** 2).mean()

    got, expected = jax.jit(jax.grad(loss, (0, 1)))(w, x), jax.jit(jax.grad(plain, (0, 1)))(w, x)
    for one, other in zip(got, expected, strict=True):
        off = jnp.linalg.norm((one - other).astype(jnp.float32))
        assert off < 0.25 * jnp.linalg.norm(other.astype(jnp.float32))
    many = jnp.stack([x, 2 * x])
    for each, given in zip(jax.jit(jax.vmap(partial(loss, w)))(many), many, strict=True):
        assert each == jax.jit(loss)(w, given)
    mesh = jax.make_mesh((1,), ("data",))
    rows = jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(
        lambda x: bsj.linear(x, w, format=format), mesh=mesh, in_specs=rows, out_specs=rows
    )
    assert (jax.jit(sharded)(x) == bsj.linear(x, w, format=format)).all()


def test_donated_and_repeated():
    _, x = normal(512, 1024)
    once = jax.jit(lambda x: bsj.dequantize(bsj.quantize(x)), donate_argnums=0)
    first = once(jnp.array(x))
    for _ in range(3):
        assert (once(jnp.array(x)) == first).all()
