"""ScaledTensor: its attributes, everything that keeps values and scales together, torch.compile."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import blockscale as bs
from blockscale.formats import formats
from blockscale.layouts import as_bytes, layouts

LAYOUTS = {"E8M0": "tcgen05", "UE4M3": "packed", "FP32": "sm90"}
KINDS = [
    (name, layout)
    for name, format in formats.items()
    for layout in ("compact", LAYOUTS[format.scale.name])
]


def make(name="mxfp8", layout="compact", axis=-1, shape=(256, 384), seed=0, dtype=torch.bfloat16):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return bs.quantize(x, name, axis, layout=layout)


def parts(q):
    return [p for p in (q.qdata, q.scale, q.global_scale, q.offsets) if p is not None]


def shares_memory(a, b):
    return all(x.data_ptr() == y.data_ptr() for x, y in zip(parts(a), parts(b), strict=True))


def grouped(axis):
    offsets = torch.tensor([40, 40, 200], dtype=torch.int32)
    return bs.quantize(torch.randn(256, 64), "mxfp8", axis, offsets=offsets)


# --- what it is -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("axis", [-1, -2])
def test_attributes(name, axis):
    q, format = make(name, axis=axis), formats[name]
    assert isinstance(q, torch.Tensor)
    assert isinstance(q, bs.ScaledTensor)
    assert q.shape == (256, 384)
    assert q.dtype == torch.bfloat16
    assert q.device.type == "cpu"
    assert q.axis == axis
    assert q.format is format
    assert q.scale_layout is layouts["compact"]
    assert q.layout is torch.strided  # torch's own
    assert q.data is q.qdata
    assert q.qdata.dtype == format.element.dtype
    assert q.scale.dtype == format.scale.dtype
    stored = list(q.shape)
    stored[axis] = stored[axis] * format.element.bits // (8 * q.qdata.dtype.itemsize)
    assert list(q.qdata.shape) == stored
    blocks = [
        -(-n // b) for n, b in zip(q.shape, format.block[:: 1 if axis == -1 else -1], strict=True)
    ]
    assert list(q.scale.shape) == blocks == list(q.compact_shape)
    assert (q.global_scale is not None) == format.has_global_scale
    assert q.offsets is None
    assert not q.k_grouped
    assert q.is_contiguous() == (axis == -1 or format.element.bits == 8)
    size = sum(p.nbytes for p in (q.qdata, q.scale))
    assert size == q.numel() * format.bits_per_element / 8


def test_repr():
    assert repr(make()) == (
        "ScaledTensor(mxfp8, shape=(256, 384), axis=-1, layout=compact, dtype=torch.bfloat16, "
        "device=cpu)"
    )
    assert "groups=3" in str(grouped(-2))
    assert "nvfp4" in f"{nn.Parameter(make('nvfp4'), requires_grad=False)}"


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout"), KINDS)
def test_clone_detach_deepcopy(name, layout):
    q = make(name, layout)
    for copied in (q.clone(), copy.deepcopy(q)):
        assert torch.equal(copied, q)
        assert not any(
            a.data_ptr() == b.data_ptr() for a, b in zip(parts(q), parts(copied), strict=True)
        )
        assert copied.scale_layout is q.scale_layout
    assert torch.equal(q.detach(), q)
    assert shares_memory(q.detach(), q)
    assert torch.equal(copy.copy(q), q)


@pytest.mark.parametrize(("name", "layout"), KINDS)
@pytest.mark.parametrize("axis", [-1, -2])
def test_save_and_load(name, layout, axis):
    q, file = make(name, layout, axis), io.BytesIO()
    torch.save({"w": q}, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)["w"]
    assert type(back) is bs.ScaledTensor
    assert torch.equal(back, q)
    assert torch.equal(back.dequantize(), q.dequantize())


def test_save_and_load_groups():
    for q in (grouped(-1), grouped(-2)):
        file = io.BytesIO()
        torch.save(q, file)
        file.seek(0)
        back = torch.load(file, weights_only=True)
        assert torch.equal(back, q)
        assert back.k_grouped == q.k_grouped


@pytest.mark.parametrize(("name", "layout"), KINDS)
def test_to(name, layout):
    q = make(name, layout)
    assert q.to("cpu") is q
    assert q.to(torch.bfloat16) is q
    for dtype in (torch.float32, torch.float16, torch.float64):
        other = q.to(dtype)
        assert other.dtype == dtype
        assert other.dequantize().dtype == dtype
        assert torch.equal(other.dequantize(torch.float32), q.dequantize(torch.float32))
    meta = q.to("meta")
    assert meta.device.type == "meta"
    assert all(p.device.type == "meta" for p in parts(meta))
    assert meta.dequantize().shape == q.shape
    with pytest.raises(TypeError, match="floating-point"):
        q.to(torch.int32)
    with pytest.raises(TypeError, match="dtype"):
        q.to(torch.float8_e4m3fn)


def test_equal_means_bytes_and_meaning():
    q = make()
    assert torch.equal(q, make())
    others = [
        make(seed=1), make("mxfp8_e5m2"), make("nvfp4"), q.to_layout("tcgen05"), q.mT,
        q.to(torch.float32), q[:32], q.dequantize(), make(shape=(384, 256)),
    ]  # fmt: skip
    assert not any(torch.equal(q, other) for other in others)
    plain = q.dequantize()
    assert not torch.equal(q, plain)
    assert not torch.equal(plain, q)


# --- in modules -----------------------------------------------------------------------------------


def linear(weight):
    module = nn.Linear(384, 256, bias=False, dtype=torch.bfloat16)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


@pytest.mark.parametrize(("name", "layout"), KINDS)
def test_parameter_and_state_dict(name, layout):
    q = make(name, layout)
    module = linear(q)
    assert isinstance(module.weight, nn.Parameter)
    assert isinstance(module.weight, bs.ScaledTensor)
    state = module.state_dict()
    assert torch.equal(state["weight"], q)

    other = linear(make(name, layout, seed=1))
    before = parts(other.weight)[0].data_ptr()
    other.load_state_dict(state)
    assert torch.equal(other.weight, q)
    assert parts(other.weight)[0].data_ptr() == before

    plain = nn.Linear(384, 256, bias=False, dtype=torch.bfloat16)
    plain.load_state_dict(state, assign=True)
    assert torch.equal(plain.weight, q)
    assert shares_memory(plain.weight, q)

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    third = linear(make(name, layout, seed=2))
    third.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(third.weight, q)


@pytest.mark.parametrize("wrong", [
    make(), make("mxfp8_e5m2"), make("nvfp4"), make(layout="tcgen05"), make(shape=(384, 256)).mT,
    make(dtype=torch.float32), make().dequantize(),
], ids=["format", "element", "blocks", "layout", "axis", "dtype", "plain"])  # fmt: skip
def test_load_state_dict_never_converts(wrong):
    module = linear(make("mxfp6_e3m2"))
    before = module.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"copy_: .* can be overwritten as a whole by a Scaled"):
        module.load_state_dict({"weight": wrong})
    assert torch.equal(module.weight, before)


def test_module_moves_and_copies():
    module = linear(make())
    assert torch.equal(copy.deepcopy(module).weight, module.weight)
    assert module.to("meta").weight.device.type == "meta"
    half = linear(make()).half()
    assert half.weight.dtype == torch.float16
    with pytest.raises(ValueError, match=r"dequantize\(\) first .* blockscale\.gemm"):
        linear(make())(torch.ones(2, 384, dtype=torch.bfloat16))


@pytest.mark.parametrize(("name", "layout"), KINDS)
def test_share_memory(name, layout):
    """torch's own would ask the wrapper for its storage, and crash."""
    module = linear(make(name, layout))
    module.share_memory()
    assert all(part.is_shared() for part in parts(module.weight))
    assert torch.equal(module.weight, make(name, layout))


