"""The kernel that looks at quantized matrices, run in the emulator: and numbers counted anew."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import blockscale as bs
from blockscale import emulator as em
from blockscale.debug.form_numbers import Blocks, compare
from blockscale.formats import FP32
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.common.matrix import Matrix
from blockscale.kernels.watch.config import Word, row_words
from blockscale.kernels.watch.plan import plan_watch
from blockscale.layouts import as_bytes
from stand_in import chip

BF16, FP16 = torch.bfloat16, torch.float16
POISON = 0x5A5A5A5A
NONE = -1


def values(shape: tuple[int, int], dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Blocks of every size, some of them zeros."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(-3, 2, shape[1])
    x[: shape[0] // 2, : shape[1] // 3] = 0
    return x.to(dtype)


def matrix_of(q: bs.ScaledTensor, turned: bool = False) -> Matrix:
    data = as_bytes(q.qdata)
    parts = data.mT if turned else data, q.qscale, q.global_scale
    return Matrix(q.format, tuple(q.shape), q.axis, q.layout_name, *parts, turned)


def look(
    x: Tensor | None, q: bs.ScaledTensor, places: Tensor, arch: str, turned: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """What the kernel writes into the second of three rows, by name, and the other two rows."""
    matrix = matrix_of(q, turned)
    with em.cutedsl(em.Device(arch, completion="late", check="all,exit_stores,global")):
        plan = plan_watch(x, matrix, places, torch.device("cpu"), chip(arch, 3))
        rows = torch.full((3, row_words(len(places))), POISON, dtype=torch.int32)
        rows[1] = 0
        plan(x, (matrix.data, matrix.scale, matrix.global_scale), (rows, 1))
    found = rows[1]
    floats, doubles = found.view(torch.float32), found.view(torch.float64)
    return {
        "codes": found[Word.CODES : Word.CODES + 256],
        "octaves": found[Word.OCTAVES : Word.OCTAVES + 24],
        "counts": found[Word.COMPARED : Word.SATURATED + 1],
        "sums": doubles[Word.SIGNAL // 2 : Word.PICKS // 2],
        "first": found[Word.FIRST],
        "amax": floats[Word.AMAX],
        "element": found[Word.ELEMENT],
        "value": floats[Word.VALUE],
        "global_scale": floats[Word.GLOBAL_SCALE],
    }, rows[::2]


def lines_of(x: Tensor, axis: int) -> Tensor:
    return x if axis == -1 else x.mT


def check(
    x: Tensor,
    q: bs.ScaledTensor,
    count: int = 40,
    arch: str = "sm_90a",
    *,
    given: bool = True,
    turned: bool = False,
) -> dict[str, Tensor]:
    """Count, and compare, by what the tensor's compact scales and bytes are."""
    scale = lines_of(q.compact_bytes(), q.axis)
    codes = scale if scale.dtype == torch.uint8 else (scale.view(torch.int32) >> 23) & 255
    across = scale.shape[1]
    total = lines_of(x, q.axis).shape[0] * across
    places = torch.randint(total, (count,), generator=torch.Generator().manual_seed(1)).int()
    places[-1] = total - 1
    found, others = look(x if given else None, q, places, arch, turned)
    assert (others == POISON).all()
    counts = torch.bincount(codes.flatten().int(), minlength=256)
    assert torch.equal(found["codes"].long(), counts)
    nan = 255 if q.format.scale is FP32 else q.format.scale.nan_code
    order = codes if q.axis == -1 else codes.mT
    bad = (order.flatten() == nan).nonzero().flatten()
    first = bad[0].item() if len(bad) else NONE
    assert found["first"].item() - 1 == first
    if q.global_scale is not None:
        assert found["global_scale"] == q.global_scale
    if not given:
        assert not found["octaves"].any()
        assert not found["counts"].any()
        return found
    amax = x.float().abs().amax()
    assert torch.equal(found["amax"].isnan(), amax.isnan())
    assert amax.isnan() or found["amax"] == amax
    wanted = compared(x, q, scale, places)
    n, signal, noise, zeros, flushed, saturated = wanted[:6].tolist()
    assert found["counts"].tolist() == [n, zeros, zeros + flushed, saturated]
    assert found["octaves"].tolist() == wanted[6:].tolist()
    assert found["sums"].tolist() == pytest.approx([signal, noise], rel=1e-12)
    if first == NONE:
        assert found["element"] == 0
    return found


