r"""The vLLM plugin's layers on a GPU, over vLLM's Python files without its binaries.

vLLM's own ``get_model`` loads a model of one layer in the widths of Llama 3 8B, and a mixture, from
folders that were quantized here, onto the GPU: its linear layers and experts, with their loaders,
are those that vLLM would serve. Its kernels for attention, norms and routing are not there, so that
whole models do not run. For each layer and number of tokens:

- the output of ``quant_method.apply`` is that of ``bs.nn.quantized_linear`` (of ``bs.gemm`` where
  NVFP4's activations have the folder's global scale), bit for bit, and near that of the
  dequantized weights;
- a CUDA graph of it gives the bits of the eager call;
- microseconds in the graph, with a weight that is not in the cache, and those of a bf16 weight.

A product that falls back to plain torch is an error. The dense model's layers have run on an H200,
and of the mixture's the experts of NVFP4 weights.

    python benchmarks/vllm_layers_h200.py [--device cuda]    writes results/vllm_layers_h200.json

What has to be there beside blockscale, torch 2.11 or newer and transformers: the .py files of vllm
0.33.0 with its dist-info (its wheel with all else left out, 13 MB as a zip), and these packages,
without what they depend on: annotated-types cachetools cbor2 cffi pycparser compressed-tensors
fastapi llguidance loguru msgspec openai openai-harmony opentelemetry-api partial-json-parser
pybase64 pydantic pydantic-core pydantic-extra-types python-multipart pyzmq sniffio starlette
typing-inspection xgrammar (15 MB of wheels). It has run so on a CPU, with torch 2.11+cu130.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import vllm_loader as loader  # sets vLLM up without its platform

import vllm.model_executor.layers.utils as layers_utils  # isort: skip
import vllm.model_executor.models.registry as registry  # isort: skip

import torch  # isort: skip
from torch import Tensor  # isort: skip
from transformers import (  # isort: skip
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm.config import VllmConfig  # isort: skip

import blockscale as bs
import blockscale.vllm
from blockscale import checkpoint

RESULT = Path(__file__).resolve().parent / "results" / "vllm_layers_h200.json"
TOKENS = 1, 16, 64, 512
#: Convention, format, and whether weights alone are quantized.
FOLDERS = (
    ("modelopt", "nvfp4", True),
    ("modelopt", "nvfp4", False),
    ("modelopt", "mxfp8", False),
    ("compressed-tensors", "mxfp8", True),
    ("compressed-tensors", "mxfp4", True),
    ("compressed-tensors", "mxfp4", False),
)


def models(small: bool) -> dict[str, Any]:
    """One layer each; ``small`` for a CPU."""
    common = {"num_hidden_layers": 1, "vocab_size": 256, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 8 if small else 128}
    dense = {"hidden_size": 256, "intermediate_size": 512} if small else {
        "hidden_size": 4096, "intermediate_size": 14336}  # fmt: skip
    mixed = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8} if small else {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}  # fmt: skip
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**common, **heads, **dense)),
        "qwen3_moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**common, **heads, **mixed, num_experts_per_tok=8)
        ),
    }


def load(folder: Path, device: torch.device) -> Any:
    """The model as vLLM loads it, on a device that its platform does not know."""

    def on_device(config: VllmConfig) -> None:
        config.device_config.device = device

    return loader.load(folder, change=on_device, quantization="blockscale")[0]


# --- one layer ------------------------------------------------------------------------------------


def linear_of(layer: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor]:
    """What vLLM calls, the same by blockscale's functions, and the values of the weight."""
    (served,) = layer.served
    weight, recipe, scale = served.weight, served.recipe, served.input_scale

    def expected(x: Tensor) -> Tensor:
        if scale is None:
            return bs.nn.quantized_linear(x, weight, recipe=recipe)
        return bs.gemm(bs.quantize(x, "nvfp4", global_scale=scale), weight.mT, x.dtype)

    return lambda x: layer.quant_method.apply(layer, x), expected, weight.dequantize()


def experts_of(layer: Any, tokens: int) -> tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]:
    """What vLLM calls with some routing, and the same expert by expert from dequantized weights,
    whose activations are not quantized."""
    served = layer.served
    device = served.up.codes.device
    scores = torch.randn(tokens, served.up.shape[0], device=device)
    weights, ids = scores.softmax(-1).topk(8)
    ids = ids.int()

    def expected(x: Tensor) -> Tensor:
        up, down = (each.weight.dequantize(torch.float32) for each in (served.up, served.down))
        out = torch.zeros(x.shape, device=device)
        for e in ids.unique().tolist():
            token, j = torch.where(ids == e)
            h = bs.nn.SWIGLU(x[token].float() @ up[e].T)
            out.index_add_(0, token, weights[token, j, None] * (h @ down[e].T))
        return out

    return lambda x: layer.quant_method.apply(layer, x, weights, ids, None, None), expected


def in_a_graph(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[bool, float]:
    """Whether a CUDA graph has the bits of the eager call, and its microseconds, the L2 cache
    overwritten before each replay."""
    expected = run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(x)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=x.device)
    times = []
    for _ in range(30):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return torch.equal(expected, got), median(times)


def layers(model: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Each layer of a model, for each number of tokens."""
    cuda = device.type == "cuda"
    for name, layer in model.named_modules():
        if not hasattr(layer, "served"):
            continue
        dense = isinstance(layer.served, torch.nn.ModuleList)
        width = layer.served[0].shape[1] if dense else layer.served.up.shape[2]
        for tokens in TOKENS:
            x = torch.randn(tokens, width, device=device).bfloat16()
            about = {"layer": name, "tokens": tokens}
            if dense:
                run, same, values = linear_of(layer)
                about["equal"] = torch.equal(run(x), same(x))
                near = x.float() @ values.float().T
                plain: Callable[[Tensor], Tensor] = values.bfloat16().T.__rmatmul__
            else:
                run, dequantized = experts_of(layer, tokens)
                near = dequantized(x)
            about["db"] = loader.shown(loader.sqnr(near, run(x)))
            if cuda:
                about["graph_equal"], about["us"] = in_a_graph(run, x)
                if dense:
                    about["bf16_us"] = in_a_graph(plain, x)[1]
            yield about


def run(place: Path, device: torch.device) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    for name, model in models(small=device.type == "cpu").items():
        source = place / name
        model.bfloat16().save_pretrained(source)
        for convention, format, weight_only in FOLDERS:
            folder = place / f"{name}-{convention}-{format}-{weight_only}"
            activations = "bfloat16" if weight_only else None
            checkpoint.quantize_folder(source, folder, format, convention, activations=activations)
            about = {"model": name, "convention": convention, "format": format}
            about["weight_only"] = weight_only
            with torch.inference_mode():
                for each in layers(load(folder, device), device):
                    yield {**about, **each}


def main() -> int:
    """Run, print, write. 1 unless all outputs are right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    device = torch.device(parser.parse_args().device)
    warnings.simplefilter("error", bs.FallbackWarning)
    loader._stub()
    registry._run_in_subprocess = lambda run: run()  # else another process asks for its binaries
    layers_utils.check_cpu_sgl_kernel = lambda *_: False  # which packs weights on CPUs with AMX
    blockscale.vllm.register()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for each in run(Path(scratch), device):
            results.append(each)
            print(json.dumps(each), flush=True)
            if device.type == "cuda":
                about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
                RESULT.write_text(json.dumps({**about, "layers": results}, indent=1) + "\n")
    return int(not all(x.get("equal", True) and x.get("graph_equal", True) for x in results))


if __name__ == "__main__":
    sys.exit(main())
