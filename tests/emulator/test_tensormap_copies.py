"""Copies through tensor maps: against an H200, and against a model of one element at a time."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from h200_tensormaps import BITS, H200, named, short
from hypothesis import given, settings
from hypothesis import strategies as st

from blockscale.emulator.memory.buffers import Buffer, GlobalMemory, MemoryFault
from blockscale.emulator.memory.tensormap import TensorMap
from blockscale.emulator.memory.tensormap_tile import Tile, swizzled

# What the copy engine did


def pattern(count: int) -> np.ndarray:
    """As in tensormap_dump.py: words all different, a quarter of them denormal."""
    words = np.arange(count, dtype=np.uint64) * 2654435761 & 0xFFFF_FFFF
    words[::4] &= 0x807F_FFFF
    return words.astype(np.uint32).view(np.uint8)


def aligned(data: np.ndarray) -> np.ndarray:
    """The same bytes at a multiple of 128."""
    room = np.zeros(len(data) + 128, np.uint8)
    out = room[-room.ctypes.data % 128 :][: len(data)]
    out[:] = data
    return out


def memory_of(data: np.ndarray) -> GlobalMemory:
    memory = GlobalMemory()
    memory.add(Buffer("data", data.ctypes.data, data))
    return memory


def load(tile: Tile, memory: GlobalMemory, image: np.ndarray, base: int = 0) -> None:
    pieces = tile.load(memory.load)
    image[tile.places(base)[:, None] + np.arange(tile.unit)] = pieces


def store(tile: Tile, memory: GlobalMemory, image: np.ndarray, base: int = 0) -> None:
    pieces = image[tile.places(base)[:, None] + np.arange(tile.taken)]
    tile.store(pieces, memory.store)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("case", H200["copied"], ids=short)
def test_copies_are_those_of_an_h200(case: dict[str, Any]) -> None:
    shared, size = 4096, 1 << 16
    loads = case["verb"] == "load"
    data = aligned(pattern(size // 4) if loads else np.zeros(size, np.uint8))
    given = named({k: v for k, v in case.items() if k != "address"})
    assert given is not None
    tensor = TensorMap(**(given | {"address": data.ctypes.data + case["address"]}))
    if "error" in case and "bytes" not in case:
        with pytest.raises(MemoryFault):
            tensor.tile(case["at"], store=not loads)
        return
    tile = tensor.tile(case["at"], store=not loads)
    if "error" in case:  # the mbarrier waited for ever: it expected other bytes
        assert tile.nbytes != case["bytes"]
        return
    wanted = np.frombuffer(zlib.decompress(base64.b64decode(case["memory"])), np.uint8)
    if loads:
        image = np.full(shared, 0xCD, np.uint8)
        load(tile, memory_of(data), image, case["base"])
        np.testing.assert_array_equal(image, wanted)
    else:
        store(tile, memory_of(data), pattern(shared // 4), case["base"])
        np.testing.assert_array_equal(data, wanted)


# A model of one element at a time

# PTX ISA 5.5.7: which 16 bytes lie where, one row 128 bytes of shared memory; rows repeat.
TABLES = {
    "none": ["01234567"],
    "32B": ["01234567", "10325476"],
    "64B": ["01234567", "10325476", "23016745", "32107654"],
    "128B": [
        *("01234567", "10325476", "23016745", "32107654"),
        *("45670123", "54761032", "67452301", "76543210"),
    ],
    "128B_atom_32B": ["01234567", "23016745", "45670123", "67452301"],
    "128B_atom_64B": ["01234567", "45670123"],
}
TABLES["128B_atom_32B_flip_8B"] = TABLES["128B_atom_32B"]  # and 8 bytes swapped in odd rows
SPAN = {"none": 0, "32B": 32, "64B": 64}


def place_by_table(address: int, swizzle: str) -> int:
    table = TABLES[swizzle]
    line, at = divmod(address, 128)
    row = table[line % len(table)]
    out = line * 128 + row.index(str(at // 16)) * 16 + at % 16
    if swizzle.endswith("flip_8B") and line % 2:
        out ^= 8
    return out


@pytest.mark.parametrize("swizzle", TABLES)
def test_swizzles_are_those_of_the_tables(swizzle: str) -> None:
    addresses = np.arange(4096)
    expected = [place_by_table(a, swizzle) for a in range(4096)]
    np.testing.assert_array_equal(swizzled(addresses, swizzle), expected)


def boxes(tensor: TensorMap, at: list[int]) -> Iterator[tuple[int, int, int, int, bool]]:
    """Each element: row and column in the box, byte in global memory, coordinate in dimension 0,
    and whether the other coordinates are in bounds."""
    steps = zip(tensor.box[1:], tensor.element_strides[1:], strict=True)
    size = BITS[tensor.element] // 8
    for row, outer in enumerate(itertools.product(*[range(0, n, s) for n, s in steps][::-1])):
        where = [a + i for a, i in zip(at[1:], outer[::-1], strict=True)]
        inside = all(0 <= c < n for c, n in zip(where, tensor.shape[1:], strict=True))
        start = sum(c * s for c, s in zip(where, tensor.strides, strict=True))
        for column in range(tensor.box[0]):
            x = at[0] + column
            yield row, column, start + x * size, x, inside


def pitch(tensor: TensorMap, inner: int) -> int:
    return max(inner, SPAN.get(tensor.swizzle, 128))


@st.composite
def copies(draw: st.DrawFn) -> tuple[TensorMap, list[int], int, int]:
    """A map at address 0, coordinates, a base in shared memory and bytes of global memory."""
    rank = draw(st.integers(1, 5))
    element = draw(st.sampled_from(["u8", "u16", "s32", "f16", "f32", "f64"]))
    size = BITS[element] // 8
    swizzle = draw(st.sampled_from([*TABLES]))
    quanta = draw(st.integers(1, SPAN.get(swizzle, 128) // 16 or 8))
    box = [quanta * 16 // size, *draw(st.lists(st.integers(1, 5), min_size=4, max_size=4))][:rank]
    shape = [draw(st.integers(1, 200 // size)), *(draw(st.integers(1, 6)) for _ in box[1:])]
    strides, reach = [], -(-shape[0] * size // 16) * 16
    for n in shape[1:]:
        strides.append(reach + 16 * draw(st.integers(0, 2)))
        reach = strides[-1] * n
    at = [draw(st.integers(-3, 14)) * 16 // size, *(draw(st.integers(-4, 8)) for _ in box[1:])]
    tensor = TensorMap(
        0,
        element,
        tuple(shape),
        tuple(strides),
        tuple(box),
        tuple(draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))),
        swizzle,
        oob_fill=draw(st.sampled_from(["zeros", "nan"])) if element[0] == "f" else "zeros",
    )
    return tensor, at, 128 * draw(st.integers(0, 9)), reach


def moved(tensor: TensorMap, data: np.ndarray) -> TensorMap:
    return dataclasses.replace(tensor, address=data.ctypes.data)


@settings(max_examples=150, deadline=None)
@given(copies())
def test_loads_match_the_model(drawn: tuple[TensorMap, list[int], int, int]) -> None:
    tensor, at, base, reach = drawn
    size = BITS[tensor.element] // 8
    data = aligned(np.random.default_rng(0).integers(0, 256, reach, dtype=np.uint8))
    image = np.full(1 << 17, 0xCD, np.uint8)
    expected, count = image.copy(), 0
    fill = np.tile(np.array([0xF7, 0x7F] if tensor.oob_fill == "nan" else [0, 0], np.uint8), 4)
    for row, column, offset, x, inside in boxes(tensor, at):
        inside = inside and 0 <= x < tensor.shape[0]
        value = data[offset : offset + size] if inside else fill[:size]
        start = base + row * pitch(tensor, tensor.box[0] * size) + column * size
        for i in range(size):
            expected[place_by_table(start + i, tensor.swizzle)] = value[i]
        count += size
    tile = moved(tensor, data).tile(at)
    load(tile, memory_of(data), image, base)
    np.testing.assert_array_equal(image, expected)
    assert tile.nbytes == count
    assert (image[base + tile.extent :] == 0xCD).all()


@settings(max_examples=150, deadline=None)
@given(copies())
def test_stores_match_the_model(drawn: tuple[TensorMap, list[int], int, int]) -> None:
    tensor, at, base, reach = drawn
    if tensor.swizzle.endswith("flip_8B"):
        with pytest.raises(MemoryFault, match="loads alone"):
            tensor.tile(at, store=True)
        return
    if min(at) < 0:
        with pytest.raises(MemoryFault, match="negative"):
            tensor.tile(at, store=True)
        return
    size = BITS[tensor.element] // 8
    data = aligned(np.zeros(reach, np.uint8))
    image = np.random.default_rng(0).integers(0, 256, 1 << 17, dtype=np.uint8)
    expected = data.copy()
    for row, column, offset, x, inside in boxes(tensor, at):
        first = x - x % (16 // size)  # in 16 bytes that begin in bounds all are stored
        if inside and first < tensor.shape[0]:
            start = base + row * pitch(tensor, tensor.box[0] * size) + column * size
            for i in range(size):
                expected[offset + i] = image[place_by_table(start + i, tensor.swizzle)]
    store(moved(tensor, data).tile(at, store=True), memory_of(data), image, base)
    np.testing.assert_array_equal(data, expected)


# Sub-byte types


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of 4 or 6 bits in a row, the first lowest, through one big integer."""
    number = sum(int(v) << bits * i for i, v in enumerate(values.reshape(-1)))
    return np.frombuffer(number.to_bytes(values.size * bits // 8, "little"), np.uint8)


def of_bits(element: str, rows: int, swizzle: str = "none") -> tuple[np.ndarray, TensorMap]:
    """(rows, 256) random elements and a map with boxes of 128 x 4 on them."""
    bits = BITS[element]
    values = np.random.default_rng(1).integers(0, 1 << bits, (rows, 256), dtype=np.uint8)
    data = aligned(packed(values, bits)).reshape(rows, -1)
    return values, TensorMap.of(data, (128, 4), element=element, swizzle=swizzle)


@pytest.mark.parametrize("swizzle", ["none", "128B", "128B_atom_32B"])
@pytest.mark.parametrize("element", ["b4x16_align8", "b4x16_align16", "b6x16_align16"])
def test_loads_of_packed_elements(element: str, swizzle: str) -> None:
    values, tensor = of_bits(element, 6, swizzle)
    assert tensor.shape == (256, 6)
    bits, memory = BITS[element], memory_of(tensor.array.reshape(-1))
    image = np.full(2048, 0xCD, np.uint8)
    tile = tensor.tile([128, 3])
    load(tile, memory, image, 128)
    expected = np.full(2048, 0xCD, np.uint8)
    group = 16 if element.endswith("16") else bits * 2  # bytes of 16 elements in shared memory
    span = max(8 * group, 0 if swizzle == "none" else 128)
    for row, of_16 in itertools.product(range(4), range(8)):
        y, x = 3 + row, 128 + 16 * of_16
        chosen = values[y, x : x + 16] if y < 6 else np.zeros(16, np.uint8)
        for i, byte in enumerate(packed(chosen, bits)):
            at = place_by_table(128 + row * span + of_16 * group + i, swizzle)
            expected[at] = byte
    np.testing.assert_array_equal(image, expected)
    assert tile.nbytes == 4 * 128 * bits // 8  # gaps are not counted


@pytest.mark.parametrize("swizzle", ["none", "128B", "128B_atom_32B", "128B_atom_64B"])
def test_stores_of_six_bits_drop_two(swizzle: str) -> None:
    """PTX ISA 5.5.1.1: the type is b6p2x16 in stores, a byte for each element."""
    values, tensor = of_bits("b6x16_align16", 6, swizzle)
    image = np.random.default_rng(2).integers(0, 256, 2048, dtype=np.uint8)
    store(tensor.tile([0, 1], store=True), memory_of(tensor.array.reshape(-1)), image, 256)
    for row, x in itertools.product(range(4), range(128)):
        values[1 + row, x] = image[place_by_table(256 + row * 128 + x, swizzle)] & 63
    np.testing.assert_array_equal(tensor.array.reshape(-1), packed(values, 6))


def test_directions_of_packed_elements() -> None:
    with pytest.raises(MemoryFault, match="loads alone"):
        of_bits("b4x16_align16", 6)[1].tile([0, 0], store=True)
    with pytest.raises(MemoryFault, match="stores alone"):
        of_bits("b6x16_align16", 6, "128B_atom_64B")[1].tile([0, 0])
    with pytest.raises(MemoryFault, match="multiple of 128 elements"):
        of_bits("b6x16_align16", 6)[1].tile([64, 0])


# tf32


def nearest_tf32(x: np.float32) -> float:
    """10 bits of mantissa by arithmetic: the ulp is a power of two, round() goes to even."""
    exponent = max(math.frexp(float(x))[1] - 1, -126)
    ulp = 2.0 ** (exponent - 10)
    return round(float(x) / ulp) * ulp


def test_tf32_rounds_while_loading() -> None:
    rng = np.random.default_rng(3)
    words = rng.integers(0, 1 << 32, 4096, dtype=np.uint32)
    words[:1024] = words[:1024] & 0xFFFF_E000 | 0x1000  # ties
    words[1024:1280] &= 0x807F_FFFF
    words[words & 0x7F80_0000 == 0x7F80_0000] = 0x7F00_1234
    values = aligned(words.view(np.uint8)).view(np.float32).reshape(64, 64)
    tensor = TensorMap.of(values, (64, 64), element="tf32")
    found = tensor.tile([0, 0]).load(memory_of(values.reshape(-1).view(np.uint8)).load)
    wanted = [nearest_tf32(x) for x in values.reshape(-1)]
    np.testing.assert_array_equal(found.reshape(-1).view(np.float32), np.float32(wanted))


# gather4 and scatter4


@pytest.mark.parametrize("swizzle", ["none", "64B", "128B"])
def test_gather_and_scatter(swizzle: str) -> None:
    array = aligned(pattern(1024)).reshape(32, 128)
    tensor = TensorMap.of(array, (48, 1), swizzle=swizzle)
    memory, image = memory_of(array.reshape(-1)), np.zeros(1024, np.uint8)
    rows = [7, 31, -1, 7]
    tile = tensor.tile4([96, *rows])
    load(tile, memory, image)
    for i, row in enumerate(rows):
        for x in range(48):
            value = array[row, 96 + x] if row >= 0 and 96 + x < 128 else 0
            at = place_by_table(i * pitch(tensor, 48) + x, swizzle)
            assert image[at] == value
    assert tile.nbytes == 4 * 48

    before = array.copy()
    image = np.random.default_rng(4).integers(0, 256, 1024, dtype=np.uint8)
    store(tensor.tile4([32, 0, 40, 9, 3], store=True), memory, image)
    for i, row in enumerate([0, 40, 9, 3]):
        for x in range(48):
            if row < 32:
                at = place_by_table(i * pitch(tensor, 48) + x, swizzle)
                before[row, 32 + x] = image[at]
    np.testing.assert_array_equal(array, before)


def test_gather_takes_rows_of_two_dimensions() -> None:
    array = np.zeros((8, 64), np.uint8)
    for tensor, at in (
        (TensorMap.of(array, (16, 2)), [0, 1, 2, 3, 4]),
        (TensorMap.of(array, (16, 1)), [0, 1, 2]),
        (TensorMap.of(array.reshape(2, 4, 64), (16, 1, 1)), [0, 1, 2, 3, 4]),
    ):
        with pytest.raises(ValueError, match="gather4 and scatter4 take five"):
            tensor.tile4(at)
