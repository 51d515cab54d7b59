r"""Do quantized folders of ours load in vLLM 0.33, and are the numbers the same there? On a CPU.

Tiny random models (a Llama and a Qwen3-MoE) are saved in shards and quantized in each convention
and format that vLLM reads; its own ``get_model`` loads them. Compared, layer by layer:

- weights: what vLLM holds after loading, dequantized by its code, and ours by ``load_folder``, with
  q, k and v (gate and up) joined as vLLM's ``packed_modules_mapping`` says. "Equal" is bit for bit
  in bf16, as vLLM multiplies; in fp32 NVFP4's two products are taken in another order there;
- outputs: vLLM's ``quant_method.apply`` of random input in fp32, and the product of our weights
  and of our quantization of that input, where vLLM quantizes it. SQNR in dB;
- logits: the model in vLLM, and transformers' with our weights and our quantized inputs, both in
  fp32: in bf16 their other roundings differ, which moves codes of 4 bits in all later layers.
  vLLM returns logits in bf16, and 52 dB is that rounding. With FP8 blocks they have 26 dB,
  though in the same run each layer's product has 57 or more (a few codes of activations differ).

Faults that are known stand beside them, and have to be found: no input scales, and q, k and v of
several global scales. ``convert_folder(..., repair=True)`` has to mend both. While vLLM loads,
``torch.empty`` gives NaN (torch's ``fill_uninitialized_memory``), so what nobody wrote shows.

What is vLLM's own: reading of config.json, choice of quantization method, model, weight loaders,
``process_weights_after_loading``, emulation of NVFP4 and MXFP8, quantization of activations to FP8.
What is not, all of it in ``_stub``, ``_stand_in`` and ``_in_fp32``:

- ``_current_platform`` is its ``CpuPlatform``, and ``torch.accelerator.empty_cache`` does nothing;
- its ``Emulation*LinearKernel`` of NVFP4 and MXFP8 are registered for CPUs;
- where vLLM then still refuses, for all of its kernels need a GPU or AMX, the case is run a second
  time with "stand-ins": kernels of ours for FP8 blocks, MXFP4, and NVFP4 with activations in high
  precision (methods of its ``MarlinNvFp4LinearKernel``). They keep what was loaded as it is.
  Decoding is vLLM's where it has such code (``dequantize_to_dtype``, ``break_fp4_bytes``). Emulated
  experts of NVFP4 say that they run on this device: they are loaded, never run;
- after loading and comparing weights, what is not quantized is cast to fp32, and attention over one
  sequence becomes torch's, without a cache. vLLM loads in bf16, as servers do; it refuses fp32.

Not loaded: experts of FP8 blocks and of MXFP4. Not run: products of experts (Triton); MXFP4 of
gpt-oss and DeepSeek V4 (kernels of GPUs). MXFP8's emulation leaves activations in high precision,
unlike vLLM's GPU kernels.

An environment of its own, Python 3.11 (vLLM's wheel is 336 MB, and its requirements bring CUDA):

    pip install torch==2.13.0+cpu "transformers<5.21" compressed-tensors==0.17.0
    pip install --no-deps vllm==0.33.0 xgrammar apache-tvm-ffi==0.1.11 depyf==0.20.0
    pip install aiohttp anthropic blake3 cachetools cbor2 cloudpickle diskcache einops \
        "fastapi<0.137" gguf ijson jsonschema lark llguidance mcp mistral_common msgspec ninja \
        model-hosting-container-standards \
        openai openai-harmony outlines_core partial-json-parser pillow psutil py-cpuinfo pybase64 \
        prometheus-fastapi-instrumentator python-json-logger pyzmq requests sentencepiece \
        setproctitle tiktoken uvloop watchfiles
    pip install -e .
    python benchmarks/vllm_loader.py       writes benchmarks/results/vllm_loader.json, two minutes

vLLM asks for torch 2.14; results are of 2.13, as the rest of the repository.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
import vllm.platforms
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()  # before anything else of vLLM asks for it

from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.kernels import linear as kernels  # noqa: E402
from vllm.model_executor.kernels.linear.mxfp4 import MxFp4LinearKernel  # noqa: E402
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel  # noqa: E402
from vllm.model_executor.kernels.linear.scaled_mm import Fp8BlockScaledMMLinearKernel  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.model_executor.layers.fused_moe.experts import nvfp4_emulation_moe  # noqa: E402
from vllm.model_executor.layers.linear import LinearBase  # noqa: E402
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import (  # noqa: E402
    dequant_mxfp8_to_bf16,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (  # noqa: E402
    break_fp4_bytes,
    dequantize_to_dtype,
)
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding  # noqa: E402
from vllm.model_executor.model_loader import get_model  # noqa: E402
from vllm.platforms import PlatformEnum  # noqa: E402

import blockscale as bs  # noqa: E402
from blockscale import checkpoint  # noqa: E402

RESULT = Path(__file__).resolve().parent / "results" / "vllm_loader.json"
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
TOKENS = 64
#: What is rounded to bf16 somewhere has about 50 dB; weights 6% too large have 24.
RIGHT = 40.0


# --- what is not vLLM's ---------------------------------------------------------------------------


def _fp8_blocks(weight: Tensor, scale: Tensor) -> Tensor:
    """Values of E4M3 with a scale for each 128x128."""
    n, k = weight.shape
    return weight.float() * scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def _mxfp4(weight: Tensor, scale: Tensor) -> Tensor:
    """Values of E2M1, two in a byte, with a power of two for each 32."""
    values = break_fp4_bytes(weight, torch.float32)
    return values * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)


class Fp8BlockStandIn(Fp8BlockScaledMMLinearKernel):
    """vLLM's base class, which prepares weights and quantizes activations; the product in fp32."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        return linear(A.float() * As.repeat_interleave(128, -1), _fp8_blocks(B, Bs))


