"""Tensor maps: their bytes and rules against the driver's, and maps of arrays."""

from __future__ import annotations

import gc
import struct
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from h200_tensormaps import BITS, H200, named, short

from blockscale.emulator.memory.buffers import MemoryFault
from blockscale.emulator.memory.tensormap import TensorMap

HOPPER_ELEMENTS, HOPPER_SWIZZLES = 13, 4  # how many of them an H200 takes
CALLS = [case for case in H200["encoded"] if "im2col" not in case]
ENCODED = [case for case in CALLS if "hex" in case]
REFUSED = [case for case in CALLS if "error" in case]


# What the driver wrote


def test_the_driver_was_asked_enough() -> None:
    assert len(ENCODED) > 300
    assert len(REFUSED) > 100
    for key, most in (("element", 13), ("swizzle", 4), ("interleave", 3), ("l2_promotion", 4)):
        assert {(H200["base"] | c)[key] for c in ENCODED} == set(range(most))
    assert {len((H200["base"] | c)["shape"]) for c in ENCODED} == {1, 2, 3, 4, 5}


@pytest.mark.sampled(50)
@pytest.mark.parametrize("case", ENCODED, ids=short)
def test_bytes_are_those_of_the_driver(case: dict[str, Any]) -> None:
    raw = bytes.fromhex(case["hex"]).ljust(128, b"\0")
    given = named(case)
    assert given is not None
    made, read = TensorMap(**given), TensorMap.decode(raw)
    assert made.encode().hex() == raw.hex()
    assert {key: getattr(read, key) for key in given} == given
    assert read == made


@pytest.mark.parametrize("case", ENCODED[::7], ids=short)
def test_the_second_half_is_not_needed(case: dict[str, Any]) -> None:
    raw = bytes.fromhex(case["hex"])[:64].ljust(128, b"\0")
    assert TensorMap.decode(raw) == TensorMap(**named(case))  # type: ignore[arg-type]


@pytest.mark.sampled(50)
@pytest.mark.parametrize("case", REFUSED, ids=short)
def test_refuses_what_the_driver_refuses(case: dict[str, Any]) -> None:
    full = H200["base"] | case
    if full["element"] >= HOPPER_ELEMENTS or full["swizzle"] >= HOPPER_SWIZZLES:
        return  # refused by this device, not by the rules
    given = named(case)
    if given is not None:
        with pytest.raises(ValueError, match="got"):
            TensorMap(**given)


@pytest.mark.parametrize("case", [c for c in H200["encoded"] if "im2col" in c], ids=short)
def test_im2col_maps_are_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="im2col"):
        TensorMap.decode(bytes.fromhex(case["hex"]).ljust(128, b"\0"))


# tensormap.replace of the fields that only sm_100 has: bits that ptxas sets in the word at byte 8.
SM100_BITS = {
    ("element", "b4x16_align8"): 0x580,
    ("element", "b4x16_align16"): 0x600,
    ("element", "b6x16_align16"): 0x680,
    ("swizzle", "128B_atom_32B"): 0x8_6000,
    ("swizzle", "128B_atom_32B_flip_8B"): 0x10_6000,
    ("swizzle", "128B_atom_64B"): 0x18_6000,
}


@pytest.mark.parametrize(("field", "value"), SM100_BITS)
def test_bits_of_sm100(field: str, value: str) -> None:
    shape = {"address": 32, "shape": (256, 8), "strides": (256,), "box": (128, 8)}
    tensor = TensorMap(**({"element": "u8"} | shape | {field: value}))  # type: ignore[arg-type]
    raw = tensor.encode()
    assert struct.unpack_from("<I", raw, 8)[0] == 1 << 4 | SM100_BITS[field, value]
    assert TensorMap.decode(raw) == tensor


