"""What is left alone by default: the same in files and in models, and right."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import blockscale as bs
from blockscale import checkpoint
from blockscale.nn.exclude import default_exclusions

#: Model -> names of its matrices that are multiplied, and of those that are left alone.
MODELS = {
    "Llama": (
        "model.layers.0.self_attn.q_proj.weight model.layers.0.self_attn.o_proj.weight "
        "model.layers.0.mlp.gate_proj.weight model.layers.0.mlp.up_proj.weight "
        "model.layers.0.mlp.gate_up_proj.weight model.layers.0.mlp.down_proj.weight",
        "model.embed_tokens.weight lm_head.weight model.norm.weight "
        "model.layers.0.input_layernorm.weight model.layers.0.self_attn.q_proj.lora_A.weight "
        "base_model.model.lm_head.lora_B.default.weight",
    ),
    "Mixtral": (
        "model.layers.0.block_sparse_moe.experts.0.w1.weight "
        "model.layers.0.block_sparse_moe.experts.7.w3.weight "
        "model.layers.0.mlp.experts.gate_up_proj model.layers.0.mlp.experts.down_proj",
        "model.layers.0.block_sparse_moe.gate.weight model.layers.0.mlp.gate.weight",
    ),
    "Qwen2-MoE": (
        "model.layers.0.mlp.shared_expert.gate_proj.weight "
        "model.layers.0.mlp.shared_expert.down_proj.weight "
        "model.layers.0.mlp.experts.3.gate_proj.weight",
        "model.layers.0.mlp.gate.weight model.layers.0.mlp.shared_expert_gate.weight",
    ),
    "DeepSeek-V3": (
        "model.layers.3.self_attn.q_a_proj.weight "
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight "
        "model.layers.3.self_attn.kv_b_proj.weight "
        "model.layers.3.mlp.shared_experts.up_proj.weight "
        "model.layers.3.mlp.shared_experts.gate_proj.weight "
        "model.layers.3.mlp.experts.255.down_proj.weight "
        "model.layers.3.self_attn.indexer.wq_b.weight attention.wk.weight",
        "model.layers.61.eh_proj.weight model.layers.3.self_attn.indexer.weights_proj.weight "
        "model.layers.3.self_attn.indexer.wk.weight "
        "model.layers.3.mlp.gate.weight model.layers.3.self_attn.q_a_proj.weight_scale_inv "
        "model.layers.61.shared_head.head.weight model.layers.61.embed_tokens.weight "
        "model.layers.61.enorm.weight model.layers.3.self_attn.kv_a_layernorm.weight",
    ),
    "T5": (
        "encoder.block.0.layer.0.SelfAttention.q.weight "
        "decoder.block.0.layer.1.EncDecAttention.o.weight "
        "encoder.block.0.layer.1.DenseReluDense.wi.weight",
        "shared.weight encoder.embed_tokens.weight lm_head.weight "
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ),
    "BART": (
        "model.encoder.layers.0.self_attn.out_proj.weight model.decoder.layers.0.fc1.weight",
        "model.shared.weight model.encoder.embed_positions.weight final_logits_bias "
        "model.decoder.layernorm_embedding.weight",
    ),
    "Mamba": (
        "backbone.layers.0.mixer.in_proj.weight backbone.layers.0.mixer.x_proj.weight "
        "backbone.layers.0.mixer.out_proj.weight",
        "backbone.layers.0.mixer.dt_proj.weight "
        "backbone.embeddings.weight backbone.layers.0.mixer.A_log",
    ),
    "XLNet": (
        "transformer.layer.0.ff.layer_1.weight transformer.layer.0.ff.layer_2.weight",
        "transformer.mask_emb transformer.word_embedding.weight lm_loss.weight "
        "transformer.layer.0.rel_attn.q transformer.layer.0.rel_attn.o "
        "transformer.layer.0.rel_attn.r_w_bias transformer.layer.0.rel_attn.seg_embed "
        "transformer.layer.0.ff.layer_norm.weight",
    ),
    "GPT-NeoX": (
        "gpt_neox.layers.0.attention.query_key_value.weight "
        "gpt_neox.layers.0.attention.dense.weight "
        "gpt_neox.layers.0.mlp.dense_h_to_4h.weight",
        "gpt_neox.embed_in.weight embed_out.weight",
    ),
    "torchtitan": (
        "layers.0.attention.wq.weight layers.0.feed_forward.w1.weight layers.0.output.weight",
        "tok_embeddings.weight output.weight layers.0.moe.router.gate.weight",
    ),
    "a small model": (
        "blocks.0.mlp.gate.weight blocks.0.mlp.up.weight blocks.0.mlp.down.weight "
        "blocks.0.attention.output.weight blocks.0.head.weight",
        "head.weight blocks.1.mlp.gate.weight classifier.weight score.weight",
    ),
    "others": (
        "h.0.norm1.linear.weight moe.shared.w1.weight moe.shared_mlp.gate_proj.weight "
        "multi_scale_attn.q.weight attention_pair_bias.q.weight h.0.delegate.weight",
        "tokens_router.weight h.router_z.weight moe.gating.weight moe.gate.wg.weight emb.weight "
        "vit.cls_token tok_emb.weight q_proj.scales h.norm_q.weight scale_shift_table "
        "time_embedding.linear_1.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_files_and_models_decide_alike(model: str, tmp_path: Path):
    multiplied, left = (names.split() for names in MODELS[model])
    save_file({name: torch.ones(32, 64) for name in multiplied + left}, tmp_path / "in")
    manifest = checkpoint.quantize_file(tmp_path / "in", tmp_path / "out")["tensors"]
    of_file = {name: manifest[name].get("copied", "") for name in multiplied + left}
    assert [name for name, why in of_file.items() if not why] == multiplied

    root = nn.Module()
    for name in multiplied + left:
        at = root
        *above, last = name.removesuffix(".weight").split(".")
        for part in above:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        if not hasattr(at, last):
            at.add_module(last, nn.Linear(64, 32))
    why = default_exclusions(root)
    for name in multiplied + left:
        if name.endswith(".weight"):  # else no layer's
            assert why(nn.Linear(64, 32), name.removesuffix(".weight")) == of_file[name]


def test_both_tables_are_public():
    for name in MODELS["T5"][1].split():
        assert any(fnmatchcase(name, glob) for glob in checkpoint.DEFAULT_EXCLUDE), name
    assert isinstance(checkpoint.DEFAULT_EXCLUDE, tuple)
    assert bs.nn.DEFAULT_EXCLUDE["output head"][1] == "embed_out"
    assert all(isinstance(patterns, tuple) for patterns in bs.nn.DEFAULT_EXCLUDE.values())


def test_what_another_choice_made_is_not_taken_for_the_result(tmp_path: Path, monkeypatch):
    """As when a later version leaves other tensors alone."""
    save_file({"a.weight": torch.ones(32, 64), "b.weight": torch.ones(32, 64)}, tmp_path / "in")
    with monkeypatch.context() as patch:
        patch.setattr(
            checkpoint.selection, "why_left_alone", lambda name, _: "by default" * (name[0] == "b")
        )
        checkpoint.quantize_file(tmp_path / "in", tmp_path / "out")
    with pytest.raises(ValueError, match="made with another choice of tensors; remove it"):
        checkpoint.quantize_file(tmp_path / "in", tmp_path / "out")
