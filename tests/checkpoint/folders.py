"""A folder as ``save_pretrained`` writes it: two files, an index, a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYER = "model.layers.0."
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
    "hidden_size": 128, "tie_word_embeddings": True,
}  # fmt: skip


def weights() -> dict[str, Tensor]:
    """Of one layer, k_proj ten times as large as the rest."""
    g = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, size: float = 0.02) -> Tensor:
        return (torch.randn(rows, columns, generator=g) * size).bfloat16()

    return {
        "model.embed_tokens.weight": matrix(96, 128),
        f"{LAYER}input_layernorm.weight": torch.ones(128, dtype=torch.bfloat16),
        f"{LAYER}self_attn.q_proj.weight": matrix(128, 128),
        f"{LAYER}self_attn.k_proj.weight": matrix(64, 128, 0.2),
        f"{LAYER}self_attn.v_proj.weight": matrix(64, 128),
        f"{LAYER}self_attn.o_proj.weight": matrix(128, 128),
        f"{LAYER}mlp.gate.weight": matrix(4, 128),
        f"{LAYER}mlp.experts.0.gate_proj.weight": matrix(256, 128),
        f"{LAYER}mlp.experts.0.up_proj.weight": matrix(256, 128),
        f"{LAYER}mlp.experts.0.down_proj.weight": matrix(128, 256),
    }


QUANTIZED = tuple(name for name in weights() if "_proj." in name)
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def make(folder: Path, state: dict[str, Tensor] | None = None, **config: object) -> Path:
    """``folder`` with ``state``, its parts in turn in the first and in the second file."""
    state = weights() if state is None else state
    places = {name: FILES[i % 2] for i, name in enumerate(sorted(state))}
    folder.mkdir()
    for file in FILES:
        content = {n: x.contiguous() for n, x in state.items() if places[n] == file}
        save_file(content, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{1}")
    (folder / "original" / "consolidated.00.pth").write_bytes(b"weights")
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    return folder
