"""Products of operands that a Hopper kernel widens to bf16, run in the emulator, against fp64
products of operands that are dequantized by plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from sm90_inputs import frame_bytes

from blockscale import emulator as em
from blockscale import quantize
from blockscale.emulator.hostcode import settings
from blockscale.formats import get_format
from blockscale.kernels.gpu import compiled
from blockscale.kernels.gpu.plan import Unsupported
from blockscale.kernels.sm90.widened_config import Config, choose_config, why_not
from blockscale.kernels.sm90.widened_gemm import widened_gemm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
Operand = tuple[Tensor, Tensor | None]

SMALL = Config("mxfp8", "mxfp8", BF16, tile=(128, 64), stages=2)


@pytest.fixture(autouse=True)
def _keep_code(monkeypatch):
    """Compiled functions have their machine code, too."""
    monkeypatch.setattr(settings(), "keep_cubin", True)


def operand(name: str, rows: int, k: int, seed: int) -> Operand:
    """Random bytes of all kinds but NaN and infinities, and scales over six binades."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    if name == "bf16":
        return torch.randn(rows, k, generator=generator).to(BF16), None
    format = get_format(name)
    data = integers(0, 256, rows, format.element.stored(k))
    if format.element.bits == 8:  # largest exponents become smallest
        data = torch.where(data & 0x78 == 0x78, data & 0x87, data)
    low, high = (124, 130) if format.scale.name == "E8M0" else (0, 0x7F)
    return data, integers(low, high, rows, k // format.block_size)


def dequantized(name: str, data: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return data.double()
    format = get_format(name)
    if format.element.bits == 4:
        codes = torch.stack((data & 15, data >> 4), -1).flatten(1).long()
        values = E2M1[codes]
    else:
        values = data.view(format.element.dtype).double()
    if format.scale.name == "E8M0":
        factors = torch.exp2(scale.double() - 127)
        factors[scale == 255] = float("nan")
    else:
        factors = scale.view(torch.float8_e4m3fn).double()
    return values * factors.repeat_interleave(format.block_size, 1)


def operands(config: Config, m: int, n: int, k: int) -> tuple[Operand, Operand]:
    """A and B."""
    a, b = names(config)
    return operand(a, m, k, 1), operand(b, n, k, 2)


def names(config: Config) -> tuple[str, str]:
    return (config.right, config.left) if config.swap else (config.left, config.right)


def emulated(
    config: Config,
    a: Operand,
    b: Operand,
    *,
    start: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    completion: str = "late",
    multiprocessors: int = 2,
) -> Tensor:
    """What the kernel leaves in poisoned memory, or in a copy of ``start``, its rows apart; nothing
    between them may change."""
    m, n, pad = a[0].shape[0], b[0].shape[0], 16 // config.out_dtype.itemsize
    whole = torch.empty(m + 2, n + 2 * pad, dtype=config.out_dtype)
    whole.view(torch.uint8).fill_(0xA5)
    before = whole.clone()
    out = whole[1:-1, pad:-pad]
    if start is not None:
        out.copy_(start)
    left, right = (b, a) if config.swap else (a, b)
    with em.cutedsl(em.Device("sm_90a", completion=completion, check="all")):
        kernel = compiled.build(config)
        assert frame_bytes(kernel.__cubin__) == [0], "spills"
        kernel(*left, *right, out, bias, alpha, multiprocessors)
    result = out.clone()
    out.copy_(before[1:-1, pad:-pad])
    assert torch.equal(whole.view(torch.uint8), before.view(torch.uint8)), "written beside it"
    return result


def assert_close(got: Tensor, a: Tensor, b: Tensor, added: Tensor | float = 0.0) -> None:
    """The error is that of one rounding and of fp32 sums: of 16 products each, truncated, in units
    of the last of the 24 bits of what may be as large as the sum of magnitudes."""
    want = a @ b.T + added
    slack = (a.shape[1] / 16 + 4) * 2.0**-23 * (a.abs() @ b.abs().T + abs(added))
    half = torch.finfo(got.dtype).eps / 2
    assert bool(((got.double() - want).abs() <= half * (want.abs() + slack) + slack).all())


def check(config: Config, m: int, n: int, k: int, **kwargs) -> None:
    a, b = operands(config, m, n, k)
    got = emulated(config, a, b, **kwargs)
    x, y = (dequantized(name, *each) for name, each in zip(names(config), (a, b), strict=True))
    assert_close(got, x, y)


# --- formats and shapes ---------------------------------------------------------------------------

WEIGHTS = {"right": "bf16", "swap": True, "tma_store": False}
CASES = [
    ("eager", {"left": "mxfp8", "right": "mxfp4", "tile": (128, 8)}),
    ("random", {"left": "mxfp4", "right": "mxfp8_e5m2", "tile": (128, 16)}),
    ("late", {"left": "mxfp8_e5m2", "right": "mxfp8", "tile": (128, 32), "ahead": 2}),
    ("random", {"left": "nvfp4", "right": "nvfp4", "tile": (64, 64), "warpgroups": 1}),
    ("eager", {"left": "mxfp8", "tile": (128, 128), **WEIGHTS}),
    ("late", {"left": "mxfp4", "tile": (256, 8), "warpgroups": 4, "split": 2, **WEIGHTS}),
    ("random", {"left": "nvfp4", "tile": (256, 16), "warpgroups": 4, "split": 4, **WEIGHTS}),
    ("random", {"left": "mxfp8", "tile": (128, 16), "split": 2, **WEIGHTS, "right": "mxfp8"}),
]


@pytest.mark.parametrize("case", CASES)
def test_pairs(case):
    """Pairs of formats; each shape of a wgmma; tails in M and N, and several tiles by one block;
    blocks that have a part of K each, and bring together the sums of one of their warpgroups, or of
    two."""
    completion, fields = case
    store = fields["tile"][1] >= 32
    config = replace(SMALL, **{"out_dtype": FP32, "stages": 3, "tma_store": store, **fields})
    rows, columns = config.tile
    m, n = (columns - 3, rows + 8) if config.swap else (rows + 8, max(8, columns - 8))
    k = 128 * (config.split + 1)
    check(config, m, n, k, completion=completion, multiprocessors=config.split)


@pytest.mark.parametrize(("left", "k"), [("mxfp8", 288), ("nvfp4", 32)])
def test_tails_of_k(left, k):
    """Stages that are not whole; scales whose rows lie at any address."""
    config = replace(SMALL, left=left, right=left, out_dtype=FP32, async_scales=False)
    check(replace(config, tile=(128, 16), c_buffers=1, tma_store=False), 20, 24, k)


def test_large_tiles():
    config = choose_config((8192, 8192, 8192), "mxfp8", "mxfp8", BF16)
    assert config.tile == (256, 128)
    check(config, 136, 80, 256, completion="random")


def test_stored_transposed():
    check(replace(SMALL, left="nvfp4", right="bf16", swap=True), 70, 136, 128)


# --- numbers --------------------------------------------------------------------------------------


COLUMNS = (0, 37, 74, 111)  # of all threads that share a row, in both halves of a stage
SCALES = {  # the last that bf16 can hold with what brings elements to their value, and the next
    "E4M3": [0, 126, 134, 135, 254, 255],
    "E5M2": [0, 126, 254, 255],
    "E2M1": [0, 126, 128, 129, 254, 255],
    "UE4M3": [0, 1, 7, 8, 0x38, 0x77, 0x7E, 0x7F],
}


def packed(codes: Tensor, bits: int) -> Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes


def every_code(name: str) -> Operand:
    """Each element with the first and the last finite one of some scales, and some with the others:
    rows of zeros but for four columns."""
    format = get_format(name)
    bits = format.element.bits
    every = torch.arange(1 << bits, dtype=torch.uint8)
    some = every if bits == 4 else every[7::8]
    scales = SCALES[format.element.name if format.scale.name == "E8M0" else "UE4M3"]
    taken = [every if i in (0, len(scales) - 2) else some for i in range(len(scales))]
    codes = torch.zeros(sum(map(len, taken)), 128, dtype=torch.uint8)
    for i, column in enumerate(COLUMNS):
        codes[:, column] = torch.cat([each.roll(i) for each in taken])
    lengths = torch.tensor([len(each) for each in taken])
    scale = torch.tensor(scales, dtype=torch.uint8).repeat_interleave(lengths)
    return packed(codes, bits), scale[:, None].repeat(1, 128 // format.block_size)


def ones(name: str) -> Operand:
    """Rows that take one of these columns each."""
    format = get_format(name)
    one = {"E4M3": 0x38, "E5M2": 0x3C, "E2M1": 0x02}[format.element.name]
    codes = torch.zeros(len(COLUMNS), 128, dtype=torch.uint8)
    for i, column in enumerate(COLUMNS):
        codes[i, column] = one
    scale = torch.full((len(codes), 128 // format.block_size), 127, dtype=torch.uint8)
    if format.scale.name == "UE4M3":
        scale.fill_(0x38)
    return packed(codes, format.element.bits), scale


def in_range(x: Tensor) -> Tensor:
    step = 2.0**-133
    x = torch.where(x.abs() < 2.0**-126, (x / step).round() * step, x)
    return torch.where(x.abs() >= 2.0**128, x.sign() * float("inf"), x)


@pytest.mark.parametrize(
    ("name", "swap"),
    [
        *[("mxfp8", False), ("nvfp4", False), ("mxfp8_e5m2", True), ("mxfp4", True)],
    ],
)
def test_every_element(name, swap):
    """Exact; infinite where fp32 cannot hold it, and in steps of bf16's least number."""
    config = replace(SMALL, left=name, right=name, out_dtype=FP32, tma_store=False, tile=(128, 8))
    a, b = every_code(name), ones(name)
    if swap:
        config, a, b = replace(config, tile=(128, 64)), b, a
    got = emulated(config, a, b)
    x, y = (in_range(dequantized(name, *each)) for each in (a, b))
    want = torch.stack([(row * y).sum(1) for row in x])
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0), want.float().nan_to_num(0.0))


# --- epilogues and calls --------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "swap"), [(BF16, True), (FP32, False)])
def test_epilogue(dtype, swap):
    config = replace(SMALL, out_dtype=dtype, accumulate=True, bias=BF16, alpha=True)
    config = replace(config, swap=swap, tma_store=not swap)
    a, b = operands(config, 40, 72, 128)
    start, bias = torch.randn(40, 72).to(dtype), torch.randn(72).to(BF16)
    got = emulated(config, a, b, start=start, bias=bias, alpha=torch.tensor(0.75))
    x, y = (dequantized("mxfp8", *each) for each in (a, b))
    assert_close(got, 0.75 * x, y, start.double() + bias.double())


def call(a: Operand, a_format: str, b: Operand, b_format: str, **kwargs) -> Tensor:
    with em.cutedsl(em.Device("sm_90a", check="all")):
        return widened_gemm(
            *a, None if a_format == "bf16" else a_format, *b, b_format, arch="sm_90a", **kwargs
        )


def test_quantized():
    """From values to a product."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 96, generator=generator) for rows in (24, 40))
    a, b = quantize(x, "nvfp4"), quantize(w, "nvfp4")
    got = call((a.qdata, a.scale), "nvfp4", (b.qdata, b.scale), "nvfp4", out_dtype=FP32,
               alpha=a.global_scale * b.global_scale)  # fmt: skip
    assert_close(got, a.dequantize(torch.float64), b.dequantize(torch.float64))


@pytest.mark.parametrize("shape", [(0, 16, 128), (16, 0, 128), (16, 24, 0)])
def test_empty(shape):
    m, n, k = shape
    a, b = operands(SMALL, m, n, k)
    bias = torch.ones(n)
    assert bool((call(a, "mxfp8", b, "mxfp8", bias=bias) == 1).all())
    start = torch.ones(m, n)
    kept = call(a, "mxfp8", b, "mxfp8", c=start, out_dtype=FP32, accumulate=True)
    assert kept is start
    assert bool((kept == 1).all())


def test_bad_input():
    a, b = operands(SMALL, 16, 24, 128)
    wrong = {
        "expected \\(M, K\\)": (a, (b[0][:, :64], b[1][:, :2])),
        "a_scale: has shape": ((a[0], a[1][:, :2]), b),
        "a_scale: belongs": ((a[0], None), b),
        "b_data: has strides.*k_major=True": (a, (b[0].T.contiguous().T, b[1])),
        "b_scale: has strides": (a, (b[0], b[1].T.contiguous().T)),
    }
    for message, (left, right) in wrong.items():
        with pytest.raises(ValueError, match=message):
            call(left, "mxfp8", right, "mxfp8")
    with pytest.raises(TypeError, match="a_data: got"):
        call((a[0].float(), a[1]), "mxfp8", b, "mxfp8")
    with pytest.raises(TypeError, match="b_scale: got"):
        call(a, "mxfp8", (b[0], b[1].float()), "mxfp8")
    with pytest.raises(ValueError, match="accumulate: needs c"):
        call(a, "mxfp8", b, "mxfp8", accumulate=True)
    with pytest.raises(Unsupported, match="16 bytes"):
        call((a[0][:, 8:104], a[1][:, :3]), "mxfp8", (b[0][:, :96], b[1][:, :3]), "mxfp8")
    with pytest.raises(Unsupported, match="format mxfp6_e2m3"):
        call(a, "mxfp6_e2m3", b, "mxfp8")
    with pytest.raises(Unsupported, match="cannot be multiplied"):
        call(a, "mxfp8", b, "nvfp4")
    assert "sm_100a" in why_not("mxfp8", "mxfp8", BF16, "sm_100a")
    assert "float64" in why_not("mxfp8", "mxfp8", torch.float64, "sm_90a")
    with pytest.raises(ValueError, match="tile: got"):
        replace(SMALL, tile=(96, 64))


# --- code -----------------------------------------------------------------------------------------

CHOSEN = [
    ((8192, 8192, 8192), "mxfp4", "mxfp8_e5m2"),
    ((64, 8192, 8192), "bf16", "nvfp4"),
]


@pytest.mark.parametrize("case", CHOSEN)
def test_no_spills(case):
    with em.cutedsl(em.Device("sm_90a")):
        frames = frame_bytes(compiled.build(choose_config(*case, BF16)).__cubin__)
    assert frames == [0]
