"""Functions of arrays that four devices share, under a plain jit: run by ``test_jax_partition``.

Meshes have automatic axes, whose shardings XLA chooses, or explicit ones, which types tell.
"""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import blockscale as bs
import blockscale.jax as bsj
from blockscale.fallback import FallbackWarning
from blockscale.jax import formulas, gpu_dequantize, gpu_gemm, gpu_quantize, target
from blockscale.jax.target import Target, standing_in
from blockscale.kernels.common.gpu import GPUS

pytestmark = pytest.mark.kernels  # compiling takes as long: a quarter of the cases, or all
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
of_each_kind = pytest.mark.parametrize("kind", KINDS)


def share(x, spec, kind="auto", sizes=(2, 2)):
    """``x`` on a mesh of "d" and "t"."""
    mesh = jax.make_mesh(sizes, ("d", "t"), axis_types=(KINDS[kind],) * 2)
    return jax.device_put(x, NamedSharding(mesh, spec))


def hard(*shape, dtype="float32", seed=0):
    """Of all sizes, with zeros, subnormals, infinities and NaN."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-20, 20, size=shape)
    x.flat[:: x.size // 60] = np.resize([0, -0.0, 1e-40, np.inf, np.nan, 3e38, -6e-8], 61)[
        : len(x.flat[:: x.size // 60])
    ]
    with np.errstate(over="ignore"):
        return jnp.asarray(x.astype(np.float32)).astype(dtype)


def normal(*shape, seed=0, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def assert_same(got, wanted):
    """The same bytes."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def collectives(function, *given):
    """What travels between devices: for each kind of message, the shapes of its results."""
    text = jax.jit(function).lower(*given).compile().as_text()
    kinds = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    found = {}
    for kind in kinds:
        results = re.findall(rf"= (.*?) {kind}(?:-start)?\(", text)
        if results:
            found[kind] = sorted(re.findall(r"\w+\[[\d,]*\]", " ".join(results)))
    return found


def specs(tree):
    """Without trailing dimensions that are whole."""

    def of(x):
        spec = list(x.sharding.spec)
        while spec and spec[-1] is None:
            spec.pop()
        return P(*spec)

    return [of(x) for x in jax.tree.leaves(tree)]


#: Where (256, 512) is cut, and where data of packed columns is, which lies turned.
CUTS = [
    (P("t", "d"), P("d", "t")),
    (P(("d", "t")), P(None, ("d", "t"))),
    (P(None, ("t", "d")), P(("t", "d"))),
]


@of_each_kind
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "mxfp6_e2m3", "fp8_128x128"])
def test_quantize(name, axis, kind):
    """Nothing travels but the largest magnitude, and all parts lie as ``x`` does."""
    x = hard(256, 512, dtype="bfloat16")
    quantize = jax.jit(lambda x: bsj.quantize(x, name, axis))
    wanted = quantize(x)
    messages = {"all-reduce"} if wanted.global_scale is not None else set()
    for cut, turned in CUTS:
        if name == "fp8_128x128" and cut[0] == ("d", "t"):
            continue  # 64 rows are no block
        shared = share(x, cut, kind)
        got = quantize(shared)
        assert_same(got, wanted)
        data = turned if got.turned[0] else cut
        assert specs(got)[:2] == [data, cut]
        assert set(collectives(quantize, shared)) == messages
        back = jax.jit(bsj.dequantize)
        assert_same(back(got), wanted.dequantize())
        assert specs(back(got)) == [cut]
        assert not collectives(back, got)


@of_each_kind
def test_both_axes(kind):
    x = hard(2, 128, 256)
    quantize = jax.jit(partial(bsj.quantize_both, format="nvfp4"))
    shared = share(x, P("d", None, "t"), kind)
    got = quantize(shared)
    assert_same(got, quantize(x))
    assert set(collectives(quantize, shared)) == {"all-reduce"}


