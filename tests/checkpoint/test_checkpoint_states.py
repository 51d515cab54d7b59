"""save_file and load_file: what goes in comes out, and other tools can read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file as their_load
from safetensors.torch import save_file as their_save

import blockscale as bs
from blockscale import checkpoint


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def same(a: bs.ScaledTensor, b: torch.Tensor) -> bool:
    """Bytes and meaning; whatever the layout of the scales was."""
    return (
        isinstance(b, bs.ScaledTensor)
        and b.layout_name == "compact"
        and torch.equal(a.to_layout("compact"), b)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("format", list(bs.formats))
def test_round_trip(format: str, axis: int, dtype: torch.dtype, tmp_path: Path):
    x = randn(256, 384, dtype=dtype)
    q = bs.quantize(x, format, axis)
    state = {
        "q": q,
        "turned": q.mT,
        "padded": bs.quantize(x[:100, :100].contiguous(), format, axis, pad=True),
        "batch": bs.quantize(randn(2, 3, 128, 256, dtype=dtype), format, axis),
        "plain": x,
    }
    path = tmp_path / "x.safetensors"
    checkpoint.save_file(state, path)
    loaded = checkpoint.load_file(path)
    assert set(loaded) == set(state)
    for name in ("q", "turned", "padded", "batch"):
        assert same(state[name], loaded[name]), name
        assert loaded[name].dtype == dtype
    assert torch.equal(loaded["plain"], x)
    # memory order too: FP4 columns stay contraction-major, a transposed weight stays one
    for name in ("q", "turned", "batch"):
        assert loaded[name].qdata.stride() == state[name].qdata.stride(), name
    again = tmp_path / "y.safetensors"
    checkpoint.save_file(loaded, again)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("format", "layout"),
    [("mxfp8", "tcgen05"), ("nvfp4", "tcgen05"), ("fp8_1x128", "sm90"), ("mxfp8", "packed")],
)
@pytest.mark.parametrize("axis", [-1, -2])
def test_every_layout_is_stored_compact(format: str, layout: str, axis: int, tmp_path: Path):
    q = bs.quantize(randn(200, 256)[: 128 if axis == -2 else 200], format, axis, layout=layout)
    path = tmp_path / "x.safetensors"
    checkpoint.save_file({"q": q}, path)
    assert same(q, checkpoint.load_file(path)["q"])
    plain = tmp_path / "y.safetensors"
    checkpoint.save_file({"q": q.to_layout("compact")}, plain)
    assert plain.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("format", "axis", "k_major"),
    [("mxfp8", -1, False), ("mxfp8", -2, False), ("mxfp8", -2, True), ("mxfp4", -2, False)],
)
def test_grouped(format: str, axis: int, k_major: bool, turned: bool, tmp_path: Path):
    offsets = torch.tensor([40, 40, 200], dtype=torch.int32)
    q = bs.quantize(randn(200, 128), format, axis, offsets=offsets, k_major=k_major)
    q = q.mT if turned else q
    checkpoint.save_file({"q": q}, tmp_path / "x.safetensors")
    loaded = checkpoint.load_file(tmp_path / "x.safetensors")["q"]
    assert same(q, loaded)
    assert loaded.k_grouped == q.k_grouped
    assert torch.equal(loaded.offsets, offsets)
    if q.k_grouped:  # kernels read the contraction where it is contiguous
        assert loaded.qdata.stride() == q.qdata.stride()


def test_other_tools_see_the_names_of_the_field(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    x = randn(128, 256)
    state = {"a.weight": bs.quantize(x, "mxfp8"), "b.weight": bs.quantize(x, "nvfp4")}
    checkpoint.save_file(state, path, {"format": "pt"})
    theirs = their_load(path)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in theirs.items()} == {
        "a.weight": (torch.float8_e4m3fn, (128, 256)),
        "a.weight_scale": (torch.uint8, (128, 8)),
        "b.weight": (torch.uint8, (128, 128)),
        "b.weight_scale": (torch.float8_e4m3fn, (128, 16)),
        "b.weight_scale_2": (torch.float32, ()),
        "b.input_scale": (torch.float32, ()),
    }
    # the multiplier, as ModelOpt has it: fp4 * scale * scale_2
    nibbles = torch.stack((theirs["b.weight"] & 15, theirs["b.weight"] >> 4), -1).flatten(-2).long()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scale = theirs["b.weight_scale"].float().repeat_interleave(16, -1)
    values = torch.cat((table, -table))[nibbles] * scale * theirs["b.weight_scale_2"]
    assert torch.equal(values, state["b.weight"].dequantize(torch.float32))
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    described = json.loads(metadata["blockscale"])
    assert described["tensors"]["a.weight"] == {
        "format": "mxfp8", "axis": -1, "shape": [128, 256], "dtype": "bfloat16",
        "layout": "compact",
    }  # fmt: skip


def test_a_model(tmp_path: Path):
    model = torch.nn.Linear(64, 32)
    state = {**model.state_dict(), "q": bs.quantize(model.weight, "mxfp4")}
    state["view"] = model.weight.detach().t()[:, ::2]  # neither contiguous nor alone in its memory
    checkpoint.save_file(state, tmp_path / "x")
    loaded = checkpoint.load_file(tmp_path / "x")
    model.load_state_dict({k: loaded[k] for k in ("weight", "bias")})
    assert torch.equal(loaded["view"], state["view"])
    assert same(state["q"], loaded["q"])


def test_files_of_others_are_plain_tensors(tmp_path: Path):
    state = {"w": randn(3, 5), "w_scale": torch.ones(2)}
    their_save(state, tmp_path / "x")
    loaded = checkpoint.load_file(tmp_path / "x")
    assert all(torch.equal(loaded[k], v) for k, v in state.items())
    checkpoint.save_file({}, tmp_path / "empty")
    assert checkpoint.load_file(tmp_path / "empty") == {}


@pytest.mark.parametrize(
    ("state", "error", "why"),
    [
        (torch.zeros(2), TypeError, r"tensors: got Tensor; expected a dictionary .*: tensor}"),
        (torch.nn.Linear(2, 2), TypeError, r"got Linear; expected .* as model\.state_dict\(\)"),
        ([("w", torch.zeros(2))], TypeError, "tensors: got list; expected a dictionary"),
        ({"w": 1.0}, TypeError, "tensors: 'w' is float"),
        ({"w": torch.eye(2).to_sparse()}, TypeError, "dense"),
        ({3: torch.eye(2)}, ValueError, "name"),
        ({"__metadata__": torch.eye(2)}, ValueError, "rename"),
        ({"w": torch.zeros(2, dtype=torch.complex128)}, TypeError, "cast it"),
        ({"w": bs.quantize(randn(32, 32)), "w_scale": torch.eye(2)}, ValueError, "'w_scale'"),
    ],
)
def test_what_cannot_be_saved(state, error, why, tmp_path: Path):
    with pytest.raises(error, match=why):
        checkpoint.save_file(state, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x"
    checkpoint.save_file({"w": torch.zeros(3)}, path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"path: .*No space left.*free some space"):
        checkpoint.save_file({"w": torch.ones(3)}, path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError, match="path: the directory"):
        checkpoint.save_file({}, tmp_path / "no" / "x")
    with pytest.raises(IsADirectoryError, match="path"):
        checkpoint.save_file({}, tmp_path)


DESCRIPTION = {
    "format": "mxfp8",
    "axis": -1,
    "shape": [4, 32],
    "dtype": "float32",
    "layout": "compact",
}


@pytest.mark.parametrize(
    "change",
    [
        {"format": "mxfp7"}, {"format": ["mxfp8"]}, {"axis": 0}, {"axis": True}, {"shape": [4, 64]},
        {"shape": [-4, 32]}, {"shape": [4.0, 32]}, {"shape": [2**62, 2**62]}, {"shape": []},
        {"shape": "4,32"}, {"dtype": "int8"}, {"layout": "tcgen05"}, {"transposed": 1.5},
        {"groups": "rows"}, {"groups": 3}, {"format": "nvfp4"}, {"format": "fp8_1x128"},
        {"axis": -2},
    ],
)  # fmt: skip
def test_a_wrong_description_is_refused(change: dict, tmp_path: Path):
    path = tmp_path / "x"
    q = bs.quantize(randn(4, 32, dtype=torch.float32), "mxfp8")
    parts = {"w": q.qdata, "w_scale": q.scale.view(torch.uint8)}

    def save(description: object) -> None:
        their_save(parts, path, {"blockscale": json.dumps({"version": 1, "tensors": description})})

    save({"w": DESCRIPTION})
    assert torch.equal(checkpoint.load_file(path)["w"], q)
    save({"w": {**DESCRIPTION, **change}})
    for read in (checkpoint.load_file, checkpoint.inspect_file):
        with pytest.raises(ValueError, match=r"path: .*'blockscale' is damaged.*again"):
            read(path)


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "{}", '{"version": 2, "tensors": {}}', '{"version": 1, "tensors": []}',
        '{"version": 1, "tensors": {"w": []}}',
        f'{{"version": 1, "tensors": {{"gone": {json.dumps(DESCRIPTION)}}}}}',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_description_is_refused(text: str, tmp_path: Path):
    their_save({"w": torch.zeros(4, 32)}, tmp_path / "x", {"blockscale": text})
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.load_file(tmp_path / "x")


def test_it_is_found_as_an_attribute():
    assert bs.checkpoint.save_file is checkpoint.save_file


def test_storages_can_be_resized(tmp_path: Path):
    """Of what is saved, and of what is loaded: FSDP resizes those of parameters."""
    state = {"q": bs.quantize(torch.randn(32, 64), "nvfp4"), "x": torch.ones(3)}
    checkpoint.save_file(state, tmp_path / "x")
    for each in (state, checkpoint.load_file(tmp_path / "x")):
        q = each["q"]
        for t in (q.qdata, q.scale, q.global_scale, each["x"]):
            t.untyped_storage().resize_(0)


def test_tied_weights_are_loaded_untied(tmp_path: Path):
    """As the documentation says: a name each, and two tensors until the model ties them."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(8, 64)
            self.lm_head = torch.nn.Linear(64, 8, bias=False)
            self.lm_head.weight = self.embed.weight

    model = Model()
    checkpoint.save_file(model.state_dict(), tmp_path / "tied")
    state = checkpoint.load_file(tmp_path / "tied")
    assert set(state) == {"embed.weight", "lm_head.weight"}
    model.load_state_dict(state, assign=True)
    assert model.lm_head.weight is not model.embed.weight
    assert torch.equal(model.lm_head.weight, model.embed.weight)


@pytest.mark.slow
def test_torch_load_needs_the_import(tmp_path: Path):
    torch.save({"w": bs.quantize(torch.ones(2, 32), "mxfp8")}, tmp_path / "state.pt")
    load = "import torch; print(type(torch.load('state.pt')['w']).__name__)"
    for code, printed in (load, ""), (f"import blockscale; {load}", "ScaledTensor\n"):
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (ran.stdout, ran.returncode == 0) == (printed, bool(printed))


def test_the_file_of_fp8_block(tmp_path: Path):
    """What the documentation names as its format."""
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    checkpoint.save_file(model.state_dict(), tmp_path / "in")
    checkpoint.quantize_file(tmp_path / "in", tmp_path / "q", "fp8_128x128")
    recipe, x = bs.Recipe("fp8_block"), torch.randn(3, 128)
    other = bs.quantize_(torch.nn.Sequential(torch.nn.Linear(128, 128)), recipe)
    other.load_state_dict(checkpoint.load_file(tmp_path / "q"))
    assert torch.equal(other(x), bs.quantize_(model, recipe)(x))
