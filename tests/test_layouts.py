"""Scale layouts: there and back on any shape, the offset formula byte by byte, zero padding."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import blockscale as bs
from blockscale.layouts import Grouped, get_layout, layouts

E8M0, UE4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
#: Every layout with every scale type that it can hold.
HELD = [
    ("compact", E8M0), ("compact", UE4M3), ("compact", torch.float32),
    ("tcgen05", E8M0), ("tcgen05", UE4M3),
    ("sm90", torch.float32),
    ("packed", E8M0), ("packed", UE4M3),
]  # fmt: skip
SHAPES = [
    (1, 1), (1, 4), (3, 5), (32, 3), (127, 4), (128, 4), (129, 4), (128, 5), (130, 7), (256, 8),
    (257, 9), (300, 1), (1, 300), (1000, 33), (4096, 128), (0, 4), (4, 0), (0, 0), (0, 5), (7, 0),
]  # fmt: skip
OFFSETS = [[5], [128], [0], [1, 2, 3], [0, 0, 200], [128, 256, 300], [100, 100, 229, 230], [7, 0]]


def scales(shape, dtype, *, seed=0):
    """Random scales, none of them zero, so that padding cannot be mistaken for one."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.float32:
        return torch.rand(shape, generator=generator) + 0.5
    return torch.randint(1, 127, shape, generator=generator, dtype=torch.uint8).view(dtype)


def octets(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(octets(a), octets(b))


def assert_bytes_where_the_formula_says(stored, scale, offset_of):
    """Every scale at its offset, and zero everywhere else."""
    memory, size = octets(stored).tolist(), scale.dtype.itemsize
    wanted = octets(scale).reshape(scale.shape[0], -1, size).tolist() if scale.numel() else []
    expected = [0] * len(memory)
    for row, blocks in enumerate(wanted):
        for block, value in enumerate(blocks):
            at = offset_of(row, block)
            assert expected[at : at + size] == [0] * size, "two scales in one place"
            expected[at : at + size] = value
    assert memory == expected


# --- plain ----------------------------------------------------------------------------------------


@pytest.mark.sampled(50)
@pytest.mark.parametrize(("name", "dtype"), HELD, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back(name, dtype, shape):
    layout, scale = layouts[name], scales(shape, dtype)
    stored = layout.swizzle(scale)
    assert same(layout.unswizzle(stored, shape, dtype), scale)
    assert stored.is_contiguous()
    assert stored.shape == layout.stored_shape(shape)
    assert stored.dtype == layout.stored_dtype(dtype)
    assert stored.nbytes == layout.nbytes(shape, dtype.itemsize)
    if scale.numel():
        assert stored.data_ptr() % 16 == 0


@pytest.mark.sampled(33)
@pytest.mark.parametrize(("name", "dtype"), HELD, ids=str)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] * s[1] < 40000], ids=str)
def test_offset_points_at_the_byte_and_padding_is_zero(name, dtype, shape):
    layout, scale = layouts[name], scales(shape, dtype)
    assert_bytes_where_the_formula_says(
        layout.swizzle(scale), scale, lambda r, b: layout.offset(r, b, shape, dtype.itemsize)
    )


@pytest.mark.parametrize(("name", "dtype"), HELD, ids=str)
def test_strided_scales(name, dtype):
    """Scales of axis -2 come transposed, slices come with gaps."""
    wide = scales((200, 160), dtype)
    for scale in (wide.mT, wide[3:150, ::2], wide[::2]):
        stored = layouts[name].swizzle(scale)
        assert same(stored, layouts[name].swizzle(scale.contiguous()))
        assert same(layouts[name].unswizzle(stored, tuple(scale.shape), dtype), scale)


@given(st.sampled_from(HELD), st.integers(0, 400), st.integers(0, 40), st.integers(0, 2**32))
def test_there_and_back_any_shape(held, rows, blocks, seed):
    name, dtype = held
    scale = scales((rows, blocks), dtype, seed=seed)
    layout = layouts[name]
    assert same(layout.unswizzle(layout.swizzle(scale), (rows, blocks), dtype), scale)


def test_padding_of_tcgen05_fills_whole_tiles_with_zeros():
    """Never 0xFF: NaN times zero poisons the accumulator (K = 2880 has 90 blocks)."""
    scale = torch.full((200, 90), 0xFF, dtype=torch.uint8).view(E8M0)
    stored = layouts["tcgen05"].swizzle(scale).view(torch.uint8)
    assert stored.numel() == 256 * 92
    assert (stored == 0xFF).sum() == 200 * 90
    assert (stored == 0).sum() == 256 * 92 - 200 * 90


