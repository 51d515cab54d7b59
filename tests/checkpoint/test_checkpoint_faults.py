"""Folders that are odd: what they hold is read as it is meant, or refused by name."""

from __future__ import annotations

import json
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

Cli = Callable[..., Ran]
Q, K, V = QUANTIZED[:3]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folders.make(tmp_path / "in")


def stored(folder: Path) -> dict[str, Tensor]:
    return {n: x for path in folder.glob("*.safetensors") for n, x in their_load(path).items()}


def change(folder: Path, of: Callable[[str, Tensor], Tensor | None]) -> None:
    """Each stored tensor made into another one; None takes it away."""
    for path in folder.glob("*.safetensors"):
        content = {name: of(name, x) for name, x in their_load(path).items()}
        save_file({name: x for name, x in content.items() if x is not None}, path)
        path.with_name(path.name + ".manifest.json").unlink(missing_ok=True)


def configure(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def own(folder: Path, state: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir()
    checkpoint.save_file(state, folder / "model.safetensors")
    quantization = {"quant_method": "blockscale"}
    (folder / "config.json").write_text(
        json.dumps({"dtype": "float32", "quantization_config": quantization, **config})
    )
    return folder


def test_each_matrix_with_its_global_scale(tmp_path: Path):
    """All were multiplied by the first one's."""
    x = torch.randn(3, 32, 64) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    scales = torch.stack([bs.quantize(each, "nvfp4").global_scale for each in x])
    q = bs.quantize(x, "nvfp4", global_scale=scales)
    source = own(tmp_path / "in", {"experts.weight": q})
    checkpoint.convert_folder(source, tmp_path / "out", "bf16")
    out = checkpoint.load_folder(tmp_path / "out")["experts.weight"]
    assert torch.equal(out, q.dequantize(torch.float32))
    checkpoint.save_file({"experts.weight": x}, tmp_path / "x.safetensors")
    path = source / "model.safetensors"
    (report,) = checkpoint.inspect_file(path, tmp_path / "x.safetensors").tensors
    assert report.error.sqnr_db > 15
    assert report.error.elements == x.numel()
    checkpoint.convert_folder(source, tmp_path / "mx", "blockscale", "mxfp8")
    out = checkpoint.load_folder(tmp_path / "mx")["experts.weight"]
    assert torch.equal(out, bs.quantize(q.dequantize(torch.float32), "mxfp8"))


# --- places ---------------------------------------------------------------------------------------


def test_what_others_made_is_not_swept(source: Path, tmp_path: Path, blockscale: Cli):
    """``OUT.partial`` lost whatever was in it."""
    arguments = ("quantize", source, tmp_path / "out", "--format=mxfp8")
    work = tmp_path / "out.partial"
    work.mkdir()
    (work / "mine.txt").write_text("mine")
    ran = blockscale(*arguments)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "out.partial is in the way, and was not made here; move it away" in ran.err
    assert (work / "mine.txt").read_text() == "mine"
    (work / "mine.txt").unlink()
    work.rmdir()
    work.symlink_to(source)
    assert "out.partial is the source" in blockscale(*arguments).err.replace(str(source), str(work))
    work.unlink()
    work.write_text("a file")
    assert "is in the way, and was not made here" in blockscale(*arguments).err
    work.unlink()
    work.mkdir()  # as a run leaves it that finished nothing
    assert blockscale(*arguments).code == 0


def test_places_that_are_the_source(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    work = source.rename(tmp_path / "out.partial")
    with pytest.raises(ValueError, match=r"target: .*out.partial is the source"):
        checkpoint.quantize_folder(work, tmp_path / "out")
    inside = folders.make(tmp_path / "other")
    with pytest.raises(ValueError, match="target: the source lies in"):
        checkpoint.quantize_folder(inside, inside.parent)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"target: \. has no name of its own"):
        checkpoint.quantize_folder(inside, ".")


# --- what servers fuse ----------------------------------------------------------------------------


def modelopt(folder: Path, formats: dict[str, str]) -> Path:
    """Layer 0 as ModelOpt writes it, each tensor with a scale of its own; others as they are."""
    state = {}
    for name, x in weights().items():
        if name not in QUANTIZED:
            state[name] = x
            continue
        q = bs.quantize(x, formats.get(name, "nvfp4"))
        state[name] = q.qdata
        state[f"{name}_scale"] = q.scale
        if q.scale.dtype == torch.float8_e8m0fnu:
            state[f"{name}_scale"] = q.scale.view(torch.uint8)
            continue
        state[f"{name}_scale_2"] = q.global_scale
        state[name.replace(".weight", ".input_scale")] = torch.tensor(1.0)
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    return folders.make(folder, state, quantization_config=quantization)


def test_a_fused_group_of_two_formats(tmp_path: Path, blockscale: Cli):
    """It ended with an AssertionError."""
    source = modelopt(tmp_path / "in", {Q: "mxfp8"})
    with pytest.raises(ValueError, match=r"servers fuse .*k_proj.*v_proj.* scales differ"):
        checkpoint.convert_folder(source, tmp_path / "out", "modelopt")
    given = "convert-checkpoint", source, tmp_path / "out", "--to", "modelopt", "--repair"
    ran = blockscale(*given)
    assert ran.code == 0
    assert "repaired: 2 weights (" in ran.out
    assert f"{V!r}) have the global scale of what servers fuse with them" in ran.out
    out = checkpoint.load_folder(tmp_path / "out")
    assert out[Q].format.name == "mxfp8"
    assert out[K].global_scale == out[V].global_scale


def test_a_format_that_some_have_already(tmp_path: Path):
    """Those that had it kept scales of their own, which were not looked at."""
    source = modelopt(tmp_path / "in", {})
    with pytest.raises(ValueError, match="whose global scales differ"):
        checkpoint.convert_folder(source, tmp_path / "out", "modelopt", "nvfp4")
    source = modelopt(tmp_path / "mixed", {Q: "mxfp8"})
    checkpoint.convert_folder(source, tmp_path / "out", "modelopt", "nvfp4", repair=True)
    out = checkpoint.load_folder(tmp_path / "out")
    scales = {out[Q.replace("q_proj", f"{each}_proj")].global_scale.item() for each in "qkv"}
    assert len(scales) == 1


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan"), -1.0])
def test_what_is_no_scale(scale: float, source: Path, tmp_path: Path):
    folder = tmp_path / "q"
    checkpoint.quantize_folder(source, folder, "nvfp4", "compressed-tensors")
    change(folder, lambda n, x: x.fill_(scale) if n.endswith("weight_global_scale") else x)
    with pytest.raises(ValueError, match=r"weight_global_scale' is .*, which is no scale"):
        checkpoint.convert_folder(folder, tmp_path / "out", "modelopt")


# --- what a configuration says --------------------------------------------------------------------


def test_older_folders_of_modelopt(source: Path, tmp_path: Path):
    """hf_quant_config.json alone: codes were returned as if they were weights."""
    folder = tmp_path / "q"
    checkpoint.quantize_folder(source, folder, "nvfp4", "modelopt")
    expected = checkpoint.load_folder(folder)
    configure(folder, quantization_config=None)
    assert torch.equal(checkpoint.load_folder(folder)[Q], expected[Q])
    with pytest.raises(ValueError, match="is quantized already"):
        checkpoint.quantize_folder(folder, tmp_path / "no")
    checkpoint.convert_folder(folder, tmp_path / "out", "bf16")
    assert torch.equal(checkpoint.load_folder(tmp_path / "out")[Q], expected[Q].dequantize())


def test_own_folders_written_anew_by_others(source: Path, tmp_path: Path):
    folder = tmp_path / "q"
    checkpoint.quantize_folder(source, folder, "nvfp4")
    change(folder, lambda name, x: x)  # without what headers say
    with pytest.raises(ValueError, match=r"path: .*no header in it describes a tensor"):
        checkpoint.load_folder(folder)


def test_weights_of_a_changed_model(source: Path, tmp_path: Path):
    """AWQ multiplies weights, and divides what they are multiplied with."""
    folder = tmp_path / "q"
    checkpoint.quantize_folder(source, folder, "nvfp4", "modelopt")
    first = folder / FILES[0]
    extra = {f"{LAYER}self_attn.q_proj.pre_quant_scale": torch.ones(128)}
    save_file({**their_load(first), **extra}, first)
    with pytest.raises(ValueError, match=r"pre_quant_scale' changes what its layer computes"):
        checkpoint.load_folder(folder)
    folder = tmp_path / "ct"
    checkpoint.quantize_folder(source, folder, "nvfp4", "compressed-tensors")
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    configure(folder, quantization_config={**said, "transform_config": {}})
    checkpoint.load_folder(folder)
    transform = {"config_groups": {"R1": {"type": "hadamard"}}}
    configure(folder, quantization_config={**said, "transform_config": transform})
    with pytest.raises(ValueError, match=r"path: its config.json has a transform_config"):
        checkpoint.load_folder(folder)


def test_infinity_in_a_configuration(source: Path, tmp_path: Path):
    """Of Mamba 2, as transformers wrote it."""
    configure(source, time_step_limit=[0.0, float("inf")])
    checkpoint.quantize_folder(source, tmp_path / "q", "nvfp4", "modelopt")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["time_step_limit"] == [0.0, float("inf")]


def test_the_dtype_of_a_part(source: Path, tmp_path: Path):
    configure(source, dtype=None, text_config={"dtype": "float16"})
    checkpoint.quantize_folder(source, tmp_path / "q", "nvfp4", "modelopt")
    assert checkpoint.load_folder(tmp_path / "q")[Q].dtype == torch.float16


def test_nan_with_scales_of_exponents(tmp_path: Path):
    """It said that NaN has no E8M0."""
    state = weights()
    state[Q][0, 0] = float("nan")
    source = folders.make(tmp_path / "in", state, model_type="deepseek_v4")
    checkpoint.quantize_folder(source, tmp_path / "q", "fp8_128x128", "deepseek-v4")
    values = checkpoint.load_folder(tmp_path / "q")[Q].dequantize()
    assert values.isnan().all()
    checkpoint.convert_folder(tmp_path / "q", tmp_path / "ct", "compressed-tensors")
    assert checkpoint.load_folder(tmp_path / "ct")[Q].dequantize().isnan().all()


def test_made_stacks(tmp_path: Path):
    """Chunks of their rows were taken for matrices, and an error told of shapes inside."""
    x = torch.randn(4, 64, 128)
    source = folders.make(tmp_path / "in", {**weights(), "experts.down_proj": x})
    made = {"experts.down_proj": bs.quantize(x)}
    with pytest.raises(ValueError, match=r"weights: 'experts.down_proj' is a stack of matrices"):
        checkpoint.quantize_folder(source, tmp_path / "out", weights=made)
    assert not (tmp_path / "out.partial").exists()


def test_made_weights_with_scales_of_exponents(tmp_path: Path, blockscale: Cli):
    """In the middle it said that values are not those of a dtype, and of no tensor."""
    source = folders.make(tmp_path / "in", weights(), model_type="deepseek_v4")
    given = source, tmp_path / "out", "fp8_128x128", "deepseek-v4"
    made = {Q: bs.quantize(weights()[Q], "fp8_128x128")}
    with pytest.raises(ValueError, match=r"weights: .* scales that are no powers of two"):
        checkpoint.quantize_folder(*given, weights=made)
    made = {Q: bs.quantize(weights()[Q], "fp8_128x128", scale_rounding="rceil")}
    checkpoint.quantize_folder(*given, weights=made)
    text = tmp_path / "text"
    text.write_text("words")
    options = "--format=fp8_128x128", "--convention=deepseek-v4", "--gptq", "--calibrate", text
    ran = blockscale("quantize", source, tmp_path / "other", *options)
    assert ran.code == 2
    assert "gptq: DeepSeek V4's FP8 blocks and FP4 experts has scales that are powers" in ran.err


# --- conventions ----------------------------------------------------------------------------------


def test_a_divisor_stays_what_it_is(source: Path, tmp_path: Path):
    """Two reciprocals moved it, and nothing said so."""
    folder = tmp_path / "q"
    checkpoint.quantize_folder(source, folder, "nvfp4", "compressed-tensors")
    scale = 2 - 2**-23  # 1 / scale is 0.5 + 2^-24 and less
    for odd in (scale, 2 - 2**-22, 1 + 2**-23):
        change(folder, lambda n, x, odd=odd: x.fill_(odd) if "weight_global" in n else x)
        out = tmp_path / f"out{odd}"
        manifest = checkpoint.convert_folder(folder, out, "compressed-tensors")
        assert manifest["summary"]["rounded_reciprocals"] == 0
        for name, x in stored(folder).items():
            assert torch.equal(stored(out)[name], x), name
    # in a repaired group all have the same
    k = K.replace(".weight", ".weight_global_scale")
    change(folder, lambda n, x: x.fill_(3) if n == k else x)
    checkpoint.convert_folder(folder, tmp_path / "fused", "compressed-tensors", repair=True)
    names = [Q.replace("q_proj.weight", f"{each}_proj.weight_global_scale") for each in "qkv"]
    assert len({stored(tmp_path / "fused")[name].item() for name in names}) == 1


def test_experts_of_deepseek_v4(tmp_path: Path):
    """Their readers go by ``expert_dtype``, which said "fp4" of fp8, too."""
    source = folders.make(tmp_path / "in", model_type="deepseek_v4")
    checkpoint.quantize_folder(source, tmp_path / "a", "fp8_128x128", "deepseek-v4")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["expert_dtype"] == "fp8"
    with pytest.raises(ValueError, match=r"has mxfp4 for experts alone, and .*_proj' is none"):
        checkpoint.quantize_folder(source, tmp_path / "b", "mxfp4", "deepseek-v4")
    checkpoint.quantize_folder(source, tmp_path / "b", "mxfp4", "deepseek-v4", "*.experts.*")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["expert_dtype"] == "fp4"
    # scales that are no powers of two
    checkpoint.quantize_folder(source, tmp_path / "c", "fp8_128x128")
    with pytest.raises(ValueError, match=r"to: scale of 'model\S+' cannot be F8_E8M0 .*; give"):
        checkpoint.convert_folder(tmp_path / "c", tmp_path / "d", "deepseek-v4")
    checkpoint.convert_folder(tmp_path / "c", tmp_path / "d", "deepseek-v4", "fp8_128x128")
    was, now = (checkpoint.load_folder(tmp_path / each)[Q] for each in "cd")
    x = was.dequantize(torch.float32)
    assert torch.equal(now.scale, bs.quantize(x, "fp8_128x128", scale_rounding="rceil").scale)


def test_rows_that_are_no_multiple_of_the_block(tmp_path: Path):
    q = bs.quantize(torch.randn(64, 200), "fp8_128x128", pad=True)
    state = {"a.q_b.weight": q.qdata[:, :200].contiguous(), "a.q_b.weight_scale_inv": q.scale}
    source = folders.make(tmp_path / "in", state, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"format: rows of 'a.q_b.weight' have 200 values"):
        checkpoint.convert_folder(source, tmp_path / "out", "modelopt", "mxfp8")
    assert not list(tmp_path.glob("out*"))


def test_activations_that_become_quantized(source: Path, tmp_path: Path, blockscale: Cli):
    folder = tmp_path / "q"
    checkpoint.quantize_folder(
        source, folder, "mxfp8", "compressed-tensors", activations="bfloat16"
    )
    ran = blockscale("convert-checkpoint", folder, tmp_path / "out", "--to", "modelopt")
    assert ran.code == 0
    assert "warning: activations are in high precision in the source; NVIDIA ModelOpt" in ran.out
    out = checkpoint.convert_folder(folder, tmp_path / "ct", "compressed-tensors")
    assert not any("activations" in each for each in out.get("warnings", ()))


# --- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [float("inf"), float("nan"), -1.0, 1e39, "4", torch.tensor(float("inf")), torch.ones(2)],
)
def test_activations_that_are_no_magnitudes(value: object, source: Path, tmp_path: Path):
    """NaN became a scale like any other."""
    with pytest.raises(ValueError, match=r"activations: 'a' has .*; expected the largest magnit"):
        checkpoint.quantize_folder(
            source, tmp_path / "out", "nvfp4", "modelopt", activations={"a": value}
        )


def test_activations_of_other_layers(source: Path, tmp_path: Path):
    layer = Q.removesuffix(".weight")
    for amax in ({}, {f"model.{layer}": 1.0}):
        with pytest.raises(ValueError, match=r"activations: of the 7 layers .* they have none"):
            checkpoint.quantize_folder(
                source, tmp_path / "out", "nvfp4", "modelopt", activations=amax
            )
    with pytest.raises(TypeError, match="activations: got list; expected None, 'bfloat16', or a"):
        checkpoint.quantize_folder(source, tmp_path / "out", "nvfp4", "modelopt", activations=[1])
    amax = {layer: torch.tensor(2688.0 / 4)}
    checkpoint.quantize_folder(source, tmp_path / "out", "nvfp4", "modelopt", activations=amax)
    assert stored(tmp_path / "out")[f"{layer}.input_scale"] == 0.25


def test_a_file_of_the_folder_is_quantized_already(source: Path, tmp_path: Path):
    checkpoint.quantize_file(source / FILES[0], tmp_path / "x.safetensors", "mxfp8")
    (tmp_path / "x.safetensors").replace(source / FILES[0])
    index = {n: f for f in FILES for n in their_load(source / f)}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ValueError, match="is quantized already, as the header of its file says"):
        checkpoint.quantize_folder(source, tmp_path / "out", "nvfp4", "modelopt")
    with pytest.raises(ValueError, match="is quantized already, as the header of its file says"):
        checkpoint.quantize_file(
            source / FILES[0], tmp_path / "y.safetensors", "nvfp4", convention="modelopt"
        )
    checkpoint.quantize_folder(source, tmp_path / "out", "nvfp4")
    formats = {checkpoint.load_folder(tmp_path / "out")[n].format.name for n in QUANTIZED}
    assert formats == {"mxfp8", "nvfp4"}


