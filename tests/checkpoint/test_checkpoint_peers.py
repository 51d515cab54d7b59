"""Folders of ours read by the programs that they are for, and folders of theirs read by ours.

compressed-tensors, transformers and ModelOpt, on a CPU, with models of two layers.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as their_load
from small_file import Ran
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

import blockscale as bs
from blockscale import checkpoint

warnings.filterwarnings("ignore", module="modelopt|transformers|torchao")
logging.disable(logging.WARNING)  # of extensions of torchao, of reports of what is loaded

from compressed_tensors.compressors import BaseCompressor, ModelCompressor  # noqa: E402
from compressed_tensors.quantization import (  # noqa: E402
    QuantizationConfig,
    apply_quantization_config,
)
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme  # noqa: E402
from compressed_tensors.quantization.utils import (  # noqa: E402
    calculate_qparams,
    generate_gparam,
)
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

logging.disable(logging.NOTSET)
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
IDS = torch.arange(32).reshape(2, 16)
CT_FORMATS = {"NVFP4": "nvfp4", "MXFP4": "mxfp4", "MXFP8": "mxfp8", "FP8_BLOCK": "fp8_128x128"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("peers") / "llama"
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="300KB")
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("peers") / "mixture"
    config = Qwen3MoeConfig(
        **SIZES, head_dim=32, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(llama: Path) -> Callable[[str, str], Path]:
    """The model quantized in a convention, once."""

    def make(convention: str, format: str) -> Path:
        folder = llama.with_name(f"{convention}-{format}")
        if not folder.exists():
            checkpoint.quantize_folder(llama, folder, format, convention)
        return folder

    return make


def stored(folder: Path) -> dict[str, Tensor]:
    return {n: x for path in folder.glob("*.safetensors") for n, x in their_load(path).items()}


def quantized(folder: Path) -> dict[str, bs.ScaledTensor]:
    loaded = checkpoint.load_folder(folder).items()
    return {name: q for name, q in loaded if isinstance(q, bs.ScaledTensor)}


def parts_of(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a layer has, by local names."""
    layer = name.removesuffix("weight")
    return {n.removeprefix(layer): x for n, x in tensors.items() if n.startswith(layer)}


# --- compressed-tensors ---------------------------------------------------------------------------


