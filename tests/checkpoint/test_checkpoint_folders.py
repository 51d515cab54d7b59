"""quantize_folder and load_folder: what is in a folder, in each convention, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import folders
import pytest
import torch
from folders import FILES, LAYER, QUANTIZED, weights
from safetensors.torch import load_file as their_load
from small_file import Ran

import blockscale as bs
from blockscale import checkpoint
from blockscale.checkpoint import CONVENTIONS

Cli = Callable[..., Ran]

#: Of each convention, the formats that it writes for a model like Llama.
WRITTEN = [
    (name, format)
    for name, convention in CONVENTIONS.items()
    if not convention.model_types
    for format in convention.storages
    if name != "blockscale" or format in ("mxfp8", "nvfp4", "mxfp6_e2m3")
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folders.make(tmp_path / "in")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {n: x for file in FILES for n, x in their_load(folder / file).items()}


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("convention", "format"), WRITTEN)
def test_what_is_written_is_read(convention: str, format: str, source: Path, tmp_path: Path):
    target = tmp_path / "out"
    manifest = checkpoint.quantize_folder(source, target, format, convention)
    loaded = checkpoint.load_folder(target)
    assert loaded.keys() == weights().keys()
    for name, x in weights().items():
        q = loaded[name]
        if name not in QUANTIZED:
            assert torch.equal(q, x)
            continue
        scale = q.global_scale if bs.formats[format].has_global_scale else None
        assert torch.equal(q, bs.quantize(x, format, global_scale=scale))
        assert q.dtype == torch.bfloat16
    assert manifest["summary"]["quantized"] == {format: len(QUANTIZED)}
    assert manifest["summary"]["others"] == len(weights()) - len(QUANTIZED)
    # the rest of the folder
    assert {p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()} == {
        *FILES, *(f"{file}.manifest.json" for file in FILES), "model.safetensors.index.json",
        "config.json", "tokenizer.json", "original/params.json", "blockscale.manifest.json",
        *(["hf_quant_config.json"] if convention == "modelopt" else []),
    }  # fmt: skip
    assert manifest["left_out"] == ["original/consolidated.00.pth", "pytorch_model.bin"]
    assert (target / "original" / "params.json").read_text() == "{1}"
    assert not list(tmp_path.glob("out.*"))
    # index and configuration
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {n: f for f in FILES for n in their_load(target / f)}
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in stored(target).values())
    quantization = config(target).pop("quantization_config")
    assert quantization["quant_method"] in CONVENTIONS[convention].methods
    left_alone = quantization.get("ignore") or quantization["modules_to_not_convert"]
    assert set(left_alone) == {"lm_head", f"{LAYER}mlp.gate", "model.embed_tokens"}
    assert {k: v for k, v in config(target).items() if k != "quantization_config"} == folders.CONFIG


NAMES = {
    ("modelopt", "nvfp4"): {
        "weight": ("uint8", (128, 64)), "weight_scale": ("float8_e4m3fn", (128, 8)),
        "weight_scale_2": ("float32", ()), "input_scale": ("float32", ()),
    },
    ("modelopt", "mxfp8"): {
        "weight": ("float8_e4m3fn", (128, 128)), "weight_scale": ("uint8", (128, 4)),
    },
    ("compressed-tensors", "nvfp4"): {
        "weight_packed": ("uint8", (128, 64)), "weight_scale": ("float8_e4m3fn", (128, 8)),
        "weight_global_scale": ("float32", (1,)), "input_global_scale": ("float32", (1,)),
    },
    ("compressed-tensors", "mxfp4"): {
        "weight_packed": ("uint8", (128, 64)), "weight_scale": ("uint8", (128, 4)),
    },
    ("compressed-tensors", "mxfp8"): {
        "weight": ("float8_e4m3fn", (128, 128)), "weight_scale": ("uint8", (128, 4)),
    },
    ("compressed-tensors", "fp8_128x128"): {
        "weight": ("float8_e4m3fn", (128, 128)), "weight_scale": ("float32", (1, 1)),
    },
    ("deepseek", "fp8_128x128"): {
        "weight": ("float8_e4m3fn", (128, 128)), "weight_scale_inv": ("float32", (1, 1)),
    },
    ("fine-grained", "mxfp8"): {
        "weight": ("float8_e4m3fn", (128, 128)), "weight_scale_inv": ("uint8", (128, 4)),
    },
}  # fmt: skip


@pytest.mark.parametrize(("convention", "format"), NAMES)
def test_names_dtypes_and_shapes(convention: str, format: str, source: Path, tmp_path: Path):
    checkpoint.quantize_folder(source, tmp_path / "out", format, convention)
    layer = f"{LAYER}self_attn.q_proj."
    found = {
        name.removeprefix(layer): (str(x.dtype).removeprefix("torch."), tuple(x.shape))
        for name, x in stored(tmp_path / "out").items()
        if name.startswith(layer)
    }
    assert found == NAMES[convention, format]


@pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors"])
def test_what_servers_fuse_has_one_scale(convention: str, source: Path, tmp_path: Path):
    checkpoint.quantize_folder(source, tmp_path / "out", "nvfp4", convention)
    loaded = checkpoint.load_folder(tmp_path / "out")
    scales = {n: loaded[n].global_scale.item() for n in QUANTIZED}
    q, k, v = (scales[f"{LAYER}self_attn.{name}_proj.weight"] for name in "qkv")
    assert q == k == v != scales[f"{LAYER}self_attn.o_proj.weight"]
    gate, up, down = (
        scales[f"{LAYER}mlp.experts.0.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    assert gate == up
    assert gate != down or convention == "compressed-tensors"
    if convention == "compressed-tensors":  # reciprocals are exact
        assert all(torch.frexp(torch.tensor(scale)).mantissa == 0.5 for scale in scales.values())
        expected = bs.quantize(weights()[f"{LAYER}mlp.experts.0.down_proj.weight"], "nvfp4")
        assert 1 <= down / expected.global_scale.item() < 2


@pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors"])
def test_weight_only(convention: str, source: Path, tmp_path: Path):
    target = tmp_path / "out"
    checkpoint.quantize_folder(source, target, "nvfp4", convention, activations="bfloat16")
    assert not [name for name in stored(target) if "input" in name and "norm" not in name]
    quantization = config(target)["quantization_config"]
    assert not quantization["config_groups"]["group_0"].get("input_activations")
    assert quantization.get("quant_algo") in (None, "W4A16_NVFP4")
    assert CONVENTIONS[convention].is_weight_only(quantization)


def test_one_file_without_an_index(tmp_path: Path):
    source = folders.make(tmp_path / "in")
    from safetensors.torch import save_file

    for path in source.glob("*.safetensors*"):
        path.unlink()
    save_file(weights(), source / "model.safetensors")
    checkpoint.quantize_folder(source, tmp_path / "out", "mxfp8", "modelopt")
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not list((tmp_path / "out").glob("*.index.json"))
    assert checkpoint.load_folder(tmp_path / "out").keys() == weights().keys()


def test_again_is_nothing_to_do(source: Path, tmp_path: Path):
    notes: list[str] = []

    def run() -> dict:
        notes.clear()
        return checkpoint.quantize_folder(
            *(source, tmp_path / "out", "nvfp4", "modelopt"),
            progress=lambda event: notes.append(event.note),
        )

    assert run() == run()
    assert all("is finished already" in note for note in notes)
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config.json in it is not what this command makes"):
        run()


# --- refusals -------------------------------------------------------------------------------------


def refused(ran: Ran, *words: str) -> None:
    assert ran.code == 2, ran.err
    assert ran.err.count("\n") == 1
    for word in words:
        assert word in ran.err


def test_bad_folders(source: Path, tmp_path: Path, blockscale: Cli):
    def run(place: Path = source, **options: str) -> Ran:
        options = {"format": "nvfp4", "convention": "modelopt", **options}
        flags = [f"--{key}={value}" for key, value in options.items()]
        return blockscale("quantize", place, tmp_path / "out", *flags)

    refused(run(convention="modelop"), "convention: got 'modelop'", "did you mean 'modelopt'?")
    refused(
        run(format="mxfp4"),
        "format: NVIDIA ModelOpt has no mxfp4; it has mxfp8, nvfp4, and mxfp4 is in convention "
        "'blockscale', 'compressed-tensors', 'deepseek-v4', 'gpt-oss'",
    )
    refused(run(convention="gpt-oss", format="mxfp4"), "is for models of type gpt_oss")
    refused(blockscale("quantize", source, source / "out", "--format", "mxfp8"), "lies in it")
    refused(
        blockscale(
            "quantize", source, tmp_path / "out", "--format", "mxfp8", "--convention", "modelopt",
            "--weight-only",
        ),
        "activations: NVIDIA ModelOpt has no mxfp8 of weights alone, only nvfp4",
    )  # fmt: skip
    index = source / "model.safetensors.index.json"
    before = index.read_text()
    places = json.loads(before)["weight_map"]
    for change, words in (
        ({**places, "model.missing.weight": FILES[0]}, "'model.missing.weight' is in model-00001"),
        ({**places, "model.missing.weight": "model-3.safetensors"}, "model-3.safetensors"),
        ({**places, "a": "../escape"}, "has no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": change}))
        refused(run(), "source: ", words, "fetch")
    index.write_text("{")
    refused(run(), "index.json", "fetch it again")
    index.write_text(before)
    (source / "other.safetensors.index.json").write_text(before)
    refused(run(), "has 2 indices")
    (source / "other.safetensors.index.json").unlink()
    (source / "config.json").unlink()
    refused(run(), "has no config.json")
    (source / "config.json").write_text("[]")
    refused(run(), "config.json", "not an object")
    (source / "config.json").write_text(json.dumps(folders.CONFIG))
    path = source / FILES[1]
    path.write_bytes(path.read_bytes()[:-7])
    refused(run(), FILES[1], "truncated", "fetch or save it again")
    index.unlink()
    refused(run(), "has 2 .safetensors files and no index")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("convention", "readers"),
    [
        ("blockscale", "for blockscale alone; servers and transformers read other conventions"),
        ("modelopt", "for vLLM, SGLang, TensorRT-LLM"),
    ],
)
def test_who_reads_it_is_said(
    convention: str, readers: str, source: Path, tmp_path: Path, blockscale: Cli
):
    how = "--format", "mxfp8", "--convention", convention
    ran = blockscale("quantize", source, tmp_path / "out", *how)
    assert ran.code == 0
    assert readers in ran.out
    ran = blockscale("convert-checkpoint", tmp_path / "out", tmp_path / "again", "--to", convention)
    assert readers in ran.out
    ran = blockscale("convert-checkpoint", tmp_path / "out", tmp_path / "bf16", "--to", "bf16")
    assert readers not in ran.out


def test_a_target_in_the_way(source: Path, tmp_path: Path, blockscale: Cli):
    target = tmp_path / "out"
    arguments = ("quantize", source, target, "--format", "mxfp8")
    target.write_text("")
    refused(blockscale(*arguments), "target: ", "is a file")
    target.unlink()
    target.mkdir()
    refused(blockscale(*arguments), "target: ", "is not what this command makes")
    target.rmdir()
    assert blockscale(*arguments).code == 0
    refused(blockscale("quantize", source, target, "--format", "nvfp4"), "target: ", "is not what")


def test_room_for_the_whole_folder_is_asked_for_first(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blockscale: Cli
):
    """Not for one file after the other: the last would be told of a full disk an hour later."""
    whole = sum((source / name).stat().st_size for name in FILES)
    usage = type(shutil.disk_usage(tmp_path))(10**9, 10**9, whole // 2 - 1000)  # enough for one
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    ran = blockscale("quantize", source, tmp_path / "out", "--format", "mxfp8")
    refused(ran, "target: ", f"{tmp_path / 'out'} needs", "free some space")
    assert not list(tmp_path.glob("out*/*.safetensors*"))
    usage = type(usage)(10**9, 10**9, whole)
    checkpoint.quantize_folder(source, tmp_path / "out", "mxfp8")


def test_a_quantized_folder_is_not_quantized(source: Path, tmp_path: Path, blockscale: Cli):
    """With ``--calibrate`` that is told before a text is looked for."""
    checkpoint.quantize_folder(source, tmp_path / "a", "nvfp4", "modelopt")
    with pytest.raises(ValueError, match=r"source: .* is quantized already"):
        checkpoint.quantize_folder(tmp_path / "a", tmp_path / "b", "mxfp8", "modelopt")
    given = "--format=nvfp4", "--convention=modelopt", "--calibrate=none.txt"
    ran = blockscale("quantize", tmp_path / "a", tmp_path / "b", *given)
    refused(ran, "source: ", "is quantized already, as its config.json says")


def test_files_and_folders_are_told_apart(source: Path, tmp_path: Path):
    with pytest.raises(IsADirectoryError, match="give it to quantize_folder"):
        checkpoint.quantize_file(source, tmp_path / "out")
    with pytest.raises(NotADirectoryError, match="give it to quantize_file"):
        checkpoint.quantize_folder(source / FILES[0], tmp_path / "out")
    with pytest.raises(ValueError, match=r"give it to checkpoint.load_folder"):
        checkpoint.load_file(source)
    with pytest.raises(ValueError, match=r"give it to checkpoint.load_file"):
        checkpoint.load_folder(source / FILES[0])


def test_unknown_quantization(source: Path, tmp_path: Path):
    folder = folders.make(tmp_path / "awq", quantization_config={"quant_method": "awq"})
    with pytest.raises(
        ValueError, match=r"path: its config.json has quant_method 'awq'; known are"
    ):
        checkpoint.load_folder(folder)
    state = {**weights(), f"{LAYER}self_attn.q_proj.weight_scale": torch.ones(128)}
    folder = folders.make(
        tmp_path / "fp8", state, quantization_config={"quant_method": "compressed-tensors"}
    )
    with pytest.raises(ValueError, match=r"q_proj.weight_scale' .F32 .128.. belongs to no tensor"):
        checkpoint.load_folder(folder)


def test_inspect(source: Path, tmp_path: Path, blockscale: Cli):
    checkpoint.quantize_folder(source, tmp_path / "q", "nvfp4", "modelopt")
    report = checkpoint.inspect_folder(tmp_path / "q", source)
    assert (report.manifest, report.measured) == ("intact", "source")
    recorded = checkpoint.inspect_folder(tmp_path / "q")
    assert recorded.measured == "manifest"
    for measured, told in zip(report.tensors, recorded.tensors, strict=True):
        assert measured.name == told.name
        assert (measured.error is None) == (measured.name not in QUANTIZED)
        if measured.error is not None:
            assert measured.error.to_json() == told.error.to_json()
    ran = blockscale("inspect", tmp_path / "q")
    assert ran.code == 0
    assert "10 tensors" in ran.out
    assert "manifest: all checksums match" in ran.out
    assert blockscale("inspect", source).code == 0
    path = tmp_path / "q" / FILES[1]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    ran = blockscale("inspect", tmp_path / "q")
    assert ran.code == 1
    assert "manifest: stale" in ran.out
    path.with_name(path.name + ".manifest.json").unlink()
    assert checkpoint.inspect_folder(tmp_path / "q").manifest == "missing"


def test_calibrated(source: Path, tmp_path: Path, blockscale: Cli):
    """By name; experts also by what others call their matrices, and unvisited ones by the rest."""
    amax = {
        f"{LAYER}self_attn.{name}_proj": size for name, size in zip("qkv", (4.0,) * 3, strict=True)
    }
    amax |= {f"{LAYER}feed_forward.experts.1.w1": 8.0, f"{LAYER}feed_forward.experts.2.w1": 16.0}
    amax |= {f"{LAYER}mlp.experts.0.down_proj": 2.0, "other": 1e9}
    target = tmp_path / "out"
    manifest = checkpoint.quantize_folder(source, target, "nvfp4", "modelopt", activations=amax)
    scales = {
        name.removeprefix(LAYER).removesuffix(".input_scale"): x.item() * 2688
        for name, x in stored(target).items()
        if name.endswith("input_scale")
    }
    assert scales == pytest.approx(
        {
            "self_attn.q_proj": 4, "self_attn.k_proj": 4, "self_attn.v_proj": 4,
            "self_attn.o_proj": 2688, "mlp.experts.0.gate_proj": 16,
            "mlp.experts.0.up_proj": 2688, "mlp.experts.0.down_proj": 2,
        }
    )  # fmt: skip
    assert manifest["unvisited_experts"] == [f"{LAYER}mlp.experts.0.gate_proj"]
    assert "2 layers (" in manifest["warnings"][0]
    assert "input_scale" not in manifest
    # what it was calibrated by is a part of the job
    again = checkpoint.quantize_folder(source, target, "nvfp4", "modelopt", activations=amax)
    assert again["summary"] == manifest["summary"]
    with pytest.raises(ValueError, match=r"target: .* was made with another activations"):
        checkpoint.quantize_folder(
            source, target, "nvfp4", "modelopt", activations={f"{LAYER}self_attn.q_proj": 1.0}
        )
    with pytest.raises(ValueError, match="activations: mxfp8 has no scale that could be"):
        checkpoint.quantize_folder(source, tmp_path / "no", "mxfp8", activations=amax)
    with pytest.raises(ValueError, match="activations: got 'float32'; choose one of 'bfloat16'"):
        checkpoint.quantize_folder(source, tmp_path / "no", "nvfp4", activations="float32")
    ran = blockscale(
        "quantize", source / FILES[0], tmp_path / "no", "--format=nvfp4", "--calibrate=x"
    )
    refused(ran, "calibrate: is for folders")
    ran = blockscale("quantize", source, tmp_path / "no", "--format=nvfp4", "--calibrate=none.txt")
    refused(ran, "calibrate: ", "none.txt")
    text = source / "tokenizer.json"
    (tmp_path / "file").touch()
    ran = blockscale("quantize", source, tmp_path / "file", "--format=nvfp4", f"--calibrate={text}")
    refused(ran, "target: ", "is a file")  # said before a model runs


@pytest.mark.parametrize("scaling", ["four_over_six", "search"])
@pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors"])
def test_other_scalings(scaling: str, convention: str, source: Path, tmp_path: Path):
    lowest = []
    for name in ("amax", scaling):
        target = tmp_path / name
        manifest = checkpoint.quantize_folder(source, target, "nvfp4", convention, scaling=name)
        lowest.append(manifest["summary"]["lowest"][0])
    assert lowest[1] > lowest[0] + 0.5
    loaded = checkpoint.load_folder(tmp_path / scaling)
    for name in QUANTIZED:
        scale = loaded[name].global_scale
        expected = bs.quantize(weights()[name], "nvfp4", global_scale=scale, scaling=scaling)
        assert torch.equal(loaded[name], expected)
        if "o_proj" in name and convention == "modelopt":
            alone = bs.quantize(weights()[name], "nvfp4", scaling=scaling)
            assert torch.equal(alone, loaded[name])
    with pytest.raises(ValueError, match=r"target: .* was made with another scaling"):
        checkpoint.quantize_folder(source, tmp_path / "amax", "nvfp4", convention, scaling=scaling)


def test_scalings_that_cannot_be(source: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="scaling: 'search' is for nvfp4, not mxfp8"):
        checkpoint.quantize_folder(source, tmp_path / "no", "mxfp8", scaling="search")
    with pytest.raises(ValueError, match="scaling: got 'ms_eden'; choose one of 'amax'"):
        checkpoint.quantize_folder(source, tmp_path / "no", "nvfp4", scaling="ms_eden")


@pytest.mark.parametrize(
    ("head", "other"),
    [
        ("cls.predictions.decoder", "cls.predictions.bias"),
        ("lm_head.decoder", "lm_head.dense.weight"),
    ],
)
def test_tied_heads_are_left_alone(tmp_path, head, other):
    """They have no tensor in the file, and readers would look for their scales."""
    state = {"layer.weight": torch.randn(64, 64), other: torch.randn(64)}
    source = folders.make(tmp_path / "in", state)
    checkpoint.quantize_folder(source, tmp_path / "out", "mxfp8", "compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert head in config["quantization_config"]["ignore"]
