"""Tiny models of transformers, as folders, and what they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import blockscale as bs

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
IDS = torch.arange(18).reshape(2, 9)


def config(kind: str, **others: Any) -> Any:
    import transformers as tr

    if kind == "llama":
        return tr.LlamaConfig(**{**SIZES, **others})
    if kind == "qwen3_moe":  # a dense layer, and one of experts
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        return tr.Qwen3MoeConfig(**SIZES, **experts, mlp_only_layers=[0], **others)
    if kind == "gpt_oss":
        return tr.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, **others)
    if kind == "gpt2":
        return tr.GPT2Config(n_embd=128, n_layer=1, n_head=2, vocab_size=96, **others)
    assert kind == "deepseek_v3"
    return tr.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, moe_intermediate_size=128, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=128,
        kv_lora_rank=128, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, **others,
    )  # fmt: skip


def make(path: Path, kind: str = "llama", **others: Any) -> Path:
    """A folder with random weights, in several files."""
    import transformers as tr

    torch.manual_seed(0)
    model = tr.AutoModelForCausalLM.from_config(config(kind, **others), dtype=torch.bfloat16)
    model.save_pretrained(path, max_shard_size="200KB")
    return path


def load(path: Path, **given: Any) -> Any:
    import transformers as tr

    return tr.AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.bfloat16, **given})


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def held(model: Any) -> dict[str, bs.ScaledTensor]:
    """What is quantized."""
    return {n: t for n, t in model.state_dict().items() if isinstance(t, bs.ScaledTensor)}
