"""Stochastic rounding of parts of a tensor, and by steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import philox
from blockscale.formats import formats
from blockscale.seed import Numbers

WHOLE = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
BATCH = torch.randn(3, 256, 256, generator=torch.Generator().manual_seed(1))


def quantized(x: Tensor, name: str, axis: int, seed: int | bs.Seed, backend: str = "auto"):
    scalar = 2.0**-8 if formats[name].has_global_scale else None
    return bs.quantize(x, name, axis, seed=seed, global_scale=scalar, backend=backend)


def same(a: bs.ScaledTensor, b: bs.ScaledTensor) -> bool:
    pairs = (a.qdata, b.qdata), (a.qscale, b.qscale)
    return all(torch.equal(*(x.contiguous().view(torch.uint8) for x in pair)) for pair in pairs)


@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("axis", [-1, -2])
def test_parts_of_a_matrix(name, axis):
    """Rows, columns and both, by kernels and by the reference, have the values of the whole."""
    want = quantized(WHOLE, name, axis, bs.Seed(7, step=2)).dequantize()
    for rows, columns in ((128, 512), (512, 256), (256, 128)):
        for top, left in ((0, 0), (512 - rows, 512 - columns)):
            place = slice(top, top + rows), slice(left, left + columns)
            seed = bs.Seed(7, 2, origin=(top, left), shape=WHOLE.shape)
            part = quantized(WHOLE[place], name, axis, seed)
            assert torch.equal(part.dequantize(), want[place])
            assert same(part, quantized(WHOLE[place], name, axis, seed, "reference"))
            # in memory of its own, as ranks hold it: rows are next to each other there
            assert same(part, quantized(WHOLE[place].contiguous(), name, axis, seed))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128", "mxfp6_e2m3"])
def test_parts_of_a_batch(name):
    """Of experts, and of rows in each of them."""
    want = quantized(BATCH, name, -1, bs.Seed(-3, step=5)).dequantize()
    for first, rows in ((0, slice(0, 256)), (1, slice(0, 256)), (1, slice(128, 256))):
        place = slice(first, first + 2), rows
        seed = bs.Seed(-3, 5, origin=(first, rows.start, 0), shape=BATCH.shape)
        for backend in ("auto", "reference"):
            part = quantized(BATCH[place], name, -1, seed, backend)
            assert torch.equal(part.dequantize(), want[place])


def test_quantized_both_ways():
    seed = bs.Seed(7, origin=(256, 0), shape=WHOLE.shape)
    rows, columns = bs.quantize_both(WHOLE[256:], "mxfp8", seed=seed)
    for part, axis in ((rows, -1), (columns, -2)):
        whole = bs.quantize(WHOLE, "mxfp8", axis, seed=7)
        assert torch.equal(part.dequantize(), whole.dequantize()[256:])


def test_rows_that_are_gathered():
    """Have the places of the rows that come out."""
    gather = torch.tensor([5, 5, 300, 2], dtype=torch.int32)
    seed = bs.Seed(7, origin=(4, 0), shape=(8, 512))
    found = bs.quantize(WHOLE, "mxfp8", gather=gather, seed=seed)
    assert same(found, bs.quantize(WHOLE[gather], "mxfp8", seed=seed))


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = quantized(WHOLE, "nvfp4", -1, bs.Seed(1, 2))
    finally:
        torch.set_num_threads(before)
    assert same(found, quantized(WHOLE, "nvfp4", -1, bs.Seed(1, 2), "reference"))


def test_steps():
    """Step 0 is the number alone; another step has other bits, at the places of the same scales."""
    found = [quantized(WHOLE, "mxfp8", -1, bs.Seed(7, step=step)) for step in (0, 1, 2**40)]
    assert same(found[0], quantized(WHOLE, "mxfp8", -1, 7))
    assert not same(found[0], found[1])
    assert not same(found[1], found[2])
    assert torch.equal(found[1].qscale, found[2].qscale)


@pytest.mark.parametrize(("counter", "step", "value", "want"), [
    (0, 0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (2**64 - 1, 2**64 - 1, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (0x85A308D3_243F6A88, 0x03707344_13198A2E, 0x299F31D0_A4093822,
     [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
])  # fmt: skip
def test_known_answers(counter, step, value, want):
    """Of Philox4x32-10 (Random123, kat_vectors): the counter is an element's index / 4, then the
    step; the key is the value."""
    at = np.array([[counter]], np.uint64).astype(np.int64)
    assert philox._philox(Numbers(value, step, 0, 4, 4), at).tolist() == [want]


@pytest.mark.parametrize("name", formats)
def test_elements_are_unbiased(name):
    """Within 4 sigma of 2^24 draws: elements of 1.3 steps above a number of the format, beside one
    that keeps the scale at 1."""
    format = formats[name]
    element, n = format.element, 1 << 24
    step = 2.0**-element.mantissa_bits
    x = torch.full((n // 4096, 4096), 1 + 0.3 * step)
    x[:, :: format.block_size] = element.max
    scalar = 1 / 448 if format.has_global_scale else None  # beside block scales of 448
    q = bs.quantize(x, name, seed=11, global_scale=scalar)
    values = q.dequantize(torch.float32).view(-1, format.block_size)[:, 1:]
    down, up = float(values.min()), float(values.max())
    assert up - down == pytest.approx(step)
    found = float((values == up).double().mean())
    fraction = (float(x[0, 1]) - down) / (up - down)
    assert abs(found - fraction) < 4 * (fraction * (1 - fraction) / values.numel()) ** 0.5


def test_steps_are_independent():
    """Elements of many steps are as evenly drawn as those of one."""
    drawn = [philox.random_bits(Numbers(3, i, 0, 4, 4), np.empty(4)) for i in range(2000)]
    assert abs(float(np.mean(drawn)) / 2**32 - 0.5) < 4 * (1 / 12 / 8000) ** 0.5
    assert len(np.unique(drawn)) == 8000


def test_compiled():
    """An int and a step are numbers to a graph: another one compiles nothing anew."""

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def run(x, value, step):
        found = [bs.quantize(x, "mxfp8", seed=each) for each in (value, bs.Seed(value, step))]
        return [q.qdata.view(torch.uint8) for q in found]

    torch.compiler.reset()
    for value, step in ((3, 5), (4, 7)):
        found = run(WHOLE, value, step)
        for got, seed in zip(found, (value, bs.Seed(value, step)), strict=True):
            assert torch.equal(got, bs.quantize(WHOLE, "mxfp8", seed=seed).qdata.view(torch.uint8))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_step_in_a_tensor(backend):
    """Rounds as its number does when that is read, in a graph and out of one."""
    step = torch.tensor(5)
    run = torch.compile(
        lambda x, step: bs.quantize(x, seed=bs.Seed(3, step), backend=backend).qdata,
        backend="aot_eager",
        fullgraph=True,
    )
    for value in (5, -1):
        step.fill_(value)
        want = bs.quantize(WHOLE, seed=bs.Seed(3, value)).qdata.view(torch.uint8)
        found = bs.quantize(WHOLE, seed=bs.Seed(3, step), backend=backend).qdata
        assert torch.equal(found.view(torch.uint8), want)
        assert torch.equal(run(WHOLE, step).view(torch.uint8), want)
    with pytest.raises(ValueError, match="seed: its step is on meta, what is rounded on cpu"):
        bs.quantize(WHOLE, seed=bs.Seed(3, step.to("meta")))


@pytest.mark.parametrize(("given", "told"), [
    ({"value": 2**63}, "value=9223372036854775808; expected a 64-bit int"),
    ({"value": 1.0}, r"value=1\.0; expected a 64-bit int"),
    ({"value": 1, "step": True}, "step=True; expected"),
    ({"value": 1, "step": torch.tensor([3])}, r"or an int64 tensor of no dimensions"),
    ({"value": 1, "step": torch.tensor(3.0)}, r"or an int64 tensor of no dimensions"),
    ({"value": 1, "origin": (0, 0)}, r"origin=\(0, 0\) and shape=\(\); expected an index"),
])  # fmt: skip
def test_no_seed(given, told):
    with pytest.raises(ValueError, match=f"seed: .*{told}"):
        bs.Seed(**given)


@pytest.mark.parametrize(("origin", "shape", "told"), [
    ((256, 0), (512, 512), r"origin \(256, 0\) and shape \(512, 512\) leave no room for x"),
    ((-1, 0), (1024, 512), "leave no room"),
    ((0,), (512,), "leave no room for x"),
])  # fmt: skip
def test_no_part(origin, shape, told):
    with pytest.raises(ValueError, match=f"seed: .*{told}"):
        bs.quantize(WHOLE, seed=bs.Seed(1, origin=origin, shape=shape))


def test_parts_along_dimensions_between():
    x = BATCH.expand(2, 3, 256, 256)
    seed = bs.Seed(1, origin=(0, 1, 0, 0), shape=(2, 4, 256, 256))
    with pytest.raises(ValueError, match="other dimensions than the first and the last two"):
        bs.quantize(x, seed=seed)
