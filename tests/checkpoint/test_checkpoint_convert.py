"""convert_folder: the same values in another convention, and what has to be rounded again."""

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
from safetensors.torch import save_file
from small_file import Ran
from torch import Tensor

import blockscale as bs
from blockscale import checkpoint
from blockscale.checkpoint import CONVENTIONS

Cli = Callable[..., Ran]

GENERAL = [name for name, each in CONVENTIONS.items() if not each.model_types]
#: Format, a convention that has it, and another one, or "bf16".
PAIRS = [
    (format, a, b)
    for format in ("nvfp4", "mxfp8", "mxfp4", "fp8_128x128")
    for a in GENERAL
    if format in CONVENTIONS[a].storages
    for b in (*GENERAL, "bf16")
    if b == "bf16" or format in CONVENTIONS[b].storages
]
Q = f"{LAYER}self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Folders of each convention and format, made once."""
    place = tmp_path_factory.mktemp("made")
    source = folders.make(place / "in")

    def make(convention: str, format: str) -> Path:
        folder = place / f"{convention}-{format}"
        if not folder.exists():
            checkpoint.quantize_folder(source, folder, format, convention)
        return folder

    return make


def values(folder: Path) -> dict[str, Tensor]:
    return {
        name: x.dequantize(torch.float32) if isinstance(x, bs.ScaledTensor) else x
        for name, x in checkpoint.load_folder(folder).items()
    }


def tensors(folder: Path) -> dict[str, Tensor]:
    return {n: x for path in folder.glob("*.safetensors") for n, x in their_load(path).items()}


@pytest.mark.parametrize(("format", "before", "after"), PAIRS)
def test_the_same_codes_and_scales(
    format: str, before: str, after: str, made: Callable[[str, str], Path], tmp_path: Path
):
    source, target = made(before, format), tmp_path / "out"
    manifest = checkpoint.convert_folder(source, target, after)
    was, now = checkpoint.load_folder(source), checkpoint.load_folder(target)
    assert was.keys() == now.keys() == weights().keys()
    exact = format != "nvfp4" or before == "compressed-tensors" or after != "compressed-tensors"
    for name in QUANTIZED:
        if after == "bf16":
            assert now[name].dtype == torch.bfloat16
            assert torch.equal(now[name], was[name].dequantize())
            continue
        assert torch.equal(now[name].qdata, was[name].qdata)
        assert torch.equal(now[name].scale, was[name].scale)
        if exact:
            assert torch.equal(now[name], was[name])
        else:
            torch.testing.assert_close(
                now[name].global_scale, was[name].global_scale, rtol=2**-23, atol=0
            )
    summary = manifest["summary"]
    assert summary["rounded_again"] == 0
    assert summary["rounded_reciprocals"] == (0 if exact else len(QUANTIZED))
    if after == "bf16":
        assert "quantization_config" not in json.loads((target / "config.json").read_text())
        assert summary["dequantized"] == len(QUANTIZED)
    elif before == after:
        ours, theirs = tensors(target), tensors(source)
        assert all(torch.equal(ours[name], x) for name, x in theirs.items())


def test_there_and_back(made: Callable[[str, str], Path], tmp_path: Path):
    """compressed-tensors' scales are powers of two, so nothing is lost anywhere."""
    source = made("compressed-tensors", "nvfp4")
    checkpoint.convert_folder(source, tmp_path / "a", "modelopt")
    checkpoint.convert_folder(tmp_path / "a", tmp_path / "b", "blockscale")
    checkpoint.convert_folder(tmp_path / "b", tmp_path / "c", "compressed-tensors")
    for file in (*FILES, "config.json", "model.safetensors.index.json"):
        assert (tmp_path / "c" / file).read_bytes() == (source / file).read_bytes()


def test_other_formats(made: Callable[[str, str], Path], tmp_path: Path):
    """MXFP4 is exact in MXFP8; anything else is rounded again, and measured."""
    source = made("compressed-tensors", "mxfp4")
    manifest = checkpoint.convert_folder(source, tmp_path / "a", "modelopt", "mxfp8")
    assert manifest["summary"]["rounded_again"] == 0
    was, now = values(source), values(tmp_path / "a")
    assert all(torch.equal(was[name], now[name]) for name in was)
    manifest = checkpoint.convert_folder(source, tmp_path / "b", "modelopt", "nvfp4", repair=True)
    assert manifest["summary"]["rounded_again"] == len(QUANTIZED)
    assert manifest["input_scale"] == 1
    loaded = checkpoint.load_folder(tmp_path / "b")
    q, k, v = (loaded[f"{LAYER}self_attn.{name}_proj.weight"].global_scale for name in "qkv")
    assert q == k == v  # what servers fuse


def test_weight_only_stays_so(tmp_path: Path):
    source = folders.make(tmp_path / "in")
    checkpoint.quantize_folder(source, tmp_path / "a", "nvfp4", "modelopt", activations="bfloat16")
    before = tmp_path / "a"
    for i, to in enumerate(("blockscale", "compressed-tensors", "modelopt")):
        after = tmp_path / str(i)
        checkpoint.convert_folder(before, after, to)
        quantization = json.loads((after / "config.json").read_text())["quantization_config"]
        assert CONVENTIONS[to].is_weight_only(quantization)
        assert not [name for name in tensors(after) if "input_" in name and "norm" not in name]
        before = after