def test_load_a_plain_weight_over_it_by_assignment():
    module = linear(make())
    module.load_state_dict({"weight": torch.ones(256, 384)}, assign=True)
    assert not isinstance(module.weight, bs.ScaledTensor)


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout"), KINDS)
@pytest.mark.parametrize("axis", [-1, -2])
def test_mT_moves_the_contraction(name, layout, axis):
    q = make(name, layout, axis)
    for turned in (q.mT, q.t(), q.transpose(0, 1), q.transpose(-1, -2), q.swapaxes(1, 0)):
        assert turned.shape == (384, 256)
        assert turned.axis == -3 - axis
        assert torch.equal(turned.dequantize(), q.dequantize().mT)
        assert turned.qdata.data_ptr() == q.qdata.data_ptr()
    assert torch.equal(q.mT.mT, q)
    assert torch.equal(q.mT.contiguous().dequantize(), q.dequantize().mT)


def test_mT_is_made_once():
    """And anew where it would no longer be that of its tensor."""
    q = make("nvfp4")
    turned = q.mT
    assert q.mT is turned
    as_bytes(q.qdata)[0, 0] ^= 1
    assert torch.equal(q.mT.dequantize(), q.dequantize().mT)
    turned.requires_grad_()
    assert not q.mT.requires_grad
    for name in ("global_scale", "qdata", "qscale"):
        kept = q.mT
        setattr(q, name, getattr(make("nvfp4", seed=1), name))
        assert q.mT is not kept
        assert torch.equal(q.mT.dequantize(), q.dequantize().mT)
    other = copy.deepcopy(q)
    assert shares_memory(other.mT, other)
    assert not shares_memory(other.mT, q)
    assert pickle.loads(pickle.dumps(q)).mT is not q.mT
    gone = weakref.ref(q)
    gc.disable()  # no cycle keeps it
    try:
        del q
        assert gone() is None
    finally:
        gc.enable()