class MxFp4StandIn(MxFp4LinearKernel):
    """Weights as they were loaded, activations as they are."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def _supports_quant_scheme(cls, weight_key: Any, activation_key: Any) -> bool:
        return True

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x.float(), _mxfp4(layer.weight, layer.weight_scale), bias).to(x.dtype)


def _apply_weight_only(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, _nvfp4(layer, x.dtype), bias)


def _nvfp4(layer: Any, dtype: torch.dtype) -> Tensor:
    parts = layer.weight, layer.weight_scale, layer.weight_global_scale
    return dequantize_to_dtype(*parts, dtype, 16, swizzle=False)


def _attend(attention: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = [x.unflatten(-1, (-1, attention.head_size)).transpose(0, 1) for x in (q, k, v)]
    out = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out.transpose(0, 1).flatten(1)


def _stub() -> None:
    torch.accelerator.empty_cache = lambda: None
    for kernel, kind in (
        (kernels.EmulationNvFp4LinearKernel, "nvfp4"),
        (kernels.EmulationMxfp8LinearKernel, "mxfp8"),
    ):
        kernels.register_linear_kernel(kernel, PlatformEnum.CPU, kind)


def _stand_in() -> None:
    """For what vLLM has on GPUs alone."""
    kernels.register_linear_kernel(MxFp4StandIn, PlatformEnum.CPU, "mxfp4")
    kernels.register_linear_kernel(Fp8BlockStandIn, PlatformEnum.CPU, "fp8_block")
    MarlinNvFp4LinearKernel.is_supported = classmethod(lambda cls, capability=None: (True, None))
    MarlinNvFp4LinearKernel.process_weights_after_loading = lambda self, layer: None
    MarlinNvFp4LinearKernel.apply_weights = _apply_weight_only
    experts = nvfp4_emulation_moe.Nvfp4QuantizationEmulationTritonExperts
    experts._supports_current_device = staticmethod(lambda: True)


def _in_fp32(model: nn.Module) -> None:
    """Cast what is not quantized, and let attention see the sequence alone."""
    for layer in model.modules():
        for each in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
            each.data = each.float() if each.dtype == torch.bfloat16 else each
        if isinstance(layer, RotaryEmbedding):
            layer.cos_sin_cache = layer._compute_cos_sin_cache()
        elif isinstance(layer, Attention):
            layer.forward = partial(_attend, layer)
        elif isinstance(layer, LinearBase) and isinstance(kernel_of(layer), Fp8BlockStandIn):
            kernel_of(layer).config = replace(kernel_of(layer).config, out_dtype=torch.float32)


# --- vLLM -----------------------------------------------------------------------------------------


def load(
    folder: Path,
    rank: int = 0,
    change: Callable[[VllmConfig], None] | None = None,
    **arguments: Any,
) -> tuple[Any, VllmConfig]:
    """The model as vLLM loads it, with more arguments of its command line; ``change`` its
    configuration."""
    ranks = arguments.get("tensor_parallel_size", 1)
    config = EngineArgs(
        *(str(folder),),
        skip_tokenizer_init=True,
        max_model_len=SIZES["max_position_embeddings"],
        compilation_config={"custom_ops": ["none"]},  # its definitions in torch, not its CPU build
        **{"dtype": "bfloat16", "enforce_eager": True, **arguments},
    ).create_engine_config()
    if change is not None:
        change(config)
    with set_current_vllm_config(config):
        store = f"file://{folder.parent}/store{ranks if ranks > 1 else ''}"
        init_distributed_environment(ranks, rank, store, rank, "gloo")
        destroy_model_parallel()  # of the case before: a mixture has other groups
        ensure_model_parallel_initialized(ranks, 1)
        torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty gives NaN
        try:
            return get_model(vllm_config=config), config
        finally:
            torch.use_deterministic_algorithms(False)


def kernel_of(layer: Any) -> Any:
    """What vLLM chose for a linear layer."""
    for holder in (layer.quant_method, getattr(layer, "scheme", None)):
        for name in ("kernel", "fp8_linear"):
            if hasattr(holder, name):
                return getattr(holder, name)
    return None


def held(layer: Any) -> Tensor:
    """Weights of a linear layer after loading, as vLLM takes them, in fp32."""
    kernel = kernel_of(layer)
    if isinstance(kernel, kernels.EmulationMxfp8LinearKernel):
        return layer.weight.float()  # dequantized to bf16 when it was loaded
    if isinstance(kernel, Fp8BlockStandIn):
        scale = getattr(layer, "weight_scale_inv", getattr(layer, "weight_scale", None))
        return _fp8_blocks(layer.weight, scale)
    if isinstance(kernel, MxFp4StandIn):
        return _mxfp4(layer.weight, layer.weight_scale)
    return _nvfp4(layer, torch.float32)


def held_experts(experts: Any, part: str) -> Tensor:
    """The same of all experts' ``w13`` or ``w2``."""
    weight, scale = (
        next(x for end in ends if (x := getattr(experts, f"{part}_weight{end}", None)) is not None)
        for ends in (("", "_packed"), ("_scale", "_scale_inv"))
    )
    if weight.dtype == torch.bfloat16:  # MXFP8, dequantized when it was loaded
        return weight.float()
    if weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.uint8:
        return dequant_mxfp8_to_bf16(weight, scale).float()
    if weight.dtype == torch.float8_e4m3fn:
        return torch.stack([*map(_fp8_blocks, weight, scale)])
    if (second := getattr(experts, f"{part}_weight_scale_2", None)) is None:
        return torch.stack([*map(_mxfp4, weight, scale)])
    return dequantize_to_dtype(weight, scale, second, torch.float32, 16, swizzle=False)


