"""The header of a safetensors file: checked before anything else sees the file, and made.

A file is 8 bytes (length n of the header, little endian), n bytes of JSON, then the data::

    {"__metadata__": {"any": "string"},
     "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

Offsets count from the end of the header, and the tensors cover the data without holes or overlaps.
Source: the "Format" section of the safetensors README; limits as in its reference implementation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["DTYPES", "TORCH_DTYPES", "Header", "Stored", "build", "parse", "parse_json", "show"]

MAX_HEADER = 100_000_000  # bytes
_MAX_ITEMS = 2**63 - 1  # of torch and of safetensors
_MAX_DIMENSIONS = 64  # of numpy; torch copes with no more either
METADATA = "__metadata__"

#: dtype of a file -> bits of an element.
DTYPES: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip

#: dtype of a file -> torch dtype with the same bytes, where there is one.
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16,
    "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64,
    "I64": torch.int64, "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its bytes are ``file[offset : offset + nbytes]``."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What a file holds, in the order of its bytes."""

    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str] = field(default_factory=dict)
    data_start: int = 8  # offset of the first byte of data
    file_size: int = 8


def show(name: str) -> str:
    """A name from a file, safe to print: quoted, control characters escaped, not endless."""
    quoted = ascii(name) if any(not c.isprintable() for c in name) else repr(name)
    return quoted if len(quoted) <= 100 else f"{quoted[:60]}...{quoted[-20:]}"


def parse_json(text: bytes | str, constants: bool = False) -> Any:
    """JSON, strictly: ValueError for a name that stands twice, nesting without end, or (but with
    ``constants``) NaN and Infinity."""
    constant = float if constants else _no_constants
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=constant)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON ({error})") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"the name {show(name)} stands in it twice")
        out[name] = value
    return out


def _no_constants(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def parse(text: bytes, data_size: int) -> Header:
    """Check a header against the bytes that follow it.

    Args:
        text: the JSON.
        data_size: bytes of the file after the header.

    Raises ValueError with what is wrong; the caller adds which file.
    """
    data_start = 8 + len(text)
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError("the header is not a JSON object")
    metadata = content.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{METADATA} must map strings to strings")
    tensors = {name: _entry(name, entry, data_start) for name, entry in content.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    end = data_start
    for name, tensor in tensors.items():
        if tensor.offset != end:
            what = "overlaps another" if tensor.offset < end else "leaves a hole before it"
            raise ValueError(f"data_offsets of {show(name)}: the tensor {what}")
        end += tensor.nbytes
    if end != data_start + data_size:
        missing = end - data_start - data_size
        raise ValueError(
            f"truncated: {missing} bytes are missing at the end"
            if missing > 0
            else f"{-missing} bytes at its end belong to no tensor"
        )
    return Header(tensors, metadata, data_start, data_start + data_size)


def _entry(name: str, entry: Any, data_start: int) -> Stored:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name {show(name)} is not valid Unicode") from None
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{show(name)} needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"dtype of {show(name)}: got {show(str(dtype))}; known are {', '.join(DTYPES)}"
        )
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        # bool is an int to Python
        if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{what} of {show(name)}: expected a list of integers from 0 up")
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(
            f"shape of {show(name)}: has {len(shape)} dimensions, {_MAX_DIMENSIONS} at most"
        )
    if math.prod(max(n, 1) for n in shape) > _MAX_ITEMS:
        raise ValueError(f"shape of {show(name)}: the number of elements overflows 64 bits")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets of {show(name)}: expected [begin, end] with begin <= end")
    bits, nbytes = math.prod(shape) * DTYPES[dtype], offsets[1] - offsets[0]
    if bits != 8 * nbytes:
        raise ValueError(
            f"{show(name)}: {nbytes} bytes between its data_offsets, but shape and dtype "
            f"({dtype}) make {bits / 8:g}"
        )
    return Stored(dtype, tuple(shape), data_start + offsets[0], nbytes)


def build(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """Length and JSON of a file to be written with these (name, dtype, shape), and where they lie.

    Wide elements come first, so each tensor is aligned to its elements although there are no holes;
    then by name. The data starts on a multiple of 8 bytes. (As the reference implementation.)
    """
    items = sorted(tensors, key=lambda item: (-DTYPES[item[1]], item[0]))
    content: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, dtype, shape in items:
        nbytes = math.prod(shape) * DTYPES[dtype] // 8
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + nbytes)}
        end += nbytes
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(f"the header would have {len(text)} bytes; readers stop at {MAX_HEADER}")
    return len(text).to_bytes(8, "little") + text, parse(text, end)
