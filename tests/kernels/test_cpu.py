"""The compiled CPU kernels against the reference: the same bytes, whatever the input."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import measure, reference
from blockscale.formats import E4M3, E8M0, FP32, NONFINITE, Format, formats
from blockscale.kernels.cpu import calls as cpu
from blockscale.memory import memory_of
from blockscale.rounding import decode

pytest.importorskip("numba")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = tuple(formats)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SHAPES = ((64, 256), (1, 1), (5,), (300,), (2, 3, 40, 70), (33, 1000), (129, 130))


@pytest.fixture
def flush_to_zero() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush to zero")
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def hard(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of every size, rows of one size, runs of zeros, NaN, infinities, random bits."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    exponents = torch.randint(-150, 128, (*shape[:-1], 1), generator=g)
    x = x * torch.exp2(exponents * (torch.rand(exponents.shape, generator=g) < 0.7))
    x = x * torch.exp2(torch.randint(-30, 1, shape, generator=g).double())
    x[torch.rand(shape, generator=g) < 0.05] = 0.0
    x[torch.rand(shape, generator=g) < 0.05] = -0.0
    x = x.to(dtype)
    kind = torch.rand((*shape[:-1], 1), generator=g)
    x = torch.where(kind < 0.1, torch.zeros_like(x), x)
    bits = BITS[dtype]
    info = torch.iinfo(bits)
    noise = torch.randint(info.min, info.max + 1, shape, generator=g).to(bits).view(dtype)
    x = torch.where((kind > 0.8) & (kind < 0.9), noise, x)
    for value in (float("nan"), float("inf"), float("-inf")):
        x = torch.where(torch.rand(shape, generator=g) < 3e-4, value, x)
    return x


def same_bytes(ours: Tensor, theirs: Tensor, what: object) -> None:
    assert ours.shape == theirs.shape, what
    assert ours.dtype == theirs.dtype, what
    strides = [t.stride() for t in (ours, theirs)]
    if ours.numel():  # a stride means nothing where there is one item
        order = [[s for s, n in zip(st, ours.shape, strict=True) if n > 1] for st in strides]
        assert order[0] == order[1], what
    a, b = (t.contiguous().flatten().view(torch.uint8) for t in (ours, theirs))
    assert torch.equal(a, b), (what, (a != b).nonzero()[:5].flatten().tolist())


def same_values(ours: Tensor, theirs: Tensor, what: object) -> None:
    """Equal bits, but for the bits of a NaN."""
    bits = torch.int32 if ours.dtype == torch.float32 else torch.int16
    assert ours.shape == theirs.shape, what
    assert ours.dtype == theirs.dtype, what
    assert torch.equal(ours.isnan(), theirs.isnan()), what
    a, b = (torch.where(t.isnan(), 0, t).contiguous().view(bits) for t in (ours, theirs))
    assert torch.equal(a, b), what


def check(x: Tensor, format: Format, global_scale: Tensor | None = None, **options: object) -> None:
    options = {"axis": -1, "scale_rounding": format.default_scale_rounding, **options}
    what = format.name, tuple(x.shape), x.dtype, options
    if format.has_global_scale and global_scale is None:
        global_scale = reference.global_scale(x, format) if x.numel() else torch.tensor(1.0)
    ours = cpu.quantize(x, format, global_scale=global_scale, **options)
    theirs = reference.quantize(x, format, global_scale=global_scale, **options)
    for a, b in zip(ours, theirs, strict=True):
        same_bytes(a, b, what)
    shape = {"shape": x.shape, "axis": options["axis"], "global_scale": global_scale}
    values = reference.dequantize(*theirs, format, **shape)
    same_values(cpu.dequantize(*theirs, format, **shape), values, what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_hard_numbers(name: str, dtype: torch.dtype) -> None:
    format = formats[name]
    cases = itertools.product(SHAPES, (-1, -2), format.scale.roundings, NONFINITE)
    for seed, (shape, axis, rounding, nonfinite) in enumerate(cases):
        if len(shape) == 1 and axis == -2:
            continue
        x = hard(shape, dtype, seed)
        if format.block[0] > 1:
            x = x[..., :260]
        check(x, format, axis=axis, scale_rounding=rounding, nonfinite=nonfinite)


@pytest.mark.parametrize("name", NAMES)
def test_nothing(name: str) -> None:
    format = formats[name]
    for shape, axis in itertools.product(((0, 64), (64, 0), (0, 3, 32)), (-1, -2)):
        x = torch.zeros(shape)
        data, scale = cpu.quantize(x, format, **given_options(format, axis))
        assert data.shape == format.data_shape(shape, axis)
        assert scale.shape == format.scale_shape(shape, axis)
        assert cpu.dequantize(data, scale, format, shape=shape, axis=axis).shape == shape
    assert cpu.global_scale(torch.zeros(0), format) == 1.0


def every_pattern(dtype: torch.dtype, size: int) -> Tensor:
    """Each 16-bit pattern at each place of a block of ``size``, among its neighbours."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    return torch.stack([patterns.roll(i) for i in range(size)]).view(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_every_bfloat16_at_every_place(name: str) -> None:
    format = formats[name]
    places = min(format.block_size, 32) if format.block[0] == 1 else 4
    check(every_pattern(torch.bfloat16, places), format)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6_e3m2", "nvfp4"])
