"""``k_major=True``: 8-bit columns with the contraction contiguous, on a CPU."""

import copy
import io
import pickle
from itertools import product

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.layouts import layouts

FORMATS = ("mxfp8", "mxfp8_e5m2", "fp8_1x128", "fp8_128x128")
BACKENDS = ("auto", "reference")
PLACES = [
    (name, layout)
    for name in FORMATS
    for layout, where in layouts.items()
    if bs.formats[name].scale.nbytes in where.itemsize
]
BOTH = (-1, -2)


def matrix(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * 3
    x[..., 0, 0] = torch.inf
    return x.bfloat16()


def octets(part: Tensor) -> Tensor:
    return part.contiguous().flatten().view(torch.uint8)


def same(a: bs.ScaledTensor, b: bs.ScaledTensor) -> bool:
    """Equal bytes at equal positions, wherever these lie."""
    return torch.equal(a, b) and torch.equal(octets(a.dequantize()), octets(b.dequantize()))


def is_k_major(q: bs.ScaledTensor) -> bool:
    data = q.qdata if q.axis == -1 else q.qdata.mT
    return data.stride(-1) == 1 and data.stride(-2) % 16 == 0 and data.stride(-2) >= data.shape[-1]


# --- what quantize stores -------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "layout"), PLACES)
def test_columns(name, layout, backend):
    """The same bytes as without, in lines of whole blocks, whatever the number of rows."""
    for shape in ((256, 128), (129, 40), (1, 3)):
        x, given = matrix(*shape), {"layout": layout, "pad": True, "backend": backend}
        want = bs.quantize(x, name, -2, **given)
        q = bs.quantize(x, name, -2, k_major=True, **given)
        assert same(q, want)
        assert q.qdata.mT.is_contiguous()
        assert is_k_major(q)
        row, column = bs.quantize_both(x, name, k_major=True, **given)
        assert same(row, bs.quantize(x, name, **given))
        assert row.qdata.is_contiguous()
        assert same(column, want)
        assert column.qdata.stride() == q.qdata.stride()
        assert column.stride() == q.stride()


def test_without_it_columns_lie_as_x_does():
    assert bs.quantize(matrix(64, 32), axis=-2).qdata.is_contiguous()


@pytest.mark.parametrize("name", FORMATS)
def test_leading_dimensions(name):
    x = matrix(2, 3, 256, 128)
    q = bs.quantize(x, name, -2, k_major=True)
    assert same(q, bs.quantize(x, name, -2))
    assert q.qdata.mT.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp6_e2m3"])
def test_packed_data_lies_so_already(name, backend):
    x = matrix(64, 32)
    given = {"global_scale": 0.01} if name == "nvfp4" else {}
    want, q = (bs.quantize(x, name, -2, k_major=k, backend=backend, **given) for k in (False, True))
    assert same(q, want)
    assert q.qdata.stride() == want.qdata.stride() == (1, want.qdata.shape[0])


def test_seeds():
    x = matrix(64, 32)
    want = bs.quantize(x, axis=-2, seed=5)
    q = bs.quantize(x, axis=-2, seed=5, k_major=True)
    assert same(q, want)
    assert is_k_major(q)


@pytest.mark.parametrize("name", ["mxfp8", "fp8_1x128"])
def test_fused_producers(name):
    x, grad = matrix(129, 512), matrix(129, 256, seed=1)
    for k_major in (False, True):
        found = (
            *bs.swiglu_quantize(x, name, pad=True, k_major=k_major),
            *bs.swiglu_backward_quantize(grad, x, name, pad=True, k_major=k_major),
        )
        if not k_major:
            wanted = found
    assert all(map(same, found, wanted))
    assert [is_k_major(q) for q in wanted] == [True, False] * 2
    assert all(map(is_k_major, found))


@pytest.mark.parametrize("function", [bs.quantize_both, bs.swiglu_quantize])
def test_groups(function):
    """Values are those of columns in the order of x."""
    x, ends = matrix(64, 64), torch.tensor([7, 60], dtype=torch.int32)
    found = function(x, offsets=ends, k_major=True)
    assert is_k_major(found[1])
    assert found[1].groups_apart
    wanted = function(x, offsets=ends)
    assert same(found[0], wanted[0])
    assert torch.equal(found[1].scale.view(torch.uint8), wanted[1].scale.view(torch.uint8))
    values = found[1].dequantize()  # NaNs have bits of their own
    assert torch.equal(values.nan_to_num(9e9), wanted[1].dequantize().nan_to_num(9e9))
    rows = bs.quantize(x, layout="tcgen05", offsets=ends, k_major=True)
    assert same(rows, bs.quantize(x, layout="tcgen05", offsets=ends))


# --- what a ScaledTensor does ---------------------------------------------------------------------


def pair(name: str = "mxfp8", layout: str = "compact") -> tuple[bs.ScaledTensor, bs.ScaledTensor]:
    """Columns in the order of x, and K-major."""
    x, given = matrix(256, 384), {"layout": layout}
    return tuple(bs.quantize(x, name, -2, k_major=k, **given) for k in (False, True))  # type: ignore[return-value]


def saved(q: bs.ScaledTensor) -> bs.ScaledTensor:
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


OPERATIONS = {
    "mT": lambda q: q.mT,
    "mT twice": lambda q: q.mT.mT,
    "blocks of rows": lambda q: q[128:],
    "some columns": lambda q: q[:, 128:256],
    "clone": lambda q: q.clone(),
    "detach": lambda q: q.detach(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "save": saved,
    "to dtype": lambda q: q.to(torch.float32),
    "to device": lambda q: q.to("cpu", copy=True),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("name", ["mxfp8", "fp8_128x128"])
def test_operations(name, operation):
    """They do what they do to columns in the order of x; data stays K-major."""
    want, q = map(operation, pair(name))
    assert same(q, want)
    assert is_k_major(q)


@pytest.mark.parametrize(("name", "layout"), PLACES)
def test_to_layout(name, layout):
    want, q = (each.to_layout(layout) for each in pair(name))
    assert same(q, want)
    assert is_k_major(q)
    assert same(q.to_layout("compact"), want.to_layout("compact"))


def test_copies_between_the_two():
    want, q = pair()
    for target, source in product((want, q), repeat=2):
        target = target.clone()
        target.qdata.zero_()
        target.copy_(source)
        assert same(target, want)


@pytest.mark.parametrize("name", FORMATS)
def test_columns_are_rows_of_the_transposed(name):
    """Values by another way: rows of the transposed matrix."""
    x = matrix(256, 384)
    q, want = bs.quantize(x, name, -2, k_major=True), bs.quantize(x.mT.contiguous(), name)
    assert same(q.mT, want)
    assert q.mT.qdata.stride() == want.qdata.stride()


# --- compilers ------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mxfp8", "fp8_128x128"])
def test_compile(name, backend):
    def step(x: Tensor) -> tuple[bs.ScaledTensor, ...]:
        x = x + 1
        given = {"k_major": True, "backend": backend}
        both = bs.quantize_both(x, name, **given)
        return bs.quantize(x, name, -2, **given), *both, *bs.swiglu_quantize(x, name, **given)

    torch.compiler.reset()
    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = matrix(128, 256)
    for got, want in zip(run(x), step(x), strict=True):
        assert same(got, want)
        assert got.qdata.stride() == want.qdata.stride()
        assert got.stride() == want.stride()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FORMATS)
def test_opcheck(name, backend):
    """The fakes' strides, too."""
    x, ops = torch.randn(256, 128), torch.ops.blockscale
    more = bs.formats[name].scale.roundings[0], "propagate"
    tail = None, None, None, backend, True
    torch.library.opcheck(ops.quantize.default, (x, name, -2, *more, "compact", *tail))
    args = (x, name, *more, "compact", "compact", *tail)
    torch.library.opcheck(ops.quantize_both.default, args)
    args = (x, None, name, True, True, *more, "compact", "compact", None, None, backend, True)
    torch.library.opcheck(ops.swiglu_quantize.default, args)


@pytest.mark.parametrize("name", FORMATS)
def test_fakes_have_the_strides(name):
    """opcheck compares no strides of outputs: meta tensors go through the fakes alone."""
    x = matrix(129, 256)
    for q, fake in zip(
        bs.quantize_both(x, name, pad=True, k_major=True),
        bs.quantize_both(x.to("meta"), name, pad=True, k_major=True),
        strict=True,
    ):
        assert fake.qdata.device.type == "meta"
        assert (fake.qdata.shape, fake.qdata.stride()) == (q.qdata.shape, q.qdata.stride())