def test_mT_is_seen_by_who_looks_on():
    q = make()
    assert q.mT is q.mT
    with Seen() as mode:
        assert torch.equal(q.mT, q.t())
    assert mode.seen.count(torch.ops.aten.transpose.int) == 1
    weight = nn.Parameter(q)
    assert weight.mT.grad_fn is not None


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_inference_mode():
    """Views of a tensor made outside, and of one made inside, which is used outside."""
    q = make()
    with torch.inference_mode():
        made = make()
        for x in (q, made):
            for view in (x.mT, x.t(), x.detach(), x.view(256, 384), x[:32]):
                assert view.qdata.data_ptr() == x.qdata.data_ptr()
        assert torch.equal(q.mT.dequantize(), made.mT.dequantize())
        assert q.clone().is_inference()
    assert not q.mT.is_inference()
    assert torch.equal(q.mT, made.mT)
    assert torch.equal(q[:32].dequantize(), made[:32].dequantize())


def test_mT_of_leading_dimensions():
    q = make(shape=(3, 4, 64, 96))
    assert q.mT.shape == (3, 4, 96, 64)
    assert torch.equal(q.mT.dequantize(), q.dequantize().mT)
    with pytest.raises(TypeError, match="only the last two dimensions"):
        q.transpose(0, 1)
    with pytest.raises(TypeError, match="only the last two dimensions"):
        make(shape=(64,)).transpose(0, 0)
    with pytest.raises(TypeError, match="only the last two dimensions"):
        _ = make(shape=(64,)).mT


@pytest.mark.parametrize("name", [n for n, f in formats.items() if f.block[0] == 1])
def test_views_in_front_of_the_contraction(name):
    q = make(name, shape=(6, 8, 256))
    values = q.dequantize()
    for shape in ((48, 256), (-1, 256), (2, 3, 8, 256), (6, 2, -1, 256), (6, 8, 256)):
        view = q.view(shape)
        assert torch.equal(view.dequantize(), values.view(shape))
        assert view.qdata.data_ptr() == q.qdata.data_ptr()
        assert torch.equal(q.reshape(shape), view)
    assert torch.equal(q.flatten(0, 1), q.view(48, 256))
    assert torch.equal(q.unflatten(0, (2, 3)), q.view(2, 3, 8, 256))
    one = make(name, shape=(256,))
    assert torch.equal(one.view(1, 256).dequantize()[0], one.dequantize())