# --- comparison -----------------------------------------------------------------------------------


def sqnr(expected: Tensor, got: Tensor) -> float:
    """In dB; infinite where equal, -infinite where something is not finite."""
    noise = (got.double() - expected.double()).square().sum()
    value = 10 * torch.log10(expected.double().square().sum() / noise)
    return -math.inf if value.isnan() else round(value.item(), 1)


def shown(db: float) -> float | str:
    """For JSON."""
    return db if math.isfinite(db) else "equal" if db > 0 else "not finite"


def members(model: Any, name: str) -> list[str]:
    """Weights that vLLM made this layer of."""
    parent, dot, last = name.rpartition(".")
    each = model.packed_modules_mapping.get(last, [last])
    return [f"{parent}{dot}{member}.weight" for member in each]


def pairs(model: Any, state: dict[str, Any]) -> Iterator[tuple[list[str], Tensor]]:
    """Names of ours, and the weights that vLLM made of them."""
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase) and members(model, name)[0] in state:
            if isinstance(state[members(model, name)[0]], bs.ScaledTensor):
                yield members(model, name), held(layer)
        elif hasattr(layer, "w13_weight") or hasattr(layer, "w13_weight_packed"):
            parent = name.removesuffix(".routed_experts")
            for part, projections in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
                for i, weight in enumerate(held_experts(layer, part)):
                    yield [f"{parent}.{i}.{each}.weight" for each in projections], weight


