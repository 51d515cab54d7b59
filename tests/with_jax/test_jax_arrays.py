"""ScaledArray as JAX's own arrays: transformed, sharded, handed to torch; and what is refused."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp
from jax_cases import assert_refused

import blockscale as bs
import blockscale.jax as bsj


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def same(a: bsj.ScaledArray, b: bsj.ScaledArray) -> bool:
    leaves, tree = jax.tree.flatten(a)
    others, other = jax.tree.flatten(b)
    return tree == other and all(
        np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(leaves, others, strict=True)
    )


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_transformations(name):
    """jit, vmap, scan and donation give what a loop does."""
    x = normal(3, 32, 64)
    scale = bsj.global_scale(x, name) if name == "nvfp4" else None
    quantize = partial(bsj.quantize, format=name, global_scale=scale)
    mapped, jitted = jax.vmap(quantize)(x), jax.jit(quantize)(x)
    assert mapped.shape == x.shape
    _, scanned = jax.lax.scan(lambda carry, each: (carry, quantize(each)), 0, x)
    for i in range(3):
        one = quantize(x[i])
        for each in (mapped, scanned):
            assert same(jax.tree.map(lambda leaf, i=i: leaf[i], each), one)
    assert np.array_equal(jitted.dequantize(), mapped.dequantize())
    given = bsj.quantize(x[0], name)
    data = np.array(given.data)
    again = jax.jit(lambda q: q, donate_argnums=0)(given)
    assert np.array_equal(again.data, data)


@pytest.mark.parametrize("layout", ["tcgen05", "packed"])
def test_layouts_that_vmap_made(layout):
    """A batch whose scales lie in tiles stands for what its matrices do."""
    x = normal(3, 200, 256)
    quantize = partial(bsj.quantize, format="mxfp8", layout=layout)
    many = jax.vmap(quantize)(x)
    assert np.array_equal(many.dequantize(), jnp.stack([quantize(each).dequantize() for each in x]))
    assert np.array_equal(many.mT.dequantize(), many.dequantize().mT)
    product = bsj.gemm(many, many.mT, jnp.float32)
    assert np.allclose(product, many.dequantize() @ many.dequantize().mT, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", bs.formats)
def test_torch_and_back(name, axis):
    """In the same memory, transposed or not."""
    x = torch.randn(96, 160)
    q = bs.quantize(x, name, axis, pad=True)
    for each in (q, q.mT):
        found = bsj.from_torch(each)
        assert found.shape == tuple(each.shape)
        assert np.array_equal(found.dequantize(), each.dequantize())
        assert found.data.unsafe_buffer_pointer() == each.qdata.data_ptr()
        back = bsj.to_torch(found)
        assert back.qdata.data_ptr() == each.qdata.data_ptr()
        assert back.axis == each.axis
        assert torch.equal(back.dequantize(), each.dequantize())
    mine = bsj.quantize(jnp.asarray(x.numpy()), name, axis, pad=True)
    assert torch.equal(bsj.to_torch(mine.mT).dequantize(), q.mT.dequantize())


@pytest.mark.parametrize("layout", ["tcgen05", "packed"])
def test_layouts_of_torch(layout):
    q = bs.quantize(torch.randn(200, 256), "mxfp8", layout=layout)
    found = bsj.from_torch(q)
    assert np.array_equal(found.dequantize(), q.dequantize())
    assert torch.equal(bsj.to_torch(found).dequantize(), q.dequantize())


@pytest.mark.parametrize(("left", "right"), [
    ("mxfp8", "mxfp4"), ("nvfp4", "nvfp4"), ("fp8_1x128", "fp8_128x128"), (None, "nvfp4"),
])  # fmt: skip
def test_products(left, right):
    """Of torch's operands: its sums, in another order."""
    a, w = torch.randn(24, 256).bfloat16(), torch.randn(64, 256)
    x = a if left is None else bs.quantize(a, left)
    q = bs.quantize(w, right)
    bias = torch.randn(64)
    wanted = bs.gemm(x, q.mT, torch.float32, bias=bias, backend="reference").numpy()
    given = jnp.from_dlpack(a) if left is None else bsj.from_torch(x)
    found = bsj.gemm(given, bsj.from_torch(q).mT, jnp.float32, bias=jnp.from_dlpack(bias))
    assert np.allclose(found, wanted, rtol=1e-5, atol=1e-4)
    assert bsj.gemm(given, bsj.from_torch(q).mT).dtype == jnp.bfloat16