@pytest.mark.parametrize("name", [Q, K])
def test_a_part_of_that_name_in_another_file(name: str, tmp_path: Path):
    """The folder that was made could not be read."""
    source = folders.make(tmp_path / "in", {**weights(), f"{name}_scale": torch.ones(4)})
    with pytest.raises(ValueError, match=r"source: two tensors would be stored as .*weight_scale"):
        checkpoint.quantize_folder(source, tmp_path / "out")


def test_stacks_that_are_left_alone(tmp_path: Path):
    """A server that is not told takes them for quantized."""
    stack = f"{LAYER}mlp.other.experts"
    source = folders.make(
        tmp_path / "in", {**weights(), f"{stack}.gate_up_proj": torch.randn(2, 64, 64)}
    )
    checkpoint.quantize_folder(source, tmp_path / "out", "nvfp4", "modelopt")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stack in config["quantization_config"]["ignore"]


# --- more of what files say -----------------------------------------------------------------------


def test_a_tokenizer_that_changed(source: Path, tmp_path: Path):
    """It was said to be finished, with the former one."""
    checkpoint.quantize_folder(source, tmp_path / "out")
    (source / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"tokenizer.json in it is not what this command makes"):
        checkpoint.quantize_folder(source, tmp_path / "out")


def test_an_index_of_nothing(source: Path):
    (source / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match="has no weight_map"):
        checkpoint.load_folder(source)