@of_each_kind
@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((64, 64), {"format": "mxfp8"}),  # two blocks for four devices
        ((96, 96), {"format": "mxfp8", "axis": -2}),  # three
        ((200, 200), {"format": "nvfp4", "pad": True}),
        ((256, 384), {"format": "fp8_128x128"}),
        ((256, 256), {"format": "mxfp8", "layout": "tcgen05"}),
        ((256, 256), {"format": "fp8_1x128", "layout": "sm90"}),
        ((64, 128), {"format": "mxfp8", "axis": -2, "k_major": True}),
        ((4, 8, 64), {"format": "nvfp4", "global_scale": jnp.asarray([1e-3, 1, 0.5, 30.0])}),
    ],
)
def test_bytes_wherever_it_is_cut(shape, how, kind):
    """Blocks that would be cut are gathered before; results may be wanted elsewhere."""
    x = hard(*shape)
    quantize = jax.jit(lambda x: bsj.quantize(x, **how))
    wanted = quantize(x)
    sizes = (4, 1) if shape[-1] < 100 else (2, 2)
    for spec in (P("d", "t"), P(("t", "d")), P(None, ("d", "t"))):
        shared = share(x, spec, kind, sizes)
        assert_same(quantize(shared), wanted)
        assert_same(jax.jit(bsj.dequantize)(quantize(shared)), wanted.dequantize())
        if kind == "auto":
            elsewhere = NamedSharding(shared.sharding.mesh, P(None, "d"))
            back = jax.jit(lambda x: quantize(x * 1).dequantize(), out_shardings=elsewhere)
            assert_same(back(shared), wanted.dequantize())


@of_each_kind
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    ("shape", "cut", "gathers"),
    [
        ((64, 128), P("d", "t"), False),
        ((4, 128, 128), P("d", "t"), False),
        ((4, 64, 128), P("d", None, "t"), False),
        ((2, 2, 64, 128), P("d", None, "t"), False),
        ((2, 2, 64, 128), P("d", "t"), True),  # a shard's matrices have no one stride
    ],
)
def test_stochastic(shape, cut, gathers, axis, kind):
    """The bits that an element has in the whole array, or in one that this is a part of."""
    x = hard(*shape)
    lead, larger = (0,) * (len(shape) - 2), (*shape[:-2], 192, 150)
    of_part = bsj.Seed(5, 3, (*lead, 32, 7), larger)
    for seed in (7, of_part) if not lead else (of_part,):
        quantize = jax.jit(lambda x, seed=seed: bsj.quantize(x, "mxfp4", axis, seed=seed))
        shared = share(x, cut, kind)
        assert_same(quantize(shared), quantize(x))
        assert ("all-gather" in collectives(quantize, shared)) == gathers


FURTHER = [  # format, and how: squares, transforms and scalings
    ("mxfp8", {"square": True}),
    ("nvfp4", {"square": True, "seed": 5, "axis": -2}),
    ("nvfp4", {"hadamard": bs.Hadamard(64, 5)}),
    ("mxfp4", {"hadamard": bs.Hadamard(16, bs.Seed(7, jnp.int32(3))), "axis": -2, "seed": 1}),
    ("nvfp4", {"scaling": "four_over_six"}),
    ("nvfp4", {"scaling": "ms_eden", "hadamard": bs.Hadamard(16, 5), "seed": 3}),
]


@of_each_kind
@pytest.mark.parametrize(("name", "how"), FURTHER)
def test_squares_transforms_and_scalings(name, how, kind):
    """Between whole squares, and blocks of a transform, nothing but the largest magnitude
    travels."""
    x = hard(128, 128)
    quantize = jax.jit(lambda x: bsj.quantize(x, name, **how))
    shared = share(x, P("d", "t"), kind)
    assert_same(quantize(shared), quantize(x))
    assert set(collectives(quantize, shared)) <= {"all-reduce"}
    narrow = x[:, :96]  # not in whole blocks
    if how.get("hadamard", bs.Hadamard()).size < 64:
        assert_same(quantize(share(narrow, P("d", "t"), kind)), quantize(narrow))


@of_each_kind
@pytest.mark.parametrize("axis", [-1, -2])
def test_groups_are_gathered(axis, kind):
    x, ends = hard(192, 64), jnp.array([0, 70, 71, 190], jnp.int32)
    quantize = jax.jit(lambda x: bsj.quantize(x, "mxfp8", axis, offsets=ends))
    assert_same(quantize(share(x, P("d", "t"), kind)), quantize(x))


PRODUCTS = [(None, "mxfp8"), ("mxfp8", "mxfp4"), ("nvfp4", "nvfp4"), ("fp8_1x128", "fp8_128x128")]


