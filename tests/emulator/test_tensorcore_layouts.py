"""Layouts of wgmma and tcgen05: against the canonical layouts as CuTe writes them, and each other.

The oracle is a small evaluator of CuTe layouts; the layouts themselves are those that the PTX ISA
(9.7.16.3.3) and CUTLASS's traits state.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockscale.emulator.tensorcore import descriptors, fragments, operands, tmem
from blockscale.emulator.tensorcore.descriptors import SharedDescriptor


def size(shape: Any) -> int:
    return shape if isinstance(shape, int) else int(np.prod([size(s) for s in shape]))


def offset(index: int, shape: Any, stride: Any) -> int:
    """A CuTe layout at a linear index: the first mode runs fastest."""
    if isinstance(shape, int):
        return index * stride
    total = 0
    for s, d in zip(shape, stride, strict=True):
        total += offset(index % size(s), s, d)
        index //= size(s)
    return total


def table(shape: tuple[Any, Any], stride: tuple[Any, Any]) -> np.ndarray:
    """A layout of two modes as a matrix."""
    rows = [offset(i, shape[0], stride[0]) for i in range(size(shape[0]))]
    columns = [offset(i, shape[1], stride[1]) for i in range(size(shape[1]))]
    return np.array(rows)[:, None] + np.array(columns)


def swizzle(address: np.ndarray, b: int, m: int, s: int) -> np.ndarray:
    """CuTe's Swizzle<b, m, s>."""
    mask = (1 << b) - 1 << m + s
    return address ^ ((address & mask) >> s)


# ------------------------------------------------------------------------------- shared memory

LEADING, STRIDE = 4096, 2048
SWIZZLES = {"none": (0, 4, 3), "32B": (1, 4, 3), "64B": (2, 4, 3), "128B": (3, 4, 3)}
WIDTH = {"none": 1, "32B": 2, "64B": 4, "128B": 8}  # in 16 bytes
CASES = [(s, bits) for s in SWIZZLES for bits in (8, 16, 32)]