def split_scales(folder: Path, target: Path) -> None:
    """The same, k_proj quantized by itself, without input scales."""
    shutil.copytree(folder, target)
    k = f"{LAYER}self_attn.k_proj.weight"
    q = bs.quantize(weights()[k] / 100, "nvfp4")
    for file in FILES:
        content = {n: x for n, x in their_load(target / file).items() if "input_scale" not in n}
        if k in content:
            content[k] = q.qdata
            content[f"{k}_scale"], content[f"{k}_scale_2"] = q.scale, q.global_scale
        save_file(content, target / file)
    index = {n: f for f in FILES for n in their_load(target / f)}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_repair(made: Callable[[str, str], Path], tmp_path: Path, blockscale: Cli):
    source, target = tmp_path / "broken", tmp_path / "out"
    split_scales(made("modelopt", "nvfp4"), source)
    arguments = ("convert-checkpoint", source, target, "--to", "modelopt")
    ran = blockscale(*arguments)
    assert ran.code == 2
    assert f"{len(QUANTIZED)} weights" in ran.err
    assert "have no input_scale" in ran.err
    assert "with repair they get 1" in ran.err
    ran = blockscale(*arguments, "--repair")
    assert ran.code == 0
    assert "rounded a second time: 1 tensors" in ran.out
    assert "input_scale 1, not calibrated" in ran.out
    was, now = checkpoint.load_folder(source), checkpoint.load_folder(target)
    scales = {now[f"{LAYER}self_attn.{n}_proj.weight"].global_scale.item() for n in "qkv"}
    assert scales == {was[Q].global_scale.item()}
    for name in QUANTIZED:
        if "k_proj" not in name:
            assert torch.equal(now[name], was[name])
    k = f"{LAYER}self_attn.k_proj.weight"
    x = was[k].dequantize(torch.float32)
    expected = bs.quantize(x.bfloat16(), "nvfp4", global_scale=was[Q].global_scale)
    assert torch.equal(now[k], expected)
    # nothing else is asked of scales where nobody fuses
    checkpoint.convert_folder(source, tmp_path / "own", "blockscale")
    own = checkpoint.load_folder(tmp_path / "own")
    assert all(torch.equal(own[name], was[name]) for name in QUANTIZED)


def test_split_scales_alone(made: Callable[[str, str], Path], tmp_path: Path):
    split_scales(made("modelopt", "nvfp4"), tmp_path / "broken")
    path = tmp_path / "broken" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["quant_algo"] = "W4A16_NVFP4"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"servers fuse .*k_proj.* whose global scales differ"):
        checkpoint.convert_folder(tmp_path / "broken", tmp_path / "out", "modelopt")


