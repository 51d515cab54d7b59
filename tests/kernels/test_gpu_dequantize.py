"""The GPU dequantizer, run in the emulator: its bytes are the reference's."""

import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import ARCHITECTURES, assert_same, nasty, poisoned
from sm90_inputs import frame_bytes

import blockscale as bs
import stand_in
from blockscale import emulator as em
from blockscale import reference
from blockscale.dtypes import to_torch
from blockscale.emulator.host.hostcode import settings
from blockscale.emulator.observe.report import Report
from blockscale.formats import Format, formats
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.quantizers import calls as quantizers
from blockscale.kernels.quantizers import dequantize_config
from blockscale.layouts import as_bytes, get_layout
from stand_in import chip

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
FORMATS = [name for name, fmt in formats.items() if fmt.element.bits != 6]
NANS = {BF16: 0x7FC0, FP16: 0x7E00, FP32: 0x7FC00000}  # sign clear, the highest bit of the rest set
POISON = 0xA5


@pytest.fixture(autouse=True)
def machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have theirs."""
    monkeypatch.setattr(settings(), "keep_cubin", True)


def emulated(
    data: Tensor,
    scale: Tensor,
    format: Format,
    shape: tuple[int, ...],
    axis: int = -1,
    *,
    arch: str = "sm_90a",
    completion: str = "late",
    profile: bool = False,
    configs: list[Any] | None = None,
    multiprocessors: int = 0,
    **given: Any,
) -> tuple[Tensor, list[Report]]:
    """What the kernel gives, and the reports of its launches; ``configs`` takes what it was made
    of. On a GPU of no multiprocessors small tensors get the kernels of large ones."""

    def load(config: Any) -> Any:
        if configs is not None:
            configs.append(config)
        return compile_cache.build(config)

    device = em.Device(arch, completion=completion, check="all,exit_stores")
    with em.cutedsl(device, profile=profile) as reports, poisoned():
        gpu = replace(chip(arch, multiprocessors), load=load)
        stored = quantizers.Stored(format.name, shape, axis, given.pop("layout", "compact"))
        out = quantizers.dequantize(data, scale, stored, gpu=gpu, **given)
    return out, reports


def expected(
    data: Tensor,
    scale: Tensor,
    format: Format,
    shape: tuple[int, ...],
    axis: int,
    dtype: torch.dtype,
    global_scale: Tensor | None,
) -> Tensor:
    scale = scale.view(format.scale.dtype)
    values = reference.dequantize(
        data, scale, format, shape=torch.Size(shape), axis=axis, global_scale=global_scale
    )
    # torch's own NaN in bf16 is another one on each processor
    rounded = values.to(dtype)
    bits = rounded.view(torch.int32 if dtype == FP32 else torch.int16)
    bits[values.isnan()] = NANS[dtype]
    return rounded


def parts(
    shape: tuple[int, ...], format: Format, axis: int, seed: int = 0, k_major: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Data, compact scales and global scale of numbers of every size."""
    x = nasty(math.prod(shape[:-1]), shape[-1], BF16, seed).view(shape)
    factor = torch.tensor(0.37) if format.has_global_scale else None
    rounding = format.default_scale_rounding
    given = {"scale_rounding": rounding, "global_scale": factor, "k_major": k_major}
    data, scale = reference.quantize(x, format, axis=axis, **given)
    return as_bytes(data), as_bytes(scale), factor


def check(
    shape: tuple[int, ...],
    name: str,
    axis: int = -1,
    dtype: torch.dtype = BF16,
    layout: str = "compact",
    k_major: bool = False,
    **given: Any,
) -> list[Report]:
    """Quantize numbers, and assert that the kernel makes of them what the reference does."""
    fmt = formats[name]
    data, scale, factor = parts(shape, fmt, axis, sum(shape), k_major)
    want = expected(data, scale, fmt, shape, axis, dtype, factor)
    if layout != "compact":
        scale = get_layout(layout).swizzle(scale if axis == -1 else scale.mT)
    more = given | {"layout": layout, "dtype": dtype, "global_scale": factor}
    got, reports = emulated(data, scale, fmt, shape, axis, **more)
    assert_same(got, want, f"{name} {shape} along {axis}")
    turned = fmt.turned(axis, k_major)
    assert (got.mT if turned else got).is_contiguous()
    return reports


