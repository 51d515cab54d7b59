"""Headers: what is refused, that it is refused politely, and that safetensors agrees."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import save, save_file

from blockscale.checkpoint.header import MAX_HEADER, build, parse
from blockscale.checkpoint.reader import Reader


def entry(dtype="F32", shape=(2, 4), begin=0, end=32, **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def raw(text: str | bytes, data: bytes = b"") -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text)) + text + data


def made(header: object, data: int) -> bytes:
    return raw(json.dumps(header), bytes(data))


GOOD = made({"a": entry()}, 32)

HOSTILE = {
    "empty": (b"", "0 bytes"),
    "seven bytes": (b"1234567", "7 bytes"),
    "header of 0": (raw("", b"12345678"), "not JSON"),
    "header longer than the file": (struct.pack("<Q", 1000) + b"{}", "truncated"),
    "header of 2^64-1": (struct.pack("<Q", 2**64 - 1) + bytes(100), "more than"),
    "header of 100 MB + 1": (struct.pack("<Q", MAX_HEADER + 1) + bytes(100), "more than"),
    "a zip": (b"PK\x03\x04" + bytes(100), "whole safetensors"),
    "a pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(64), "more than"),
    "text": (b"version https://git-lfs.github.com/spec/v1\n" * 4, "more than"),
    "not JSON": (raw("hello there"), "not JSON"),
    "not UTF-8": (raw(b"\xff\xfe{}"), "not JSON"),
    "UTF-16": (raw("{}".encode("utf-16")), "not JSON"),
    "a list": (raw("[]"), "not a JSON object"),
    "null": (raw("null"), "not a JSON object"),
    "deep": (raw("[" * 500_000), "nested"),
    "deep objects": (raw('{"a":' * 100_000), "nested"),
    "long number": (raw('{"a":' + "9" * 100_000 + "}"), "digits"),
    "NaN": (raw('{"a":NaN}'), "NaN"),
    "name twice": (
        raw(
            '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"1",
        ),
        "twice",
    ),
    "key twice": (
        raw('{"a":{"dtype":"U8","dtype":"F32","shape":[1],"data_offsets":[0,1]}}', b"1"),
        "twice",
    ),
    "entry is a list": (made({"a": []}, 0), "needs dtype"),
    "no offsets": (made({"a": {"dtype": "F32", "shape": [1]}}, 4), "needs dtype"),
    "unknown dtype": (made({"a": entry("F33")}, 32), "known are"),
    "dtype is a list": (made({"a": entry([1])}, 32), "known are"),
    "shape is a number": (made({"a": {**entry(), "shape": 8}}, 32), "integers"),
    "shape of floats": (made({"a": entry(shape=(2.0, 4.0))}, 32), "integers"),
    "shape of booleans": (made({"a": entry(shape=(True, 8))}, 32), "integers"),
    "negative shape": (made({"a": entry(shape=(-2, -4))}, 32), "integers"),
    "shape overflows": (made({"a": entry(shape=(2**32, 2**32))}, 32), "overflows"),
    "shape overflows beside 0": (made({"a": entry(shape=(2**63, 2, 0), end=0)}, 0), "overflows"),
    "shape wraps to the right size": (made({"a": entry(shape=(2**61 + 1, 8))}, 32), "overflows"),
    "too many dimensions": (made({"a": entry(shape=[1] * 65, end=4)}, 4), "dimensions"),
    "one offset": (made({"a": {**entry(), "data_offsets": [0]}}, 32), "begin"),
    "three offsets": (made({"a": {**entry(), "data_offsets": [0, 32, 32]}}, 32), "begin"),
    "descending offsets": (made({"a": entry(begin=32, end=0)}, 32), "begin"),
    "negative offsets": (made({"a": entry(begin=-32, end=0)}, 32), "integers"),
    "huge offsets": (made({"a": entry(begin=2**64, end=2**64 + 32)}, 32), "hole"),
    "shape against bytes": (made({"a": entry(shape=(2, 5))}, 32), "make 40"),
    "dtype against bytes": (made({"a": entry("F64")}, 32), "make 64"),
    "half a byte": (made({"a": entry("F4", (3,), 0, 1)}, 1), "make 1.5"),
    "overlap": (made({"a": entry(), "b": entry(begin=16, end=48)}, 48), "overlaps"),
    "the same bytes": (made({"a": entry(), "b": entry()}, 32), "overlaps"),
    "hole": (made({"a": entry(), "b": entry(begin=40, end=72)}, 72), "hole"),
    "hole at the start": (made({"a": entry(begin=8, end=40)}, 40), "hole"),
    "out of range": (made({"a": entry()}, 31), "1 bytes are missing"),
    "data missing": (made({"a": entry()}, 0), "32 bytes are missing"),
    "half-written": (GOOD[: len(GOOD) // 2], "truncated"),
    "trailing bytes": (made({"a": entry()}, 40), "belong to no tensor"),
    "metadata is a list": (made({"__metadata__": [], "a": entry()}, 32), "strings to strings"),
    "metadata of numbers": (made({"__metadata__": {"a": 1}, "a": entry()}, 32), "strings"),
    "a lone surrogate": (
        raw('{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "Unicode",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(case: str, tmp_path: Path):
    content, why = HOSTILE[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why) as refused, Reader(path, "source"):
        pass
    message = str(refused.value)
    assert message.startswith(f"source: {path} is not a whole safetensors file: ")
    assert "again" in message  # the remedy
    assert len(message) < 600
    assert message.isprintable()


# What the reference implementation lets pass, and we do not: a name that stands twice (which of the
# two is meant?), zero elements of an impossible shape, and a pile of dimensions.
STRICTER = {"name twice", "key twice", "too many dimensions", "shape overflows beside 0"}


@pytest.mark.parametrize("case", sorted(set(HOSTILE) - STRICTER))
def test_safetensors_refuses_them_too(case: str):
    with pytest.raises(SafetensorError):
        deserialize(HOSTILE[case][0])


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry()},
        {"a": entry(extra=1)},
        {"": entry()},
        {"a": entry(shape=(), end=4)},
        {"z": entry("F32", (0, 7), 0, 0), "a": entry()},
        {"b": entry("U8", (1,), 0, 1), "a": entry("F32", (1,), 1, 5)},  # not aligned
        {"a": entry("F4", (4,), 0, 2)},
        {"__metadata__": {"x": "y"}},
        {},
    ],
)
def test_unusual_but_right(header: dict):
    data = max((e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"), default=0)
    text = json.dumps(header).encode()
    parsed = parse(text, data)
    deserialize(raw(text, bytes(data)))
    assert set(parsed.tensors) == set(header) - {"__metadata__"}


def test_all_that_safetensors_writes_is_read(tmp_path: Path):
    dtypes = [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.complex64, torch.uint16, torch.uint32, torch.uint64,
    ]  # fmt: skip
    given = {f"{d}.{n}": torch.zeros(n, 3).to(d) for d in dtypes for n in (0, 1, 5)}
    given["scalar"] = torch.tensor(2.5)
    path = tmp_path / "x.safetensors"
    save_file(given, path)
    with Reader(path) as file:
        assert set(file.header.tensors) == set(given)
        for name, tensor in given.items():
            read = file.tensor(name)
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(["F32", "U8", "BF16", "F8_E4M3", "I64"]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=6,
    ),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_built_headers_are_read_by_both(items, metadata):
    head, header = build(((n, d, tuple(s)) for n, (d, s) in items.items()), metadata)
    assert header.data_start % 8 == 0
    content = head + bytes(header.file_size - len(head))
    theirs = dict(deserialize(content))
    assert set(theirs) == set(items) == set(header.tensors)
    for name, tensor in header.tensors.items():
        assert tuple(theirs[name]["shape"]) == tensor.shape
        width = max(1, tensor.nbytes // max(tensor.numel, 1))
        assert tensor.offset % width == 0  # aligned
    assert header.metadata == metadata


@given(st.data())
@settings(max_examples=300)
def test_damage_is_refused_or_harmless(data):
    """One byte changed, or the end cut off: a ValueError, or what safetensors reads as well."""
    content = bytearray(save({"a": torch.ones(2, 3), "b": torch.arange(4), "c": torch.zeros(0)}))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        return
    try:
        header = parse(bytes(content[8 : 8 + length]), len(content) - 8 - length)
    except ValueError:
        return
    assert {name for name, _ in deserialize(bytes(content))} == set(header.tensors)


def test_names_that_would_play_with_the_terminal(tmp_path: Path):
    nasty = "a\x1b[31m\nred [bold]" + "x" * 5000
    text = json.dumps({nasty: entry(shape=(3,))})
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw(text, bytes(32)))
    with pytest.raises(ValueError, match="make 12") as refused, Reader(path):
        pass
    assert "\x1b" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_what_is_no_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"path: .* does not exist"):
        Reader(tmp_path / "missing")
    with pytest.raises(IsADirectoryError, match="is a directory"):
        Reader(tmp_path)
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        Reader(tmp_path / "pipe")


def test_a_file_cut_while_it_is_read(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100, 100)}, path)
    with Reader(path, "source") as file:
        with open(path, "r+b") as other:
            other.truncate(5000)
        with pytest.raises(OSError, match="became shorter"):
            file.tensor("a")
        with pytest.raises(OSError, match="changed while"):
            file.check_unchanged()


def test_safe_open_reads_what_we_build(tmp_path: Path):
    head, header = build([("w", "F32", (2, 2)), ("b", "U8", (3,))], {"format": "pt"})
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + bytes(header.file_size - len(head)))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("w").shape == (2, 2)
