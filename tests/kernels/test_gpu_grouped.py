"""Rows of experts, by the GPU quantizers in the emulator: the reference's bytes and scales.

An expert's ends are known to the device alone; along rows its scales start on a tile of 128 rows,
along columns its blocks start anew, K-major its data, too, and rows past the last end belong to
nobody.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream
from gpu_bench import ARCHITECTURES, assert_same, check, emulated, expected, nasty

from blockscale import emulator as em
from blockscale.formats import formats
from blockscale.kernels.common import compile_cache, ptx
from blockscale.kernels.common.tensor_specs import any_tensor
from blockscale.kernels.quantizers import calls as quantizers
from blockscale.kernels.quantizers import plan
from blockscale.kernels.quantizers.config import Request
from blockscale.kernels.quantizers.groups import find_rows
from stand_in import chip

COMPLETIONS = ("late", "eager", "random")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS, COLUMNS, BOTH = (-1,), (-2,), (-1, -2)
MIXED = ("tcgen05", "compact")


def ends(*offsets: int) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


# format, axes, layouts, dtype and what differs from the defaults: each is another kernel.
CASES: list[tuple[str, tuple[int, ...], Any, torch.dtype, dict[str, Any]]] = [
    ("mxfp8", BOTH, ("packed", "compact"), FP32, {"nonfinite": "te"}),
    ("mxfp8", BOTH, "compact", BF16, {"scale_rounding": "even"}),
    ("mxfp8_e5m2", COLUMNS, "compact", FP16, {"nonfinite": "te"}),
    ("fp8_1x128", BOTH, ("sm90", "compact"), BF16, {}),
    ("fp8_1x128", COLUMNS, "compact", FP32, {"nonfinite": "te"}),
    ("mxfp8", ROWS, "tcgen05", FP32, {}),
    ("mxfp4", ROWS, "packed", FP16, {"nonfinite": "te"}),
    ("nvfp4", ROWS, "tcgen05", BF16, {"global_scale": torch.tensor(0.37)}),
    ("fp8_1x128", BOTH, "sm90", BF16, {"k_major": True}),
    ("fp8_1x128", COLUMNS, "compact", FP32, {"k_major": True, "nonfinite": "te"}),
    ("mxfp8", BOTH, ("packed", "packed"), BF16, {"k_major": True}),
    ("mxfp8_e5m2", COLUMNS, "tcgen05", FP16, {"k_major": True, "scale_rounding": "floor"}),
    ("mxfp4", COLUMNS, "tcgen05", BF16, {}),
    ("mxfp4", BOTH, "compact", FP16, {"nonfinite": "te"}),
    ("nvfp4", BOTH, "tcgen05", BF16, {"global_scale": torch.tensor(0.37)}),
]


@pytest.mark.parametrize("i", range(len(CASES)), ids=["-".join(map(str, c[:4])) for c in CASES])
def test_formats(i):
    """Groups of 33, 0, 67, 0 and 135 rows (two tiles), and a tail."""
    format, axes, layout, dtype, given = CASES[i]
    columns = formats[format].block_size + 16
    x, offsets = nasty(240, columns, dtype, seed=i), ends(33, 33, 100, 100, 235)
    arch, completion = ARCHITECTURES[i % 2], COMPLETIONS[i % 3]
    check(x, format, arch, axes, layout=layout, offsets=offsets, completion=completion, **given)


GROUPS = {
    "empty at the start": (150, (0, 0, 70, 150)),
    "empty in the middle": (100, (40, 40, 40, 100)),
    "empty at the end": (100, (33, 100, 100, 100)),
    "all empty": (70, (0, 0, 0)),
    "one group and no tail": (130, (130,)),
    "whole tiles and a tail of one": (257, (128, 256)),
    "blocks cut everywhere": (95, (1, 32, 63, 64, 95)),
    "tail of several tiles": (300, (31, 40)),
    "one row each": (7, tuple(range(1, 7))),
    "more than 64": (90, (0,) * 30 + tuple(range(1, 7)) + (7,) * 28 + (80,) + (85,) * 2),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups(name):
    """Both axes from one read; every byte of both outputs is checked, and there is no race."""
    rows, offsets = GROUPS[name]
    i = list(GROUPS).index(name)
    x, arch, completion = nasty(rows, 48, BF16, seed=i), ARCHITECTURES[i % 2], COMPLETIONS[i % 3]
    given = {"layout": MIXED, "offsets": ends(*offsets), "completion": completion}
    check(x, "mxfp8", arch, BOTH, **given)
    check(x, "mxfp8", arch, BOTH, **given | {"layout": "tcgen05"}, k_major=True)


@st.composite
def grouped_rows(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A number of rows and ends of groups, some of them where blocks and tiles begin."""
    rows = draw(st.integers(1, 200))
    near = st.sampled_from([n for n in (0, 1, 32, 64, 127, 128, 129, 160, rows) if n <= rows])
    end = st.one_of(st.integers(0, rows), near)
    return rows, sorted(draw(st.lists(end, min_size=1, max_size=6)))