def quantized_inputs(format: str, x: Tensor, scale: float) -> Tensor:
    """``x`` as blockscale quantizes it where vLLM's product on this CPU does."""
    if format == "nvfp4":
        return bs.quantize(x, "nvfp4", global_scale=scale).dequantize(torch.float32)
    if format == "fp8_128x128":
        return bs.quantize(x, "fp8_1x128").dequantize(torch.float32)
    return x.float()


@dataclass(frozen=True)
class Case:
    """A folder, and what is said of it."""

    model: str
    convention: str
    format: str
    weight_only: bool = False
    note: str = ""

    @property
    def activations(self) -> str | None:
        """As ``quantize_folder`` takes them."""
        return "bfloat16" if self.weight_only else None

    def inputs(self, state: dict[str, Any], weight: str, x: Tensor) -> Tensor:
        """Of the layer of a weight."""
        if self.weight_only:
            return x.float()
        scale = state.get(f"{weight.removesuffix('weight')}input_scale", torch.tensor(1.0))
        return quantized_inputs(self.format, x, scale.item())

    def load(self, folder: Path) -> tuple[Any, VllmConfig]:
        """By vLLM's layers."""
        return load(folder)

    def run(self, folder: Path, source: Path) -> dict[str, Any]:
        """Everything compared; of what vLLM refuses, the error."""
        said = {key: value for key, value in vars(self).items() if value}
        try:
            model, config = self.load(folder)
        except Exception as error:
            lines = f"{type(error).__name__}: {error}".split("\n")
            return {**said, "loaded": False, "error": " ".join(lines[:3]).strip()}
        state = checkpoint.load_folder(folder)
        out = {**said, "loaded": True, **self._weights(model, state)}
        with torch.no_grad():
            _in_fp32(model)
            out |= self._outputs(model, state)
            if self.model == "llama":
                out |= self._logits(model, config, state, source)
        right = out["weights_equal"] and out["outputs_db"] >= RIGHT
        return {
            **{key: shown(x) if key.endswith("_db") else x for key, x in out.items()},
            "right": right,
        }

    def _weights(self, model: Any, state: dict[str, Any]) -> dict[str, Any]:
        differ, largest, names = [], 0.0, set()
        for ours, weight in pairs(model, state):
            names |= {*ours}
            expected = torch.cat([state[name].dequantize(torch.float32) for name in ours])
            difference = (expected - weight).abs().max() / expected.abs().max()
            largest = max(largest, difference.item())
            if not torch.equal(expected.bfloat16(), weight.bfloat16()):
                differ.append("+".join(ours))
        every = {name for name, each in state.items() if isinstance(each, bs.ScaledTensor)}
        return {
            "weights": len(names),
            "weights_equal": not differ and names == every,
            "largest_relative_difference_in_fp32": largest,
            **({"weights_that_differ": differ} if differ else {}),
        }

    def _outputs(self, model: Any, state: dict[str, Any]) -> dict[str, Any]:
        generator, found, chosen = torch.Generator().manual_seed(0), [], set()
        for name, layer in model.named_modules():
            ours = members(model, name)
            if not isinstance(layer, LinearBase) or not isinstance(
                state.get(ours[0]), bs.ScaledTensor
            ):
                continue
            chosen.add(type(kernel_of(layer)).__name__)
            x = torch.randn(TOKENS, layer.input_size, generator=generator)
            weight = torch.cat([state[each].dequantize(torch.float32) for each in ours])
            got = layer.quant_method.apply(layer, x)
            found.append(sqnr(linear(self.inputs(state, ours[0], x), weight), got))
        return {
            "kernel": ", ".join(sorted(chosen)),
            "outputs_db": min(found),
        }

    def _logits(self, model: Any, config: VllmConfig, state: Any, source: Path) -> dict[str, Any]:
        ids = torch.arange(TOKENS) * 37 % SIZES["vocab_size"]
        with set_current_vllm_config(config), set_forward_context(None, config):
            got = model.compute_logits(model(ids, torch.arange(TOKENS)))
        reference = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
        plain = reference(ids[None]).logits[0]
        for name, layer in reference.named_modules():
            if isinstance(q := state.get(f"{name}.weight"), bs.ScaledTensor):
                layer.weight = nn.Parameter(q.dequantize(torch.float32), requires_grad=False)

                def hook(module: nn.Module, args: tuple[Tensor], weight: str = f"{name}.weight"):
                    return (self.inputs(state, weight, args[0][0])[None],)

                layer.register_forward_pre_hook(hook)
        expected = reference(ids[None]).logits[0]
        return {"logits_db": sqnr(expected, got), "logits_from_bf16_db": sqnr(plain, got)}


