"""What else ``vllm_plugin.py`` runs: two ranks, folders with faults, and what is refused.

A fault is served right where the folder says all that is needed, and refused with a sentence where
it does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import vllm_loader as loader  # sets vLLM up for a CPU
from vllm_loader import RIGHT, rewritten, shown, sqnr

import torch  # isort: skip
import torch.multiprocessing as mp  # isort: skip
from torch import Tensor  # isort: skip
from transformers import GptOssConfig, GptOssForCausalLM, PretrainedConfig  # isort: skip
from vllm.compilation.passes.utility.fix_functionalization import (  # isort: skip
    FixFunctionalizationPass,
)
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config  # isort: skip
from vllm.forward_context import set_forward_context  # isort: skip
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # isort: skip
from vllm.plugins import load_general_plugins  # isort: skip
from vllm.transformers_utils.config import (  # isort: skip
    _read_safetensors_metadata_in_dir as read_headers,
)

import blockscale as bs
from blockscale import checkpoint
from blockscale.vllm.config import BlockscaleConfig

SERVE = {"quantization": "blockscale"}


def prepare() -> None:
    """What a process does before it loads a model."""
    loader._stub()
    load_general_plugins()


def said(error: Exception) -> str:
    """The sentence, without what pydantic says around it."""
    return str(error).partition("Value error, ")[2].partition(" [type=")[0] or str(error)


def refused(what: str, words: str, folder: Path, **arguments: Any) -> dict[str, Any]:
    """Whether vLLM does not load a folder, for a reason that has these words in it."""
    try:
        loader.load(folder, **{**SERVE, **arguments})
    except Exception as error:
        sentence = said(error)
        return {"refused": what, "error": sentence, "right": words in sentence}
    return {"refused": what, "error": None, "right": False}


# --- folders --------------------------------------------------------------------------------------


def edited(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy whose quantization_config says something else."""
    rewritten(folder, target, lambda name, x: x)
    path = target / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    return target


def calibrated(name: str, x: Tensor) -> Tensor:
    """As if calibrated: some scale for each layer, one for those that are fused, and one for each
    projection of each expert."""
    if not name.endswith("input_scale"):
        return x
    layer = name.removesuffix(".input_scale")
    if ".experts." not in name:
        layer = layer.replace("k_proj", "q_proj").replace("v_proj", "q_proj")
        layer = layer.replace("up_proj", "gate_proj")
    return torch.tensor(0.001 + 0.0001 * (sum(map(ord, layer)) % 17))


def apart(name: str, x: Tensor) -> Tensor:
    """Each ``up`` of experts with a global scale of its own, which its block scales make up for."""
    if ".up_proj.weight_scale_2" in name:
        return x * 2
    return (x.float() / 2).to(x.dtype) if ".up_proj.weight_scale" in name else x


def lacks(part: str, name: str, x: Tensor) -> Tensor | None:
    return None if name.endswith(part) else x


# --- what is served, whatever the folder is like --------------------------------------------------


def unusual(place: Path, source: dict[str, Path], case: Callable[..., Any]) -> Iterator[Any]:
    """Folders that say all that is needed in an unusual way; ``case`` makes a comparison."""
    for model in ("llama", "qwen3_moe"):
        good = place / f"{model}-modelopt-nvfp4-False-"
        note = "input scales as if calibrated"
        folder = rewritten(good, place / f"{model} calibrated", calibrated)
        yield case(model, "modelopt", "nvfp4", note=note).run(folder, source[model])
        checkpoint.convert_folder(folder, place / f"{model} ct", "compressed-tensors")
        of = case(model, "compressed-tensors", "nvfp4", note=f"{note}, converted")
        yield of.run(place / f"{model} ct", source[model])
    good = place / "llama-modelopt-nvfp4-False-"
    change = partial(loader.split_scales, source["llama"])
    of = case("llama", "modelopt", "nvfp4", note="q, k and v with global scales of their own")
    yield of.run(rewritten(good, place / "split", change), source["llama"])
    good = place / "qwen3_moe-modelopt-nvfp4-False-"
    of = case("qwen3_moe", "modelopt", "nvfp4", note="gate and up with global scales of their own")
    yield of.run(rewritten(good, place / "apart", apart), source["qwen3_moe"])
    bare = rewritten(
        place / "llama-modelopt-nvfp4-False-", place / "bare", partial(lacks, "input_scale")
    )
    checkpoint.convert_folder(bare, place / "mended", "modelopt", repair=True)
    of = case("llama", "modelopt", "nvfp4", note="without input scales, repaired")
    yield of.run(place / "mended", source["llama"])