@settings(max_examples=8)
@given(grouped_rows(), st.sampled_from((16, 48)), st.sampled_from(COMPLETIONS))
def test_random_groups(groups, columns, completion):
    rows, offsets = groups
    x = nasty(rows, columns, BF16, seed=rows)
    given = {"offsets": ends(*offsets), "completion": completion}
    check(x, "mxfp8", "sm_90a", BOTH, layout=MIXED, **given)
    check(x, "fp8_1x128", "sm_90a", BOTH, layout="sm90", k_major=True, **given)


@pytest.mark.parametrize(
    "offsets", [(100, 40, 140), (50, 500, 600), (-7, 20, 10), (2**31 - 1, -(2**31), 0)]
)
def test_offsets_that_no_host_has_seen(offsets):
    """They decrease, or overrun: the emulator finds no access outside of a tensor."""
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")):
        for format, layout in (("mxfp8", "tcgen05"), ("fp8_1x128", "sm90")):
            for k_major in (False, True):
                asked = Request(format, BOTH, (layout,) * 2, grouped=True, k_major=k_major)
                given = {"offsets": ends(*offsets), "gpu": chip("sm_90a")}
                quantizers.quantize(nasty(140, 48, BF16), asked, **given)


def test_strided_misaligned_and_odd():
    whole, offsets = nasty(120, 240, BF16), ends(7, 7, 50)
    check(whole[::2, 8:136], "mxfp8", "sm_90a", BOTH, layout=MIXED, offsets=offsets)
    odd = whole[:60, 1:38].contiguous()[:, 1:]  # TMA loads neither such rows nor such addresses
    check(odd, "mxfp8", "sm_100a", BOTH, layout=("packed", "compact"), offsets=offsets)


def test_compact_rows_take_the_kernel_without_groups():
    """Offsets change neither data nor compact scales along rows."""
    x = nasty(40, 64, BF16)
    check(x, "mxfp8", "sm_90a")
    before = compile_cache.build.cache_info().misses
    check(x, "mxfp8", "sm_90a", offsets=ends(3, 40))
    assert compile_cache.build.cache_info().misses == before