def test_a_file_with_parts_of_tensors_elsewhere(source: Path, tmp_path: Path):
    folder = tmp_path / "q"
    checkpoint.quantize_folder(source, folder, "nvfp4", "modelopt")
    whole = stored(folder)
    places = {name: FILES["scale" in name] for name in whole}
    for file in FILES:
        save_file({n: x for n, x in whole.items() if places[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert isinstance(checkpoint.load_file(folder / FILES[0])[Q], bs.ScaledTensor)
    assert f"{Q}_scale" in checkpoint.load_file(folder / FILES[1])
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="parts are missing"):
        checkpoint.load_file(folder / FILES[1])


@pytest.mark.parametrize("size", [[96, 128], [128, 96]])
def test_blocks_that_make_as_many_scales(size: list[int], tmp_path: Path):
    """Of 192 values both 96 and 128 make two."""
    q = bs.quantize(torch.randn(192, 192), "fp8_128x128", pad=True)
    state = {"a.q.weight": q.qdata[:, :192].contiguous(), "a.q.weight_scale_inv": q.scale}
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = folders.make(tmp_path / "in", state, quantization_config=said)
    assert checkpoint.load_folder(source)["a.q.weight"].shape == (192, 192)
    configure(source, quantization_config={**said, "weight_block_size": size})
    with pytest.raises(ValueError, match=r"path: 'a.q.weight' has blocks of \d+x\d+, as its conf"):
        checkpoint.load_folder(source)


@pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors"])
def test_scalars_of_one_or_of_no_dimension(convention: str, source: Path, tmp_path: Path):
    folder = tmp_path / "q"
    checkpoint.quantize_folder(source, folder, "nvfp4", convention)
    expected = stored(folder)
    scalars = {n for n, x in expected.items() if x.numel() == 1}
    change(folder, lambda n, x: x.reshape((1,) * (1 - x.ndim)) if n in scalars else x)
    assert isinstance(checkpoint.load_folder(folder)[Q], bs.ScaledTensor)
    other = ({"modelopt", "compressed-tensors"} - {convention}).pop()
    checkpoint.convert_folder(folder, tmp_path / "other", other)
    assert isinstance(checkpoint.load_folder(tmp_path / "other")[Q], bs.ScaledTensor)


def test_a_cache_that_was_quantized(source: Path, tmp_path: Path):
    folder = tmp_path / "q"
    checkpoint.quantize_folder(source, folder, "nvfp4", "modelopt")
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    cache = {"dynamic": False, "num_bits": 8, "type": "float"}
    configure(folder, quantization_config={**said, "kv_cache_scheme": cache})
    manifest = checkpoint.convert_folder(folder, tmp_path / "out", "compressed-tensors")
    assert "the source has its KV cache quantized" in manifest["warnings"][0]


@pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors"])
def test_no_groups_say_nothing_of_activations(convention: str):
    said = {"quant_method": convention, "quant_algo": "NVFP4", "config_groups": {}}
    assert not checkpoint.CONVENTIONS[convention].is_weight_only(said)