def cache(place: Path) -> dict[str, Any]:
    """An FP8 cache of keys and values, by vLLM's own method, with the checkpoint's scales."""
    scheme = {"type": "float", "num_bits": 8, "dynamic": False}
    folder = edited(place / "llama-modelopt-mxfp8-False-", place / "kv", kv_cache_scheme=scheme)
    scales = {
        f"model.layers.{i}.self_attn.{a}_proj.{a}_scale": 0.5 + i for i in (0, 1) for a in "kv"
    }
    loader.save_file(
        {name: torch.tensor(x) for name, x in scales.items()}, folder / "kv.safetensors"
    )
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(scales, "kv.safetensors")
    index.write_text(json.dumps(content))
    model, _ = loader.load(folder, **SERVE)
    found = [layer.self_attn.attn for layer in model.model.layers]
    right = [(x.kv_cache_dtype, x._k_scale_float, x._v_scale_float) for x in found] == [
        ("fp8_e4m3", 0.5, 0.5),
        ("fp8_e4m3", 1.5, 1.5),
    ]
    return {"check": "an FP8 cache has the checkpoint's scales", "right": right}


# --- compiled by vLLM -----------------------------------------------------------------------------


def _by_its_backend(config: VllmConfig) -> None:
    """As on a GPU; its platform of CPUs knows a simpler mode only."""
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    config.compilation_config.splitting_ops = config.compilation_config.compile_sizes = []


def compiled_by_vllm(place: Path) -> dict[str, Any]:
    """A model in one graph of vLLM's backend, of any number of tokens. bf16 is rounded less often
    there, which moves codes of quantized activations: those of this model are not. (A first call of
    one token gives nonsense here, of bf16 models too: vLLM's own first call has many.)"""
    folder = place / "llama-compressed-tensors-mxfp8-True-"
    found: list[list[Tensor]] = []
    with (
        patch.object(FixFunctionalizationPass, "__call__", lambda self, graph: None),  # of _C
        patch.dict(os.environ, {"VLLM_CACHE_ROOT": str(place / "cache")}),
    ):
        for how in ({}, {"enforce_eager": False, "change": _by_its_backend}):
            model, config = loader.load(folder, **SERVE, **how)
            in_torch(model)
            with (
                torch.inference_mode(),
                set_current_vllm_config(config),
                set_forward_context(None, config),
            ):
                found.append([forward(model, tokens) for tokens in (8, 31, 1)])
    db = min(sqnr(*pair) for pair in zip(*found, strict=True))
    return {"check": "compiled by vLLM's backend", "logits_db": shown(db), "right": db > RIGHT}


def in_torch(model: Any) -> None:
    """Attention over one sequence, which vLLM has no kernel for here."""
    for layer in model.modules():
        if isinstance(layer, loader.Attention):
            layer.forward = partial(loader._attend, layer)


def forward(model: Any, tokens: int) -> Tensor:
    ids = torch.arange(tokens) * 37 % loader.SIZES["vocab_size"]
    return model.compute_logits(model(ids, torch.arange(tokens)))


# --- gpt-oss, and names on a hub ------------------------------------------------------------------