@of_each_kind
@pytest.mark.parametrize(
    ("formats", "rows"),
    [*((each, 128) for each in PRODUCTS), *((each, 8) for each in PRODUCTS[:2])],
)
def test_gemm(formats, rows, kind):
    """Rows, columns and matrices of a batch ask for nothing; sums of parts are fp32."""
    x, w, bias = normal(rows, 512, dtype="bfloat16"), normal(256, 512, seed=1), normal(256)

    def operands(left, right):
        a = share(x, left, kind)
        if formats[0]:
            a = jax.jit(lambda x: bsj.quantize(x, formats[0]))(a)
        return a, jax.jit(lambda w: bsj.quantize(w, formats[1]))(share(w, right, kind))

    product = jax.jit(lambda a, b: bsj.gemm(a, b.mT, jnp.float32, bias=bias))
    wanted = product(*operands(P(), P()))
    for left, right, out, messages in (
        (P("d"), P("t"), P("d", "t"), {}),
        (P(("d", "t")), P(), P(("d", "t")), {}),
        (P(), P(("t", "d")) if formats[1] != "fp8_128x128" else P("t"), None, {}),
        (P("d", "t"), P(None, "t"), P("d"), {"all-reduce"}),
        (P(None, "t"), P("d", "t"), P(None, "d"), {"all-reduce"}),
        (P("d"), P("d"), None, {"all-gather"}),  # one of both can be cut so
    ):
        a, b = operands(left, right)
        got = product(a, b)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-3)
        assert out is None or specs(got) == [out]
        assert set(collectives(product, a, b)) == set(messages)


@of_each_kind
def test_batch_of_products(kind):
    x, w = normal(4, 64, 128), normal(4, 32, 128, seed=1)
    both = [jax.jit(partial(bsj.quantize, format="mxfp8"))(share(v, P("d"), kind)) for v in (x, w)]
    product = jax.jit(lambda a, b: bsj.gemm(a, b.mT, jnp.float32))
    wanted = product(bsj.quantize(x, "mxfp8"), bsj.quantize(w, "mxfp8"))
    np.testing.assert_allclose(product(*both), wanted, rtol=1e-6, atol=1e-5)
    assert specs(product(*both)) == [P("d")]
    assert not collectives(product, *both)


@of_each_kind
def test_kernels_have_shards(kind, monkeypatch):
    """Kernels, which are formulas here, are called on what a device has; parts of a sum are fp32,
    and seeds, whose places in the whole they do not take, are for XLA."""
    seen = []
    monkeypatch.setattr(target, "_warned", set())

    def multiplied(a, b, bias, out, _):
        seen.append((a.shape, b.shape, bias is not None, out.name))
        acc = a.dequantize(jnp.float32) @ b.dequantize(jnp.float32)
        return (acc if bias is None else acc + bias).astype(out)

    def encoded(x, *given):
        *rest, asked, _ = given
        seen.append(x.shape)
        return [formulas.encoded(x, *rest, each) for each in asked]

    def decoded(data, scale, scalar, stored, dtype, _):
        return formulas.decoded(data, scale, scalar, stored).astype(dtype)

    monkeypatch.setattr(gpu_dequantize, "decoded", decoded)
    monkeypatch.setattr(gpu_gemm, "multiplied", multiplied)
    monkeypatch.setattr(gpu_quantize, "encoded", encoded)
    x, w, bias = normal(128, 512), normal(256, 512, seed=1), normal(256)
    wanted = bsj.gemm(bsj.quantize(x), bsj.quantize(w).mT, bias=bias)
    stochastic = jax.jit(lambda x: bsj.quantize(x, seed=3))
    of_whole = stochastic(x)

    def launch(*_):
        raise AssertionError("only what is replaced here is called")

    with standing_in(Target(GPUS["sm_90a"], launch, "cpu")):
        product = jax.jit(lambda x, w: bsj.gemm(bsj.quantize(x), bsj.quantize(w).mT, bias=bias))
        for left, right, kernels in (
            (P("d"), P("t"), {(64, 512), (128, 512), ((64, 512), (512, 128), True, "bfloat16")}),
            (P("d", "t"), P(None, "t"), {
                (64, 256), (256, 256), ((64, 256), (256, 256), False, "float32"),
            }),
        ):  # fmt: skip
            given = share(x, left, kind), share(w, right, kind)
            jax.clear_caches()
            seen.clear()
            got = product(*given)
            assert kernels <= {*seen}
            np.testing.assert_allclose(
                got.astype("float32"), wanted.astype("float32"), rtol=2**-7, atol=1e-2
            )
        jax.clear_caches()
        with pytest.warns(FallbackWarning, match="where a shard of a sharded array begins"):
            got = jax.jit(lambda x: bsj.quantize(x, seed=3))(share(x, P("d", "t"), kind))
    assert_same(got, of_whole)