def test_the_host_does_not_read_offsets(monkeypatch):
    """One plan and one kernel for all offsets of a number of groups: they may change on the device,
    as in a CUDA graph.
    """
    x, offsets = nasty(100, 48, BF16), ends(10, 20, 90)
    given = {"axes": BOTH, "layouts": MIXED, "offsets": offsets}
    for name in ("tolist", "item", "cpu", "numpy", "to"):
        monkeypatch.setattr(Tensor, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
    emulated(x, "mxfp8", "sm_90a", **given)
    before = plan.plan_quantize.cache_info().misses
    offsets.copy_(torch.tensor([0, 64, 100]))
    results, _ = emulated(x, "mxfp8", "sm_90a", **given)
    monkeypatch.undo()
    assert plan.plan_quantize.cache_info().misses == before
    for axis, layout, (data, scale) in zip(BOTH, MIXED, results, strict=True):
        want_data, want_scale = expected(x, "mxfp8", axis, layout, offsets=offsets)
        assert_same(data, want_data, f"data along {axis}")
        assert_same(scale, want_scale, f"scales along {axis}")


def test_same_bytes_again():
    x, offsets = nasty(100, 48, BF16), ends(10, 20, 90)
    given = {"layouts": MIXED, "offsets": offsets, "completion": "random"}
    first, second = (emulated(x, "mxfp8", "sm_100a", BOTH, **given)[0] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same(a[0], b[0], "data")
        assert_same(a[1], b[1], "scales")


# --- what moves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("offsets", "again"),
    [
        ((32, 160, 160, 192), 0),
        ((0, 33, 97, 97, 250), 31 + 6),  # after row 33 a box's others; after 250 up to the end
    ],
)
def test_sectors(offsets, again, arch):
    """No sector of data or scales is written in part or twice. ``x`` is read once where groups are
    made of boxes of 32 rows, which are loaded at once; else rows after a group are read, too.
    """
    rows, columns = 256, 256
    x = nasty(rows, columns, BF16)
    given = {"layout": MIXED, "offsets": ends(*offsets), "profile": True}
    (report,) = check(x, "mxfp8", arch, BOTH, **given)
    write = report.global_memory("write")
    padded = (rows + len(offsets) * 127) // 128 * 128
    scales = padded * columns // 32 + (rows // 128 + len(offsets)) * 4 * columns
    assert write.asked == 32 * write.sectors == 2 * rows * columns + scales
    copied = [s for s in report.sectors if s.place.opcode.startswith("cp.async.bulk")]
    assert sum(s.asked for s in copied) == 2 * (rows + again) * columns
    assert sum(32 * s.sectors for s in copied) == 2 * (rows + again) * columns
    others = [s for s in report.sectors if s.kind == "read" and s not in copied]
    assert all(s.place.opcode.startswith("ld.global") for s in others)  # offsets, by each warp
    warps = sum(s.requests for s in others)
    assert sum(s.asked for s in others) <= warps * 4 * len(offsets)


# --- which rows a tile has ------------------------------------------------------------------------

FIELDS = ("start", "stop", "scale_stop", "scale_start", "apart")


@cute.kernel
def _find(offsets, rows: Int32, out):
    tile = cute.arch.block_idx()[0]
    found = find_rows(tile, offsets, rows)
    if cute.arch.thread_idx()[0] == 0:
        values = [getattr(found, name) for name in FIELDS]
        values += [bound for pair in found.unused for bound in pair]
        for i in cutlass.range_constexpr(len(values)):
            ptx.store_global(out.iterator.toint() + (tile * 9 + i) * 4, [Int32(values[i])], 4)


@cute.jit
def _find_all(offsets, rows: Int32, out, stream):
    grid = (out.shape[0], 1, 1)
    _find(offsets, rows, out).launch(grid=grid, block=(32, 1, 1), stream=stream)


@pytest.fixture(scope="module")
def find():
    """A function (offsets, rows, out (tiles, 9)) that fills ``out``."""
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")):
        given = any_tensor(Int32, 1, 4), Int32(0), any_tensor(Int32, 2, 4)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return cute.compile(_find_all, *given, stream, options="--enable-tvm-ffi")


@st.composite
def many_groups(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Up to 160 groups, runs of them empty."""
    sizes = []
    for size, count in draw(
        st.lists(
            st.tuples(st.sampled_from((0, 1, 5, 31, 32, 96, 128, 200)), st.integers(1, 40)),
            min_size=1,
            max_size=4,
        )
    ):
        sizes += [size] * count
    tail = draw(st.sampled_from((0, 1, 100, 300)))
    offsets = torch.tensor(sizes).cumsum(0).tolist()
    return offsets[-1] + tail or 1, offsets


@settings(max_examples=6)
@given(many_groups())
def test_tiles_of_groups(find, groups):
    """Each row is in one tile, each expert's tiles follow those before, and each tile of groups
    moved apart is written or cleared, once.
    """
    rows, offsets = groups
    tiles = (rows + (len(offsets) + 1) * 127) // 128
    out = torch.full((tiles, 9), -(1 << 30), dtype=torch.int32)
    with em.cutedsl(em.Device("sm_90a", check="all,exit_stores")):
        find(ends(*offsets), rows, out)
    found = [dict(zip(FIELDS, line, strict=False)) for line in out.tolist()]
    wanted, written = [], []  # first row, row after the last, that of rows with scales, tile
    for group, (start, end) in enumerate(pairwise((0, *offsets))):
        for first in range(start, end, 128):
            last = min(first + 128, end)
            written.append(start // 128 + group + (first - start) // 128)
            wanted.append((first, last, last, 128 * written[-1]))
    assert len(wanted) <= tiles
    for i, (tile, (start, stop, scale_stop, apart)) in enumerate(zip(found, wanted, strict=False)):
        assert (tile["start"], tile["stop"]) == (start, stop)
        assert (tile["scale_stop"], tile["apart"]) == (scale_stop, apart)
        assert tile["scale_start"] == 128 * i
    tail = [i for tile in found[len(wanted) :] for i in range(tile["start"], tile["stop"])]
    assert tail == list(range(offsets[-1], rows))
    for tile in found[len(wanted) :]:
        assert tile["scale_stop"] <= tile["start"]  # no row has a scale
        assert tile["apart"] == (rows // 128 + len(offsets)) * 128
    cleared = [i for line in out.tolist() for j in (5, 7) for i in range(line[j], line[j + 1])]
    assert sorted(written + cleared) == list(range(rows // 128 + len(offsets)))
