"""Joined and cut ScaledTensors have the bytes of the joined and cut values; all else is refused."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

import blockscale as bs

FORMATS = [name for name in bs.formats if name != "fp8_128x128"]
ONE = torch.tensor(1e-3)


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantize(x, name, axis=-1, **options):
    if bs.formats[name].has_global_scale:
        options.setdefault("global_scale", ONE)
    return bs.quantize(x, name, axis, **options)


@pytest.mark.parametrize("name", bs.formats)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_cat_and_split(name, axis, dim):
    parts = [values(2, 256, 128, seed=i) for i in range(3)]
    whole = torch.cat(parts, dim)
    quantized = [quantize(x, name, axis) for x in parts]
    joined = torch.cat(quantized, dim)
    assert torch.equal(joined, quantize(whole, name, axis))
    assert torch.equal(joined.dequantize(), torch.cat([q.dequantize() for q in quantized], dim))
    sizes = [x.shape[dim] for x in parts]
    for found in (torch.split(joined, sizes, dim), torch.split(joined, sizes[0], dim)):
        assert all(map(torch.equal, found, quantized))
    assert all(map(torch.equal, torch.chunk(joined, 3, dim), quantized))
    assert all(map(torch.equal, torch.tensor_split(joined, 3, dim), quantized))
    assert torch.equal(joined.narrow(dim, sizes[0], sizes[1]), quantized[1])


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dim", [0, 1, -2, -1])
def test_whole_tiles_stay(name, axis, dim):
    parts = [values(128, 256, seed=i) for i in range(3)]
    quantized = [quantize(x, name, axis, layout="tcgen05") for x in parts]
    joined = torch.cat(quantized, dim)
    want = quantize(torch.cat(parts, dim), name, axis, layout="tcgen05")
    assert joined.layout_name == "tcgen05"
    assert torch.equal(joined.qscale.view(torch.uint8), want.qscale.view(torch.uint8))
    assert torch.equal(joined.dequantize(), want.dequantize())


def test_tiles_that_are_cut():
    q = quantize(values(160, 64), "mxfp8", layout="tcgen05")
    for dim in (0, 1):
        with pytest.raises(TypeError, match=r"use \.to_layout\('compact'\)"):
            torch.cat([q, q], dim)
    with pytest.raises(IndexError, match="got dim=2"):
        torch.cat([quantize(values(128, 128), "mxfp8")] * 2, 2)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("axis", [-1, -2])
def test_the_last_part_may_be_padded(name, axis):
    parts = values(256, 256), values(*(256, 40) if axis == -1 else (40, 256), seed=1)
    quantized = [quantize(x, name, axis, pad=True) for x in parts]
    joined = torch.cat(quantized, axis)
    assert torch.equal(joined, quantize(torch.cat(parts, axis), name, axis, pad=True))
    with pytest.raises(ValueError, match="ends inside a block"):
        torch.cat(quantized[::-1], axis)


@pytest.mark.parametrize("name", bs.formats)
@pytest.mark.parametrize("axis", [-1, -2])
def test_stack_and_unbind(name, axis):
    parts = [values(128, 256, seed=i) for i in range(3)]
    quantized = [quantize(x, name, axis) for x in parts]
    stacked = torch.stack(quantized)
    assert torch.equal(stacked, quantize(torch.stack(parts), name, axis))
    assert all(map(torch.equal, stacked.unbind(), quantized))
    assert torch.equal(stacked.unsqueeze(1).squeeze(1), stacked)
    assert stacked.unsqueeze(0).shape == (1, 3, 128, 256)
    for squeezed in (stacked[:1].squeeze(), stacked[:1, None].squeeze((0, 1))):
        assert torch.equal(squeezed, quantized[0])
    assert torch.equal(quantized[0].unsqueeze(0)[0], quantized[0])
    for refused in (lambda: torch.stack(quantized, -1), lambda: quantized[0].unsqueeze(1)):
        with pytest.raises(TypeError, match="only dimensions in front of them"):
            refused()


def test_columns_stay_as_hopper_reads_them():
    parts = [values(128, 256, seed=i) for i in range(2)]
    quantized = [bs.quantize(x, "mxfp8", -2, k_major=True) for x in parts]
    for dim in (0, 1):
        joined = torch.cat(quantized, dim)
        assert joined.qdata.stride(-2) == 1
        assert torch.equal(joined, bs.quantize(torch.cat(parts, dim), "mxfp8", -2, k_major=True))
    assert torch.stack(quantized).qdata.stride(-2) == 1


def test_what_cannot_be_joined():
    q = bs.quantize(values(128, 128))
    others = {
        "quantize all in one format": bs.quantize(values(128, 128), "mxfp4"),
        "along one axis": bs.quantize(values(128, 128), "mxfp8", -2),
        "from one dtype": bs.quantize(values(128, 128).bfloat16()),
        "to_layout": q.to_layout("tcgen05"),
        "is plain": values(128, 128),
        r"got shapes \(128, 128\) and \(128, 64\)": bs.quantize(values(128, 64)),
    }
    for sentence, other in others.items():
        with pytest.raises((TypeError, ValueError), match=sentence):
            torch.cat([q, other])
    a, b = (bs.quantize(values(128, 128, seed=i), "nvfp4") for i in range(2))
    with pytest.raises(ValueError, match="different global scales"):
        torch.cat([a, b])
    with pytest.raises(ValueError, match="different global scales"):
        torch.cat([torch.stack([a, b]), torch.stack([b, a])], 1)
    with pytest.raises(TypeError, match="cuts through blocks of 32"):
        torch.split(q, 16, 1)


def test_joined_without_values():
    parts = [bs.quantize(values(64, 128, seed=i), "nvfp4").to("meta") for i in range(2)]
    assert torch.cat(parts).shape == (128, 128)
    assert torch.stack(parts).shape == (2, 64, 128)


@pytest.mark.parametrize("name", bs.formats)
@pytest.mark.parametrize("axis", [-1, -2])
def test_padded_blocks_go_along(name, axis):
    """Where blocks of the other dimension are whole, those along the contraction may be cut."""
    shape = (256, 200) if axis == -1 else (200, 256)
    parts = [values(*shape, seed=i) for i in range(2)]
    quantized = [quantize(x, name, axis, pad=True) for x in parts]
    dim = -3 - axis
    joined = torch.cat(quantized, dim)
    assert torch.equal(joined, quantize(torch.cat(parts, dim), name, axis, pad=True))
    assert all(map(torch.equal, joined.split(256, dim), quantized))
    assert torch.equal(torch.stack(quantized), quantize(torch.stack(parts), name, axis, pad=True))


def test_rows_of_square_blocks():
    parts = [values(rows, 128, seed=rows) for rows in (128, 40)]
    quantized = [bs.quantize(x, "fp8_128x128") for x in parts]
    assert torch.equal(torch.cat(quantized), bs.quantize(torch.cat(parts), "fp8_128x128"))
    with pytest.raises(ValueError, match="ends inside a block of 128"):
        torch.cat(quantized[::-1])
    with pytest.raises(TypeError, match="cuts through blocks of 128"):
        torch.cat(quantized).split(64)


OUT_OF_RANGE = {
    "cat": lambda q: torch.cat([q, q], 5),
    "cat, from the end": lambda q: torch.cat([q, q], -3),
    "stack": lambda q: torch.stack([q, q], 3),
    "unsqueeze": lambda q: q.unsqueeze(6),
    "squeeze": lambda q: q.squeeze(2),
    "squeeze, of several": lambda q: torch.ops.aten.squeeze.dims(q, [0, 2]),
    "permute": lambda q: q.permute(0, 3),
    "transpose": lambda q: q.transpose(2, 3),
    "split": lambda q: q.split(32, 2),
    "unbind": lambda q: q.unbind(2),
    "slice": lambda q: torch.ops.aten.slice.Tensor(q, 2, 0, 1),
}


@pytest.mark.parametrize("what", OUT_OF_RANGE)
def test_dimensions_that_are_not_there(what):
    """They were taken modulo the number of dimensions: another dimension was joined."""
    with pytest.raises(IndexError, match=what.split(",")[0] + ": got dim="):
        OUT_OF_RANGE[what](bs.quantize(values(64, 128)))


@pytest.mark.parametrize("sizes", [[-32, 96], [96, -32], [32, 16], -1, 0])
def test_sizes_that_do_not_add_up(sizes):
    """Negative sizes counted from the end: parts overlapped."""
    with pytest.raises(ValueError, match="split: got size"):
        torch.split(bs.quantize(values(64, 128)), sizes)


def test_groups_stay_whole():
    offsets = torch.tensor([40, 256], dtype=torch.int32)
    q = bs.quantize(values(256, 64), "mxfp8", -2, offsets=offsets)
    for refused in (
        lambda: torch.cat([q, q]),
        lambda: torch.stack([q, q]),
        lambda: q.split(128),
        lambda: q.unsqueeze(0),
    ):
        with pytest.raises(TypeError, match=r"has groups, .* high-precision tensor and quantize"):
            refused()


def test_one_global_scale_in_two_tensors():
    parts = [values(128, 128, seed=i) for i in range(2)]
    a, b = (quantize(x, "nvfp4", global_scale=ONE.clone()) for x in parts)
    b.global_scale = b.global_scale.reshape(1)
    assert torch.equal(torch.cat([a, b]), quantize(torch.cat(parts), "nvfp4"))
    with pytest.raises(ValueError, match=r"tensors\[0\] is on cpu, tensors\[1\] on meta"):
        torch.cat([a, b.to("meta")])


def test_compiled_joins():
    torch.compiler.reset()
    q, r = (quantize(values(64, 128, seed=i), "nvfp4") for i in range(2))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q):
        first, second = torch.cat([q, q], 1).chunk(2, 1)
        return torch.stack([first, second]).unbind()[1].T.t()

    assert torch.equal(run(q), q)
    join = torch.compile(lambda a, b: torch.cat([a, b]), backend="aot_eager", fullgraph=True)
    r.global_scale = r.global_scale.clone()
    with pytest.raises(Exception, match="cannot see whether global scales are the same"):
        join(q, r)


def test_a_part_keeps_the_global_scale_of_the_whole():
    q, r = (bs.quantize(factor * values(64, 128), "nvfp4") for factor in (1, 9))
    before = q.clone()
    with pytest.raises(ValueError, match="part of a tensor and shares its global scale"):
        q[:32] = r[:32]
    assert torch.equal(q, before)
    q[:32] = before[32:]
    assert torch.equal(q, torch.cat([before[32:], before[32:]]))
    q.copy_(r)  # as a whole
    q.mT.copy_(r.mT)
    assert torch.equal(q, r)


def test_T_and_bytes():
    q = bs.quantize(values(64, 128), "mxfp8")
    assert torch.equal(q.T, q.mT)
    assert torch.equal(q.t(), q.mT)
    assert torch.equal(q.permute(1, 0), q.mT)
    assert q.nbytes == 64 * 128 + 64 * 4
    assert bs.quantize(values(64, 128), "nvfp4").nbytes == 64 * 64 + 64 * 8 + 4
    batch = bs.quantize(values(2, 64, 128))
    with pytest.raises(TypeError, match=r"use \.mT"):
        _ = batch.T
    with pytest.raises(TypeError, match=r"by \.mT"):
        batch.t()
    with pytest.raises(TypeError, match=r"use \.mT"):
        batch.permute(1, 0, 2)


def test_safetensors_own_save_file_is_refused(tmp_path):
    """With the remedy; a file of it would lack the scales."""
    q = bs.quantize(values(64, 128))
    layer = bs.nn.QuantizedLinear(q, recipe=bs.Recipe("mxfp8"))
    for write in (
        lambda: safetensors.torch.save_file({"w": q}, tmp_path / "w.safetensors"),
        lambda: safetensors.torch.save({"plain": values(4, 4), "w": q}),
        lambda: safetensors.torch.save_model(layer, tmp_path / "w.safetensors"),
    ):
        with pytest.raises(TypeError, match=r"storage: .*blockscale\.checkpoint\.save_file"):
            write()
    assert not list(tmp_path.iterdir())


# --- batched products -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128", "mxfp6_e2m3"])
@pytest.mark.parametrize("lead", [(3,), (2, 3)])
def test_a_batch_is_its_products(name, lead):
    x, w, bias = values(*lead, 40, 128), values(*lead, 24, 128, seed=1), values(24)
    a, b = quantize(x, name), quantize(w, name).mT
    found = bs.gemm(a, b, torch.float32, bias=bias)
    out = torch.ones_like(found)
    assert bs.gemm(a, b, out=out, accumulate=True) is out
    flat = [each.reshape(-1, *each.shape[-2:]) for each in (x, w, found, out)]
    for left, right, y, z in zip(*flat, strict=True):
        one = quantize(left, name), quantize(right, name).mT
        assert torch.equal(y, bs.gemm(*one, torch.float32, bias=bias))
        assert torch.equal(
            z, bs.gemm(*one, out=torch.ones(40, 24, dtype=torch.float32), accumulate=True)
        )


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_an_empty_batch_is_checked_and_has_gradients(lead):
    x, bias = torch.empty(*lead, 8, 64).bfloat16().requires_grad_(), values(16).requires_grad_()
    whole = bs.quantize(values(*(n or 1 for n in lead), 16, 64))
    w = whole[:0] if len(lead) == 1 else whole[:, :0]
    y = bs.gemm(x, w.mT, torch.float32, bias=bias)
    assert y.shape == (*lead, 8, 16)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(bias.grad, torch.zeros(16))
    wrong = {
        "b: is blocked along axis -1": lambda: bs.gemm(x, w),
        "out_dtype: got torch.int8": lambda: bs.gemm(x, w.mT, torch.int8),
        "backend: got 'fast'": lambda: bs.gemm(x, w.mT, backend="fast"),
        r"bias: got \(7,\)": lambda: bs.gemm(x, w.mT, bias=torch.empty(7)),
        "a: got torch.float32": lambda: bs.gemm(x.float(), w.mT),
        "out: is torch.bfloat16": lambda: bs.gemm(
            x, w.mT, torch.float32, out=torch.empty(*lead, 8, 16).bfloat16()
        ),
    }
    for sentence, call in wrong.items():
        with pytest.raises((TypeError, ValueError), match=sentence):
            call()


def test_a_batch_of_plain_rows_has_a_gradient():
    x = values(3, 8, 64).bfloat16().requires_grad_()
    b = bs.quantize(values(3, 16, 64)).mT
    bs.gemm(x, b).float().sum().backward()
    want = torch.ones(3, 8, 16) @ b.dequantize().mT
    assert torch.equal(x.grad, want.bfloat16())


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_batch_written_in_place_has_the_gradients_of_its_products(accumulate):
    b, start = bs.quantize(values(3, 16, 64)).mT, values(3, 8, 16, seed=1)
    found = []
    for batched in (True, False):
        x = values(3, 8, 64).bfloat16().requires_grad_()
        c = start.clone().requires_grad_()
        if batched:
            y = bs.gemm(x, b, out=c * 1, accumulate=accumulate)
        else:
            each = zip(x, b.unbind(), c, strict=True)
            y = torch.stack([bs.gemm(p, q, out=z * 1, accumulate=accumulate) for p, q, z in each])
        (y * start).sum().backward()
        found.append((y, x.grad, torch.zeros_like(c) if c.grad is None else c.grad))
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_a_compiled_batch():
    torch.compiler.reset()
    a, b = bs.quantize(values(3, 8, 64)), bs.quantize(values(3, 16, 64)).mT
    run = torch.compile(bs.gemm, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(a, b), bs.gemm(a, b))
    written = [torch.ones(3, 8, 16) for _ in range(2)]
    for call, out in zip((run, bs.gemm), written, strict=True):
        call(a, b, out=out, accumulate=True)
    assert torch.equal(*written)


@pytest.mark.parametrize(
    ("a", "b"), [((2, 8, 64), (3, 16, 64)), ((2, 8, 64), (16, 64)), ((8, 64), (2, 16, 64))]
)
def test_batches_that_do_not_belong_together(a, b):
    x, w = bs.quantize(values(*a)), bs.quantize(values(*b)).mT
    with pytest.raises(ValueError, match="same leading dimensions: there is no broadcast") as told:
        bs.gemm(x, w)
    assert ("gemm(a.flatten(0, -2), b)" in str(told.value)) == (w.dim() == 2)
    if w.dim() == 2:
        assert bs.gemm(x.flatten(0, -2), w).shape == (16, 16)


def test_out_of_a_batch():
    a, b = bs.quantize(values(2, 8, 64)), bs.quantize(values(2, 16, 64)).mT
    with pytest.raises(ValueError, match="accumulate: needs out"):
        bs.gemm(a, b, accumulate=True)
    with pytest.raises(ValueError, match=r"out: has shape \(8, 16\)"):
        bs.gemm(a, b, out=torch.empty(8, 16))
    with pytest.raises(TypeError, match="out: got list"):
        bs.gemm(a, b, out=[torch.empty(8, 16)] * 2)


def test_no_product_of_a_batch_is_written_over_what_a_later_one_reads():
    memory = values(4, 32, 32).bfloat16()
    a, b = memory[:-1], bs.quantize(values(3, 32, 32)).mT
    before = memory.clone()
    with pytest.raises(ValueError, match="out: shares memory with a"):
        bs.gemm(a, b, out=memory[1:])
    with pytest.raises(ValueError, match=r"out: has strides .* its elements share memory"):
        bs.gemm(a, b, out=torch.empty(1, 32, 32).bfloat16().expand(3, -1, -1))
    octets = b.qdata.view(torch.uint8).mT.flatten()[: 3 * 32 * 32]
    with pytest.raises(ValueError, match="out: shares memory with b"):
        bs.gemm(a[:, :16], b, out=octets.view(torch.bfloat16).view(3, 16, 32))
    assert torch.equal(memory, before)