def gpt_oss(place: Path) -> dict[str, Any]:
    """Its stacks, byte for byte, and experts' outputs beside those of transformers in fp32."""
    sizes = {**loader.SIZES, "intermediate_size": 256, "num_local_experts": 4}
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    config = GptOssConfig(**sizes, num_experts_per_tok=2, layer_types=layers)
    reference = GptOssForCausalLM(config).bfloat16()
    for name, x in reference.named_parameters():
        if "bias" in name:
            x.data.normal_(0, 0.02)
    plain, folder = place / "gpt-oss", place / "gpt-oss-mxfp4"
    reference.save_pretrained(plain)
    folder.mkdir()
    tensors = loader.load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("up_proj", "down_proj"))]:
        q = bs.quantize(tensors.pop(name).mT.contiguous(), "mxfp4")
        tensors |= {
            f"{name}_blocks": q.qdata.unflatten(-1, (-1, 16)).contiguous(),
            f"{name}_scales": q.qscale,
        }
    loader.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    about = json.loads((plain / "config.json").read_text())
    about["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(about))
    model, _ = loader.load(folder, **SERVE)
    state, found, equal = checkpoint.load_folder(folder), [], []
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts.routed_experts
        theirs = reference.model.layers[i].mlp.experts.float()
        for name, held in (("gate_up_proj", experts.served.up), ("down_proj", experts.served.down)):
            q = state[f"model.layers.{i}.mlp.experts.{name}"]
            equal += [torch.equal(q.qdata, held.weight.qdata)]
            equal += [torch.equal(q.qscale, held.weight.qscale)]
            getattr(theirs, name).data = q.dequantize(torch.float32).mT.contiguous()
        x = torch.randn(loader.TOKENS, sizes["hidden_size"]).bfloat16()
        weights, ids = torch.rand(loader.TOKENS, 4).topk(2)
        got = experts.quant_method.apply(experts, x, weights, ids.int(), None, None)
        with torch.no_grad():
            found.append(sqnr(theirs(x.float(), ids, weights), got))
    right = all(equal) and min(found) > RIGHT
    return {"check": "experts of gpt-oss", "outputs_db": shown(min(found)), "right": right}


def on_a_hub(place: Path) -> dict[str, Any]:
    """The same layers by the headers alone, as vLLM gets them of a name on a hub."""
    folder = place / "qwen3_moe-compressed-tensors-nvfp4-False-"
    about = json.loads((folder / "config.json").read_text())
    configs = [BlockscaleConfig(about["quantization_config"]) for _ in range(2)]
    configs[0].maybe_update_config(str(folder), PretrainedConfig(**about))
    headers = read_headers(folder)
    with patch(
        "vllm.transformers_utils.config.get_safetensors_params_metadata", return_value=headers
    ):
        configs[1].maybe_update_config("a-name/on-a-hub", PretrainedConfig(**about))
    return {"check": "a name on a hub", "right": configs[0].table == configs[1].table}


# --- refusals -------------------------------------------------------------------------------------


def refusals(place: Path, source: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """What is not served, and the words of the sentence that say why."""
    nvfp4, mxfp8 = (place / f"llama-modelopt-{each}-False-" for each in ("nvfp4", "mxfp8"))
    mixture = place / "qwen3_moe-modelopt-nvfp4-False-"

    def without(part: str, folder: Path = nvfp4) -> Path:
        return rewritten(folder, place / f"no {part} {folder.name}", partial(lacks, part))

    yield refused("no input scales", "--repair", place / "bare")
    yield refused("no input scales of experts", "--repair", without("input_scale", mixture))
    yield refused(
        "a weight without block scales", "parts are missing", without("k_proj.weight_scale")
    )
    yield refused("an expert that is not there", "was not read", without_expert(mixture, place))
    yield {**unread(nvfp4, "up_proj.weight"), "refused": "a weight that a loader left out"}
    yield {**unread(mxfp8, "v_proj.weight_scale"), "refused": "scales that a loader left out"}
    yield {**unread(mixture, "2.down_proj.weight"), "refused": "an expert that a loader left out"}
    for method in ("awq", "fp8"):
        yield refused(
            f"quant_method {method!r}",
            "without quantization='blockscale'",
            edited(mxfp8, place / method, quant_method=method),
        )
    yield refused(
        "quant_algo W4A8_NVFP4_FP8",
        "'W4A8_NVFP4_FP8'",
        edited(nvfp4, place / "w4a8", quant_algo="W4A8_NVFP4_FP8"),
    )
    yield refused(
        "an NVFP4 cache",
        "keys and values",
        edited(nvfp4, place / "kv4", kv_cache_quant_algo="NVFP4"),
    )
    yield refused("LoRA", "--enable-lora", nvfp4, enable_lora=True)
    yield refused("fp16", "float16", nvfp4, dtype="float16")
    embedding = place / "embedding"
    layers = ["*proj*", "*embed*"]
    checkpoint.quantize_folder(source["llama"], embedding, "mxfp8", "modelopt", include=layers)
    yield refused("a quantized embedding", "embedding", embedding)
    yield refused("a folder that is not quantized", "no quantization_config", source["llama"])


def without_expert(folder: Path, place: Path) -> Path:
    return rewritten(
        folder, place / "no expert", lambda name, x: None if ".experts.3." in name else x
    )


def unread(folder: Path, left_out: str) -> dict[str, Any]:
    """A loader that does not see a tensor which is there."""
    whole = DefaultModelLoader.get_all_weights

    def some(self: Any, *args: Any) -> Iterator[tuple[str, Tensor]]:
        return ((n, x) for n, x in whole(self, *args) if not n.endswith(left_out))

    with patch.object(DefaultModelLoader, "get_all_weights", some):
        return refused("", "was not read", folder)


# --- ranks ----------------------------------------------------------------------------------------


def ranks(place: Path, size: int = 2) -> Iterator[dict[str, Any]]:
    """Whether ranks that share layers, each of which has a part, have the logits of one."""
    folders = [
        f"{model}-modelopt-{format}-False-"
        for model in ("llama", "qwen3_moe")
        for format in ("nvfp4", "mxfp8")
    ]
    mp.spawn(_on_rank, (size, place, folders), nprocs=size)
    for folder in folders:
        model, config = loader.load(place / folder, **SERVE)
        found, held = torch.load(place / f"{folder}.pt")
        db, share = sqnr(logits(model, config), found), stored(model) / held
        yield {
            "check": f"{folder} on {size} ranks",
            "logits_db": shown(db),
            "right": db > RIGHT and share == size,
        }


def stored(model: Any) -> int:
    """Bytes of all quantized weights, without their global scales."""
    names = ("codes", "scales")
    return sum(x.nbytes for n, x in model.named_parameters() if n.rpartition(".")[2] in names)


def _on_rank(rank: int, size: int, place: Path, folders: list[str]) -> None:
    prepare()
    for folder in folders:
        model, config = loader.load(
            place / folder, rank, **SERVE, tensor_parallel_size=size, disable_custom_all_reduce=True
        )
        found = logits(model, config)
        if rank == 0:
            torch.save((found, stored(model)), place / f"{folder}.pt")


def logits(model: Any, config: Any) -> Tensor:
    """Of some tokens, in fp32."""
    loader._in_fp32(model)
    with torch.no_grad(), set_current_vllm_config(config), set_forward_context(None, config):
        return forward(model, loader.TOKENS)
