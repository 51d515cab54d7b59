"""Projections of experts, whose names in files may be others than in models.

Mixtral's files have ``block_sparse_moe.experts.3.w1``, its model ``mlp.experts.3.gate_proj``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["Key", "expert_of", "renamed"]

#: block, expert and projection.
_EXPERT = re.compile(r"^(.*?\.\d+)\..*experts\.(\d+)\.(\w+)$")
_SAME = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
Key = tuple[str, str]  # of an expert's projection: its block, and what it is called


def expert_of(layer: str) -> tuple[Key, str] | None:
    """A projection of all experts of a block, and which expert; None for other layers.

    >>> expert_of("model.layers.0.block_sparse_moe.experts.3.w1")
    (('model.layers.0', 'gate_proj'), '3')
    """
    match = _EXPERT.match(layer)
    return match and ((match[1], _SAME.get(match[3], match[3])), match[2])


def renamed(weights: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Names of weights -> those of ``others`` that name the same, or the names themselves.

    >>> renamed(["layers.0.mlp.experts.3.up_proj.weight"], ["layers.0.moe.experts.3.w3.weight"])
    {'layers.0.mlp.experts.3.up_proj.weight': 'layers.0.moe.experts.3.w3.weight'}
    """
    experts, known = {}, set(others)
    for name in known:
        if (expert := expert_of(name.removesuffix(".weight"))) is not None:
            experts[expert] = name
    found = {}
    for name in weights:
        same = None if name in known else expert_of(name.removesuffix(".weight"))
        found[name] = name if same is None else experts.get(same, name)
    return found
