"""The model in a folder, and a text to run it on, by transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.nn import Module

__all__ = ["model_and_batches"]

#: Tokens of a sequence, most sequences, and sequences at a time.
LENGTH, SEQUENCES, BATCH = 512, 256, 8


def model_and_batches(
    folder: Path, text: Path, dtypes: Mapping[str, dtype]
) -> tuple[Module, list[Tensor]]:
    """The model in ``folder``, and a text as tokens in batches that it can be called with.

    ``dtypes`` are those of the weights that will be quantized, by name. The model has their values,
    whatever dtype its configuration names.

    Raises ValueError where transformers is missing or cannot load them, or the text cannot be read
    or is empty.
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
    with _loading(folder, "tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokens = tokenizer(content, return_tensors="pt").input_ids[0][: LENGTH * SEQUENCES]
    if not len(tokens):
        raise ValueError(f"calibrate: {text} has no text; name another file")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one = {*dtypes.values()}
    with _loading(folder, "model"):
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(folder, dtype=one.pop() if len(one) == 1 else "auto").to(device)
    length = min(LENGTH, getattr(model.config, "max_position_embeddings", None) or LENGTH)
    return model.eval(), _batches(tokens.to(device), length)


@contextmanager
def _loading(folder: Path, what: str) -> Iterator[None]:
    """What transformers raises, as a sentence with the argument and a remedy."""
    try:
        yield
    except Exception as error:  # tokenizers raises nothing more special
        why = " ".join(str(error).split())
        raise ValueError(
            f"calibrate: transformers cannot load the {what} of {folder} ({why:.200}); leave "
            "calibrate out, or call blockscale.calibrate or blockscale.gptq on a model of your own"
        ) from None


def _batches(tokens: Tensor, length: int) -> list[Tensor]:
    whole = len(tokens) // length * length
    batches = list(tokens[:whole].view(-1, length).split(BATCH)) if whole else []
    return [*batches, tokens[None, whole:]] if whole < len(tokens) else batches