def test_groups():
    """An empty group, and rows past the last one."""
    x, w = torch.randn(50, 64), torch.randn(3, 32, 64)
    ends = torch.tensor([20, 20, 44], dtype=torch.int32)
    a, b = bs.quantize(x, "mxfp8"), bs.quantize(w, "mxfp8")
    wanted = bs.grouped_gemm(a, b.mT, ends, torch.float32, backend="reference").numpy()
    given = bsj.from_torch(a), bsj.from_torch(b).mT, jnp.from_dlpack(ends)
    assert np.allclose(bsj.grouped_gemm(*given, jnp.float32), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "fp8_block"])
def test_gradients(format):
    """Those of products of operands that are quantized along their contraction."""
    x, w, g = normal(2, 40, 128), normal(128, 96, seed=1) / 8, normal(2, 40, 96, seed=2)
    formats = ("fp8_1x128", "fp8_128x128") if format == "fp8_block" else (format, format)
    y, pull = jax.vjp(partial(bsj.linear, format=format), x, w)
    grad_x, grad_w = pull(g)
    rows, g_rows = x.reshape(80, 128), g.reshape(80, 96)

    def q(v: jax.Array, axis: int, weight: bool = False) -> jax.Array:
        return bsj.quantize(v, formats[weight], axis, pad=True).dequantize()

    wanted = q(rows, -1) @ q(w, -2, True)
    assert np.allclose(y.reshape(80, 96), wanted, rtol=1e-4, atol=1e-4)
    assert np.allclose(
        grad_x.reshape(80, 128), q(g_rows, -1) @ q(w, -1, True).T, rtol=1e-4, atol=1e-4
    )
    assert np.allclose(grad_w, q(rows, -2).T @ q(g_rows, -2), rtol=1e-4, atol=1e-4)


def test_dot_general():
    """Any dimensions, and the gradients that lax has, but for what is rounded."""
    x, w = normal(4, 3, 32, 2), normal(32, 5, 4, 2, seed=1)
    numbers = (((2, 3), (0, 3)), ((0,), (2,)))
    plain = partial(jax.lax.dot_general, dimension_numbers=numbers)
    found = partial(bsj.dot_general, dimension_numbers=numbers)
    assert found(x, w).shape == plain(x, w).shape
    for f, limit in ((lambda h: h(x, w), 0.06), (lambda h: jax.grad(
        lambda x: (h(x, w) ** 2).sum())(x), 0.08)):  # fmt: skip
        a, b = f(found), f(plain)
        assert jnp.linalg.norm(a - b) < limit * jnp.linalg.norm(b)


def test_signatures_of_jax_nn():
    x, w = normal(2, 16, 64), normal(2, 8, 64, seed=1)
    numbers = (((2,), (2,)), ((0,), (0,)))
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    y = bsj.scaled_dot_general(x, w, numbers, configs=configs)
    a, b = bsj.quantize(x, "mxfp8"), bsj.quantize(w, "mxfp8")
    assert np.array_equal(y, bsj.gemm(a, b.mT, jnp.float32))
    found = bsj.scaled_matmul(a.data, b.data, a.scale, b.scale)
    assert np.allclose(found, y, rtol=1e-6, atol=1e-6)
    plain = bsj.scaled_dot_general(x, w, numbers)
    assert np.array_equal(plain, jax.lax.dot_general(x, w, numbers))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
