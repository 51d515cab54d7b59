"""Headers, indices and configurations with bytes changed: each is read, or refused in a sentence.

``MUTATIONS=1000000 pytest tests/checkpoint/test_checkpoint_mutations.py`` tries more of them.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import folders
import pytest

from blockscale import checkpoint
from blockscale.checkpoint.files import Files
from blockscale.checkpoint.folders import read_config
from blockscale.checkpoint.reading import descriptions_of

COUNT = int(os.environ.get("MUTATIONS", "6000"))
#: What JSON is made of, and names and numbers that mean something here.
TOKENS = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-1", b"0", b"1e400", b"2",
    b"99999999999999999999", b"\xff", b"\x00", b"\\u0000", b"weight", b"_scale", b"_packed", b"U8",
    b"F32", b"F8_E4M3", b"F8_E8M0", b"I8", b"modelopt", b"fp8", b"compressed-tensors", b"mxfp4",
    b"quant_method", b"config_groups", b"blockscale", b'"shape":[]', b"../", b"data_offsets",
)  # fmt: skip


def mutate(text: bytes, rng: random.Random) -> bytes:
    """A few bytes or tokens put in, taken out or doubled."""
    out = bytearray(text)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, end = rng.randrange(len(out) + 1), rng.randrange(12)
        kind = rng.randrange(5)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at:at] = rng.choice(TOKENS)
        elif kind == 2:
            del out[at : at + end]
        elif kind == 3:
            out[at : at + end] = rng.choice(TOKENS)
        else:
            out[at:at] = out[at : at + 40]
    return bytes(out)


@pytest.mark.parametrize(
    ("convention", "format"),
    [("blockscale", "nvfp4"), ("modelopt", "nvfp4"), ("compressed-tensors", "mxfp4")],
)
def test_read_or_refused(convention: str, format: str, tmp_path: Path):
    folders.make(tmp_path / "in")
    folder = tmp_path / "q"
    checkpoint.quantize_folder(tmp_path / "in", folder, format, convention)
    names = ("config.json", "model.safetensors.index.json", folders.FILES[0], "repaired header")
    whole = {name: (folder / name).read_bytes() for name in names[:3]}
    rng, read, slowest = random.Random(0), 0, 0.0
    for _ in range(COUNT // 3):
        name = rng.choice(names)
        target = folder / (folders.FILES[0] if name == "repaired header" else name)
        content = whole[target.name]
        if target.suffix == ".json":
            changed = mutate(content, rng)
        else:
            length = int.from_bytes(content[:8], "little")
            header = mutate(content[8 : 8 + length], rng)
            if name == "repaired header":  # so that more than its length is looked at
                length = len(header)
            changed = length.to_bytes(8, "little") + header + content[8 + length :]
        target.write_bytes(changed)
        start, told = time.perf_counter(), "path: "
        try:
            with Files(folder) as files:
                descriptions_of(files, read_config(files, "path"), "path")
            read += 1
        except (ValueError, OSError) as error:
            told = str(error)
        assert told.startswith("path: ")
        assert "\n" not in told
        slowest = max(slowest, time.perf_counter() - start)
        target.write_bytes(content)
    assert read > COUNT // 60  # not everything that changes is wrong
    assert slowest < 5
    assert checkpoint.load_folder(folder)


def test_hostile_configurations(tmp_path: Path):
    """Values of other types where objects, lists and names are expected."""
    folders.make(tmp_path / "in")
    values = [None, 3, "x", [], {}, [None], {"quant_method": None}, {"quant_method": ["modelopt"]}]
    values += [{"quant_method": "modelopt", "config_groups": value} for value in (3, [], {"a": 3})]
    for value in values:
        path = tmp_path / "in" / "config.json"
        path.write_text(json.dumps({**folders.CONFIG, "quantization_config": value, "dtype": [3]}))
        told = "path: "
        try:
            checkpoint.load_folder(tmp_path / "in")
        except ValueError as error:
            told = str(error)
        assert told.startswith("path: ")
        with pytest.raises(ValueError, match="source: "):
            checkpoint.convert_folder(tmp_path / "in", tmp_path / "out", "modelopt")
