"""Text as bytes: read, split, and cut into the batches that every recipe sees."""

from __future__ import annotations

import gzip
import zlib
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Corpus", "read_text"]

#: The last tenth of the text is held out for validation.
_HELD_OUT = 10


def read_text(path: Path | None = None) -> bytes:
    """The bytes of a file (decompressed if its name ends in ``.gz``), or of the packaged text.

    Raises ValueError where there is nothing to read.
    """
    if path is None:
        packed = files("blockscale").joinpath("data", "shakespeare.txt.gz").read_bytes()
        return gzip.decompress(packed)
    try:
        content = path.read_bytes()
        text = gzip.decompress(content) if path.suffix == ".gz" else content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"data: {path} is not a whole gzip file ({error}); rename it if it is not compressed"
        ) from None
    except OSError as error:
        raise ValueError(
            f"data: cannot read {path} ({error.strerror}); name a readable file"
        ) from None
    if not text:
        raise ValueError(f"data: {path} is empty; name a file with text to learn from")
    return text


class Corpus:
    """A text split in two, and sequences of ``context`` bytes with the byte that follows each.

    Raises ValueError where a part is shorter than one sequence.
    """

    def __init__(self, text: bytes, context: int) -> None:
        held_out = len(text) // _HELD_OUT
        if held_out < context + 1:
            raise ValueError(
                f"data: {len(text):,} bytes are too few; sequences of {context} and a tenth held "
                f"out for validation need {_HELD_OUT * (context + 1):,} or more: name a longer file"
            )
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context
        self.train, self.validation = tokens[:-held_out], tokens[-held_out:]

    def batches(self, steps: int, batch: int, seed: int) -> Tensor:
        """Where each training sequence starts, drawn beforehand: (steps, batch)."""
        generator = torch.Generator().manual_seed(seed)
        last = len(self.train) - self.context
        return torch.randint(last, (steps, batch), generator=generator)

    def validation_starts(self, sequences: int) -> Tensor:
        """Where each validation sequence starts: ``sequences`` at most, evenly spread."""
        last = len(self.validation) - self.context - 1
        count = min(sequences, last // self.context + 1)
        return torch.linspace(0, last, count, dtype=torch.float64).long()

    def sequences(self, part: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 (len(starts), context), of ``part`` of this corpus."""
        index = starts[:, None] + torch.arange(self.context + 1)
        tokens = part[index].long()
        return tokens[:, :-1], tokens[:, 1:]