import blockscale.jax as bsj
mesh = jax.make_mesh((2,), ("d",))
x = jax.random.normal(jax.random.key(0), (64, 128))
for name in ("mxfp8", "nvfp4"):
    for axis in (-1, -2):
        for dimension in (-1, -2):
            spec = P("d", None) if dimension == -2 else P(None, "d")
            def gathered(part, shared=True):
                scale = bsj.global_scale(part, name, "d") if name == "nvfp4" and shared else None
                q = bsj.quantize(part, name, axis, global_scale=scale)
                return bsj.all_gather(q, "d", dimension)
            given = jax.device_put(x, jax.NamedSharding(mesh, spec))
            def run(f):
                mapped = jax.shard_map(
                    f, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
                return jax.jit(mapped)(given)
            found, wanted = run(gathered), bsj.quantize(x, name, axis)
            assert found.shape == x.shape
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                assert np.array_equal(np.asarray(a), np.asarray(b)), (name, axis, dimension)
            if name == "nvfp4":
                assert bool(jnp.isnan(run(partial(gathered, shared=False)).dequantize()).all())
"""


CHECKED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
import blockscale.jax as bsj
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(64, 96), (96, 32)]))
def shards(f, out):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P("d"), P()), out_specs=out))(x, w)
def parts(x, w):
    q = bsj.quantize(x, "mxfp8")
    few = bsj.gemm(x[:4].astype(jnp.bfloat16), bsj.quantize(w.T, "mxfp8").mT)
    own, ends = bsj.quantize(x, "nvfp4").dequantize(), jnp.array([5, 20], jnp.int32)
    columns = bsj.quantize(x, "mxfp8", -2, offsets=ends)
    groups = columns.dequantize(), bsj.grouped_gemm(columns.mT, columns, ends)
    return q.dequantize(), own, few, *groups, bsj.dot_general(x, w, (((1,), (0,)), ((), ())))
for found, *halves in zip(shards(parts, P("d")), parts(x[:32], w), parts(x[32:], w)):
    assert np.array_equal(found, np.concatenate(halves))
@jax.jit
def gradients(x, w):
    return jax.grad(lambda x, w: (bsj.linear(x, w) ** 2).sum(), (0, 1))(x, w)
halves = gradients(x[:32], w), gradients(x[32:], w)
rows, weights = shards(gradients, (P("d"), P()))
assert np.array_equal(rows, np.concatenate([each[0] for each in halves]))
assert np.allclose(weights, halves[0][1] + halves[1][1], rtol=1e-5, atol=1e-4)
"""


@pytest.mark.parametrize("program", [SHARDED, CHECKED], ids=["gathered", "checked"])
def test_shards(program):
    """Gathered rows and columns have the bytes of the whole; global scales that differ give NaN.
    Where JAX checks what varies, each shard has its own, and gradients of weights are summed."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_flax():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    layer = nnx.Linear(64, 32, dot_general=bsj.dot_general, rngs=nnx.Rngs(0))
    x = normal(8, 64)
    y, grad = nnx.value_and_grad(lambda layer: (layer(x) ** 2).mean())(layer)
    plain = ((x @ layer.kernel[...] + layer.bias[...]) ** 2).mean()
    assert abs(y - plain) < 0.02 * plain
    assert grad.kernel[...].shape == (64, 32)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128"])
def test_checkpoints(name, tmp_path):
    """Orbax saves and restores it as a whole."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    q = bsj.quantize(normal(128, 256), name, axis=-2)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "saved", {"w": q})
        saver.wait_until_finished()
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), q)
        found = saver.restore(tmp_path / "saved", {"w": like})["w"]
    assert same(found, q)


def test_other_platforms():
    """Formulas, which call nothing of a CPU."""
    shape = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    for platform, by_loops in (("cpu", True), ("cuda", False)):
        step = jax.jit(lambda x: bsj.quantize(x, "nvfp4").mT.dequantize())
        found = jax.export.export(step, platforms=[platform], disabled_checks=CALLS)(shape)
        assert ("custom_call" in found.mlir_module()) == by_loops


#: Custom calls that an export may have.
CALLS = [
    jax.export.DisabledSafetyCheck.custom_call(f"blockscale_{each}")
    for each in ("quantize_bfloat16", "global_scale_bfloat16", "dequantize_float32")
]

