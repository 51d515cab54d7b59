"""The model in a folder, and a text to run it on, by transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from ..checkpoint import Progress

__all__ = ["first_tokens", "model_and_batches"]

#: Tokens of a sequence, most sequences, and sequences at a time.
LENGTH, SEQUENCES, BATCH = 512, 256, 8
#: Of a token, for the first look at a text: twice what English has.
CHARACTERS = 8


def model_and_batches(
    folder: Path, text: Path, tell: Callable[[Progress], None]
) -> tuple[Module, Iterable[Tensor]]:
    """The model in ``folder``, and a text as tokens in batches that it can be called with, which
    ``tell`` how far the model is.

    Raises ValueError where transformers is missing, or the text cannot be read or is empty.
    """
    import torch

    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise ValueError(
            "calibrate: transformers, which runs the model, is not installed; install it, or leave "
            "calibrate out"
        ) from None
    _beginning(text, 1)  # what is wrong with it is said before transformers takes its time
    tokens = first_tokens(transformers.AutoTokenizer.from_pretrained(folder), text)
    if not len(tokens):
        raise ValueError(f"calibrate: {text} has no text; name another file")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
    return model.eval(), _Told(_batches(tokens.to(device)), f"{len(tokens):,} tokens", tell)


@dataclass(frozen=True)
class _Told:
    """Batches that say where they are, each time that a model goes through them."""

    batches: list[Tensor]
    what: str
    tell: Callable[[Progress], None]

    def __iter__(self) -> Iterator[Tensor]:
        from ..checkpoint import Progress

        self.tell(Progress(note=f"the model runs on {self.what} of text"))
        for i, batch in enumerate(self.batches, 1):
            self.tell(Progress(name=f"batch {i} of {len(self.batches)}"))
            yield batch


def first_tokens(tokenizer: Any, text: Path) -> Tensor:
    """Those at the beginning of a text that a model is run on; little more of it is read.

    Where the text is cut, the last tokens may be others than in the whole: enough of them follow.
    """
    most, characters = LENGTH * SEQUENCES, CHARACTERS * LENGTH * SEQUENCES
    while True:
        content = _beginning(text, characters)
        tokens: Tensor = tokenizer(content, return_tensors="pt").input_ids[0]
        if len(tokens) >= most + LENGTH or len(content) < characters:
            return tokens[:most]
        characters *= 2


def _beginning(text: Path, characters: int) -> str:
    from ..checks import reading

    try:
        with reading("calibrate", text), text.open(encoding="utf-8") as file:
            return file.read(characters)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"calibrate: {text} is no text in UTF-8 ({error.reason}); name a file of plain text"
        ) from None


def _batches(tokens: Tensor) -> list[Tensor]:
    whole = len(tokens) // LENGTH * LENGTH
    batches = list(tokens[:whole].view(-1, LENGTH).split(BATCH)) if whole else []
    return [*batches, tokens[None, whole:]] if whole < len(tokens) else batches
