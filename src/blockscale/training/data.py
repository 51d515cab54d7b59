"""Text as bytes: read, split, and cut into the batches that every recipe sees."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from ..checks import reading

__all__ = ["Corpus", "Text", "read_text"]

#: The last tenth of a file is held out for validation.
_HELD_OUT = 10


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to learn from and others to be tested on."""

    source: str  # where they come from, in words
    train: bytes
    validation: bytes
    held_out: str  # which part ``validation`` is, in words

    @classmethod
    def of(cls, text: bytes, source: str) -> Text:
        """``text`` with its last tenth held out."""
        cut = len(text) - len(text) // _HELD_OUT
        return cls(source, text[:cut], text[cut:], "the last tenth")

    def __len__(self) -> int:
        return len(self.train) + len(self.validation)


def read_text(path: Path | None = None) -> Text:
    """The bytes of a file (decompressed if its name ends in ``.gz``), or the packaged text.

    Raises ValueError where there is nothing to read.
    """
    if path is None:
        packed = files("blockscale").joinpath("data", "shakespeare.txt.gz").read_bytes()
        return Text.of(gzip.decompress(packed), "Shakespeare, seven plays (packaged)")
    with reading("data", path):
        content = path.read_bytes()
    try:
        text = gzip.decompress(content) if path.suffix == ".gz" else content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"data: {path} is not a whole gzip file ({error}); rename it if it is not compressed"
        ) from None
    if not text:
        raise ValueError(f"data: {path} is empty; name a file with text to learn from")
    return Text.of(text, path.name)


class Corpus:
    """Both parts of a text as tokens, and sequences of ``context`` bytes with the byte that follows
    each.

    Args:
        device: where the tokens are kept; sequences are cut there.

    Raises ValueError where a part is shorter than one sequence.
    """

    def __init__(self, text: Text, context: int, device: str = "cpu") -> None:
        if min(len(text.train), len(text.validation)) < context + 1:
            raise ValueError(
                f"data: {len(text):,} bytes are too few; sequences of {context} need "
                f"{context + 1:,} or more to learn from and as many held out ({text.held_out}, "
                f"here {len(text.validation):,}): name a longer text"
            )
        self.context = context
        self.train, self.validation = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device)
            for part in (text.train, text.validation)
        )

    def batches(self, steps: int, batch: int, seed: int) -> Tensor:
        """Where each training sequence starts, drawn beforehand: (steps, batch)."""
        generator = torch.Generator().manual_seed(seed)
        last = len(self.train) - self.context
        return torch.randint(last, (steps, batch), generator=generator).to(self.train.device)

    def validation_starts(self, sequences: int) -> Tensor:
        """Where each validation sequence starts: ``sequences`` at most, evenly spread."""
        last = len(self.validation) - self.context - 1
        count = min(sequences, last // self.context + 1)
        starts = torch.linspace(0, last, count, dtype=torch.float64).long()
        return starts.to(self.validation.device)

    def sequences(self, part: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 (len(starts), context), of ``part`` of this corpus."""
        index = starts[:, None] + torch.arange(self.context + 1, device=starts.device)
        tokens = part[index].long()
        return tokens[:, :-1], tokens[:, 1:]