def canonical(name: str, major: str, bits: int, rows: int, k: int, d: SharedDescriptor) -> Any:
    """Element offsets (rows, k) of the canonical layouts of 9.7.16.3.3."""
    t, w = 128 // bits, WIDTH[name]
    lbo, sbo = d.leading * 8 // bits, d.stride * 8 // bits
    if major == "k":
        step = lbo if name == "none" else t
        return table(((8, rows // 8), (t, k // t)), ((w * t, sbo), (1, step)))
    m, groups = rows // (t * w), k // 8
    strides = ((1, t, sbo), (t, lbo)) if name == "none" else ((1, t, lbo), (w * t, sbo))
    return table(((t, w, m), (8, groups)), strides)


@pytest.mark.parametrize(("name", "bits"), CASES)
@pytest.mark.parametrize("start", [0, 1024, 0x1C00])
def test_k_major_operand_is_the_canonical_layout(name: str, bits: int, start: int) -> None:
    d = SharedDescriptor(start, LEADING, STRIDE, 0, name)
    expected = start + canonical(name, "k", bits, 64, 256 // bits, d) * bits // 8
    found = operands.operand_bytes(d, 64, 32, "k", bits)
    np.testing.assert_array_equal(found, swizzle(expected, *SWIZZLES[name]))


@pytest.mark.parametrize(("name", "bits"), [c for c in CASES if c[1] < 32])
def test_mn_major_operand_is_the_canonical_layout(name: str, bits: int) -> None:
    d = SharedDescriptor(2048, LEADING, STRIDE, 0, name)
    expected = 2048 + canonical(name, "mn", bits, 256, 256 // bits, d) * bits // 8
    found = operands.operand_bytes(d, 256, 32, "mn", bits)
    np.testing.assert_array_equal(found, swizzle(expected, *SWIZZLES[name]))


def test_tf32_mn_major_has_atoms_of_32_bytes() -> None:
    d = SharedDescriptor(1024, LEADING, STRIDE, 0, "128B_atom_32B")
    lines = table(((4, 8, 2), (4, 2)), ((1, 4, LEADING // 4), (32, STRIDE // 4)))
    found = operands.operand_bytes(d, 64, 32, "mn", 32)
    np.testing.assert_array_equal(found, swizzle(1024 + 4 * lines, 2, 5, 2))


@pytest.mark.parametrize("name", ["32B", "64B", "128B"])
def test_k_advances_by_moving_the_start_inside_the_pattern(name: str) -> None:
    line = 16 * WIDTH[name]
    d = SharedDescriptor(1024, 16, 8 * line, 0, name)
    whole = operands.operand_bytes(d, 64, line, "k", 8)
    assert sorted(whole.ravel()) == list(range(1024, 1024 + 64 * line))
    for x in range(0, line, 32):
        part = operands.operand_bytes(
            SharedDescriptor(1024 + x, 16, 8 * line, 0, name), 64, 32, "k", 8
        )
        np.testing.assert_array_equal(part, whole[:, x : x + 32])


@pytest.mark.parametrize("at", range(8))
def test_base_offset_counts_lines_from_where_the_pattern_starts(at: int) -> None:
    aligned = operands.operand_bytes(SharedDescriptor(1024, 16, 1024, 0, "128B"), 64, 32, "k", 8)
    start = 1024 + 128 * at
    moved = operands.operand_bytes(SharedDescriptor(start, 16, 1024, at, "128B"), 64, 32, "k", 8)
    np.testing.assert_array_equal(moved - start, aligned - 1024)


@pytest.mark.parametrize("bits", [8, 16])
def test_mn_major_without_gaps_is_a_permutation(bits: int) -> None:
    rows, k = 1024 // bits, 256 // bits  # one line of 128 bytes along MN
    d = SharedDescriptor(0, 0, 1024, 0, "128B")
    found = operands.operand_bytes(d, rows, 32, "mn", bits)
    assert sorted(found.ravel()) == list(range(0, rows * k * bits // 8, bits // 8))


def test_operands_that_cannot_be() -> None:
    d = SharedDescriptor(0, 16, 256, 0, "32B")
    with pytest.raises(ValueError, match="row_bytes is 64, allowed with swizzle 32B: <= 32"):
        operands.operand_bytes(d, 64, 64, "k", 8)
    with pytest.raises(ValueError, match="element_bits is 4"):
        operands.operand_bytes(d, 64, 32, "k", 4)
    with pytest.raises(ValueError, match="major is 'm'"):
        operands.operand_bytes(d, 64, 32, "m", 8)
    with pytest.raises(ValueError, match="swizzle is 32B, allowed where MN-major with 32-bit"):
        operands.operand_bytes(d, 64, 32, "mn", 32)
    atoms = SharedDescriptor(0, 16, 256, 0, "128B_atom_32B")
    with pytest.raises(ValueError, match="K-major: all others"):
        operands.operand_bytes(atoms, 64, 32, "k", 32)
    with pytest.raises(ValueError, match="leading_absolute"):
        operands.operand_bytes(SharedDescriptor(0, 0, 0, 0, "128B", True), 64, 32, "k", 8)


@given(st.binary(min_size=32, max_size=32), st.sampled_from([4, 6]))
def test_narrow_elements_follow_each_other_from_the_lowest_bit(data: bytes, bits: int) -> None:
    source = np.frombuffer(data, np.uint8).reshape(2, 16)
    found = operands.unpack_slots(source, bits)
    for row in range(2):
        number = int.from_bytes(source[row].tobytes(), "little")
        expected = [number >> bits * i & (1 << bits) - 1 for i in range(16)]
        assert found[row].tolist() == expected
    moved = tmem.decompress(source, {4: "b4x16_p64", 6: "b6x16_p32"}[bits])
    np.testing.assert_array_equal(moved, found << {4: 2, 6: 0}[bits])


def test_packed_nibbles_have_the_low_half_first() -> None:
    found = operands.unpack_nibbles(np.array([[0x21, 0x43], [0x65, 0x87]], np.uint8))
    assert found.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


# ------------------------------------------------------------------------------- descriptors

ADDRESS = st.integers(0, (1 << 14) - 1)
NAMES = {"wgmma": ["none", "128B", "64B", "32B"]}
NAMES["tcgen05"] = ["none", "128B_atom_32B", "128B", "", "64B", "", "32B"]


@given(ADDRESS, ADDRESS, ADDRESS, st.integers(0, 7), st.sampled_from(["wgmma", "tcgen05"]))
def test_fields_of_shared_descriptors(a: int, b: int, c: int, base: int, which: str) -> None:
    decode = getattr(descriptors, f"{which}_descriptor")
    fixed = 1 << 46 if which == "tcgen05" else 0
    at = 61 if which == "tcgen05" else 62
    for code, name in enumerate(NAMES[which]):
        bits = a | b << 16 | c << 32 | fixed | base << 49 | code << at
        if not name or (name == "none" and base and which == "wgmma"):
            with pytest.raises(ValueError, match="swizzling mode" if not name else "base offset"):
                decode(bits)
            continue
        places = 0 if name == "none" else base  # no pattern without swizzling
        assert decode(bits) == SharedDescriptor(16 * a, 16 * b, 16 * c, places, name)


@pytest.mark.parametrize("which", ["wgmma", "tcgen05"])
def test_reserved_bits_of_shared_descriptors(which: str) -> None:
    decode = getattr(descriptors, f"{which}_descriptor")
    fields = {*range(14), *range(16, 30), *range(32, 46), *range(49, 52)}
    fields |= {46, 47, 48, 52, 61, 62, 63} if which == "tcgen05" else {62, 63}
    good = (1 << 46 | 2 << 61) if which == "tcgen05" else 1 << 62
    for bit in set(range(64)) - fields:
        with pytest.raises(ValueError, match=rf"reserved bits \[{bit}\] are set"):
            decode(good | 1 << bit)


def test_shared_descriptors_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="bits 46 to 48"):
        descriptors.tcgen05_descriptor(2 << 61)
    with pytest.raises(ValueError, match="64 bits"):
        descriptors.wgmma_descriptor(1 << 64)
    absolute = descriptors.tcgen05_descriptor(1 << 46 | 1 << 52 | 2 << 61)
    assert absolute.leading_absolute
    with pytest.raises(ValueError, match="leading dimension stride mode"):
        descriptors.tcgen05_descriptor(1 << 46 | 1 << 52 | 4 << 61)


def mxf8(m: int = 128, n: int = 128, **fields: int) -> int:
    """Bits of an instruction descriptor of kind mxf8f6f4."""
    at = {"sparse": 2, "sfb": 4, "a": 7, "b": 10, "na": 13, "nb": 14, "ta": 15, "tb": 16, "sfa": 29}
    return n >> 3 << 17 | 1 << 23 | m >> 7 << 27 | sum(v << at[f] for f, v in fields.items())


def plain(m: int, n: int, a: int, b: int, d: int, **fields: int) -> int:
    at = {"selector": 0, "sparse": 2, "sat": 3, "na": 13, "ta": 15, "tb": 16, "shift": 30}
    rest = sum(v << at[f] for f, v in fields.items())
    return d << 4 | a << 7 | b << 10 | n >> 3 << 17 | m >> 4 << 24 | rest


def test_fields_of_a_scaled_instruction() -> None:
    bits = mxf8(256, 240, a=4, b=1, sfa=3, sfb=2, na=1, tb=0)
    found = descriptors.instruction_descriptor(bits, "mxf8f6f4", 2)
    assert (found.m, found.n, found.k) == (256, 240, 32)
    assert (found.a_type, found.b_type, found.d_type) == ("e3m2", "e5m2", "f32")
    assert (found.scale_type, found.sfa_id, found.sfb_id) == ("ue8m0", 3, 2)
    assert (found.negate_a, found.negate_b) == (True, False)


def test_fields_of_a_plain_instruction() -> None:
    bits = plain(64, 256, 1, 0, 2, sat=1, sparse=1, ta=1)
    with pytest.raises(ValueError, match=r"N is 256, allowed: 64, 128 for kind::i8\.ws"):
        descriptors.instruction_descriptor(bits | 2 << 30, "i8", ws=True)
    found = descriptors.instruction_descriptor(bits, "i8")
    assert (found.m, found.n, found.k, found.sparse) == (64, 256, 64, True)
    assert (found.a_type, found.b_type, found.d_type) == ("s8", "u8", "s32")
    assert found.saturate
    assert (found.transpose_a, found.transpose_b) == (True, False)
    half = descriptors.instruction_descriptor(plain(64, 8, 0, 0, 1, sparse=1, selector=3), "f16")
    assert (half.k, half.sparse_selector) == (32, 3)


@pytest.mark.parametrize("code", range(4))
def test_maximum_shift_of_a_stationary_b(code: int) -> None:
    bits = plain(32, 64, 2, 2, 1, shift=code)
    found = descriptors.instruction_descriptor(bits, "tf32", ws=True)
    assert found.max_shift == (8 * 2 ** (code - 1) if code else 0)


def test_integers_take_n_in_steps_of_8_up_to_32() -> None:
    for n in (8, 16, 24, 32, 48):
        assert descriptors.instruction_descriptor(plain(64, n, 0, 1, 2), "i8").n == n


REFUSED = [
    ("f16", 1, plain(128, 64, 1, 0, 0), "atype is bf16, allowed: f16 where dtype is f16"),
    ("f16", 1, plain(128, 64, 2, 0, 1), r"atype is 2, allowed: 0 \(f16\), 1 \(bf16\)"),
    ("f16", 1, plain(96, 64, 0, 0, 1), "M is 96, allowed: 64, 128 for"),
    ("f16", 2, plain(64, 64, 0, 0, 1), "M is 64, allowed: 128, 256 for"),
    ("f16", 2, plain(256, 24, 0, 0, 1), "N is 24, allowed: 16, 32"),
    ("f16", 1, plain(128, 0, 0, 0, 1), "N is 0"),
    ("f16", 1, plain(128, 264, 0, 0, 1), "N is 264"),
    ("f16", 1, plain(128, 64, 0, 0, 1, sat=1), "saturate"),
    ("f16", 1, plain(128, 64, 0, 0, 1, selector=1), "sparsity selector is 1"),
    ("f16", 1, plain(128, 64, 0, 0, 1, shift=1), "maximum shift is 1"),
    ("i8", 1, plain(128, 32, 0, 0, 2, sparse=1, selector=2), "sparsity selector is 2"),
    ("i8", 1, plain(128, 40, 0, 0, 2), "N is 40"),
    ("i8", 1, plain(128, 64, 0, 0, 2, na=1), "negate A"),
    ("i8", 1, plain(128, 64, 0, 0, 1), r"dtype is 1, allowed: 2 \(s32\)"),
    ("f8f6f4", 1, plain(128, 64, 5, 0, 1, ta=1), "transpose A is 1, allowed: 0 for type e2m1"),
    ("f8f6f4", 1, plain(128, 24, 0, 0, 1, tb=1), "N is 24"),
    ("f8f6f4", 2, plain(256, 48, 1, 1, 1, tb=1), "N is 48, allowed: 32, 64"),
    ("mxf8f6f4", 1, mxf8(256), "M is 256, allowed: 128 for"),
    ("mxf8f6f4", 2, mxf8(128, sparse=1), "M is 128, allowed: 256 for"),
    ("mxf8f6f4", 1, mxf8() & ~(1 << 23), r"scale matrix type is 0, allowed: 1 \(ue8m0\)"),
    ("mxf8f6f4", 1, mxf8(a=2), "atype is 2"),
    ("mxf4", 1, mxf8(a=1, b=1, sfa=1), "scale factor A ID is 1, allowed: 0, 2"),
    ("mxf4", 1, mxf8(a=1, b=1, ta=1), "transpose A"),
    ("mxf4", 1, mxf8(a=1, b=1) | 1 << 31, "K = 96 is for sm_103a"),
    ("mxf4", 1, mxf8(a=1, b=5), r"reserved bits \[12\] are set"),
    ("mxf4nvf4", 1, mxf8(a=0, b=1), "atype is 0"),
    ("f4", 1, 0, "kind is 'f4'"),
]


@pytest.mark.parametrize(("kind", "group", "bits", "message"), REFUSED)
def test_illegal_instructions(kind: str, group: int, bits: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        descriptors.instruction_descriptor(bits, kind, group)


RESERVED = [("mxf8f6f4", mxf8(), (0, 1, 3, 6, 24, 25, 26, 31))]
RESERVED += [(kind, mxf8(a=1, b=1), (0, 1, 3, 6, 12, 24, 25, 26)) for kind in ("mxf4", "mxf4nvf4")]
RESERVED += [("f16", plain(128, 64, 0, 0, 1), (6, 23, 29)), ("i8", plain(64, 64, 0, 0, 2), (6, 23))]


@pytest.mark.parametrize(("kind", "good", "bits"), RESERVED)
def test_reserved_bits_of_instructions(kind: str, good: int, bits: tuple[int, ...]) -> None:
    descriptors.instruction_descriptor(good, kind)
    for bit in bits:
        with pytest.raises(ValueError, match=rf"kind::{kind}: reserved bits \[{bit}\] are set"):
            descriptors.instruction_descriptor(good | 1 << bit, kind)


# ------------------------------------------------------------------------------- registers

# CUTLASS's DstLayout of SM100_TMEM_LOAD_* for repetitions r: threads and bits of a register file to
# bits of a block of 16 or 32 lanes, whose lines have `line` bits.
LOADS: dict[str, tuple[int, int, Any]] = {
    "32x32b": (32, 32, lambda r: (((32,), (32, r)), ((32 * r,), (1, 32)))),
    "16x64b": (
        16,
        64,
        lambda r: (((2, 2, 8), (32, r)), ((512 * r, 32, 64 * r), (1, 64))),
    ),
    "16x128b": (
        16,
        128,
        lambda r: (((4, 8), (32, 2, r)), ((32, 128 * r), (1, 1024 * r, 128))),
    ),
    "16x256b": (
        16,
        256,
        lambda r: (((4, 8), (64, 2, r)), ((64, 256 * r), (1, 2048 * r, 256))),
    ),
}


def loads() -> Iterator[tuple[str, int]]:
    for shape, (_, line, _) in LOADS.items():
        for num in (1, 2, 4, 8, 16, 32, 64, 128):
            if num * max(line // 64, 1) <= 128:
                yield shape, num


@pytest.mark.parametrize(("shape", "num"), list(loads()))
def test_loads_are_cutlass_layouts(shape: str, num: int) -> None:
    height, line, layout = LOADS[shape]
    bits = table(*layout(num))[:, ::32]
    for warp in range(5):
        lanes, columns = tmem.load_places(shape, num, warp)
        np.testing.assert_array_equal(lanes, bits // (line * num) + 32 * (warp % 4))
        np.testing.assert_array_equal(columns, bits % (line * num) // 32)
    assert len(set(zip(lanes.ravel(), columns.ravel(), strict=True))) == height * line * num // 32


@pytest.mark.parametrize(("split", "num"), [(1, 1), (2, 2), (64, 16), (128, 128)])
def test_two_accesses_of_16_lanes(split: int, num: int) -> None:
    lanes, columns = tmem.load_places("16x32bx2", num, 1, split)
    for thread, i in itertools.product(range(32), range(num)):
        assert lanes[thread, i] == 32 + thread % 16
        assert columns[thread, i] == i + (split if thread >= 16 else 0)


@pytest.mark.parametrize(("shape", "num"), [("32x32b", 4), ("16x64b", 2), ("16x256b", 2)])
def test_packed_registers_take_16_bits_of_two_columns(shape: str, num: int) -> None:
    """CUTLASS's ValID of the _16b variants: chunk i of 16 bits of a line is in column i."""
    _, line, layout = LOADS[shape]
    halves = table(*layout(num))[:, ::16] % (line * num) // 16
    lanes, columns = tmem.packed_places(shape, num, 2)
    np.testing.assert_array_equal(columns.reshape(32, -1), halves)
    np.testing.assert_array_equal(lanes, tmem.load_places(shape, num, 2)[0])


def test_packed_second_access_starts_at_its_own_column() -> None:
    _, columns = tmem.packed_places("16x32bx2", 1, 0, 2)  # CUTLASS's 16dp32b1x_16b passes 2
    assert columns[0, 0].tolist() == [0, 1]
    assert columns[16, 0].tolist() == [2, 3]


def test_loads_that_cannot_be() -> None:
    for shape, num, split, message in [
        ("16x512b", 1, 0, "shape is '16x512b'"),
        ("16x256b", 64, 0, "num is 64, allowed for 16x256b: powers of 2 up to 32"),
        ("32x32b", 3, 0, "num is 3"),
        ("32x32b", 1, 4, "half_split is 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            tmem.load_places(shape, num, 0, split)


# CUTLASS's ALayout_64x*, CLayout_64xN: threads and elements to the column-major index in 64 rows.
A_LAYOUTS = {
    32: (((4, 8, 4), (2, 2)), ((64, 1, 16), (8, 256))),
    16: (((4, 8, 4), (2, 2, 2)), ((128, 1, 16), (64, 8, 512))),
    8: (((4, 8, 4), (4, 2, 2)), ((256, 1, 16), (64, 8, 1024))),
}


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_wgmma_operand_fragment(bits: int) -> None:
    rows, k = fragments.operand_fragment(bits)
    np.testing.assert_array_equal(rows + 64 * k, table(*A_LAYOUTS[bits]))


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_wgmma_accumulator_fragment(n: int) -> None:
    rows, columns = fragments.accumulator_fragment(n)
    layout = (((4, 8, 4), (2, 2, n // 8)), ((128, 1, 16), (64, 8, 512)))
    np.testing.assert_array_equal(rows + 64 * columns, table(*layout))
    assert len(np.unique(rows + 64 * columns)) == 64 * n


def test_fragments_that_cannot_be() -> None:
    for n in (0, 4, 12, 264):
        with pytest.raises(ValueError, match=f"n is {n}"):
            fragments.accumulator_fragment(n)
    with pytest.raises(ValueError, match="element_bits is 4"):
        fragments.operand_fragment(4)


# ------------------------------------------------------------------------------- tensor memory

# CUTLASS's tmem_frg and tmem_frg_ws: (rows, columns) to lane + 128 * column.
ACCUMULATORS: dict[tuple[int, int, bool, bool], Any] = {
    (256, 2, False, False): lambda n: ((128, n), (1, 128)),
    (128, 2, False, False): lambda n: ((64, (n // 2, 2)), (1, (128, 64))),
    (128, 2, False, True): lambda n: (((16, 4), n), ((1, 32), 128)),
    (128, 1, False, False): lambda n: ((128, n), (1, 128)),
    (128, 1, True, False): lambda n: ((128, n), (1, 128)),
    (64, 1, True, False): lambda n: ((64, (n // 2, 2)), (1, (128, 64))),
    (64, 1, False, False): lambda n: (((16, 4), n), ((1, 32), 128)),
    (32, 1, True, False): lambda n: ((32, (n // 4, 4)), (1, (128, 32))),
}


@pytest.mark.parametrize("case", ACCUMULATORS)
@pytest.mark.parametrize("n", [64, 128, 256])
def test_accumulators_are_cutlass_layouts(case: tuple[int, int, bool, bool], n: int) -> None:
    m, group, ws, sparse = case
    expected = table(*ACCUMULATORS[case](n))
    every = []
    for rank in range(group):
        lanes, columns = tmem.accumulator_places(m, n, group, rank, ws, sparse)
        np.testing.assert_array_equal(lanes + 128 * columns, expected)
        assert lanes.max() < 128
        every += tmem.accumulator_rows(m, group, rank).tolist()
    assert every == list(range(m))


@pytest.mark.parametrize("n", [8, 64, 256])
def test_half_datapath_read_by_16x256b_is_the_wgmma_fragment(n: int) -> None:
    """A warp that loads M = 64 gets what a warp has after wgmma: two routes to one fragment."""
    lanes, columns = tmem.accumulator_places(64, n, 1, 0)
    row_at = {place: i for i, place in enumerate(lanes[:, 0].tolist())}
    rows, expected = fragments.accumulator_fragment(n)
    for warp in range(4):
        at, found = tmem.load_places("16x256b", n // 8, warp)
        mine = slice(32 * warp, 32 * warp + 32)
        np.testing.assert_array_equal(np.vectorize(row_at.get)(at), rows[mine])
        np.testing.assert_array_equal(columns[0][found], expected[mine])


@pytest.mark.parametrize(("m", "group", "ws"), [(128, 1, False), (256, 2, False), (64, 1, False)])
@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_operand_in_tensor_memory_has_the_lanes_of_its_rows_of_d(
    m: int, group: int, ws: bool, bits: int
) -> None:
    lanes, columns, low = tmem.operand_places(m, 256 // bits, bits, group, ws)
    result, _ = tmem.accumulator_places(m, 8, group, 0, ws)
    np.testing.assert_array_equal(lanes, np.broadcast_to(result[:, :1], lanes.shape))
    assert (32 * columns + low).tolist() == [list(range(0, 256, bits))] * (m // group)
    assert list(tmem.operand_copies(m, group, ws)) == [0]


@pytest.mark.parametrize(("m", "group", "ws"), [(128, 2, False), (64, 1, True), (32, 1, True)])
def test_each_part_of_d_has_a_copy_of_the_operand_in_its_lanes(
    m: int, group: int, ws: bool
) -> None:
    lanes, _, _ = tmem.operand_places(m, 16, 16, group, ws)
    result, _ = tmem.accumulator_places(m, 64, group, 0, ws)
    copies = tmem.operand_copies(m, group, ws)
    assert {c + lane for c in copies for lane in lanes.ravel()} == set(range(128))
    for part, copy in enumerate(copies):
        columns = slice(64 // len(copies) * part, 64 // len(copies) * (part + 1))
        np.testing.assert_array_equal(result[:, columns][:, :1], lanes[:, :1] + copy)


@pytest.mark.parametrize(("vector", "ids"), [("1X", (0, 1, 2, 3)), ("2X", (0, 2)), ("4X", (0,))])
@pytest.mark.parametrize("rows", [64, 128, 192, 256])
def test_scales_are_cutlass_layouts(vector: str, ids: tuple[int, ...], rows: int) -> None:
    """tmem_sf_frg: (((32, rows / 32), 4), blocks):(((1, 512), 32), 128), lane + 128 * byte."""
    blocks = int(vector[0])
    for number in ids:
        lanes, columns, at = tmem.scale_places(vector, rows, number)
        for copy in tmem.scale_copies():
            expected = table(((32, rows // 32), blocks), ((1, 512), 128)) + copy + 128 * number
            np.testing.assert_array_equal(lanes + copy + 128 * (4 * columns + at), expected)
    assert list(tmem.scale_copies()) == [0, 32, 64, 96]


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_scales_of_two_halves_are_cutlass_layouts(rows: int) -> None:
    """The 2x2 datapath: (((32, rows / 64), 2, 2), blocks):(((1, 512), 64, 32), 128)."""
    lanes, columns, at = tmem.scale_places("4X", rows, 0, 2)
    expected = table(((32, rows // 64, 2), 4), ((1, 512, 64), 128))
    np.testing.assert_array_equal(lanes + 128 * (4 * columns + at), expected)
    assert list(tmem.scale_copies(2)) == [0, 32]


def copied(shape: str, multicast: str | None, source: bytes) -> np.ndarray:
    """Tensor Memory (128 lanes, bytes) after a copy of ``source``, rows of 16 bytes on end."""
    d = SharedDescriptor(0, 16, 128, 0, "none")
    rows, row_bytes = tmem.COPY_SHAPES[shape]
    addresses = operands.operand_bytes(d, rows, row_bytes, "k")
    data = np.frombuffer(source, np.uint8)[addresses].reshape(rows, -1, 4)
    memory = np.zeros((128, 8, 4), np.uint8)
    lanes, columns = tmem.copy_places(shape, multicast)
    for copy in lanes:
        memory[copy[:, None], columns] = data
    return memory


def test_copied_scale_tile_is_where_an_mma_reads_scales() -> None:
    """A 128 x 4 tile of scales, (row, block) at byte 16 (row % 32) + 4 (row / 32) + block."""
    tile = np.random.default_rng(0).integers(0, 256, 512).astype(np.uint8)
    memory = copied("32x128b", "warpx4", tile.tobytes())
    lanes, columns, at = tmem.scale_places("4X", 128)
    row, block = np.arange(128)[:, None], np.arange(4)
    for copy in tmem.scale_copies():
        found = memory[lanes + copy, columns, at]
        np.testing.assert_array_equal(found, tile[row % 32 * 16 + row // 32 * 4 + block])


def test_two_copied_scale_tiles_are_where_a_pair_of_ctas_reads_them() -> None:
    """M = 128 with cta_group::2, N = 256: two tiles, copied to two warps each."""
    tiles = np.random.default_rng(1).integers(0, 256, 1024).astype(np.uint8)
    memory = copied("64x128b", "warpx2::01_23", tiles.tobytes())
    lanes, columns, at = tmem.scale_places("4X", 256, 0, 2)
    row, block = np.arange(256)[:, None], np.arange(4)
    expected = tiles[row // 128 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block]
    for copy in tmem.scale_copies(2):
        np.testing.assert_array_equal(memory[lanes + copy, columns, at], expected)


# CUTLASS's ValID of SM100_UTCCP_*: source rows and copies to lanes.
COPIES: dict[tuple[str, str | None], tuple[Any, Any, tuple[Any, Any]]] = {
    ("128x256b", None): (8, 1, (128, 1)),
    ("128x128b", None): (4, 1, (128, 1)),
    ("4x256b", None): (8, 1, (4, 32)),
    ("64x128b", "warpx2::02_13"): (4, 2, (((64,), 2), ((1,), 64))),
    ("64x128b", "warpx2::01_23"): (4, 2, (((32, 2), 2), ((1, 64), 32))),
    ("32x128b", "warpx4"): (4, 4, (((32,), 4), ((1,), 32))),
}


@pytest.mark.parametrize("case", COPIES)
def test_copies_are_cutlass_layouts(case: tuple[str, str | None]) -> None:
    words, copies, layout = COPIES[case]
    lanes, columns = tmem.copy_places(*case)
    expected = [offset(i, *layout) for i in range(size(layout[0]))]
    assert lanes.ravel().tolist() == expected
    assert lanes.shape == (copies, tmem.COPY_SHAPES[case[0]][0])
    assert columns.tolist() == list(range(words))
    if case[0] != "4x256b":
        assert sorted(expected) == list(range(128))  # no lane is left out or written twice


def test_shift_moves_every_lane_but_the_last_and_a_copy_refills_that_one() -> None:
    """31 x 256 bits, and 4x256b has one row of as many bits for each 32 lanes."""
    lanes, columns = tmem.copy_places("4x256b")
    assert len(columns) == tmem.SHIFT_WORDS
    refilled = {lane + len(tmem.SHIFT_LANES) for lane in lanes.ravel().tolist()}
    assert refilled == {31, 63, 95, 127}


def test_places_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"allowed: .*64x128b warpx2::01_23"):
        tmem.copy_places("64x128b")
    with pytest.raises(ValueError, match="scale_id is 1, allowed for 2X: 0, 2"):
        tmem.scale_places("2X", 128, 1)
    with pytest.raises(ValueError, match="vector is '3X'"):
        tmem.scale_places("3X", 128)
    with pytest.raises(ValueError, match="halves is 3"):
        tmem.scale_places("1X", 128, 0, 3)
    with pytest.raises(ValueError, match="m, cta_group, ws"):
        tmem.accumulator_places(256, 64, 1, 0)
    with pytest.raises(ValueError, match="rank is 1, allowed with cta_group 1: < 1"):
        tmem.accumulator_places(128, 64, 1, 1)
    with pytest.raises(ValueError, match="n is 66, allowed for m 32: multiples of 4"):
        tmem.accumulator_places(32, 66, 1, 0, True)
    with pytest.raises(ValueError, match="element_bits is 6"):
        tmem.operand_places(128, 32, 6)
    with pytest.raises(ValueError, match="source is 'b2x16'"):
        tmem.decompress(np.zeros((1, 16), np.uint8), "b2x16")


def test_results_are_shared_and_cannot_be_written() -> None:
    d = SharedDescriptor(0, 16, 1024, 0, "128B")
    arrays = [operands.operand_bytes(d, 64, 32, "k"), *tmem.load_places("32x32b", 4, 0)]
    arrays += [*tmem.scale_places("1X", 128), *fragments.operand_fragment(16)]
    assert operands.operand_bytes(d, 64, 32, "k") is arrays[0]
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