X = jnp.ones((32, 64))
Q = bsj.quantize(X, "mxfp8")
BAD = [
    (lambda: bsj.quantize(X, "mxfp9"), ValueError, "format: got 'mxfp9'"),
    (lambda: bsj.quantize(X, axis=0), ValueError, "axis"),
    (lambda: bsj.quantize(X[:, :40]), ValueError, "pass pad=True"),
    (lambda: bsj.quantize(X[0]), ValueError, "expected a matrix"),
    (lambda: bsj.quantize(np.ones((32, 64))), TypeError, r"pass jnp.asarray\(x\)"),
    (lambda: bsj.quantize(X.astype(jnp.int32)), TypeError, "cast it first"),
    (lambda: bsj.quantize(Q), TypeError, "rounds twice"),
    (lambda: bsj.quantize(X, scale_rounding="up"), ValueError, "scale_rounding"),
    (lambda: bsj.quantize(X, layout="sm90"), ValueError, "choose 'compact'"),
    (lambda: bsj.quantize(X, global_scale=1.0), ValueError, "leave it out"),
    (lambda: bsj.quantize(X, seed=True), TypeError, "seed"),
    (lambda: bsj.quantize(X, seed=1 << 64), ValueError, "expected a 64-bit int"),
    (lambda: bsj.quantize(X, seed=bsj.Seed(1, jnp.ones(()))), ValueError, "expected a 64-bit int"),
    (lambda: bsj.quantize(X, seed=bsj.Seed(1, 0, (9, 9), (16, 16))), ValueError, "leave no room"),
    (lambda: bsj.gemm(Q, Q), ValueError, r"pass b.mT"),
    (lambda: bsj.gemm(Q, X), TypeError, "expected a ScaledArray"),
    (lambda: bsj.gemm(X, Q.mT), TypeError, "bfloat16"),
    (lambda: bsj.gemm(bsj.quantize(X, "nvfp4"), Q.mT), ValueError, "not multiplied"),
    (lambda: bsj.gemm(bsj.quantize(X[:, :32]), Q.mT), ValueError, "shapes"),
    (lambda: bsj.linear(X, X), ValueError, r"expected \(..., K\) and \(K, N\)"),
    (lambda: bsj.linear(X, X.T, gradients="nvfp4"), ValueError, "gradients"),
    (lambda: bsj.linear(X, X.T, jnp.ones((3, 32))), ValueError, "bias: has shape"),
    (lambda: bsj.gemm(Q, Q.mT, bias=jnp.ones((32, 1))), ValueError, "bias: has shape"),
    (lambda: bsj.gemm(Q, Q.mT, "int32"), ValueError, "out_dtype: got int32"),
    (lambda: bsj.dot_general(
        jnp.ones((5, 8, 4)), jnp.ones((4, 8, 7)), (((1, 2), (0, 1)), ((), ()))),
     ValueError, "match one by one"),
    (lambda: jax.grad(lambda a: jax.grad(lambda b: (bsj.linear(b, X.T) ** 2).sum())(a).sum())(X),
     NotImplementedError, "no second derivatives"),
    (lambda: jax.grad(lambda w: jax.grad(lambda b: bsj.linear(b, w).sum())(X).sum())(X.T),
     NotImplementedError, "no second derivatives"),
    (lambda: bsj.from_torch(X), TypeError, "ScaledTensor"),
    (lambda: bsj.dequantize(X), TypeError, "expected a ScaledArray"),
    (lambda: bsj.global_scale(X, "mxfp8"), ValueError, "no global scale"),
    (lambda: bsj.scaled_dot_general(X, X, (((1,), (1,)), ((), ())), configs=["mxfp8"]),
     ValueError, "lhs, rhs and gradients"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "says"), BAD)
def test_bad_input(call, kind, says):
    assert_refused(call, kind, says)


WITHOUT = """
import sys
sys.modules["torch"] = None
import jax.numpy as jnp
import blockscale.jax as bsj
q = bsj.quantize(jnp.ones((32, 64)), "nvfp4")
assert bool((bsj.linear(jnp.ones((4, 64)), q.mT.dequantize(), format="mxfp8") == 64).all())
try:
    bsj.to_torch(q)
except ImportError:
    pass
else:
    raise AssertionError
"""


def test_torch_is_not_imported():
    """Nor needed, but for what goes to it."""
    for code in (WITHOUT, "import sys, blockscale.jax; assert 'torch' not in sys.modules"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