#: Cuts of tokens and of two weights.
MODELS = {
    "data": (P("d"), P(), P()),
    "fsdp": (P("d"), P("d"), P("d")),
    "fsdp, columns": (P("d"), P(None, "d"), P(None, "d")),
    "tensor": (P(), P(None, "t"), P("t")),
    "both": (P("d"), P("d", "t"), P("t", "d")),
}


@of_each_kind
def test_dot_general(kind):
    """Dimensions that are merged before a product, and split after it, are cut as before."""
    x, w = normal(4, 32, 4, 32), normal(4, 32, 2, 64, seed=1)
    dot = jax.jit(partial(bsj.dot_general, dimension_numbers=(((2, 3), (0, 1)), ((), ()))))
    given = share(x, P("d"), kind), share(w, P(None, None, "t"), kind)
    np.testing.assert_allclose(dot(*given), dot(x, w), rtol=1e-5, atol=1e-4)
    assert specs(dot(*given)) == [P("d", None, "t")]
    assert not collectives(dot, *given)


@of_each_kind
@pytest.mark.parametrize(
    ("cuts", "format"),
    [(cuts, "nvfp4") for cuts in MODELS]
    + [("fsdp", "mxfp8"), ("both", "mxfp8"), ("both", "fp8_block")],
)
def test_training(cuts, format, kind):
    """An MLP's loss and gradients are those of one device, but for the order of sums. Weights of
    FSDP are gathered quantized, and their gradients scattered as they are summed."""
    x, up, down = normal(8, 128, 256), normal(256, 512, seed=1) / 16, normal(512, 256, seed=2) / 32

    def loss(weights, x):
        hidden = jax.nn.relu(bsj.linear(x, weights[0], format=format))
        return (bsj.linear(hidden, weights[1], format=format) ** 2).mean()

    step = jax.value_and_grad(loss)
    wanted = jax.jit(step)([up, down], x)
    tokens, *weights = (
        share(v, spec, kind) for v, spec in zip((x, up, down), MODELS[cuts], strict=True)
    )

    places = [w.sharding for w in weights]

    def of_shards(weights, x):
        value, grads = step(weights, x)
        if kind == "auto":  # as optimizers have them
            grads = [*map(jax.lax.with_sharding_constraint, grads, places)]
        return value, grads

    got = jax.jit(of_shards)(weights, tokens)
    assert specs(got[1]) == specs(weights)
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5)
    for one, other in zip(got[1], wanted[1], strict=True):
        # a sum that is rounded otherwise may move an element of what is quantized next by a step
        assert np.linalg.norm(one - other) <= 2.0**-9 * np.linalg.norm(other)
    messages = collectives(of_shards, weights, tokens)
    assert messages.keys() <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert ("all-gather" in messages) == ("fsdp" in cuts or cuts == "both")
    if format != "fp8_block":  # whose scales are fp32
        assert all(each.startswith("u8") for each in messages.get("all-gather", []))
    if "fsdp" in cuts:
        assert len(messages["reduce-scatter"]) == 2