@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("axis", [-1, -2])
def test_slices_along_whole_blocks(name, axis):
    q = make(name, axis=axis, shape=(2, 512, 512))
    values, block = q.dequantize(), formats[name].block
    rows, columns = block if axis == -1 else block[::-1]
    for index in (
        (slice(None), slice(rows, 3 * rows)),
        (slice(None), slice(None), slice(columns, 2 * columns)),
        (slice(1, 2), slice(0, 2 * rows), slice(2 * columns, None)),
        (slice(None), slice(3 * rows, 1000)),
        (slice(0, 1),),
        (Ellipsis,),
    ):
        part = q[index]
        assert torch.equal(part.dequantize(), values[index])
        assert part.qdata.untyped_storage().data_ptr() == q.qdata.untyped_storage().data_ptr()
    narrow = q.narrow(-1, columns, columns)
    assert torch.equal(narrow.dequantize(), values.narrow(-1, columns, columns))


def test_slice_to_the_ragged_end():
    x = torch.randn(4, 100)
    q = bs.quantize(x, pad=True)
    assert torch.equal(q[:, 64:].dequantize(), q.dequantize()[:, 64:])
    assert q[:, 64:].qdata.shape == (4, 64)


def test_leading_dimensions_are_selected():
    q = make(shape=(2, 3, 64, 96))
    values = q.dequantize()
    for index in (0, -1, (1, 2), (slice(None), 1)):
        assert torch.equal(q[index].dequantize(), values[index])
    assert torch.equal(q.select(1, -1).dequantize(), values[:, -1])


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", formats)
def test_to_layout(name, axis):
    q = make(name, axis=axis, shape=(256, 384))
    for layout in layouts:
        if formats[name].scale.nbytes not in layouts[layout].itemsize:
            with pytest.raises(ValueError, match=f"layout '{layout}' holds"):
                q.to_layout(layout)
            continue
        moved = q.to_layout(layout)
        assert moved.layout_name == layout
        assert moved.qdata is q.qdata
        assert torch.equal(moved.to_layout("compact"), q)
        assert torch.equal(moved.dequantize(), q.dequantize())
        assert torch.equal(moved.mT.to_layout("compact"), q.mT)
    assert q.to_layout("compact") is q


def test_the_tiles_of_a_tensor_are_those_of_its_transpose():
    q = make(layout="tcgen05")
    assert q.mT.scale.data_ptr() == q.scale.data_ptr()
    column = make(layout="tcgen05", axis=-2)
    x = torch.randn((256, 384), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    row = bs.quantize(x.mT.contiguous(), layout="tcgen05")
    assert torch.equal(column.scale.view(torch.uint8), row.scale.view(torch.uint8))


@pytest.mark.parametrize("axis", [-1, -2])
def test_grouped_layouts(axis):
    offsets = torch.tensor([40, 40, 200], dtype=torch.int32)
    x = torch.randn(256, 64)
    q = bs.quantize(x, "mxfp8", axis, offsets=offsets)
    moved = bs.quantize(x, "mxfp8", axis, offsets=offsets, layout="tcgen05")
    assert torch.equal(moved, q.to_layout("tcgen05"))
    if axis == -2:
        assert torch.equal(moved.to_layout("compact"), q)
        assert torch.equal(moved.dequantize(), q.dequantize())
        return
    assert torch.equal(moved.to_layout("compact").scale.view(torch.uint8)[:200],
                       q.scale.view(torch.uint8)[:200])  # fmt: skip
    assert torch.equal(moved.dequantize()[:200], q.dequantize()[:200])


@pytest.mark.parametrize("name", list(bs.formats))
def test_pickle(name):
    q = bs.quantize(torch.randn(128, 256), name)
    assert torch.equal(pickle.loads(pickle.dumps(q)), q)