def test_every_bfloat16_at_every_place_of_a_column(name: str) -> None:
    x = every_pattern(torch.bfloat16, 16).reshape(16 * 64, 1024).mT.contiguous()
    check(x, formats[name], axis=-2, nonfinite="te")


@pytest.mark.parametrize("name", NAMES)
def test_every_float16(name: str) -> None:
    check(every_pattern(torch.float16, 4), formats[name], nonfinite="te")


@pytest.mark.parametrize("name", NAMES)
def test_rounding_boundaries(name: str) -> None:
    """Each element value and each midpoint, and their fp32 neighbours, under many block scales."""
    format = formats[name]
    element = format.element
    codes = torch.arange(element.max_code + 1, dtype=torch.uint8)
    values = decode(codes, element)
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    up, down = (torch.nextafter(points, torch.tensor(to)) for to in (3e38, -3e38))
    points = torch.cat((points, up, down, -points))
    size = format.block_size
    x = torch.zeros(len(points), size)
    x[:, 0] = element.max  # so that the scale is a known one, and 1 is among the factors
    x[:, 1::3] = points[:, None]
    factors = 2.0 ** torch.arange(-130, 110, 7 * size // 16).float()
    factors = torch.cat((factors, torch.tensor([1.0, 1.1, 0.7, 1 / 3])))
    x = (x[None] * factors[:, None, None]).reshape(-1, size)
    x[1::2, 0] *= 1.0000001  # and one that is just not enough
    for rounding in format.scale.roundings:
        for global_scale in (0.001, 1.0, 3.7) if format.has_global_scale else (None,):
            given = None if global_scale is None else torch.tensor(global_scale)
            check(x, format, global_scale=given, scale_rounding=rounding)


GLOBAL_SCALES = (1e-44, 1e-38, 2.0**-117, 1e-30, 2.0**-27, 0.3, 1.0, 12345.0, 2.0**97, 1e33, 3e38)


@pytest.mark.parametrize("value", GLOBAL_SCALES)
def test_extreme_global_scales(value: float) -> None:
    format, given = formats["nvfp4"], torch.tensor(value)
    for dtype, axis in itertools.product(DTYPES, (-1, -2)):
        check(hard((48, 80), dtype, 7), format, given, axis=axis)
        check(hard((48, 80), dtype, 8) * given.to(dtype), format, given, axis=axis)


@pytest.mark.parametrize("name", NAMES)
def test_tiny_blocks(name: str) -> None:
    """Subnormal numbers, alone and in blocks whose largest is not."""
    g = torch.Generator().manual_seed(3)
    for top in (1, 2, 1 << 10, 0x7FFFFF, 0x800001, 0x02000000, 0x0D000000, 0x0D800000, 0x20000000):
        bits = torch.randint(0, top + 1, (64, 256), generator=g, dtype=torch.int32)
        bits[::2] &= 0x7FFFFF
        bits[:, ::32] = top
        bits[:, ::3] |= -(1 << 31)
        x = bits.view(torch.float32)  # made of bits all along, since flush-to-zero may be on
        check(x, formats[name])
        check((bits >> 16).to(torch.int16).view(torch.bfloat16), formats[name], axis=-2)
        for given in (7, 1 << 20, 1 << 23) if formats[name].has_global_scale else ():
            check(x, formats[name], torch.tensor(given, dtype=torch.int32).view(torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_strides(name: str) -> None:
    format = formats[name]
    x = hard((3, 4, 70, 200), torch.bfloat16, 5)
    wide = x[..., 8:136]
    for given in (
        wide,
        x[:, :, ::2],
        x[1:, 1:3, 5:],
        x[0, 0, :1].expand(40, 200),
        x.mT,
        x[..., ::2],
    ):
        for axis in (-1, -2):
            check(given.contiguous(), format, axis=axis)
            for a, b in zip(
                cpu.quantize(given, format, **given_options(format, axis)),
                cpu.quantize(given.contiguous(), format, **given_options(format, axis)),
                strict=True,
            ):
                same_bytes(a, b, given.stride())
    before = wide.clone()
    cpu.quantize(wide, format, **given_options(format, -1))
    assert torch.equal(wide.view(torch.int16), before.view(torch.int16))


def given_options(format: Format, axis: int) -> dict[str, object]:
    given = torch.tensor(0.01) if format.has_global_scale else None
    return {
        "axis": axis,
        "scale_rounding": format.default_scale_rounding,
        "global_scale": given,
    }


@pytest.mark.parametrize("block", [(1, 16), (1, 48), (1, 64), (1, 4096), (16, 16), (32, 64)])
def test_other_blocks(block: tuple[int, int]) -> None:
    for element, scale in ((E4M3, E8M0), (E4M3, FP32), (formats["mxfp4"].element, E8M0)):
        format = Format("other", element, scale, block)
        assert cpu.supported(format)
        for axis in (-1, -2):
            check(hard((100, 200), torch.bfloat16, 1), format, axis=axis)
    assert not cpu.supported(Format("narrow", E4M3, E8M0, (1, 8)))
    assert not cpu.supported(Format("short", E4M3, E8M0, (2, 32)))


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_every_code_with_every_scale(name: str) -> None:
    check_every_code(name, DTYPES)


def check_every_code(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    format = formats[name]
    element = format.element
    codes = torch.arange(element.sign_code * 2, dtype=torch.uint8).repeat(
        max(1, 256 >> element.bits)
    )
    if format.scale is FP32:
        g = torch.Generator().manual_seed(1)
        exponents = torch.arange(512, dtype=torch.int64) << 23
        bits = exponents | torch.randint(0, 1 << 23, (512,), generator=g)
        bits = torch.cat((bits, exponents))
        scales = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
        scales = scales.view(torch.float32)[:: format.block[0] // 4 + 1]
    else:
        scales = torch.arange(128 if name == "nvfp4" else 256, dtype=torch.uint8)
        scales = scales.view(format.scale.dtype)
    factors = [torch.tensor(v) for v in GLOBAL_SCALES] if format.has_global_scale else [None]
    rows, columns = format.block
    for axis, global_scale in itertools.product((-1, -2), factors):
        data = codes.repeat(len(scales) * rows, max(1, columns // codes.numel()))
        data = reference_pack(data, format)
        scale = scales[:, None].expand(-1, data_columns(data, format) // columns).contiguous()
        shape = torch.Size((data.shape[0], data_columns(data, format)))
        if axis == -2:
            data, scale, shape = data.mT, scale.mT.contiguous(), torch.Size(shape[::-1])
            data = data.contiguous() if element.bits == 8 else data
        given = {"shape": shape, "axis": axis, "global_scale": global_scale}
        values = reference.dequantize(data, scale, format, **given)
        for dtype in dtypes:
            ours = cpu.dequantize(data, scale, format, dtype=dtype, **given)
            same_values(ours, values.to(dtype), (name, axis, global_scale, dtype))


def reference_pack(codes: Tensor, format: Format) -> Tensor:
    from blockscale.rounding import pack

    return pack(codes, format.element)


def data_columns(data: Tensor, format: Format) -> int:
    return format.element.elements(data.shape[-1])


def test_bfloat16_is_rounded_once_to_nearest_even() -> None:
    """Against fp32 bits rounded by hand, since torch's own cast may flush subnormals."""
    format = formats["nvfp4"]
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for scale in (1e-38, 1e-30, 1.0, 1e36):
        given = torch.tensor(scale)
        stored = cpu.quantize(x * scale, format, scale_rounding="nearest", global_scale=given)
        full = cpu.dequantize(*stored, format, shape=x.shape, global_scale=given)
        half = cpu.dequantize(
            *stored, format, shape=x.shape, global_scale=given, dtype=torch.bfloat16
        )
        bits = full.view(torch.int32).long() & 0xFFFFFFFF
        expected = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        assert torch.equal(half.view(torch.int16).long() & 0xFFFF, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_global_scale(dtype: torch.dtype) -> None:
    format = formats["nvfp4"]
    for seed, shape in enumerate(((), (1,), (31,), (3, 5, 70), (40, 2100))):
        x = hard(shape or (1,), dtype, seed).reshape(shape)
        same_bytes(cpu.global_scale(x, format), reference.global_scale(x, format), shape)
    for value in (0.0, float("nan"), float("inf"), 1e-40, -3e38):
        x = torch.full((70, 33), value).to(dtype)
        same_bytes(cpu.global_scale(x, format), reference.global_scale(x, format), value)
    x = hard((2, 64, 256), dtype, 0)[:, ::2, 3:200]
    same_bytes(cpu.global_scale(x, format), reference.global_scale(x, format), "strided")


@pytest.mark.parametrize("name", NAMES)
def test_flush_to_zero_changes_nothing(name: str, flush_to_zero: None) -> None:
    format = formats[name]
    assert torch.tensor(1e-40) * 1.0 == 0.0
    for dtype, axis in itertools.product(DTYPES, (-1, -2)):
        check(hard((128, 192), dtype, 2), format, axis=axis)
    for value in (2e-38, 2.0**-117, 3e38) if format.has_global_scale else ():
        check(hard((128, 192), torch.float32, 3), format, torch.tensor(value))
    test_tiny_blocks(name)
    check_every_code(name, (torch.float32,))


def test_threads(three_threads: None) -> None:
    """Large tensors are split among threads, and several callers may come at once."""
    cases = []
    for i, name in enumerate(("mxfp8", "nvfp4", "fp8_128x128", "mxfp6_e2m3")):
        x = hard((700, 2050), torch.bfloat16, i)
        for axis in (-1, -2):
            cases.append((x, formats[name], given_options(formats[name], axis)))
    torch.set_num_threads(1)
    expected = [cpu.quantize(x, format, **options) for x, format, options in cases]
    check(cases[0][0], cases[0][1])
    torch.set_num_threads(3)
    wrong: list[object] = []

    def work() -> None:
        torch.set_num_threads(3)
        for (x, format, options), want in zip(cases * 3, expected * 3, strict=True):
            got = cpu.quantize(x, format, **options)
            for a, b in zip(got, want, strict=True):
                try:
                    same_bytes(a, b, format.name)
                except AssertionError as error:
                    wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork(three_threads: None) -> None:
    """A child of a process whose threads have run makes its own."""
    x, format = hard((700, 2050), torch.bfloat16, 0), formats["mxfp8"]
    want = [t.view(torch.uint8).numpy().tobytes() for t in cpu.quantize(x, format)]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # not torch.equal: torch's own threads do not survive a fork
            got = [t.view(torch.uint8).numpy().tobytes() for t in cpu.quantize(x, format)]
            status = int(got != want)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_numba_is_imported_by_the_first_call_and_its_code_kept_on_disk(tmp_path: object) -> None:
    code = """
import sys, torch
from blockscale.formats import formats
from blockscale.kernels.cpu import calls as cpu
from blockscale.memory import memory_of
assert "numba" not in sys.modules
assert cpu.global_scale(torch.ones(3), formats["nvfp4"]) == torch.tensor(1.0) / 2688
from blockscale.kernels.cpu import compiled
kernel = compiled.amax_tiles.__closure__[0].cell_contents
print(kernel.stats.cache_hits.total(), kernel.stats.cache_misses.total())
"""
    assert python(code, NUMBA_CACHE_DIR=str(tmp_path)).split() == ["0", "1"]
    assert python(code, NUMBA_CACHE_DIR=str(tmp_path)).split() == ["1", "0"]


def test_machine_code_of_other_sources_is_not_read(tmp_path: object) -> None:
    """numba's index pickles classes by name: what another version wrote may not be readable."""
    code = """
import os, torch
from pathlib import Path
import blockscale.kernels.cpu.spec as spec
if os.environ["EARLIER"]:
    read = Path.read_bytes
    Path.read_bytes = lambda path: read(path) + b"other"
    spec.Shape = spec.Geometry
    spec.Geometry.__qualname__ = spec.Geometry.__name__ = "Shape"
from blockscale.formats import formats
from blockscale.kernels.cpu import calls as cpu
print(float(cpu.global_scale(torch.zeros(3), formats["nvfp4"])))
"""
    for earlier in ("yes", ""):
        assert python(code, EARLIER=earlier, NUMBA_CACHE_DIR=str(tmp_path)).split() == ["1.0"]


def test_a_full_disk_costs_only_the_cache(tmp_path: object) -> None:
    code = """
import torch
from numba.core import caching
def full(self, *args): raise OSError(28, "No space left on device")
caching.IndexDataCacheFile.save = full
from blockscale.formats import formats
from blockscale.kernels.cpu import calls as cpu
from blockscale.memory import memory_of
print(float(cpu.global_scale(torch.zeros(3), formats["nvfp4"])))
"""
    assert python(code, NUMBA_CACHE_DIR=str(tmp_path)).split() == ["1.0"]


@pytest.mark.parametrize(
    ("suffix", "rest"), [("nbi", b""), ("nbc", b"\x80\x04\x95"), ("nbc", b"garbage")]
)
def test_a_damaged_cache_is_written_anew(tmp_path: Path, suffix: str, rest: bytes) -> None:
    code = """
import torch
from blockscale.formats import formats
from blockscale.kernels.cpu import calls as cpu
print(float(cpu.global_scale(torch.zeros(3), formats["nvfp4"])))
from blockscale.kernels.cpu import compiled
print(compiled.amax_tiles.__closure__[0].cell_contents.stats.cache_hits.total())
"""
    python(code, NUMBA_CACHE_DIR=str(tmp_path))
    for path in tmp_path.rglob(f"*.{suffix}"):
        path.write_bytes(rest)
    assert python(code, NUMBA_CACHE_DIR=str(tmp_path)).split() == ["1.0", "0"]
    assert python(code, NUMBA_CACHE_DIR=str(tmp_path)).split() == ["1.0", "1"]


def test_wrong_dtype() -> None:
    with pytest.raises(TypeError, match=r"x: got torch\.int32"):
        cpu.quantize(torch.zeros(2, 32, dtype=torch.int32), formats["mxfp8"])
    with pytest.raises(ValueError, match="global_scale"):
        cpu.quantize(torch.zeros(2, 32), formats["nvfp4"], scale_rounding="nearest")


# --- what was lost --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_error_sums(name: str, dtype: torch.dtype) -> None:
    """All counts are those of plain torch; sums of squares but for the order of additions."""
    format = formats[name]
    shapes = (64, 256), (2, 130, 384), (129, 4096), (1, 128), (3, 5, 100), (7, 33)
    for seed, shape in enumerate(shapes):
        for x in (hard(shape, dtype, seed), torch.randn(shape).to(dtype), torch.zeros(shape)):
            q = bs.quantize(x, format, pad=True)
            given = x, q.qdata, q.scale, format, q.global_scale
            ours, theirs = cpu.error_sums(*given), reference.error_sums(*given)
            for key, value in theirs._asdict().items():
                if key in ("signal", "noise"):
                    value = pytest.approx(value, rel=1e-13)
                assert getattr(ours, key) == value, (name, dtype, shape, key)


def test_error_sums_by_hand() -> None:
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([448.0, 1.03, -1.0, 2.0**-12, -3.5, float("nan")])
    q = bs.quantize(x.nan_to_num(0.0), "mxfp8")
    sums = cpu.error_sums(x, q.qdata, q.scale, q.format, None)
    assert (sums.elements, sums.nonfinite, sums.zeros, sums.flushed) == (31, 1, 27, 1)
    assert sums.bins[0] == sum(sums.bins) - 2 == 29
    lost = x[0, 1].double() - 1
    assert sums.noise == pytest.approx((lost**2 + 2.0**-24).item(), rel=1e-14)
    assert sums.signal == pytest.approx(448**2 + 1 + 3.5**2 + 1.0609, rel=1e-6)
    assert (sums.max_rel, sums.max_abs) == (1.0, lost.float().item())


def test_error_sums_of_rows_apart_in_memory(three_threads: None) -> None:
    x = torch.randn(300, 1024)[:, :512]
    q = bs.quantize(x, "nvfp4")
    apart, together = (
        cpu.error_sums(t, q.qdata, q.scale, q.format, q.global_scale) for t in (x, x.contiguous())
    )
    assert apart._replace(signal=0.0, noise=0.0) == together._replace(signal=0.0, noise=0.0)
    assert apart.signal == pytest.approx(together.signal, rel=1e-13)


def test_error_sums_refuse_what_does_not_fit() -> None:
    x = torch.randn(64, 64)
    for q in (
        bs.quantize(x, axis=-2), bs.quantize(x, layout="tcgen05"), bs.quantize(x[:32])
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"q: is .* expected the shape of x, \(64, 64\)"):
            measure.error_sums(x, q)


def test_amax() -> None:
    for dtype in DTYPES:
        x = hard((33, 1000), dtype, 3)
        assert torch.equal(measure.amax(x), reference.amax(x))
        assert torch.equal(cpu.amax(x), reference.amax(x))
    nothing = torch.full((4, 4), float("nan"))
    assert cpu.amax(nothing) == reference.amax(nothing) == 0


# --- the caller's memory --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_storages_can_be_resized_afterwards(name: str, dtype: torch.dtype) -> None:
    """FSDP resizes those of parameters; torch's bridge to numpy forbids that for good."""
    for axis in (-1, -2):
        x = torch.randn(128, 256).to(dtype)
        q = bs.quantize(x, name, axis)
        values = [q.dequantize(wanted) for wanted in DTYPES]
        scales = [] if q.global_scale is None else [q.global_scale]
        for t in (x, q.qdata, q.scale, *scales, *values):
            t.untyped_storage().resize_(0)
    x = torch.randn(4, 32).to(dtype)
    cpu.global_scale(x, formats["nvfp4"])
    x.resize_(64, 64)


def test_the_storage_of_a_weight_can_be_resized_after_a_layer_ran() -> None:
    layer = bs.nn.Linear(64, 64)
    x = torch.randn(32, 64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    for t in (layer.weight, x, y, x.grad, layer.weight.grad):
        assert t is not None
        t.untyped_storage().resize_(0)


def test_a_lazily_negated_tensor() -> None:
    x = torch.randn(8, 64)
    for name in ("mxfp8", "nvfp4"):
        assert torch.equal(bs.quantize(torch._neg_view(x), name), bs.quantize(-x, name))
        apart = torch._neg_view(x)[::2, 32:]  # whose rows do not lie together
        assert torch.equal(bs.quantize(apart, name), bs.quantize(apart.clone(), name))


def test_zeros_without_memory() -> None:
    zeros = torch._efficientzerotensor((8, 64))
    for name in ("mxfp8", "nvfp4"):
        assert torch.equal(bs.quantize(zeros, name), bs.quantize(torch.zeros(8, 64), name))


def test_memory_lives_as_long_as_its_array() -> None:
    x = torch.arange(5, dtype=torch.int32)
    array, alive = memory_of(x[2:], np.int32, 3), weakref.ref(x)
    del x
    gc.collect()
    assert array.tolist() == [2, 3, 4]
    array[0] = 7
    del array
    gc.collect()
    assert alive() is None
    assert memory_of(torch.empty(0), np.float32, 0).size == 0


def test_memory_that_was_freed() -> None:
    x = torch.randn(8, 64)
    x.untyped_storage().resize_(0)
    for name in ("mxfp8", "nvfp4"):
        with pytest.raises(ValueError, match=r"tensor was freed"):
            bs.quantize(x, name)


def test_a_thread_that_outlives_the_main_one():
    """Python then takes no new work for pools; the thread does it alone."""
    script = """
import threading, time, torch, blockscale as bs
torch.set_num_threads(2)
x = torch.randn(2048, 2048)
want = bs.quantize(x)
def work():
    time.sleep(1)
    print(torch.equal(bs.quantize(x), want))
threading.Thread(target=work).start()
"""
    run = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert (run.stdout, run.stderr) == ("True\n", "")