@of_each_kind
def test_transformations(kind):
    """vmap has a dimension more, which automatic axes may cut; scan, remat, donation and
    ``shard_map``, whose arrays are shards already, are as ever."""
    x = hard(4, 64, 128)
    for name in ("mxfp8", "nvfp4"):
        mapped = jax.jit(jax.vmap(lambda x, name=name: bsj.quantize(x, name)))
        cuts = [P(None, "d", "t"), P("d", "t"), P("t", None, "d")]
        for cut in cuts if kind == "auto" else cuts[:1]:
            shared = share(x, cut, kind)
            assert_same(mapped(shared), mapped(x))
            assert "all-gather" not in collectives(mapped, shared)
        twice = jax.jit(jax.vmap(jax.vmap(lambda x, name=name: bsj.quantize(x, name), 1)))
        turned = jnp.stack([x, -x], 2)
        assert_same(twice(share(turned, P(None, "d", None, "t"), kind)), twice(turned))
    shared = share(x, P(None, "d", "t"), kind)
    scanned = jax.jit(lambda x: jax.lax.scan(lambda _, x: (0, bsj.quantize(x, "nvfp4")), 0, x)[1])
    assert_same(scanned(shared), scanned(x))
    assert "all-gather" not in collectives(scanned, shared)
    w = normal(128, 64)
    loss = jax.checkpoint(lambda w, x: bsj.linear(x, w).sum())
    got = jax.jit(jax.grad(loss))(share(w, P("t"), kind), share(normal(64, 128), P("d", "t"), kind))
    np.testing.assert_allclose(got, jax.grad(loss)(w, normal(64, 128)), rtol=1e-5, atol=1e-4)
    given = jax.jit(bsj.quantize)(share(normal(64, 128), P("d", "t"), kind))
    data = np.array(given.data)
    assert np.array_equal(jax.jit(lambda q: q, donate_argnums=0)(given).data, data)
    one = share(normal(64, 128), P("d", "t"), kind)
    for axes in ({"d", "t"}, {"d"}):
        spec = P("d", "t" if "t" in axes else None)
        inside = jax.jit(jax.shard_map(
            lambda x: bsj.quantize(x, "mxfp8").dequantize(),
            mesh=one.sharding.mesh, in_specs=spec, out_specs=spec, axis_names=axes,
        ))  # fmt: skip
        assert_same(inside(one), bsj.quantize(normal(64, 128), "mxfp8").dequantize())


def test_derivative_of_a_product():
    """By values, of an operand that is not quantized."""
    a, b = normal(64, 128, dtype="bfloat16"), bsj.quantize(normal(32, 128), "mxfp8").mT
    grad = jax.jit(jax.grad(lambda a: (bsj.gemm(a, b, jnp.float32) ** 2).sum()))
    exact = jax.grad(lambda a: ((a.astype("float32") @ b.dequantize()) ** 2).sum())(a)
    for x in (a, share(a, P("d")), share(a, P("d"), "explicit")):
        np.testing.assert_allclose(grad(x).astype("float32"), exact, rtol=2**-6, atol=1e-1)


def test_eager():
    """Without jit, too."""
    x = normal(64, 128)
    got = bsj.quantize(share(x, P("d", "t")), "nvfp4")
    assert_same(got, bsj.quantize(x, "nvfp4"))
    assert specs(got)[:2] == [P("d", "t")] * 2


CALLS = [
    jax.export.DisabledSafetyCheck.custom_call(f"blockscale_{each}_float32")
    for each in ("quantize", "global_scale", "dequantize")
]


@of_each_kind
def test_export(kind):
    """What is exported asks nobody: it gathers, or has its shards already."""
    x = normal(64, 128)
    shared = share(x, P("d", "t"), kind)
    step = jax.jit(lambda x: bsj.quantize(x, "nvfp4").dequantize())
    exported = jax.export.export(step, disabled_checks=CALLS)(shared)
    assert "CustomSPMDPartitioning" not in exported.mlir_module()
    assert_same(jax.jit(exported.call)(shared), step(x))


def test_one_device():
    """Is asked nothing."""
    text = jax.jit(bsj.quantize).lower(normal(64, 128)).as_text()
    assert "CustomSPMDPartitioning" not in text
    assert text.count("custom_call @blockscale_quantize") == 1


@of_each_kind
def test_lowered_for_gpus(kind, monkeypatch):
    """Kernels are compiled for shards where they are known, in a mesh with explicit axes; XLA asks
    for them else, when it compiles for a GPU."""
    checks = pytest.importorskip("cutlass.jax").get_export_disabled_safety_checks()
    pytest.importorskip("tvm_ffi")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    x, w = share(normal(128, 512), P("d"), kind), share(normal(256, 512), P("t"), kind)
    step = jax.jit(lambda x, w: bsj.gemm(bsj.quantize(x), bsj.quantize(w).mT))
    asked = step.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    exported = jax.export.export(step, platforms=["cuda"], disabled_checks=checks)(x, w)
    text = str(exported.mlir_module())
    calls = [line for line in text.splitlines() if "custom_call @CuteDSLRT" in line]
    assert calls
    shards = kind == "explicit"
    for shard, whole in (("64x512xf32", "256x512xf32"), ("64x128xbf16", "128x256xbf16")):
        assert shards == any(f"tensor<{shard}>" in line for line in calls)
        assert shards != any(f"tensor<{whole}>" in line for line in calls)
    assert asked.count("CustomSPMDPartitioning") == (0 if shards else 3)