# --- folders --------------------------------------------------------------------------------------


def sources(place: Path) -> dict[str, Path]:
    """Models as ``save_pretrained`` writes them. k and up are larger than q, v and gate."""
    torch.manual_seed(0)
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES)),
        "qwen3_moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)),
    }
    for name, model in models.items():
        with torch.no_grad():
            for key, weight in model.named_parameters():
                weight *= 4 if "k_proj" in key or "up_proj" in key.split(".")[-2] else 1
        model.bfloat16().save_pretrained(place / name, max_shard_size="1MB")
    return {name: place / name for name in models}


def rewritten(folder: Path, target: Path, change: Callable[[str, Tensor], Tensor | None]) -> Path:
    """A copy with other tensors; those of which ``change`` makes None are left out."""
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
            continue
        made = {name: change(name, x) for name, x in load_file(file).items()}
        kept = {name: x for name, x in made.items() if x is not None}
        save_file(kept, target / file.name, {"format": "pt"})
    index = target / "model.safetensors.index.json"
    names = {name: file.name for file in target.glob("*.safetensors") for name in load_file(file)}
    index.write_text(json.dumps({**json.loads(index.read_text()), "weight_map": names}))
    return target


def without_input_scale(name: str, x: Tensor) -> Tensor | None:
    return None if name.endswith(("input_scale", "input_global_scale")) else x


def with_input_scale(name: str, x: Tensor) -> Tensor:
    """As if calibrated: some number for each layer, one for q, k and v and one for gate and up."""
    if not name.endswith("input_scale"):
        return x
    return torch.tensor(0.0013 if "down" in name else 0.0029 if "o_proj" in name else 0.0017)