def compared(x: Tensor, q: bs.ScaledTensor, scale: Tensor, places: Tensor) -> Tensor:
    """Sums over the picked blocks, by torch operations; ``scale``: that of lines."""
    (height, size), k = q.format.block, lines_of(x, q.axis).shape[1]
    padded = torch.nn.functional.pad(lines_of(x, q.axis).float(), (0, -k % size))
    line, block = places.long() // scale.shape[1], places.long() % scale.shape[1]
    stored = q.format.element.stored(size)
    data = lines_of(as_bytes(q.qdata), q.axis).unfold(1, stored, stored)
    there = (k - block * size).clamp(max=size)
    scalar = None if q.global_scale is None else q.global_scale.reshape(1)
    picked = padded.unfold(1, size, size)[line, block], data[line, block]
    each = (*picked, scale[line // height, block], there)
    x, data, scale, there = (part[None] for part in each)
    return compare(q.format, Blocks(x, data, scale, scalar, there))[0]


CASES = [
    ("mxfp8", "compact"),
    ("mxfp8", "tcgen05"),
    ("mxfp8", "packed"),
    ("nvfp4", "tcgen05"),
    ("nvfp4", "compact"),
    ("mxfp4", "tcgen05"),
    ("fp8_1x128", "sm90"),
    ("fp8_1x128", "compact"),
    ("fp8_128x128", "compact"),
]


@pytest.mark.kernels
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("format", "layout"), CASES)
def test_numbers(format: str, layout: str, axis: int):
    x = values((136, 144))
    for k_major in (False, True) if axis == -2 else (False,):
        q = bs.quantize(x, format, axis, layout=layout, pad=True, k_major=k_major)
        check(x, q, turned=q.qdata.stride(-1) != 1)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, FP16])
@pytest.mark.parametrize("shape", [(3, 7), (130, 33), (1, 512)], ids=str)
def test_sizes_and_dtypes(shape, dtype):
    x = values(shape, dtype)
    check(x, bs.quantize(x, "nvfp4", pad=True, layout="tcgen05"), 7, "sm_100a")
    check(x, bs.quantize(x, "mxfp8", -2, pad=True, layout="tcgen05"), 7, "sm_100a")


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("format", "axis", "value"),
    [
        ("mxfp8", -1, math.nan),
        ("mxfp8", -2, -math.inf),
        ("nvfp4", -1, math.inf),
        ("nvfp4", -2, math.nan),
        ("fp8_128x128", -1, -math.inf),
        ("fp8_128x128", -2, math.nan),
        ("fp8_1x128", -1, math.inf),
        ("fp8_1x128", -2, -math.inf),
    ],
)
def test_first_nonfinite(format, axis, value):
    """The element is named by its place in the first such block, as compact scales are counted."""
    x = values((160, 288), torch.float32)
    x[150, 280] = math.nan
    x[70, 201], x[71, 201] = value, math.nan
    q = bs.quantize(x, format, axis, pad=True)
    found = check(x, q)
    height, size = q.format.block
    line, along = (70, 201) if axis == -1 else (201, 70)
    inside = line % height * size + along % size
    down, across = lines_of(q.compact_bytes(), axis).shape
    block = line // height * across + along // size
    if axis == -2:
        block = along // size * down + line // height
    assert found["first"].item() - 1 == block
    assert found["element"] == inside + 1
    assert found["value"].item() == value or (math.isnan(value) and found["value"].isnan())


@pytest.mark.kernels
def test_without_values():
    """Scales alone are counted where nobody has what was quantized."""
    x = values((64, 96))
    x[5, 5] = math.nan
    found = check(x, bs.quantize(x, "mxfp8", pad=True), given=False)
    assert found["element"] == found["amax"] == 0


@pytest.mark.kernels
def test_strided_source():
    """A weight whose transpose is contiguous."""
    x = values((96, 64)).mT
    check(x, bs.quantize(x.contiguous(), "mxfp8", pad=True))


def test_refusals():
    x = values((64, 96))
    gpu, cpu, places = chip("sm_90a"), torch.device("cpu"), torch.zeros(1, dtype=torch.int32)
    six = bs.quantize(x, "mxfp6_e2m3")
    with pytest.raises(Unsupported, match="6 bits"):
        plan_watch(x, matrix_of(six), places, cpu, gpu)
    q = matrix_of(bs.quantize(x))
    with pytest.raises(Unsupported, match="must lie together"):
        plan_watch(values((64, 192))[:, ::2], q, places, cpu, gpu)
    with pytest.raises(Unsupported, match="was made of"):
        plan_watch(x.double(), q, places, cpu, gpu)
    with pytest.raises(Unsupported, match="multiple of 16 bytes"):
        plan_watch(torch.zeros(64 * 96 + 1, dtype=BF16)[1:].view(64, 96), q, places, cpu, gpu)
