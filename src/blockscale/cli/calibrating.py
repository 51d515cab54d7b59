"""Input scales of a model in a folder: it runs on a text, by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["calibrated"]

#: Tokens of a sequence, most sequences, and sequences at a time.
LENGTH, SEQUENCES, BATCH = 512, 256, 8


def calibrated(folder: Path, text: Path | None) -> dict[str, float] | None:
    """Largest inputs of the layers of the model in ``folder`` on a text; None without one.

    Raises ValueError where transformers is missing, or the text cannot be read or is empty.
    """
    if text is None:
        return None
    import torch

    from .. import calibrate
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
    return calibrate(model.eval(), _batches(tokens.to(device)))


def _batches(tokens: Tensor) -> Iterator[Tensor]:
    whole = len(tokens) // LENGTH * LENGTH
    if whole:
        yield from tokens[:whole].view(-1, LENGTH).split(BATCH)
    if whole < len(tokens):
        yield tokens[None, whole:]
