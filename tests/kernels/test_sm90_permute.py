"""A of few rows, widened and put in order by a Hopper kernel, run in the emulator: bits of the
reference, their columns moved by torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from guarded import guarded
from kernel_code import built
from mixed_inputs import ordered, packed
from sm90_inputs import assert_no_spills

import blockscale as bs
from blockscale import emulator as em
from blockscale import reference
from blockscale.formats import get_format
from blockscale.kernels.common import compile_cache
from blockscale.kernels.sm90.mixed_config import BLOCK_K, COUNTERS
from blockscale.kernels.sm90.permute_config import PermuteConfig

pytestmark = pytest.mark.usefixtures("keep_code")

BF16, BYTE = torch.bfloat16, torch.uint8
NANS = {"mxfp8": (0x7F,), "mxfp8_e5m2": (0x7D, 0x7E, 0x7F), "mxfp4": (), "nvfp4": ()}


def emulated(
    name: str, a: Tensor, scale: Tensor | None, k: int, completion: str, block_k: int = 128
) -> Tensor:
    """Bits that the kernel leaves in poisoned memory."""
    config = PermuteConfig(name, block_k)
    with guarded((len(a), -(-k // 128) * 128), BF16, None) as out:
        with em.cutedsl(em.Device("sm_90a", completion=completion, check="all,exit_stores")):
            compile_cache.build(config)(a, scale, out, None)
        got = out.clone()
    assert_no_spills(config)
    return got.view(torch.int16)


def apart(x: Tensor, columns: int) -> Tensor:
    """The same matrix, ``columns`` of what would be NaN after each row but the last."""
    whole = torch.empty(len(x), x.shape[1] + columns, dtype=x.dtype)
    whole.view(BYTE).fill_(0xFF)
    whole[:, : x.shape[1]] = x
    return whole.view(-1)[: whole.numel() - columns].as_strided(x.shape, whole.stride())


def check(
    name: str,
    codes: Tensor,
    scale: Tensor,
    spaces: int = 0,
    completion: str = "late",
    block_k: int = 128,
) -> None:
    """What differs from the reference is NaN in an octet that has one. ``spaces``: bytes between
    rows, beside those without which no row starts at a multiple of 16."""
    format = get_format(name)
    m, k = codes.shape
    data = packed(codes, format.element.bits)
    values = reference.dequantize(
        data.view(format.element.dtype), scale.view(format.scale.dtype), format, shape=codes.shape
    )
    octets = values.isnan().view(m, -1, 8).any(-1).repeat_interleave(8, 1)
    nan = ordered(octets.to(torch.int16), block_k)
    data, scale = apart(data, -data.shape[1] % 16 + spaces), apart(scale, spaces % 7)
    got = emulated(name, data, scale, k, completion, block_k)
    assert torch.equal(got.view(BF16).isnan(), nan.bool())
    want = ordered(values.to(BF16), block_k).view(torch.int16)
    assert torch.equal(got.where(nan == 0, 0), want.where(nan == 0, 0))


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [(1, 1, 0, "eager"), (17, 9, 16, "random"), (128, 73, 0, "late")])
@pytest.mark.parametrize("block_k", [128, 64])
@pytest.mark.parametrize("name", NANS)
def test_shapes(name, case, block_k):
    """Random bytes of all kinds; some columns of 128, the last ones not all there."""
    m, blocks, spaces, completion = case
    size = get_format(name).block_size
    generator = torch.Generator().manual_seed(m)

    def integers(low: int, high: int, columns: int) -> Tensor:
        return torch.randint(low, high, (m, columns), generator=generator, dtype=BYTE)

    codes = integers(0, 1 << get_format(name).element.bits, blocks * size)
    scales = (0, 256) if name == "nvfp4" else (100, 129)
    check(name, codes, integers(*scales, blocks), spaces, completion, block_k)


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 8), (17, 144), (17, 1000), (128, 1168), (5, 1023), (3, 1150)]
)
def test_bf16(shape):
    """All bits, those of NaN too, in rows that lie apart."""
    generator = torch.Generator().manual_seed(shape[1])
    bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)
    a = apart(bits.view(BF16), -shape[1] % 8 + 8 * (shape[1] % 16 == 0))
    for block_k in (128, 64):
        got = emulated("bf16", a, None, shape[1], "late", block_k)
        assert torch.equal(got, ordered(bits, block_k))


def test_compact():
    """The output as a product takes it: no bytes between rows."""
    for m in (1, 6):
        a = torch.randn(m, 256).to(BF16)
        out = torch.full((m, 256), float("nan"), dtype=BF16)
        with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")):
            compile_cache.build(PermuteConfig("bf16", BLOCK_K))(a, None, out, None)
        assert torch.equal(out.view(torch.int16), ordered(a.view(torch.int16)))


def test_fp8_with_scales_of_k_blocks():
    """Elements alone: each E4M3, and a NaN that takes its octet."""
    every = torch.arange(256, dtype=torch.uint8)
    codes = torch.stack([every.roll(i) for i in range(17)])
    got = emulated("fp8_1x128", codes, None, 256, "random").view(BF16)
    want = codes.view(torch.float8_e4m3fn).to(BF16)
    nan = want.isnan().view(17, -1, 8).any(-1).repeat_interleave(8, 1)
    assert torch.equal(got.isnan(), ordered(nan.to(torch.int16)).bool())
    want = ordered(want.masked_fill(nan, 0))
    assert torch.equal(got.nan_to_num(0).view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_not_ordered(name):
    """Columns stay where they are."""
    format = get_format(name)
    q = bs.quantize(torch.randn(5, 640), format)
    out = torch.full((5, 640), float("nan"), dtype=BF16)
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")):
        compile_cache.build(PermuteConfig(name, block_k=0))(
            q.qdata.view(BYTE), q.scale.view(BYTE), out, None
        )
    want = reference.dequantize(q.qdata, q.scale, format, shape=(5, 640))
    assert torch.equal(out.float(), want)


@pytest.mark.parametrize("rows", [1, 40])
def test_counters(rows):
    """Become zero, and nothing after them changes: by fewer threads than there are, and by more."""
    a, words = torch.randn(rows, 128).to(BF16), torch.full((COUNTERS + 64,), -1, dtype=torch.int32)
    out = torch.empty(rows, 128, dtype=BF16)
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")):
        compile_cache.build(PermuteConfig("bf16", BLOCK_K, clears=True))(a, None, out, words)
    assert bool((words[:COUNTERS] == 0).all())
    assert bool((words[COUNTERS:] == -1).all())
    assert torch.equal(out, ordered(a))


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", NANS)
def test_every_value(name, mixed):
    """Each element with each scale: neighbours with scales of one size, or of all sizes. Octets
    that have NaN have no element that is nowhere else."""
    format = get_format(name)
    nans = [code | sign for code in NANS[name] for sign in (0, 0x80)]
    others = [code for code in range(1 << format.element.bits) if code not in nans]
    line = nans + [0] * (-len(nans) % 8) + others
    line = torch.tensor(line + [0] * (-len(line) % format.block_size), dtype=BYTE)
    rows, blocks = torch.arange(256)[:, None], torch.arange(len(line) // format.block_size)
    scale = (89 * rows + 37 * blocks) % 256 if mixed else rows + 0 * blocks
    check(name, line.expand(256, -1).contiguous(), scale.to(BYTE))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2"])
def test_nan_elements(name):
    """In each place, beside the largest codes that are none: NaN where their octet is."""
    for code in NANS[name]:
        for sign, other in ((0, 0x80), (0x80, 0)):
            codes = torch.full((128, 128), (NANS[name][0] - 1) | other, dtype=BYTE)
            codes.fill_diagonal_(code | sign)
            check(name, codes, torch.full((128, 4), 127, dtype=BYTE))


def test_nan_scales():
    """Of a block, and of none past K, where there are none."""
    codes = torch.full((3, 96), 0x38, dtype=BYTE)
    scale = torch.tensor([[255, 127, 127], [127, 255, 127], [127, 127, 255]], dtype=BYTE)
    check("mxfp8", codes, scale, 16)


# --- order in a stream ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "nvfp4"])
def test_follows_then_precedes(name):
    """The next kernel comes early, but not before the one before this one is over."""
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")):
        code = built(PermuteConfig(name, BLOCK_K)).__ptx__
    wait, launch = (code.index(f"griddepcontrol.{each}") for each in ("wait", "launch_dependents"))
    assert wait < launch < code.index("ld.global")
