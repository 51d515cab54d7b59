"""The model in a folder, and a text to run it on, by transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from torch.nn import Module

    from ..checkpoint import Progress

__all__ = ["first_tokens", "model_and_batches"]

#: Tokens of a sequence, most sequences, and sequences at a time.
LENGTH, SEQUENCES, BATCH = 512, 256, 8
#: Of a token, for the first look at a text: twice what English has.
CHARACTERS = 8


def model_and_batches(
    folder: Path, text: Path, dtypes: Mapping[str, dtype], tell: Callable[[Progress], None]
) -> tuple[Module, Iterable[Tensor]]:
    """The model in ``folder``, and a text as tokens in batches that it can be called with, which
    ``tell`` how far the model is.

    ``dtypes`` are those of the weights that will be quantized, by name. The model has their values,
    whatever dtype its configuration names.

    Raises ValueError where transformers is missing or cannot load them, or the text cannot be read
    or is empty.
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
    with _loading(folder, "tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokens = first_tokens(tokenizer, text)
    if not len(tokens):
        raise ValueError(f"calibrate: {text} has no text; name another file")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one = {*dtypes.values()}
    with _loading(folder, "model"):
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(folder, dtype=one.pop() if len(one) == 1 else "auto").to(device)
    length = min(LENGTH, getattr(model.config, "max_position_embeddings", None) or LENGTH)
    batches = _batches(tokens.to(device), length)
    return model.eval(), _Told(batches, f"{len(tokens):,} tokens", tell)


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

    with reading("calibrate", text), text.open(encoding="utf-8") as file:
        return file.read(characters)


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
