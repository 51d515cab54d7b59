"""Descriptors, fragments and Tensor Memory layouts against tables of the PTX ISA typed by hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import tcgen05_tables as t

from blockscale.emulator.tensorcore import descriptors, fragments, operands, tmem

NAMES = {
    "d": "d_type",
    "a": "a_type",
    "b": "b_type",
    "sfa": "sfa_id",
    "sfb": "sfb_id",
    "scale": "scale_type",
}
BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
KINDS = tuple(t.FIELDS)


def span(block: tuple[int, int]) -> range:
    """First and last, as the figures write them."""
    return range(block[0], block[1] + 1)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def pack(fields: list[tuple[str, int, int]], values: dict[str, int]) -> int:
    word = 0
    for name, low, bits in fields:
        value = values.get(name, 0)
        assert 0 <= value < 1 << bits, (name, value)
        word |= value << low
    assert not set(values) - {name for name, _, _ in fields}
    return word


# --- tcgen05.ld and .st ---------------------------------------------------------------------------


def figure(shape: str) -> dict[tuple[int, int], tuple[int, int]]:
    """(thread, register) -> (lane, column) of .x1."""
    places = {}
    for lane, line in enumerate(t.FRAGMENT_X1[shape].split("|")):
        for column, entry in enumerate(line.split()):
            thread, register = entry.split(".")
            places[int(thread), int(register)] = lane, column
    return places


@pytest.mark.sampled(50)
@pytest.mark.parametrize("warp", [0, 1, 2, 3, 6])
@pytest.mark.parametrize(("shape", "num"), [(s, n) for s in t.REGISTERS for n in t.REGISTERS[s]])
def test_load_fragment(shape: str, num: int, warp: int) -> None:
    lanes, columns = tmem.load_places(shape, num, warp, int(shape == "16x32bx2"))
    assert lanes.shape == columns.shape == (32, t.REGISTERS[shape][num])
    right, up = t.REPEAT[shape]
    first, last = t.WARP_LANES[warp % 4]
    for (thread, register), (lane, column) in figure(shape).items():
        for repetition in range(num):
            at = thread, register + up * repetition
            assert (lanes[at], columns[at]) == (first + lane, column + right * repetition), at
    assert lanes.min() >= first
    assert lanes.max() <= last


@pytest.mark.parametrize(("shape", "num", "split"), t.FRAGMENT_ANCHORS)
def test_load_anchors(shape: str, num: int, split: int) -> None:
    lanes, columns = tmem.load_places(shape, num, 0, split)
    for thread, register, lane, column in t.FRAGMENT_ANCHORS[shape, num, split]:
        assert (lanes[thread, register], columns[thread, register]) == (lane, column)


@pytest.mark.parametrize(("shape", "num"), t.NOT_ALLOWED)
def test_load_shapes_that_do_not_exist(shape: str, num: int) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        tmem.load_places(shape, num, 0)


@pytest.mark.parametrize("shape", t.REGISTERS)
def test_packed_load(shape: str) -> None:
    """9.7.16.8.2: "two 16-bit elements from adjacent columns" in one register, low first."""
    split = np.zeros((32, 1), int)
    if shape == "16x32bx2":  # the second access is of threads 16 on, at an offset in columns
        split[16:] = 64
    lanes, columns = tmem.packed_places(shape, 2, 1, int(split[-1, 0]))
    plain_lanes, plain = tmem.load_places(shape, 2, 1, 0)
    assert (lanes == plain_lanes).all()
    assert (columns[..., 0] == 2 * plain + split).all()
    assert (columns[..., 1] == 2 * plain + split + 1).all()


# --- the instruction descriptor -------------------------------------------------------------------


def shape_fields(kind: str, m: int, n: int) -> dict[str, int]:
    return (
        {"m / 128": m // 128, "n / 8": n // 8}
        if kind in BLOCK_SCALED
        else {
            "m / 16": m // 16,
            "n / 8": n // 8,
        }
    )


def some_word(kind: str, cta_group: int = 1) -> tuple[int, dict[str, int]]:
    """A dense word that is legal, and its fields."""
    fields = shape_fields(kind, t.SHAPES[kind, cta_group, False][0][-1], 64)
    fields |= {"a type": next(iter(t.AB_CODES[kind].values()))}
    fields |= {"b type": fields["a type"]}
    if kind in BLOCK_SCALED:
        fields["scale type"] = 1
    else:
        fields["d type"] = list(t.D_CODES[kind].values())[-1]
    return pack(t.FIELDS[kind], fields), fields


def decode(kind: str, cta_group: int = 1, ws: bool = False, **changes: int) -> Any:
    _, fields = some_word(kind, cta_group)
    changed = {name.replace("_", " "): value for name, value in changes.items()}
    word = pack(t.FIELDS[kind], fields | changed)
    return descriptors.instruction_descriptor(word, kind, cta_group, ws)


@pytest.mark.parametrize("case", t.WORDS, ids=lambda case: f"{case[0]} {case[2]:08x}")
def test_descriptor_word(case: tuple[str, int, int, dict[str, object]]) -> None:
    kind, cta_group, word, says = case
    got = asdict(descriptors.instruction_descriptor(word, kind, cta_group))
    assert {name: got[NAMES.get(name, name)] for name in says} == says
    for name in ("transpose_a", "transpose_b", "negate_a", "negate_b", "sparse"):
        assert got[name] is False


@pytest.mark.parametrize("kind", KINDS)
def test_types(kind: str) -> None:
    for name, code in t.AB_CODES[kind].items():
        assert decode(kind, **{"a type": code}).a_type == name
        assert decode(kind, **{"b type": code}).b_type == name
    for name, code in t.D_CODES.get(kind, {}).items():
        assert decode(kind, **{"d type": code}).d_type == name
    for name, code in t.SCALE_CODES.get(kind, {}).items():
        assert decode(kind, **{"scale type": code}).scale_type == name
    if kind in BLOCK_SCALED:
        assert decode(kind).d_type == "f32"
    else:
        assert decode(kind).scale_type is None


@pytest.mark.parametrize("kind", KINDS)
def test_codes_that_no_table_has(kind: str) -> None:
    tables = {
        "a type": t.AB_CODES[kind],
        "b type": t.AB_CODES[kind],
        "d type": t.D_CODES.get(kind),
        "scale type": t.SCALE_CODES.get(kind),
    }
    for name, _, bits in t.FIELDS[kind]:
        if name in tables:
            for code in set(range(1 << bits)) - set((tables[name] or {}).values()):
                with pytest.raises(ValueError, match=r"\w"):
                    decode(kind, **{name: code})


@pytest.mark.parametrize("kind", KINDS)
def test_reserved_bits(kind: str) -> None:
    word, _ = some_word(kind)
    for name, low, bits in t.FIELDS[kind]:
        if name == "reserved":
            for bit in range(low, low + bits):
                with pytest.raises(ValueError, match=r"\d"):
                    descriptors.instruction_descriptor(word | 1 << bit, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_transpose_and_negate(kind: str) -> None:
    transpose, negate = t.TRANSPOSE_NEGATE[kind]
    plain = decode(kind)
    for operation, allowed in (("transpose", transpose), ("negate", negate)):
        for operand in ("a", "b"):
            if allowed:
                got = decode(kind, **{f"{operation} {operand}": 1})
                assert got == replace(plain, **{f"{operation}_{operand}": True})
            else:
                with pytest.raises(ValueError, match=rf"{operation}"):
                    decode(kind, **{f"{operation} {operand}": 1})


@pytest.mark.parametrize("kind", ["f8f6f4", "mxf8f6f4"])
def test_no_transpose_of_less_than_8_bits(kind: str) -> None:
    """Table 54: column (transpose) for A, row for B, of 8 and 16 bits (and 32) only."""
    for name in ("e2m3", "e3m2", "e2m1"):
        for operand in ("a", "b"):
            code = {f"{operand} type": t.AB_CODES[kind][name], f"transpose {operand}": 1}
            with pytest.raises(ValueError, match=r"transpose"):
                decode(kind, **code)


@pytest.mark.parametrize("cta_group", [1, 2])
@pytest.mark.parametrize("kind", ["f8f6f4", "mxf8f6f4", "i8"])
def test_n_of_a_transposed_b(kind: str, cta_group: int) -> None:
    every = numbers(t.SHAPES[kind, cta_group, False][1])
    allowed = set(numbers(t.TRANSPOSED_8_BIT[cta_group]))
    for n in every:
        change = {"n / 8": n // 8, "transpose b": 1}
        if n in allowed:
            assert decode(kind, cta_group, **change).n == n
        else:
            with pytest.raises(ValueError, match=str(n)):
                decode(kind, cta_group, **change)


def test_d_of_16_bits() -> None:
    """Table 39: .f16 D of .f16 A and B, not of .bf16."""
    f16 = {"d type": 0, "a type": 0, "b type": 0}
    assert decode("f16", **f16).d_type == "f16"
    for other in ({"a type": 1}, {"b type": 1}, {"a type": 1, "b type": 1}):
        with pytest.raises(ValueError, match="f16"):
            decode("f16", **f16 | other)


def test_saturate_is_for_integers() -> None:
    assert decode("i8", saturate=1) == replace(decode("i8"), saturate=True)
    for kind in ("f16", "tf32", "f8f6f4"):
        with pytest.raises(ValueError, match="saturate"):
            decode(kind, saturate=1)


def test_max_shift() -> None:
    shifts = [decode("f16", ws=True, **{"max shift": code}).max_shift for code in range(4)]
    assert shifts == [0, 8, 16, 32]


@pytest.mark.parametrize("kind", BLOCK_SCALED)
def test_scale_ids(kind: str) -> None:
    allowed = t.SCALE_IDS["1X"] if kind == "mxf8f6f4" else t.SCALE_IDS["2X"]
    for which in ("sfa", "sfb"):
        for scale_id in range(4):
            if scale_id in allowed:
                got = decode(kind, **{f"{which} id": scale_id})
                assert got == replace(decode(kind), **{f"{which}_id": scale_id})
            else:
                with pytest.raises(ValueError, match=str(scale_id)):
                    decode(kind, **{f"{which} id": scale_id})


@pytest.mark.parametrize("kind", ["mxf4", "mxf4nvf4"])
def test_k_96_is_not_for_sm_100a(kind: str) -> None:
    with pytest.raises(ValueError, match="96"):
        decode(kind, 2, **{"k 96": 1})


@pytest.mark.sampled(13)
@pytest.mark.parametrize("ws", [False, True])
@pytest.mark.parametrize("cta_group", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_shapes(kind: str, cta_group: int, ws: bool) -> None:
    """Every M and N that the fields can hold, against Table 39."""
    all_m, all_n, k = t.SHAPES.get((kind, cta_group, ws), ((), "", 0))
    (m_field, m_bits), step = (("m / 128", 2), 128) if kind in BLOCK_SCALED else (("m / 16", 5), 16)
    for m in range(0, step << m_bits, step):
        for n in range(0, 8 << 6, 8):
            change = {m_field: m // step, "n / 8": n // 8}
            if m in all_m and n in numbers(all_n):
                got = decode(kind, cta_group, ws, **change)
                assert (got.m, got.n, got.k, got.kind) == (m, n, k, kind)
            else:
                with pytest.raises(ValueError, match=r"\d"):
                    decode(kind, cta_group, ws, **change)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse(kind: str) -> None:
    got = decode(kind, 2, sparse=1)
    assert (got.sparse, got.k, got.m) == (True, t.SPARSE_K[kind], 256)
    if kind in BLOCK_SCALED:
        with pytest.raises(ValueError, match="128"):
            decode(kind, 2, sparse=1, **{"m / 128": 1})
        return
    for selector in range(4):  # 9.7.16.10.8.4.5: 0 for .kind::i8 and .kind::f8f6f4
        change = {"sparse": 1, "sparsity selector": selector}
        if selector == 0 or kind in ("f16", "tf32"):
            assert decode(kind, **change).sparse_selector == selector
        else:
            with pytest.raises(ValueError, match=str(selector)):
                decode(kind, **change)
    m = {"m / 16": 2}
    assert decode(kind, 1, True, sparse=1, **m, **{"n / 8": 16}).k == t.SPARSE_K[kind]
    with pytest.raises(ValueError, match="256"):
        decode(kind, 1, True, sparse=1, **m, **{"n / 8": 32})


# --- the shared memory descriptor -----------------------------------------------------------------

FAMILIES = {
    "wgmma": (descriptors.wgmma_descriptor, t.WGMMA_SHARED, t.WGMMA_SWIZZLES),
    "tcgen05": (descriptors.tcgen05_descriptor, t.TCGEN05_SHARED, t.TCGEN05_SWIZZLES),
}


def shared(family: str, **values: int) -> Any:
    function, fields, _ = FAMILIES[family]
    if family == "tcgen05":
        values = {"version": 1, **values}
    return function(pack(fields, {name.replace("_", " "): v for name, v in values.items()}))


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_fields(family: str) -> None:
    code = {name: code for code, name in FAMILIES[family][2].items()}["128B"]
    plain = shared(family, swizzle=code)
    assert (plain.start, plain.leading, plain.stride, plain.base_offset) == (0, 0, 0, 0)
    for name, field in (("start", "start"), ("leading", "leading"), ("stride", "stride")):
        for bit in range(14):
            got = shared(family, swizzle=code, **{field: 1 << bit})
            assert got == replace(plain, **{name: 16 << bit}), (name, bit)
    for base in range(8):
        assert shared(family, swizzle=code, base_offset=base) == replace(plain, base_offset=base)


@pytest.mark.parametrize("family", FAMILIES)
def test_swizzle_codes(family: str) -> None:
    _, fields, codes = FAMILIES[family]
    for code in range(1 << fields[-1][2]):
        if code in codes:
            assert shared(family, swizzle=code).swizzle == codes[code]
        else:
            with pytest.raises(ValueError, match=str(code)):
                shared(family, swizzle=code)


def test_fixed_bits_of_tcgen05() -> None:
    for version in (0, 2, 3, 5, 7):
        with pytest.raises(ValueError, match=r"\d"):
            shared("tcgen05", version=version)
    for bit in range(8):
        with pytest.raises(ValueError, match=r"\d"):
            shared("tcgen05", zero=1 << bit)


def test_leading_address() -> None:
    got = shared("tcgen05", swizzle=2, leading=0x123, absolute=1)
    assert (got.leading_absolute, got.leading) == (True, 0x1230)
    assert not shared("tcgen05", swizzle=2).leading_absolute


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", t.OPERANDS, ids=str)
def test_operand_in_shared_memory(case: tuple[str, str, int, int, int], family: str) -> None:
    major, swizzle, bits, leading, stride = case
    codes = {name: code for code, name in FAMILIES[family][2].items()}
    if family == "wgmma" and (swizzle not in codes or (major == "mn" and bits != 16)):
        pytest.skip("wgmma has no such operand")
    start = 0x4C00  # a multiple of 1024: where every pattern starts
    fields = {"start": start >> 4, "leading": leading >> 4, "stride": stride >> 4}
    descriptor = shared(family, swizzle=codes[swizzle], **fields)
    places = operands.operand_bytes(descriptor, 256, 32, major, bits)
    assert places.shape == (256, 256 // bits)
    for row, k, offset in t.OPERANDS[case]:
        assert places[row, k] - start == offset, (row, k)


@pytest.mark.parametrize("family", FAMILIES)
def test_operand_inside_a_swizzle_pattern(family: str) -> None:
    code = {name: code for code, name in FAMILIES[family][2].items()}["128B"]
    pattern = 0x4C00
    descriptor = shared(family, start=(pattern + 32) >> 4, leading=1, stride=64, swizzle=code)
    places = operands.operand_bytes(descriptor, 64, 32, "k", 8)
    for row, k, offset in t.INSIDE_PATTERN:
        assert places[row, k] - pattern == offset, (row, k)


@pytest.mark.parametrize("bits", t.SLOTS)
def test_slots(bits: int) -> None:
    source, codes, result = t.SLOTS[bits]
    data = np.frombuffer(bytes.fromhex(source), np.uint8)[None]
    assert operands.unpack_slots(data, bits).tolist() == [list(codes)]
    name = {4: "b4x16_p64", 6: "b6x16_p32"}[bits]
    assert tmem.decompress(data, name).tobytes() == bytes.fromhex(result)


# --- D and A in Tensor Memory ---------------------------------------------------------------------


def check_accumulator(blocks: list[t.Block], m: int, n: int, cta_group: int, **how: bool) -> None:
    seen = 0
    for rank, rows, eighths, first_lane in blocks:
        lanes, columns = tmem.accumulator_places(m, n, cta_group, rank, **how)
        assert lanes.shape == columns.shape == (m // cta_group, n)
        held = tmem.accumulator_rows(m, cta_group, rank).tolist()
        for row in span(rows):
            for column in range(eighths[0] * n // 8, (eighths[1] + 1) * n // 8):
                at = held.index(row), column
                lane, word = first_lane + row - rows[0], column - eighths[0] * n // 8
                assert (lanes[at], columns[at]) == (lane, word), (rank, row, column)
                seen += 1
    assert seen == m * n


@pytest.mark.parametrize("n", [64, 128, 256])
@pytest.mark.parametrize(("m", "cta_group", "ws"), t.ACCUMULATOR)
def test_accumulator(m: int, cta_group: int, ws: bool, n: int) -> None:
    check_accumulator(t.ACCUMULATOR[m, cta_group, ws], m, n, cta_group, ws=ws)


def test_accumulator_of_a_sparse_a() -> None:
    check_accumulator(t.ACCUMULATOR_SPARSE, 128, 64, 2, sparse=True)


@pytest.mark.parametrize("bits", t.A_ELEMENTS)
@pytest.mark.parametrize(("m", "cta_group"), t.A_COPIES)
def test_a_in_tensor_memory(m: int, cta_group: int, bits: int) -> None:
    """Its rows have the lanes of those of D; of layout B, of both halves of D."""
    lanes, columns, low = tmem.operand_places(m, 256 // bits, bits, cta_group)
    assert tuple(tmem.operand_copies(m, cta_group)) == t.A_COPIES[m, cta_group]
    for k, column, bit in t.A_ELEMENTS[bits]:
        assert (columns[:, k] == column).all()
        assert (low[:, k] == bit).all()
    for rank, rows, eighths, first_lane in t.ACCUMULATOR[m, cta_group, False]:
        held = tmem.accumulator_rows(m, cta_group, rank).tolist()
        for row in span(rows):
            copies = [int(lanes[held.index(row), 0]) + c for c in t.A_COPIES[m, cta_group]]
            assert copies[eighths[0] // 4] == first_lane + row - rows[0]


# --- scale factors --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [32, 64, 128, 192, 256])
@pytest.mark.parametrize(("vector", "scale_id"), t.SCALE_BYTES)
def test_scales(vector: str, scale_id: int, rows: int) -> None:
    lanes, columns, low = tmem.scale_places(vector, rows, scale_id)
    assert lanes.shape == columns.shape == low.shape == (rows, int(vector[0]))
    assert tuple(tmem.scale_copies()) == (0, 32, 64, 96)
    for (first, last), word in t.SCALE_COLUMNS:
        for row in range(first, min(last + 1, rows)):
            assert (lanes[row] == row - first).all()
            assert (columns[row] == word).all()
            assert tuple(low[row]) == t.SCALE_BYTES[vector, scale_id]


@pytest.mark.parametrize("n", t.SCALE_COLUMNS_2X2)
@pytest.mark.parametrize(("vector", "scale_id"), t.SCALE_BYTES)
def test_scales_of_b_in_two_halves(vector: str, scale_id: int, n: int) -> None:
    lanes, columns, low = tmem.scale_places(vector, n, scale_id, halves=2)
    copies = tuple(tmem.scale_copies(2))
    for (first, last), word, where in t.SCALE_COLUMNS_2X2[n]:
        for row in range(first, last + 1):
            for block, byte in enumerate(t.SCALE_BYTES[vector, scale_id]):
                found = tuple(int(lanes[row, block]) + copy for copy in copies)
                assert found == tuple(lane + row - first for lane in where)
                assert (columns[row, block], low[row, block]) == (word, byte)


@pytest.mark.parametrize("vector", t.SCALE_IDS)
def test_scale_ids_of_each_vector(vector: str) -> None:
    for scale_id in set(range(4)) - set(t.SCALE_IDS[vector]):
        with pytest.raises(ValueError, match=str(scale_id)):
            tmem.scale_places(vector, 128, scale_id)


# --- tcgen05.cp -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "multicast"), t.COPIES)
def test_copy(shape: str, multicast: str) -> None:
    words, blocks = t.COPIES[shape, multicast]
    lanes, columns = tmem.copy_places(shape, multicast or None)
    assert list(columns) == list(range(words))
    expected: dict[int, set[int]] = {}
    for rows, firsts in blocks:
        for row in span(rows):
            expected[row] = {first + row - rows[0] for first in firsts}
    assert lanes.shape[1] == len(expected) == int(shape.split("x")[0])
    for row, where in expected.items():
        assert sorted(lanes[:, row].tolist()) == sorted(where)


@pytest.mark.parametrize(("shape", "multicast"), t.NO_COPIES)
def test_copies_that_do_not_exist(shape: str, multicast: str) -> None:
    with pytest.raises(ValueError, match=shape):
        tmem.copy_places(shape, multicast or None)


# --- wgmma ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [16, 128, 256])
def test_wgmma_accumulator(n: int) -> None:
    rows, columns = fragments.accumulator_fragment(n)
    assert rows.shape == columns.shape == (128, n // 2)
    for thread, element, row, column in t.WGMMA_D + (t.WGMMA_D_256 if n == 256 else []):
        assert (rows[thread, element], columns[thread, element]) == (row, column)
    assert len(set(zip(rows.flat, columns.flat, strict=True))) == 64 * n


@pytest.mark.parametrize("bits", t.WGMMA_A)
def test_wgmma_operand(bits: int) -> None:
    rows, k = fragments.operand_fragment(bits)
    assert rows.shape == k.shape == (128, 4 * 32 // bits)
    for thread, element, row, column in t.WGMMA_A[bits]:
        assert (rows[thread, element], k[thread, element]) == (row, column)
    assert len(set(zip(rows.flat, k.flat, strict=True))) == 64 * 256 // bits
