"""Weights that are left alone by default, by their names: of layers and of files alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase, translate

__all__ = ["ANYWHERE", "GLOBS", "LAST", "WHOLE", "gated_by", "why_left_alone"]

#: What it is -> patterns of a part of the name (between dots, in lower case), and all below that
#: part. They are small and cost most accuracy: peers keep them in high precision too.
ANYWHERE: Mapping[str, tuple[str, ...]] = {
    "output head": (
        "*lm_head*",
        "embed_out",
        "unembed",
        "output_embeddings",
        "lm_loss",
        "shared_head",
    ),
    "router": ("router", "*_router", "router_*", "routers", "gate", "gating", "*_expert_gate"),
    "adapter": ("lora_*",),
    "embedding": ("*embed*", "wte", "wpe"),
    "stored (in, heads, out)": ("rel_attn",),  # of XLNet
}

#: The same for whole names: below something else these are other things (``attention.output``).
WHOLE: Mapping[str, tuple[str, ...]] = {
    "head of the model": ("head", "output", "classifier", "score", "to_logits"),
}

#: The same for the last part of a name, ``weight`` not counted: ``shared.weight`` is T5's
#: embedding, ``shared.w1.weight`` an expert that is multiplied; ``norm1.linear.weight`` is
#: multiplied, too. A star stands at the beginning only, where it may match dots.
LAST: Mapping[str, tuple[str, ...]] = {
    "embedding table": ("shared", "emb", "*_emb", "*_token", "*_tokens", "*_table"),
    "norm": ("*norm", "*norm[0-9]", "*norm_[a-z0-9]"),
    "bias": ("*bias", "bias_[kv]"),
    "scale": ("*_scale", "*_scale_inv", "*_scale_[0-9]", "scales", "*_scales"),  # other libraries'
    "state matrix": ("a_log",),  # of Mamba
    "multiplied past its layer": ("dt_proj",),  # of Mamba, in transformers
    # of DeepSeek and GLM; servers have these in bf16 whatever a checkpoint says
    "projection into a layer of multi-token prediction": ("eh_proj",),
    "sparse attention's indexer": ("weights_proj", "indexer.wk"),
}


def _globs(pattern: str, tails: tuple[str, ...]) -> tuple[str, ...]:
    """A pattern of a part as globs of whole names."""
    heads = ("",) if pattern.startswith("*") else ("", "*.")
    return tuple(head + pattern + tail for head in heads for tail in tails)


def _compiled() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for what, patterns in ANYWHERE.items():
        for pattern in patterns:
            yield what, pattern, _globs(pattern, ("",) if pattern.endswith("*") else ("", ".*"))
    for what, patterns in LAST.items():
        for pattern in patterns:
            yield what, pattern, _globs(pattern, ("", ".weight"))
    for what, patterns in WHOLE.items():
        for pattern in patterns:
            yield what, pattern, (pattern, f"{pattern}.weight")


_GATE = re.compile(r"(^|\.)gate(\.weight)$")
_COMPILED = tuple(_compiled())

#: The same as globs of names of tensors, in lower case.
GLOBS = tuple(glob for _, _, globs in _COMPILED for glob in globs)
_ANY = re.compile("|".join(map(translate, GLOBS)))


def why_left_alone(name: str, names: Container[str] = ()) -> str:
    """Why a tensor of this name is left alone by default; "" if it is not.

    >>> why_left_alone("model.layers.0.mlp.gate.weight")
    "left alone by default: router ('gate')"

    ``names`` are those of :func:`gated_by`: beside an ``up`` as large a ``gate`` is a SwiGLU's.

    >>> why_left_alone("mlp.gate.weight", {"mlp.gate.weight", "mlp.up.weight"})
    ''
    """
    lower = name.lower()
    if not _ANY.match(lower):  # most names: one look instead of sixty
        return ""
    for what, pattern, globs in _COMPILED:
        if pattern == "gate" and _GATE.search(name) and _GATE.sub(r"\1up\2", name) in names:
            continue
        if any(fnmatchcase(lower, glob) for glob in globs):
            return f"left alone by default: {what} ({pattern!r})"
    return ""


def gated_by(names: Iterable[str], shape_of: Callable[[str], Sequence[int] | None]) -> set[str]:
    """Names of the ``up`` weights that are as large as the ``gate`` beside them; ``shape_of`` says
    None of a name that is none."""
    gates = [(name, _GATE.sub(r"\1up\2", name)) for name in names if _GATE.search(name)]
    return {up for gate, up in gates if shape_of(up) == shape_of(gate) is not None}
