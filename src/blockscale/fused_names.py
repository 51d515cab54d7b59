"""Names of weights that servers make one, which then share a global scale."""

from __future__ import annotations

__all__ = ["FUSED", "fused_with"]

#: Modules whose weights become one in vLLM, SGLang or TensorRT-LLM (their
#: ``packed_modules_mapping``), by that part of their names which differs.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("gate_proj", "up_proj"),
    ("gate", "up"),
    ("w1", "w3"),  # of experts too
    ("c_fc_0", "c_fc_1"),  # of EXAONE
    ("fc11", "fc12"),  # of Nomic's BERT
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq_a", "wkv"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
_GROUP = {member: group for group in FUSED for member in group}


def fused_with(name: str) -> tuple[str, ...]:
    """Names of all tensors that a server makes one with ``name``, itself among them.

    >>> fused_with("layers.0.mlp.up_proj.weight")
    ('layers.0.mlp.gate_proj.weight', 'layers.0.mlp.up_proj.weight')
    """
    parts = name.split(".")
    for i in reversed(range(len(parts))):
        if group := _GROUP.get(parts[i]):
            return tuple(".".join((*parts[:i], member, *parts[i + 1 :])) for member in group)
    return (name,)