def test_parts_in_other_files(made: Callable[[str, str], Path], tmp_path: Path):
    """A weight in the first file, its scales in the second."""
    folder = tmp_path / "apart"
    shutil.copytree(made("modelopt", "nvfp4"), folder)
    whole = tensors(folder)
    places = {name: FILES["scale" in name] for name in whole}
    for file in FILES:
        save_file({n: x for n, x in whole.items() if places[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    same = checkpoint.load_folder(made("modelopt", "nvfp4"))
    for name, x in checkpoint.load_folder(folder).items():
        assert torch.equal(x, same[name])
    assert torch.equal(checkpoint.load_file(folder / FILES[0])[Q], same[Q])
    checkpoint.convert_folder(folder, tmp_path / "out", "compressed-tensors")
    for name, x in checkpoint.load_folder(tmp_path / "out").items():
        assert torch.equal(
            x.qdata if name in QUANTIZED else x,
            (same[name].qdata if name in QUANTIZED else same[name]),
        )
    # the second file has nothing left but what is not quantized


def deepseek_v4(folder: Path) -> dict[str, Tensor]:
    """Dense weights of FP8 with E8M0 scales, experts of FP4, one with a cut block; its values."""
    g = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {"embed.weight": torch.randn(16, 64, generator=g).bfloat16()}
    expected: dict[str, Tensor] = dict(state)
    for name, shape in (("attn.wq_a", (128, 256)), ("attn.wkv", (64, 200))):
        x = torch.randn(shape, generator=g)
        q = bs.quantize(x, "fp8_128x128", scale_rounding="rceil", pad=True)
        state[f"layers.0.{name}.weight"] = q.qdata[:, : shape[1]].contiguous()
        state[f"layers.0.{name}.scale"] = q.scale.to(torch.float8_e8m0fnu)
        expected[f"layers.0.{name}.weight"] = q.dequantize(torch.float32)
    for expert in range(2):
        q = bs.quantize(torch.randn(64, 128, generator=g), "mxfp4")
        name = f"layers.0.ffn.experts.{expert}.w1"
        state[f"{name}.weight"] = q.qdata.view(torch.int8)
        state[f"{name}.scale"] = q.scale
        expected[f"{name}.weight"] = q.dequantize(torch.float32)
    folders.make(
        folder, state, model_type="deepseek_v4", expert_dtype="fp4",
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )  # fmt: skip
    return expected


def test_deepseek_v4(tmp_path: Path):
    expected = deepseek_v4(tmp_path / "in")
    loaded = values(tmp_path / "in")
    assert loaded.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(loaded[name], x), name
    manifest = checkpoint.convert_folder(tmp_path / "in", tmp_path / "ct", "compressed-tensors")
    assert manifest["summary"]["quantized"] == {"fp8_128x128": 2, "mxfp4": 2}
    again = values(tmp_path / "ct")
    assert all(torch.equal(again[name], x) for name, x in expected.items())
    config = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    targets = {g["format"]: g["targets"] for g in config["config_groups"].values()}
    assert targets == {
        "float-quantized": ["layers.0.attn.wkv", "layers.0.attn.wq_a"],
        "mxfp4-pack-quantized": [f"layers.0.ffn.experts.{i}.w1" for i in range(2)],
    }
    checkpoint.convert_folder(tmp_path / "ct", tmp_path / "v4", "deepseek-v4")
    theirs, back = tensors(tmp_path / "in"), tensors(tmp_path / "v4")
    assert back.keys() == theirs.keys()
    for name, x in theirs.items():
        assert back[name].dtype == x.dtype
        assert torch.equal(back[name].view(torch.uint8), x.view(torch.uint8)), name
    with pytest.raises(ValueError, match="to: DeepSeek's FP8 blocks has no mxfp4"):
        checkpoint.convert_folder(tmp_path / "in", tmp_path / "no", "deepseek")


def test_gpt_oss(tmp_path: Path):
    x = torch.randn(2, 64, 96)
    q = bs.quantize(x.bfloat16(), "mxfp4")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    state = {
        f"{name}_blocks": q.qdata.unflatten(-1, (3, 16)),
        f"{name}_scales": q.scale.view(torch.uint8),
        f"{name}_bias": torch.randn(2, 64),
    }
    folders.make(
        tmp_path / "in", state, model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"}
    )
    assert torch.equal(checkpoint.load_folder(tmp_path / "in")[name], q)
    checkpoint.convert_folder(tmp_path / "in", tmp_path / "own", "blockscale")
    checkpoint.convert_folder(tmp_path / "own", tmp_path / "back", "gpt-oss")
    back = tensors(tmp_path / "back")
    assert all(torch.equal(back[name], x) for name, x in state.items())
    with pytest.raises(ValueError, match="is a stack of 2 matrices, and compressed-tensors has"):
        checkpoint.convert_folder(tmp_path / "in", tmp_path / "no", "compressed-tensors")
    checkpoint.convert_folder(tmp_path / "in", tmp_path / "bf16", "bf16")
    assert torch.equal(checkpoint.load_folder(tmp_path / "bf16")[name], q.dequantize())


def test_stacked_experts_of_modelopt(tmp_path: Path):
    """(experts, in, out), packed along the contraction, as it exports Llama 4 and gpt-oss."""
    q = bs.quantize(torch.randn(2, 64, 48).bfloat16(), "nvfp4", axis=-2)
    name = f"{LAYER}feed_forward.experts.gate_up_proj"
    state = {
        name: q.qdata.contiguous(),
        f"{name}_weight_scale": q.scale,
        f"{name}_weight_scale_2": q.global_scale,
        f"{name}_input_scale": torch.tensor(0.5),
    }
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    folders.make(tmp_path / "in", state, quantization_config=quantization)
    loaded = checkpoint.load_folder(tmp_path / "in")
    assert torch.equal(loaded[name], q)
    assert loaded[f"{name}_input_scale"] == 0.5
    with pytest.raises(ValueError, match="do not run along its rows"):
        checkpoint.convert_folder(tmp_path / "in", tmp_path / "out", "blockscale")


def test_refusals(made: Callable[[str, str], Path], tmp_path: Path, blockscale: Cli):
    def run(source: Path, *arguments: str) -> str:
        ran = blockscale("convert-checkpoint", source, tmp_path / "out", *arguments)
        assert ran.code == 2
        assert ran.err.count("\n") == 1
        return ran.err

    plain = folders.make(tmp_path / "in")
    assert "is quantized; `blockscale quantize` does that" in run(plain, "--to", "modelopt")
    quantized = made("modelopt", "nvfp4")
    assert "to: got 'modelop'" in run(quantized, "--to", "modelop")
    assert "transformers' fine-grained MXFP8 has no nvfp4" in run(quantized, "--to", "fine-grained")
    assert "is for models of type deepseek_v4" in run(quantized, "--to", "deepseek-v4")
    assert "format: got 'fp5'" in run(quantized, "--to", "bf16", "--format", "fp5")
    assert "is a file; name the folder" in run(quantized / FILES[0], "--to", "bf16")
    assert not (tmp_path / "out").exists()
