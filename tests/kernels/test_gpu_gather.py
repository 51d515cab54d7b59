"""Rows gathered and quantized from one read, by the GPU quantizers in the emulator: the bytes of
the quantizer of what was gathered first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import ARCHITECTURES, assert_same, check, emulated, expected, nasty

from blockscale.formats import formats

COMPLETIONS = ("late", "eager", "random")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS, COLUMNS, BOTH = (-1,), (-2,), (-1, -2)
ENDS = torch.tensor((33, 33, 100, 100, 135), dtype=torch.int32)


def rows_of(count: int, rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(rows, (count,), generator=generator, dtype=torch.int32)


# format, axes, layouts, dtype and what differs from the defaults: each is another kernel.
CASES: list[tuple[str, tuple[int, ...], Any, torch.dtype, dict[str, Any]]] = [
    ("fp8_1x128", BOTH, "sm90", BF16, {"k_major": True, "offsets": ENDS}),
    ("mxfp8", BOTH, ("tcgen05", "compact"), BF16, {"offsets": ENDS}),
    ("mxfp8", BOTH, "compact", BF16, {"k_major": True, "offsets": ENDS}),
    ("nvfp4", BOTH, "tcgen05", BF16, {"global_scale": torch.tensor(0.37), "offsets": ENDS}),
    ("mxfp8", COLUMNS, "compact", FP32, {"nonfinite": "te", "offsets": ENDS}),
    ("mxfp4", ROWS, "tcgen05", FP16, {"offsets": ENDS}),
    ("fp8_128x128", ROWS, "compact", BF16, {}),
    ("mxfp8", ROWS, "compact", BF16, {}),
]


@pytest.mark.parametrize("i", range(len(CASES)), ids=["-".join(map(str, c[:4])) for c in CASES])
def test_formats(i):
    """Rows once, often and never; groups of 33, 0, 67, 0 and 35 rows, and a tail."""
    format, axes, layout, dtype, given = CASES[i]
    x = nasty(50, formats[format].block_size + 16, dtype, seed=i)
    given = given | {"gather": rows_of(140, 50, i), "completion": COMPLETIONS[i % 3]}
    check(x, format, ARCHITECTURES[i % 2], axes, layout=layout, **given)


def test_shapes():
    """Few rows, odd columns that lie at multiples of 16 bytes or do not, and large products."""
    x = nasty(20, 144, BF16)
    check(x, "mxfp8", "sm_90a", gather=rows_of(9, 20))
    check(x[:, :77], "mxfp8", "sm_90a", COLUMNS, gather=rows_of(33, 20))
    check(x[:, 1:78], "mxfp8", "sm_90a", BOTH, gather=rows_of(33, 20), offsets=ENDS[:1])
    check(nasty(20, 77, FP32), "mxfp8", "sm_90a", gather=rows_of(33, 20))
    check(x, "mxfp8", "sm_90a", BOTH, gather=rows_of(33, 20), multiprocessors=132)


@pytest.mark.parametrize("columns", [64, 77])
def test_rows_that_are_none(columns):
    """Are NaN, and read nothing; others are what they are."""
    x, rows = nasty(20, columns, BF16), rows_of(40, 20)
    wrong = {3: -1, 17: 20, 39: 2**31 - 1}
    for row, index in wrong.items():
        rows[row] = index
    (data, scale), *_ = emulated(x, "mxfp8", "sm_90a", gather=rows)[0]
    known = x[rows.clamp(0, 19)]
    known[list(wrong)] = torch.nan
    want_data, want_scale = expected(known, "mxfp8", -1, "compact")
    assert_same(data, want_data, "data")
    assert_same(scale, want_scale, "scales")


@settings(max_examples=6)
@given(st.data(), st.integers(1, 150), st.integers(1, 30), st.sampled_from(COMPLETIONS))
def test_random(data, count, rows, completion):
    ends = sorted(data.draw(st.lists(st.integers(0, count), min_size=1, max_size=5)))
    given = {"offsets": torch.tensor(ends, dtype=torch.int32), "completion": completion}
    x, gather = nasty(rows, 48, BF16, seed=count), rows_of(count, rows, seed=rows)
    check(x, "mxfp8", "sm_90a", BOTH, layout=("tcgen05", "compact"), gather=gather, **given)