# --- the worked examples of cuBLAS, "1D block scaling factors layout" -----------------------------


def test_worked_examples():
    tiles, shape = layouts["tcgen05"], (128, 2)
    assert [tiles.offset(5, block, shape) for block in (0, 1)] == [80, 81]
    assert [tiles.offset(row, 0, shape) for row in (0, 32, 64, 96, 1)] == [0, 4, 8, 12, 16]
    assert [tiles.offset(0, block, shape) for block in (0, 1)] == [0, 1]


def test_tile_strides():
    """The next tile along K is the next 512 bytes; the next 128 rows come after all of K."""
    tiles, shape = layouts["tcgen05"], (300, 9)  # 3 x 3 tiles
    assert tiles.offset(0, 4, shape) == 512
    assert tiles.offset(5, 8, shape) == 2 * 512 + 80
    assert tiles.offset(128, 0, shape) == 3 * 512
    assert tiles.offset(299, 8, shape) == 8 * 512 + (299 % 32) * 16 + (43 // 32) * 4
    assert tiles.nbytes(shape) == 9 * 512
    # the formula of the cuBLAS page, with sf_inner a multiple of 4 and sf_inner_dim = 12
    for outer_tile in range(3):
        for inner in (0, 4, 8):
            assert tiles.offset(128 * outer_tile, inner, shape) == (inner + outer_tile * 12) * 128


def test_sm90_and_packed_are_mn_major_in_16_byte_columns():
    assert layouts["sm90"].offset(3, 2, (5, 3)) == 4 * (2 * 8 + 3)
    assert layouts["packed"].offset(3, 6, (5, 7)) == 4 * (1 * 8 + 3) + 2
    scale = torch.tensor([[0x11, 0x22, 0x33, 0x44, 0x55]], dtype=torch.uint8).view(E8M0)
    words = layouts["packed"].swizzle(scale)
    assert words.dtype == torch.int32
    assert words.tolist() == [[0x44332211, 0, 0, 0], [0x55, 0, 0, 0]]
    assert layouts["sm90"].swizzle(torch.tensor([[1.0, 2.0]])).tolist() == [
        [1.0, 0.0, 0.0, 0.0],
        [2.0, 0.0, 0.0, 0.0],
    ]


# --- grouped --------------------------------------------------------------------------------------


def ends_of(offsets):
    offsets = offsets if offsets == sorted(offsets) else sorted(offsets)
    return offsets, torch.tensor(offsets, dtype=torch.int32)


@pytest.mark.sampled(50)
@pytest.mark.parametrize(("name", "dtype"), HELD, ids=str)
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("spare", [0, 11])
def test_grouped(name, dtype, offsets, blocks, spare):
    """Back without loss, the formula, zero padding; rows that belong to nobody are not stored."""
    layout = Grouped(layouts[name])
    offsets, ends = ends_of(offsets)
    shape = (offsets[-1] + spare, blocks)
    scale = scales(shape, dtype)
    stored = layout.swizzle(scale, ends)
    assert stored.shape == layout.stored_shape(shape, len(offsets))
    assert stored.nbytes == layout.nbytes(shape, len(offsets), dtype.itemsize)
    back = layout.unswizzle(stored, shape, dtype, ends)
    assert same(back[: offsets[-1]], scale[: offsets[-1]])
    assert not octets(back[offsets[-1] :]).any()
    assert_bytes_where_the_formula_says(
        stored,
        scale[: offsets[-1]],
        lambda r, b: layout.offset(r, b, shape, offsets, dtype.itemsize),
    )


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_every_group_starts_on_a_tile(offsets):
    """A group's tiles are those that it has alone: a GEMM per expert reads a plain slice."""
    layout, (offsets, ends) = Grouped(layouts["tcgen05"]), ends_of(offsets)
    scale = scales((offsets[-1], 6), E8M0)
    stored, start, at = layout.swizzle(scale, ends), 0, 0
    for end in offsets:
        alone = layouts["tcgen05"].swizzle(scale[start:end])
        assert same(stored[at : at + alone.numel()], alone)
        assert at % 512 == 0
        start, at = end, at + alone.numel()
    assert not octets(stored[at:]).any()


def test_grouped_row_in_no_group():
    with pytest.raises(ValueError, match=r"row: got 9; the groups end at row 9"):
        Grouped(layouts["tcgen05"]).offset(9, 0, (20, 4), [4, 9])


def test_random_groups():
    rng = random.Random(1)
    for _ in range(30):
        rows, groups = rng.randrange(1, 700), rng.randrange(1, 9)
        offsets = sorted(rng.randrange(rows + 1) for _ in range(groups))
        ends = torch.tensor(offsets, dtype=torch.int32)
        scale = scales((rows, 7), E8M0, seed=rows)
        layout = Grouped(layouts["tcgen05"])
        back = layout.unswizzle(layout.swizzle(scale, ends), (rows, 7), E8M0, ends)
        assert same(back[: offsets[-1]], scale[: offsets[-1]])


# --- values, and what they refuse -----------------------------------------------------------------


def test_layouts_are_frozen_values():
    assert set(layouts) == {"compact", "tcgen05", "sm90", "packed"}
    for name, layout in layouts.items():
        assert get_layout(name) is layout
        assert get_layout(layout) is layout
        assert type(layout)() == layout
        assert hash(type(layout)()) == hash(layout)
        with pytest.raises(AttributeError):
            layout.anything = 1
        assert layout.describe()
        assert Grouped(layout).name == f"{name}+grouped"
        assert layout.describe() in Grouped(layout).describe()
    with pytest.raises(TypeError):
        layouts["mine"] = layouts["compact"]  # type: ignore[index]


def test_unknown_layout_lists_the_known_ones():
    for wrong in ("blocked", None, 3, ["tcgen05"]):
        with pytest.raises(
            ValueError, match=r"layout: got .*'compact', 'tcgen05', 'sm90', 'packed'"
        ):
            get_layout(wrong)
    with pytest.raises(ValueError, match="layout: got 'blocked'"):
        bs.quantize(torch.ones(2, 32), layout="blocked")


@pytest.mark.parametrize(("name", "dtype"), [
    ("tcgen05", torch.float32), ("packed", torch.float32), ("sm90", E8M0), ("sm90", UE4M3),
    ("tcgen05", torch.bfloat16), ("compact", torch.float64),
])  # fmt: skip
def test_scales_of_a_size_that_a_layout_cannot_hold(name, dtype):
    with pytest.raises(ValueError, match=rf"scale: got {dtype}; layout '{name}' holds"):
        layouts[name].swizzle(torch.ones(4, 4).to(dtype))


@pytest.mark.parametrize("name", layouts)
def test_scales_that_are_no_matrix(name):
    scale = torch.ones(2, 4, 4, dtype=torch.float32 if name == "sm90" else torch.uint8)
    for wrong in (scale, scale[0, 0]):
        with pytest.raises(ValueError, match=r"scale: got . dimension.* flatten"):
            layouts[name].swizzle(wrong)


@pytest.mark.parametrize(("name", "dtype"), HELD, ids=str)
def test_stored_scales_of_the_wrong_size_or_dtype(name, dtype):
    layout = layouts[name]
    stored = layout.swizzle(scales((130, 5), dtype))
    with pytest.raises(ValueError, match=rf"scale: got .*layout '{name}' stores 400 x 5 scales as"):
        layout.unswizzle(stored, (400, 5), dtype)
    with pytest.raises(ValueError, match="scale: got"):
        layout.unswizzle(stored.to(torch.float64), (130, 5), dtype)
    with pytest.raises(ValueError, match="scale: got"):
        layout.unswizzle(stored.flatten()[:-1], (130, 5), dtype)


# --- numpy's arrays -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", bs.layouts)
def test_numpy_by_columns(name):
    """What is stored lies row by row, wherever the scales came from."""
    layout = bs.layouts[name]
    dtype = np.uint8 if 1 in layout.itemsize else np.float32
    scale = np.arange(130 * 5).reshape(130, 5).astype(dtype)
    stored = layout.swizzle(np.asfortranarray(scale))
    assert stored.flags.c_contiguous
    assert stored.tobytes("A") == layout.swizzle(scale).tobytes("A")


def test_another_byte_order_is_refused():
    with pytest.raises(TypeError, match="scale: got >f4, of another byte order; pass"):
        bs.layouts["sm90"].swizzle(np.ones((2, 3), ">f4"))