def _architecture(name: str, dtype: torch.dtype) -> str:
    """Each format is tried on both, each kernel on one."""
    return ARCHITECTURES[(FORMATS.index(name) + DTYPES.index(dtype)) % 2]


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, axis):
    """Numbers of every size; see also ``test_every_pattern``."""
    i = FORMATS.index(name)
    check((40, 272), name, axis, DTYPES[i % 3], arch=_architecture(name, DTYPES[i % 3]))


@pytest.mark.parametrize("name", [name for name in FORMATS if formats[name].element.bits == 8])
def test_k_major(name):
    check((272, 40), name, -2, k_major=True)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mxfp8", "tcgen05"),
        ("mxfp8", "packed"),
        ("nvfp4", "tcgen05"),
        ("fp8_1x128", "sm90"),
        ("fp8_128x128", "sm90"),
    ],
)
@pytest.mark.parametrize("axis", [-1, -2])
def test_layouts(name, layout, axis):
    """Scales are read where they lie; more than a tile of them."""
    check((140, 272), name, axis, layout=layout)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    ("name", "shape", "completion"),
    [
        ("mxfp8", (1, 24), "late"),
        ("mxfp8", (33, 37), "eager"),  # an element at a time
        ("mxfp8", (9, 44), "random"),  # 8 bytes at a time
        ("nvfp4", (35, 50), "late"),
        ("fp8_1x128", (131, 77), "random"),
    ],
)
def test_tails(name, shape, completion, axis):
    check(shape, name, axis, completion=completion)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_few_rows_of_a_thread(dtype):
    """As many threads as can be, where they do not fill a GPU."""
    for name, axis in (("mxfp8", -1), ("mxfp8", -2), ("nvfp4", -2)):
        check((37, 80), name, axis, dtype, multiprocessors=132)


@pytest.mark.parametrize(
    ("name", "axis", "shape", "several"),
    [
        ("mxfp8", -1, (2, 3, 5, 64), False),  # rows of one matrix
        ("mxfp8", -2, (2, 64, 40), False),  # whole blocks of one
        ("mxfp8", -2, (2, 3, 40, 24), True),  # the last block of each is cut
        ("nvfp4", -2, (3, 32, 24), True),  # packed column by column
        ("fp8_128x128", -1, (2, 3, 40, 40), True),
        ("mxfp8", -1, (70,), False),
    ],
)
def test_dimensions(name, axis, shape, several):
    """Many as one matrix where that can be."""
    configs: list[Any] = []
    check(shape, name, axis, configs=configs)
    assert [config.batched for config in configs] == [several]


