"""NVFP4 files as servers read them: input_scale, and one global scale for what they fuse."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file as their_load
from safetensors.torch import save_file
from small_file import Ran
from torch import Tensor

import blockscale as bs
from blockscale import checkpoint, reference
from blockscale.checkpoint import fused
from blockscale.fused_names import FUSED, fused_with

Cli = Callable[..., Ran]
LAYER = "model.layers.0."
NAMES = {
    "self_attn.q_proj": 1.0, "self_attn.k_proj": 0.2, "self_attn.v_proj": 3.0,
    "self_attn.o_proj": 0.7, "mlp.gate_proj": 0.1, "mlp.up_proj": 0.3, "mlp.down_proj": 5.0,
    "mlp.experts.0.w1": 2.0, "mlp.experts.0.w2": 0.4, "mlp.experts.0.w3": 0.5,
    "mlp.experts.1.w1": 0.6, "mlp.experts.1.w3": 0.9,
}  # fmt: skip
GROUPS = [
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.experts.0.w1", "mlp.experts.0.w3"),
    ("mlp.experts.1.w1", "mlp.experts.1.w3"),
]


def weights() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        f"{LAYER}{name}.weight": (size * torch.randn(48, 64, generator=g)).bfloat16()
        for name, size in NAMES.items()
    }


def split(folder: Path, index: bool = True) -> list[Path]:
    """Two files, q and gate in the first, k, v and up in the second; and their index."""
    files: list[dict[str, Tensor]] = [{}, {}]
    for name, x in weights().items():
        files[any(part in name for part in ("k_proj", "v_proj", "up_proj"))][name] = x
    paths = [folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for path, content in zip(paths, files, strict=True):
        save_file(content, path)
    places = {n: p.name for p, f in zip(paths, files, strict=True) for n in f}
    if index:
        text = json.dumps({"metadata": {}, "weight_map": places})
        (folder / "model.safetensors.index.json").write_text(text)
    return paths


def check(made: dict[str, Tensor], loaded: dict[str, Tensor]) -> None:
    """One scale for each group, that of its largest amax, and each weight quantized with it."""
    scales = {name: made[f"{LAYER}{name}.weight_scale_2"] for name in NAMES}
    groups = [*GROUPS, *((n,) for n in NAMES if not any(n in group for group in GROUPS))]
    for group in groups:
        together = torch.cat([weights()[f"{LAYER}{name}.weight"] for name in group])
        expected = reference.global_scale(together, bs.formats["nvfp4"])
        for name in group:
            assert torch.equal(scales[name], expected)
            stored, x = f"{LAYER}{name}.weight", weights()[f"{LAYER}{name}.weight"]
            assert torch.equal(loaded[stored], bs.quantize(x, "nvfp4", global_scale=expected))
            given = made[f"{LAYER}{name}.input_scale"]
            assert (given.dtype, given.shape, given.item()) == (torch.float32, (), 1.0)
            # as vLLM reads it: the largest scale of the group, for all of it
            largest = torch.stack([scales[n] for n in group]).amax()
            alone = loaded[stored].dequantize(torch.float32)
            assert torch.equal(_values(made, stored, largest), alone)
            # an element is off by half of its step at most, or cut: 6 % of its block's largest
            limit = alone.abs().reshape(48, 4, 16).amax(-1, keepdim=True).expand(-1, -1, 16)
            assert bool(((alone - x.float()).abs() <= 0.18 * limit.reshape(48, 64) + 1e-30).all())


def _values(made: dict[str, Tensor], name: str, scale_2: Tensor) -> Tensor:
    data, blocks = made[name].int(), made[f"{name}_scale"].float()
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    elements = table[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return elements * blocks.repeat_interleave(16, -1) * scale_2


def test_what_is_fused_has_one_scale(tmp_path: Path):
    save_file(weights(), tmp_path / "in")
    manifest = checkpoint.quantize_file(tmp_path / "in", tmp_path / "out", "nvfp4")
    check(their_load(tmp_path / "out"), checkpoint.load_file(tmp_path / "out"))
    assert manifest["input_scale"] == 1.0
    assert manifest["warnings"] == []


def test_what_is_fused_lies_in_several_files(tmp_path: Path):
    made: dict[str, Tensor] = {}
    loaded: dict[str, Tensor] = {}
    for path in split(tmp_path):
        target = tmp_path / f"out-{path.name}"
        checkpoint.quantize_file(path, target, "nvfp4")
        made |= their_load(target)
        loaded |= checkpoint.load_file(target)
    check(made, loaded)


def test_another_neighbour_is_another_job(tmp_path: Path):
    first, second = split(tmp_path)
    target = tmp_path / "out"
    child = os.fork()
    if not child:
        os._exit(_stop_half_way(first, target))
    assert os.waitpid(child, 0)[1]
    other = {n: 9 * x for n, x in weights().items() if "k_proj" in n or "v_proj" in n}
    save_file(other | {n: x for n, x in weights().items() if "up_proj" in n}, second)
    notes: list[str] = []
    checkpoint.quantize_file(first, target, "nvfp4", progress=lambda e: notes.append(e.note))
    assert notes[-1] == "resumed: 8 tensors are finished"  # q_proj is not
    largest = other[f"{LAYER}self_attn.v_proj.weight"]
    scale = their_load(target)[f"{LAYER}self_attn.q_proj.weight_scale_2"]
    assert torch.equal(scale, reference.global_scale(largest, bs.formats["nvfp4"]))


def _stop_half_way(source: Path, target: Path) -> int:
    def stop(event: checkpoint.Progress) -> None:
        if event.tensors == 9:
            os._exit(9)

    checkpoint.quantize_file(source, target, "nvfp4", progress=stop)
    return 0


def test_a_part_of_a_group_is_refused_where_the_rest_is_unknown(tmp_path: Path, blockscale: Cli):
    first, second = split(tmp_path, index=False)
    ran = blockscale("quantize", first, tmp_path / "out", "--format", "nvfp4")
    assert ran.code == 2
    assert "index.json and its other files beside it" in ran.err
    assert blockscale("quantize", first, tmp_path / "out", "--format", "mxfp8").code == 0
    index = tmp_path / "model.safetensors.index.json"
    for text, why in (("[", "is not JSON"), ("{}", "no weight_map")):
        index.write_text(text)
        with pytest.raises(ValueError, match=why):
            checkpoint.quantize_file(first, tmp_path / "two", "nvfp4")
    split(tmp_path)
    second.unlink()
    with pytest.raises(FileNotFoundError, match="00002-of-00002"):
        checkpoint.quantize_file(first, tmp_path / "two", "nvfp4")


def test_a_group_in_part_is_told(tmp_path: Path, blockscale: Cli):
    save_file(weights(), tmp_path / "in")
    arguments = "--format", "nvfp4", "--exclude", "*.k_proj.*"
    ran = blockscale("quantize", tmp_path / "in", tmp_path / "out", *arguments)
    assert ran.code == 0
    assert "is quantized, but not 'model.layers.0.self_attn.k_proj.weight' (excluded" in ran.out
    assert "input_scale 1, not calibrated" in ran.out
    assert "--calibrate FILE" in ran.out
    made = their_load(tmp_path / "out")
    assert f"{LAYER}self_attn.k_proj.input_scale" not in made
    q, v = (made[f"{LAYER}self_attn.{n}_proj.weight_scale_2"] for n in "qv")
    assert torch.equal(q, v)


def test_no_group_but_for_nvfp4(tmp_path: Path):
    save_file(weights(), tmp_path / "in")
    manifest = checkpoint.quantize_file(tmp_path / "in", tmp_path / "out", "mxfp8")
    assert "input_scale" not in manifest
    assert not any("input_scale" in name for name in their_load(tmp_path / "out"))


def test_the_table():
    members = [member for group in FUSED for member in group]
    assert len(set(members)) == len(members)
    assert fused_with("a.w3") == ("a.w1", "a.w3")
    assert fused_with("a.w2.weight") == ("a.w2.weight",)
    assert fused_with("h.0.mlp.c_fc_1.weight") == ("h.0.mlp.c_fc_0.weight", "h.0.mlp.c_fc_1.weight")
    assert fused_with("mlp.fc11.weight") == ("mlp.fc11.weight", "mlp.fc12.weight")
    assert fused_with("x.key.weight") == ("x.query.weight", "x.key.weight", "x.value.weight")
    assert fused_with("not_q_proj.weight") == ("not_q_proj.weight",)


def test_amax_of_a_group_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "_CHUNK", 100)
    save_file(weights(), tmp_path / "in")
    checkpoint.quantize_file(tmp_path / "in", tmp_path / "out", "nvfp4")
    check(their_load(tmp_path / "out"), checkpoint.load_file(tmp_path / "out"))


# --- save_file and load_file ----------------------------------------------------------------------


def test_saved_weights_have_an_input_scale(tmp_path: Path):
    q = bs.quantize(torch.randn(32, 64), "nvfp4")
    column = bs.quantize(torch.randn(32, 64), "nvfp4", -2)  # stored as its transpose
    checkpoint.save_file({"a.weight": q, "b": q, "c": column, "weight": q.mT}, tmp_path / "x")
    made = their_load(tmp_path / "x")
    found = {name for name in made if "input_scale" in name}
    assert found == {"a.input_scale", "b_input_scale", "c_input_scale", "input_scale"}
    assert all(made[name].shape == () and made[name] == 1 for name in found)
    assert checkpoint.load_file(tmp_path / "x").keys() == {"a.weight", "b", "c", "weight"}


def test_a_calibrated_input_scale_comes_through(tmp_path: Path):
    state = {
        "a.weight": bs.quantize(torch.randn(32, 64), "nvfp4"),
        "a.input_scale": torch.tensor(0.25),
    }
    for path in (tmp_path / "x", tmp_path / "y"):
        checkpoint.save_file(state, path)
        assert their_load(path)["a.input_scale"] == 0.25
        state = checkpoint.load_file(path)
        assert state["a.input_scale"] == 0.25
    # or if another program put it where ours was
    checkpoint.save_file({"a.weight": state["a.weight"]}, path)
    content = bytearray(path.read_bytes())
    with checkpoint.reader.Reader(path) as file:
        at = file.header.tensors["a.input_scale"].offset
    content[at : at + 4] = b"\x00\x00\x00\x3f"  # 0.5
    path.write_bytes(content)
    assert checkpoint.load_file(path)["a.input_scale"] == 0.5


def test_files_without_input_scale_are_read(tmp_path: Path):
    """Those of earlier versions."""
    q = bs.quantize(torch.randn(32, 64), "nvfp4")
    checkpoint.save_file({"w": q}, tmp_path / "x")
    made = their_load(tmp_path / "x")
    with checkpoint.reader.Reader(tmp_path / "x") as file:
        metadata = json.loads(file.header.metadata["blockscale"])
    del made["w_input_scale"], metadata["tensors"]["w"]["input_scale"]
    save_file(made, tmp_path / "y", {"blockscale": json.dumps(metadata)})
    assert torch.equal(checkpoint.load_file(tmp_path / "y")["w"], q)


def test_save_file_warns_of_differing_scales(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    """As ``quantize_`` makes them, a layer at a time: a server would take the largest for all."""
    weights = {n: torch.randn(32, 64) * s for n, s in (("q_proj", 1.0), ("k_proj", 4.0))}
    names = {name: f"a.{name}.weight" for name in weights}
    alike = {names[n]: bs.quantize(w, "nvfp4", global_scale=0.01) for n, w in weights.items()}
    checkpoint.save_file(alike, tmp_path / "alike")
    assert not recwarn.list
    each = {names[n]: bs.quantize(w, "nvfp4") for n, w in weights.items()}
    with pytest.warns(UserWarning, match="a.q_proj.weight.*vLLM takes the largest"):
        checkpoint.save_file(each, tmp_path / "each")
