"""The model in a folder, and a text to run it on, by transformers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["model_and_batches"]

#: Tokens of a sequence, most sequences, and sequences at a time.
LENGTH, SEQUENCES, BATCH = 512, 256, 8


def model_and_batches(folder: Path, text: Path) -> tuple[Module, list[Tensor]]:
    """The model in ``folder``, and a text as tokens in batches that it can be called with.

    Raises ValueError where transformers is missing, or the text cannot be read or is empty.
    """
    import torch

    from ..checks import reading

    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise ValueError(
            "calibrate: transformers, which runs the model, is not installed; install it, or leave "
            "calibrate out"
        ) from None
    with reading("calibrate", text):
        content = text.read_text(encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(content, return_tensors="pt").input_ids[0][: LENGTH * SEQUENCES]
    if not len(tokens):
        raise ValueError(f"calibrate: {text} has no text; name another file")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
    return model.eval(), _batches(tokens.to(device))


def _batches(tokens: Tensor) -> list[Tensor]:
    whole = len(tokens) // LENGTH * LENGTH
    batches = list(tokens[:whole].view(-1, LENGTH).split(BATCH)) if whole else []
    return [*batches, tokens[None, whole:]] if whole < len(tokens) else batches