def test_strides():
    """Parts and transposed views of quantized tensors, whose scales are views, too."""
    x = nasty(96, 160, BF16)
    q = bs.quantize(x, "mxfp8")
    p = bs.quantize(x, "mxfp8", -2, backend="reference")
    for t in (q[8:40, 32:96], q.mT, p[32:64, 3:77], p.mT, bs.quantize(x, "nvfp4").mT):
        data, scale, fmt, axis = as_bytes(t.data), t.compact_bytes(), t.format, t.axis
        shape = tuple(t.shape)
        want = expected(data, scale, fmt, shape, axis, BF16, t.global_scale)
        got, _ = emulated(data, scale, fmt, shape, axis, global_scale=t.global_scale)
        assert_same(got, want, str(t))


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (2, 0, 64)])
def test_nothing(shape):
    fmt = formats["mxfp8"]
    data = torch.empty(fmt.data_shape(shape, -1), dtype=torch.uint8)
    scale = torch.empty(fmt.scale_shape(shape, -1), dtype=torch.uint8)
    got, reports = emulated(data, scale, fmt, shape)
    assert got.shape == shape
    assert not reports


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_pattern(name, dtype, monkeypatch):
    """Each byte of data times each scale, NaN and infinities among them; of fp32, some."""
    monkeypatch.setattr(dequantize_config, "_MOST_ROWS", 2)  # sooner compiled
    fmt, octets = formats[name], torch.arange(256).to(torch.uint8)
    factors = [torch.tensor(v) for v in (0.37, 2.0**-117, 3e38)] if fmt.has_global_scale else [None]
    scales, generator = octets, torch.Generator().manual_seed(0)
    if fmt.scale.nbytes == 4:
        bits = torch.randint(-(1 << 31), 1 << 31, (256,), generator=generator)
        scales = bits.to(torch.int32).view(FP32)
        special = [3.4e38, math.nan, math.inf, 1e-45, 2.0**-126, 0.0, 1.0]
        scales[: len(special)] = torch.tensor(special)
    scales = scales[: 256 // fmt.block[0]]
    columns = 256 * fmt.element.codes_per_group
    data = octets.expand(256, 256).contiguous()
    each = scales.unsqueeze(1).expand(-1, columns // fmt.block_size).contiguous()
    for factor in factors:
        given = {"dtype": dtype, "global_scale": factor}
        want = expected(data, each, fmt, (256, columns), -1, **given)
        given["arch"] = _architecture(name, dtype)
        got, _ = emulated(data, each, fmt, (256, columns), **given)
        assert_same(got, want, name)
        if dtype != BF16:
            continue
        down = data.mT if fmt.element.bits < 8 else data.mT.contiguous()
        below = each.mT.contiguous()
        got, _ = emulated(down, below, fmt, (columns, 256), -2, **given)
        assert_same(got, want.mT, name)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "axis", "shape"),
    [("mxfp8", -1, (33, 72)), ("mxfp8", -2, (33, 37)), ("nvfp4", -2, (35, 46))],
)
def test_nothing_beside_the_output(name, axis, shape):
    fmt, guard = formats[name], 64
    data, scale, factor = parts(shape, fmt, axis)
    size = math.prod(shape) * 2
    memory = torch.full((size + 2 * guard,), POISON, dtype=torch.uint8)
    out = memory[guard:-guard].view(BF16)
    out = out.view(shape[::-1]).mT if fmt.turned(axis, False) else out.view(shape)
    got, _ = emulated(data, scale, fmt, shape, axis, global_scale=factor, out=out)
    assert got is out
    assert_same(out, expected(data, scale, fmt, shape, axis, BF16, factor), name)
    assert (memory[:guard] == POISON).all()
    assert (memory[-guard:] == POISON).all()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("name", "axis", "dtype"),
    [("mxfp8", -1, BF16), ("mxfp8", -2, BF16), ("nvfp4", -1, BF16), ("fp8_1x128", -1, FP32)],
)
def test_sectors(name, axis, dtype, arch):
    """No sector of data or output is moved in part, and none twice; of scales, all that lie side by
    side in a line are asked for at once. No registers are spilled.
    """
    configs: list[Any] = []
    rows, columns, fmt = 32, 512, formats[name]
    if fmt.block_size > 32:
        columns = 1024
    (report,) = check((rows, columns), name, axis, dtype, arch=arch, profile=True, configs=configs)
    write, read = report.global_memory("write"), report.global_memory("read")
    assert write.asked == 32 * write.sectors == rows * columns * dtype.itemsize
    assert read.sectors == read.fewest
    codes = rows * columns * fmt.element.bits // 8
    of_data = [each for each in report.sectors if "no_allocate" in each.place.opcode]
    assert sum(each.asked for each in of_data) == codes == 32 * sum(e.sectors for e in of_data)
    assert [frame_bytes(compile_cache.build(each).__cubin__) for each in configs] == [[0]]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout", "given", "message"),
    [
        ("mxfp8", "compact", {"gpu": chip("sm_80")}, "sm_90a and|sm_90a, sm_100a"),
        ("mxfp8", "compact", {"gpu": None}, "data is on cpu"),
        ("mxfp8", "compact", {"dtype": torch.float64}, "float64"),
        ("mxfp6_e2m3", "compact", {}, "6-bit"),
        ("mxfp8", "sm90", {}, "does not hold scales of mxfp8"),
    ],
)
def test_no_kernel(name, layout, given, message):
    fmt = formats[name]
    data, scale, _ = parts((8, 64), fmt, -1)
    stored = quantizers.Stored(name, (8, 64), layout=layout)
    with pytest.raises(Unsupported, match=message):
        quantizers.dequantize(data, scale, stored, **({"gpu": chip("sm_90a")} | given))