def split_scales(source: Path, name: str, x: Tensor) -> Tensor:
    """q, k, v each by itself, with a global scale of its own (k's is the largest)."""
    layer, part = name.rsplit(".", 1)
    if not layer.endswith(("q_proj", "k_proj", "v_proj")) or part.startswith("input"):
        return x
    whole = next(
        each[f"{layer}.weight"]
        for each in map(load_file, source.glob("*.safetensors"))
        if f"{layer}.weight" in each
    )
    q = bs.quantize(whole, "nvfp4")
    return {
        **{"weight": q.data, "weight_packed": q.data, "weight_scale": q.scale},
        **{"weight_scale_2": q.global_scale, "weight_global_scale": (1 / q.global_scale)[None]},
    }[part]


def cases() -> Iterator[Case]:
    for format, weight_only in (("nvfp4", False), ("nvfp4", True), ("mxfp8", False)):
        yield Case("llama", "modelopt", format, weight_only)
    for format in ("nvfp4", "mxfp8", "mxfp4"):
        yield Case("llama", "compressed-tensors", format)
        yield Case("llama", "compressed-tensors", format, weight_only=True)
    yield Case("llama", "compressed-tensors", "fp8_128x128")
    yield Case("llama", "deepseek", "fp8_128x128")
    for convention, formats in (
        ("modelopt", ("nvfp4", "mxfp8")),
        ("compressed-tensors", ("nvfp4", "mxfp8", "mxfp4", "fp8_128x128")),
        ("deepseek", ("fp8_128x128",)),
    ):
        for format in formats:
            yield Case("qwen3_moe", convention, format)


def run(place: Path) -> Iterator[dict[str, Any]]:
    """All cases: folders of ours, then faults and what mends them."""
    source, refused = sources(place), []
    for case in cases():
        folder = place / "-".join(map(str, vars(case).values()))
        of = source[case.model]
        checkpoint.quantize_folder(
            *(of, folder, case.format, case.convention), activations=case.activations
        )
        out = case.run(folder, of)
        if out["loaded"]:
            yield out
        else:
            refused.append((case, folder, out))
    _stand_in()
    for case, folder, out in refused:
        yield {**case.run(folder, source[case.model]), "without_stand_in": out["error"]}
    llama = source["llama"]
    for convention in ("modelopt", "compressed-tensors"):
        good, about = place / f"llama-{convention}-nvfp4-False-", ("llama", convention, "nvfp4")
        for note, change in (
            ("fault: input scales removed", without_input_scale),
            ("fault: q, k and v with global scales of their own", partial(split_scales, llama)),
        ):
            bad = rewritten(good, place / f"{convention} {note}", change)
            yield Case(*about, note=note).run(bad, llama)
            mended = place / f"{convention} {note}, mended"
            checkpoint.convert_folder(bad, mended, convention, repair=True)
            yield Case(*about, note=f"{note}; mended by convert_folder").run(mended, llama)
    note = "input scales as if calibrated"
    calibrated = rewritten(place / "llama-modelopt-nvfp4-False-", place / "cal", with_input_scale)
    yield Case("llama", "modelopt", "nvfp4", note=note).run(calibrated, llama)
    checkpoint.convert_folder(calibrated, place / "cal-ct", "compressed-tensors")
    note += ", converted by convert_folder"
    yield Case("llama", "compressed-tensors", "nvfp4", note=note).run(place / "cal-ct", llama)


def main() -> int:
    """Run, print, write. 1 unless faults, and nothing else that loads, are wrong."""
    warnings.filterwarnings("ignore")
    _stub()
    results, failed = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        for each in run(Path(scratch)):
            results.append(each)
            is_fault = each.get("note", "").startswith("fault") and "mended" not in each["note"]
            failed += each["loaded"] and each["right"] is is_fault
            print(json.dumps(each))
    packages = ("vllm", "torch", "transformers", "compressed-tensors")
    versions = {"blockscale": bs.__version__, **{name: version(name) for name in packages}}
    out = {"versions": versions, "machine": platform.machine(), "right_from_db": RIGHT}
    RESULT.write_text(json.dumps({**out, "cases": results}, indent=1) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