def decompressed(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Weights as compressed-tensors has them."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    tensors = stored(folder)
    for name in quantized(folder):
        parts = parts_of(name, tensors)
        parts.pop("input_global_scale", None)
        yield name, compressor.decompress(parts, scheme)["weight"]


@pytest.mark.parametrize("format", CT_FORMATS.values())
def test_compressed_tensors_reads_ours(format: str, made: Callable[[str, str], Path]):
    folder = made("compressed-tensors", format)
    ours, count = quantized(folder), 0
    for name, theirs in decompressed(folder):
        assert torch.equal(theirs, ours[name].dequantize(theirs.dtype))
        count += 1
    assert count == 14


def compress(model: torch.nn.Module, preset: str, folder: Path) -> None:
    """As llm-compressor does it, without calibration."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    )
    for module in model.modules():
        own = getattr(module, "quantization_scheme", None)
        if own is None or own.weights is None:
            continue
        weight, how, scale = module.weight.data, own.weights, None
        if how.strategy == "tensor_group":
            scale = generate_gparam(weight.min(), weight.max())
            module.weight_global_scale.data.copy_(scale)
        if how.strategy == "block":
            rows, columns = how.block_structure
            weight = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % rows))
            blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
            blocks = blocks.transpose(1, 2).flatten(2)
        else:
            blocks = weight.unflatten(-1, (-1, how.group_size))
        scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), how, global_scale=scale)
        module.weight_scale.data.copy_(scales)
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data.fill_(300.0)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


@pytest.mark.parametrize("preset", CT_FORMATS)
def test_ours_reads_compressed_tensors(preset: str, llama: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    compress(model, preset, tmp_path / "theirs")
    ours = quantized(tmp_path / "theirs")
    assert {q.format_name for q in ours.values()} == {CT_FORMATS[preset]}
    assert len(ours) == 14
    for name, theirs in decompressed(tmp_path / "theirs"):
        assert torch.equal(theirs, ours[name].dequantize(theirs.dtype))
    if preset == "NVFP4":
        given = checkpoint.load_folder(tmp_path / "theirs")
        scale = given["model.layers.0.mlp.down_proj.input_scale"]
        torch.testing.assert_close(scale, torch.tensor(1 / 300))
    # and writes it again, byte for byte
    checkpoint.convert_folder(
        tmp_path / "theirs", tmp_path / "ours", "compressed-tensors", repair=preset == "NVFP4"
    )
    if preset == "NVFP4":  # each weight had a scale of its own there
        return
    before, after = stored(tmp_path / "theirs"), stored(tmp_path / "ours")
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert torch.equal(after[name], x.to(after[name].dtype))


# --- transformers ---------------------------------------------------------------------------------


def logits(folder: Path, **options: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    ("convention", "format"),
    [
        *(("compressed-tensors", format) for format in CT_FORMATS.values()),
        ("deepseek", "fp8_128x128"),
        ("fine-grained", "mxfp8"),
    ],
)
def test_transformers_computes_with_ours(
    convention: str, format: str, made: Callable[[str, str], Path], tmp_path: Path
):
    """As with the values that ours dequantizes to."""
    folder, options = made(convention, format), {}
    if convention == "compressed-tensors":
        options = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    checkpoint.convert_folder(folder, tmp_path / "bf16", "bf16")
    theirs, ours = logits(folder, **options), logits(tmp_path / "bf16")
    if format == "fp8_128x128" and convention == "compressed-tensors":
        # weights are fp32 there, with scales of fp32
        torch.testing.assert_close(theirs.float(), ours.float(), rtol=0.05, atol=0.05)
    else:
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("convention", ["deepseek", "fine-grained"])
def test_transformers_computes_with_our_mixture(convention: str, mixture: Path, tmp_path: Path):
    format = next(iter(checkpoint.CONVENTIONS[convention].storages))
    checkpoint.quantize_folder(mixture, tmp_path / "q", format, convention)
    checkpoint.convert_folder(tmp_path / "q", tmp_path / "bf16", "bf16")
    assert torch.equal(logits(tmp_path / "q"), logits(tmp_path / "bf16"))


# --- ModelOpt -------------------------------------------------------------------------------------


def modelopt_values(name: str, tensors: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """A weight as ModelOpt dequantizes it."""
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    data, scale = tensors[name], tensors[f"{name}_scale"]
    if data.dtype == torch.uint8:
        return NVFP4QTensor(shape, torch.bfloat16, data).dequantize(
            scale=scale, double_scale=tensors[f"{name}_scale_2"], block_sizes={-1: 16}
        )
    return MXFP8QTensor(shape, torch.bfloat16, data).dequantize(scale=scale)


def check_modelopt(folder: Path, count: int) -> None:
    tensors, ours = stored(folder), quantized(folder)
    assert len(ours) == count
    for name, q in ours.items():
        theirs = modelopt_values(name, tensors, q.shape)
        assert torch.equal(theirs, q.dequantize(torch.bfloat16)), name


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_modelopt_reads_ours(format: str, made: Callable[[str, str], Path]):
    check_modelopt(made("modelopt", format), 14)


def sqnr(x: Tensor, y: Tensor) -> float:
    x, y = x.double(), y.double()
    return 10 * math.log10(float(x.square().sum() / (x - y).square().sum()))


@pytest.mark.parametrize("kind", ["llama", "mixture"])
@pytest.mark.parametrize(
    ("format", "preset"), [("nvfp4", "NVFP4_DEFAULT_CFG"), ("mxfp8", "MXFP8_DEFAULT_CFG")]
)
def test_modelopts_own_export(
    kind: str, format: str, preset: str, request: pytest.FixtureRequest, tmp_path: Path
):
    """Ours reads it bit for bit; what ours writes has its names, its configuration, its global
    scales and, but for ties, its codes."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    source = request.getfixturevalue(kind)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    found = bs.calibrate(model, [IDS]) if format == "nvfp4" else None
    with torch.no_grad():
        model = mtq.quantize(model, getattr(mtq, preset), lambda m: m(IDS))
        export_hf_checkpoint(model, export_dir=str(tmp_path / "theirs"))
    count = 14 if kind == "llama" else 32
    check_modelopt(tmp_path / "theirs", count)
    checkpoint.quantize_folder(source, tmp_path / "ours", format, "modelopt", activations=found)
    theirs, ours = stored(tmp_path / "theirs"), stored(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    high = stored(source)
    for name, x in theirs.items():
        y = ours[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        if name.endswith("input_scale"):  # theirs is that of all experts
            assert torch.equal(x, y) or (".experts." in name and y <= x), name
            continue
        if name.endswith("scale_2") or not name.endswith(("_scale", "_proj.weight")):
            assert torch.equal(x, y), name
            continue
        differ = (x.view(torch.uint8) != y.view(torch.uint8)).double().mean().item()
        assert differ <= (0.01 if name.endswith("_scale") else 0.0035), (name, differ)
    for name, q in quantized(tmp_path / "ours").items():
        mine = sqnr(high[name], modelopt_values(name, ours, q.shape))
        assert abs(mine - sqnr(high[name], modelopt_values(name, theirs, q.shape))) < 0.1
    for file in ("config.json", "hf_quant_config.json"):
        a, b = (json.loads((tmp_path / of / file).read_text()) for of in ("theirs", "ours"))
        assert _sorted(a) == _sorted(b)


@pytest.fixture
def written(llama: Path, tmp_path: Path) -> tuple[Path, list[torch.Tensor]]:
    """A model with a tokenizer, beside a file ``text``, and the tokens of that."""
    source = tmp_path / "in"
    shutil.copytree(llama, source)
    words = {f"w{i}": i for i in range(127)} | {"[UNK]": 127}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(source)
    (tmp_path / "text").write_text(" ".join(f"w{i * i % 127}" for i in range(700)))
    ids = torch.tensor([[i * i % 127 for i in range(700)]])
    return source, [ids[:, :512], ids[:, 512:]]


def test_calibrate_by_the_command(
    written: tuple[Path, list[torch.Tensor]], tmp_path: Path, blockscale: Callable[..., Ran]
):
    """The model of the folder runs on a text, with the tokenizer of the folder."""
    source, batches = written
    ran = blockscale(
        "quantize", source, tmp_path / "out", "--format=nvfp4", "--convention=modelopt",
        "--calibrate", tmp_path / "text",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "not calibrated" not in ran.out
    assert "the model runs on 700 tokens of text" in ran.err
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    found = bs.calibrate(model, batches)
    scales = {n: x for n, x in stored(tmp_path / "out").items() if n.endswith("input_scale")}
    assert len(scales) == 14
    for name, scale in scales.items():
        assert scale == torch.tensor(found[name.removesuffix(".input_scale")]) / 2688
    assert (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("format", "convention", "options"),
    [
        ("nvfp4", "modelopt", ["--scaling=search"]),
        ("nvfp4", "compressed-tensors", ["--weight-only"]),
        ("fp8_128x128", "compressed-tensors", []),
    ],
)
def test_gptq_by_the_command(
    written: tuple[Path, list[torch.Tensor]],
    tmp_path: Path,
    blockscale: Callable[..., Ran],
    format: str,
    convention: str,
    options: list[str],
):
    """What :func:`blockscale.gptq` makes, with input scales of the model as it was."""
    source, batches = written
    given = "--format", format, "--convention", convention, "--calibrate", tmp_path / "text"
    ran = blockscale("quantize", source, tmp_path / "out", *given, "--gptq", *options)
    assert ran.code == 0, ran.err
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    found = bs.calibrate(model, batches)
    scaling = "search" if "--scaling=search" in options else "amax"
    how = {"scaling": scaling, "power_of_two": convention == "compressed-tensors"}
    made = bs.gptq(model, batches, format, **how)
    state = checkpoint.load_folder(tmp_path / "out")
    assert len(made) == 14
    for name, q in made.items():
        assert torch.equal(state[name].dequantize(), q.dequantize()), name
        assert torch.equal(q.dequantize(), model.get_parameter(name))
    scales = [n for n in stored(tmp_path / "out") if n.endswith("input_scale")]
    assert len(scales) == (14 if convention == "modelopt" else 0)
    for name in scales:
        scale = stored(tmp_path / "out")[name]
        assert scale == torch.tensor(found[name.removesuffix(".input_scale")]) / 2688
    left = "--exclude=*.1.mlp.*", "--gptq", *options
    ran = blockscale("quantize", source, tmp_path / "fewer", *given, *left)
    assert ran.code == 0, ran.err
    state = checkpoint.load_folder(tmp_path / "fewer")
    assert sum(isinstance(x, bs.ScaledTensor) for x in state.values()) == 11
    early = blockscale("quantize", source, tmp_path / "no", *given, "--exclude=nothing", "--gptq")
    assert early.code == 2
    assert "exclude: 'nothing' matches none" in early.err
    assert "Loading weights" not in early.err  # it is told before a model runs
    scaled = "--format=mxfp8", "--calibrate", tmp_path / "text"
    early = blockscale("quantize", source, tmp_path / "no", *scaled)
    assert early.code == 2
    assert "calibrate: mxfp8 has no scale of activations" in early.err
    assert "Loading weights" not in early.err
    error = blockscale("quantize", source, tmp_path / "no", "--format=mxfp8", "--gptq")
    assert error.code == 2
    assert "gptq: needs a text to run the model on; add --calibrate FILE" in error.err


def _sorted(content: Any) -> Any:
    """Lists of names in order, and what is a version left out."""
    if isinstance(content, dict):
        return {k: _sorted(v) for k, v in content.items() if "version" not in k}
    return sorted(content) if isinstance(content, list) else content