@pytest.mark.parametrize("place", [(8, 4), (10, 0x80), (11, 1), (54, 1), (60, 1), (8, 0x70)])
def test_unknown_bits_are_refused(place: tuple[int, int]) -> None:
    raw = bytearray.fromhex(ENCODED[0]["hex"]).ljust(128, b"\0")
    raw[place[0]] |= place[1]
    with pytest.raises(ValueError, match="raw"):
        TensorMap.decode(bytes(raw))


@pytest.mark.parametrize("bit", [1, 21])
def test_flags_of_other_encoders_are_let_be(bit: int) -> None:
    """CuTe DSL's host code sets them; the driver, on an H200, does not."""
    raw = bytearray.fromhex(ENCODED[0]["hex"]).ljust(128, b"\0")
    raw[8 + bit // 8] |= 1 << bit % 8
    assert TensorMap.decode(bytes(raw)) == TensorMap(**named(ENCODED[0]))  # type: ignore[arg-type]


def test_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="raw: got 64 bytes"):
        TensorMap.decode(bytes(64))


# From arrays


@pytest.mark.parametrize(
    ("dtype", "element"),
    [
        *((np.uint8, "u8"), (np.int8, "u8"), (np.int16, "u16"), (np.int32, "s32")),
        *((np.uint32, "u32"), (np.int64, "s64"), (np.float16, "f16"), (np.float32, "f32")),
        *((np.float64, "f64"), (ml_dtypes.bfloat16, "bf16"), (ml_dtypes.float8_e4m3fn, "u8")),
        *((torch.bfloat16, "bf16"), (torch.float8_e5m2, "u8"), (torch.int64, "s64")),
        *((torch.float32, "f32"), (torch.float4_e2m1fn_x2, "u8"), (torch.int16, "u16")),
    ],
)
def test_dtypes(dtype: Any, element: str) -> None:
    of_torch = isinstance(dtype, torch.dtype)
    array = torch.zeros((4, 64), dtype=dtype) if of_torch else np.zeros((4, 64), dtype)
    tensor = TensorMap.of(array, (16, 2))
    size = BITS[element] // 8
    assert (tensor.element, tensor.shape, tensor.strides) == (element, (64, 4), (64 * size,))
    assert tensor.address == (array.data_ptr() if of_torch else array.ctypes.data)


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_strides_of_a_view(make: Callable[..., Any]) -> None:
    array = make((3, 8, 5, 64))[1:, ::2, :, 16:48]
    tensor = TensorMap.of(array, (16, 2, 2, 1))
    assert tensor.shape == (32, 5, 4, 2)
    size = array[0, 0, 0, 0].itemsize
    assert tensor.strides == (64 * size, 640 * size, 2560 * size)
    array[1, 2, 3, 4] = 1  # the address of one element, found by its value
    tile = tensor.tile([0, 3, 2, 1])
    base = array.data_ptr() if make is torch.zeros else array.ctypes.data
    assert tensor.address == base
    place = base + size * 4 + 3 * 64 * size + 2 * 640 * size + 2560 * size
    assert int(tile.addresses[size * 4 // 16]) == place - place % 16


def test_dimensions_of_one_need_no_stride() -> None:
    array = np.zeros((1, 1, 24), np.uint8)
    assert TensorMap.of(array, (16, 1, 1)).tile([16, 0, 0]).valid.tolist() == [8]


def test_given_strides_and_elements() -> None:
    array = np.zeros(4096, np.uint8)
    tensor = TensorMap.of(array.reshape(4, 1024), (16, 2), element="f32", strides=[512])
    assert (tensor.shape, tensor.strides) == ((256, 4), (512,))


def test_the_array_is_kept_and_not_compared() -> None:
    array = np.zeros((4, 64), np.float32)
    tensor, alive = TensorMap.of(array, (16, 2)), weakref.ref(array)
    assert tensor == TensorMap.decode(tensor.encode())
    assert hash(tensor) == hash(TensorMap.decode(tensor.encode()))
    del array
    gc.collect()
    assert alive() is not None


def test_arrays_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        TensorMap.of(np.zeros((8, 64), np.uint8).T, (16, 2))
    with pytest.raises(ValueError, match="contiguous"):
        TensorMap.of(np.zeros((), np.uint8), ())
    with pytest.raises(ValueError, match="needs elements"):
        TensorMap.of(np.zeros((0, 64), np.uint8), (16, 2))
    with pytest.raises(ValueError, match="strides: got"):
        TensorMap.of(np.zeros((8, 64), np.uint8)[::-1], (16, 2))
    with pytest.raises(TypeError, match="array: got list"):
        TensorMap.of([1, 2], (16,))
    with pytest.raises(ValueError, match="element: got 'f8'"):
        TensorMap.of(np.zeros((8, 64), np.uint8), (16, 2), element="f8")


# Rules

GOOD: dict[str, Any] = {
    "address": 1 << 20,
    "element": "f16",
    "shape": (100, 40, 30),
    "strides": (208, 8320),
    "box": (64, 8, 2),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"element": "f8"}, "element: got 'f8'; choose one of u8, u16"),
        ({"swizzle": "96B"}, "swizzle: got '96B'; choose one of none, 32B"),
        ({"shape": ()}, "shape: got 0 dimensions"),
        ({"shape": (100, 40), "strides": (208,)}, "box: got \\(64, 8, 2\\); 2 dimensions need 2"),
        ({"strides": (208,)}, "strides: got \\(208,\\); 3 dimensions need 2"),
        ({"address": 8}, "address: got 8; must be a multiple of 16"),
        ({"address": -16}, "address: got -16; must be 0 to"),
        ({"strides": (200, 8320)}, "strides: .* multiples of 16"),
        ({"strides": (1 << 40, 8320)}, "strides: .* 0 to 2\\*\\*40"),
        ({"box": (64, 8, 257)}, "box: .* 1 to 256 each"),
        ({"box": (4, 8, 2)}, "box: .* multiple of 16 bytes in dimension 0, not 8 bytes"),
        ({"swizzle": "64B"}, "box: .* at most 64 bytes in dimension 0 with swizzle 64B, not 128"),
        ({"box": (64, 256, 9)}, "box: .* at most 233472 bytes in all"),
        ({"element_strides": (1, 9, 1)}, "element_strides: .* 1 to 8"),
        ({"element": "u16", "oob_fill": "nan"}, "oob_fill: got 'nan'; must be zeros"),
        ({"element": "b4x16_align8", "shape": (101, 40, 30)}, "shape: .* multiple of 2"),
        ({"element": "b4x16_align16"}, "shape: .* multiple of 128"),
        (
            {"element": "b6x16_align16", "shape": (128, 40, 30), "strides": (224, 8960)},
            "box: .* 128 b6x16_align16 in dimension 0",
        ),
        (
            {"element": "b6x16_align16", "shape": (128, 40, 30)},
            "strides: .* multiples of 32",
        ),
    ],
    ids=str,
)
def test_rules_are_named(change: dict[str, Any], message: str) -> None:
    TensorMap(**GOOD)
    with pytest.raises(ValueError, match=message):
        TensorMap(**(GOOD | change))


def test_copies_that_are_refused() -> None:
    tensor = TensorMap(**GOOD)
    with pytest.raises(ValueError, match="the map has 3 dimensions"):
        tensor.tile([0, 0])
    with pytest.raises(MemoryFault, match=r"coordinate 4 in dimension 0.* multiple of 8 elements"):
        tensor.tile([4, 0, 0])
    with pytest.raises(MemoryFault, match=r"0x40.* multiple of 128"):
        tensor.tile([0, 0, 0]).places(64)
    with pytest.raises(ValueError, match="interleave: 16B is not supported"):
        TensorMap(**GOOD, interleave="16B").tile([0, 0, 0])