def test_no_kernel_for_such_strides():
    data, scale, factor = parts((32, 64), formats["nvfp4"], -2)
    stored, given = quantizers.Stored("nvfp4", (32, 64), -2), {"gpu": chip("sm_90a")}
    with pytest.raises(Unsupported, match="packed along axis -2"):
        quantizers.dequantize(data.contiguous(), scale, stored, global_scale=factor, **given)
    data, scale, _ = parts((8, 64), formats["mxfp8"], -1)
    spread = data.repeat_interleave(2, 1).repeat_interleave(2, 0)[::2, ::2]
    with pytest.raises(Unsupported, match="not contiguous in a dimension"):
        quantizers.dequantize(spread, scale, quantizers.Stored("mxfp8", (8, 64)), **given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (8, 96)}, r"data: got \(8, 64\)"),
        ({"scale": torch.zeros(8, 3, dtype=torch.uint8)}, r"scale: got \(8, 3\)"),
        ({"scale": torch.zeros(8, 2)}, r"scale: got \(8, 2\) torch.float32"),
        ({"global_scale": torch.ones(2)}, "global_scale: got 2 values"),
        ({"out": torch.zeros(8, 64)}, r"out: got \(8, 64\) torch.float32"),
        ({"out": torch.zeros(64, 8, dtype=BF16).mT}, "expected contiguous, as the data is"),
        ({"axis": -2, "shape": (64,), "data": torch.zeros(64, dtype=torch.uint8)}, "axis: got -2"),
    ],
)
def test_parts_that_do_not_fit(change, message):
    data, scale, _ = parts((8, 64), formats["mxfp8"], -1)
    given = {"data": data, "scale": scale, "shape": (8, 64), "axis": -1} | change
    stored = quantizers.Stored("mxfp8", given.pop("shape"), given.pop("axis"))
    with pytest.raises(ValueError, match=message):
        quantizers.dequantize(stored=stored, gpu=chip("sm_90a"), **given)


# --- the op ---------------------------------------------------------------------------------------


def test_the_op_uses_it(monkeypatch):
    """CPU tensors play GPU ones; float64 is what fp32 is; groups go to the reference, it says."""
    module = import_module("blockscale.ops.dequantize")
    monkeypatch.setattr(module, "no_cpu_kernels", lambda: "no CPU kernels")
    with stand_in.emulated("sm_90a") as launched:
        x = nasty(64, 64, BF16)
        quantized = [
            bs.quantize(x, n, a, backend="reference") for n, a in (("mxfp8", -1), ("nvfp4", -2))
        ]
        for q, dtype in zip(quantized, (torch.float64, BF16), strict=True):
            got = q.dequantize(dtype)
            made = FP32 if dtype == torch.float64 else dtype
            want = expected(q.data, q.scale, q.format, tuple(q.shape), q.axis, made, q.global_scale)
            assert_same(got.to(made), want, str(q))
            assert got.dtype == dtype
            assert got.is_contiguous()
        assert [to_torch(config.dtype) for config in launched] == [FP32, BF16]
        ends = torch.tensor([10, 64], dtype=torch.int32)
        grouped = bs.quantize(x, "mxfp8", -2, offsets=ends, backend="reference")
        with pytest.warns(bs.FallbackWarning, match="dequantize .* groups along the contraction"):
            grouped.dequantize()
        assert len(launched) == 2
