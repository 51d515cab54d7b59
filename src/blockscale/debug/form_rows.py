"""Rows of words that a GPU's kernel writes of forms, and the numbers in them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.common import watch_vector as at
from ..kernels.watch.config import Word, row_words
from ..kernels.watch.plan import WatchPlan
from ..nn.quantize_launches import Parts
from .form_numbers import Measured
from .form_samples import About

__all__ = ["FormRows", "RowWay"]

_ROWS = 256  # that are kept together


class RowWay(NamedTuple):
    """The kernel that looks at forms alike, and what they are."""

    plan: WatchPlan
    about: About


class _Kept(NamedTuple):
    """Rows, what each is of, and its number."""

    rows: Tensor
    ways: list[RowWay]
    numbers: list[int]


class FormRows:
    """Those of a step. Nothing is read back before they are evaluated."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._last: dict[Any, _Kept] = {}  # of forms alike

    def add(self, number: int, way: RowWay, x: Tensor | None, parts: Parts) -> None:
        """Keep the row of a form of these parts, which was made of ``x``, by its ``number``."""
        plan = way.plan
        device, picks = plan.places.device, plan.picks
        alike = device, picks, _stream(device)
        kept = self._last.get(alike)
        if kept is None or len(kept.ways) == _ROWS:
            rows = torch.zeros((_ROWS, row_words(picks)), dtype=torch.int32, device=device)
            kept = self._last[alike] = _Kept(rows, [], [])
            self._kept.append(kept)
        plan(x, parts, (kept.rows, len(kept.ways)))
        kept.ways.append(way)
        kept.numbers.append(number)

    def evaluate(self) -> dict[int, Measured]:
        """The numbers of all forms by theirs; nothing is kept any more."""
        found: dict[int, Measured] = {}
        for rows, ways, numbers in self._kept:
            words = rows[: len(ways), : Word.PICKS].cpu().numpy()
            known = ways[0].plan.picks > 0  # what they are of
            vectors = _vectors(words, [way.about for way in ways], known)
            for number, way, vector in zip(numbers, ways, vectors, strict=True):
                found[number] = Measured(way.about, vector)
        self._kept.clear()
        self._last.clear()
        return found


def _stream(device: torch.device) -> int:
    """The stream that rows are made zeros on: another one may write before."""
    if device.type != "cuda":
        return 0
    return torch._C._cuda_getCurrentRawStream(device.index)  # a Stream takes 2 us to make


def _vectors(words: np.ndarray, abouts: list[About], known: bool) -> np.ndarray:
    """Make a vector of each row; ``known``: whether anybody has what was quantized."""
    vectors = np.zeros((len(words), at.LENGTH))
    floats, doubles, counts = words.view(np.float32), words.view(np.float64), words.view(np.uint32)
    vectors[:, at.FIRST_BLOCK] = words[:, Word.FIRST] - 1
    scaled = np.array([about.format.has_global_scale for about in abouts])
    vectors[:, at.GLOBAL_SCALE] = np.where(scaled, floats[:, Word.GLOBAL_SCALE], math.nan)
    vectors[:, at.CODES_AT : at.SUMS_AT] = counts[:, Word.CODES : Word.OCTAVES]
    if not known:
        vectors[:, at.AMAX] = vectors[:, at.SUMS_AT :] = math.nan
        return vectors
    zeros = counts[:, Word.ZEROS].astype(np.int64)
    sums: dict[str, np.ndarray] = {
        "compared": counts[:, Word.COMPARED],
        "signal": doubles[:, Word.SIGNAL // 2],
        "noise": doubles[:, Word.NOISE // 2],
        "zeros": zeros,
        "flushed": counts[:, Word.QUANTIZED_ZEROS] - zeros,
        "saturated": counts[:, Word.SATURATED],
    }
    vectors[:, at.AMAX] = floats[:, Word.AMAX]
    vectors[:, at.SUMS_AT : at.OCTAVES_AT] = np.stack([sums[name] for name in at.SUMS], 1)
    vectors[:, at.OCTAVES_AT : at.ELEMENT] = counts[:, Word.OCTAVES : Word.COMPARED]
    whole = np.array([math.prod(about.format.block) for about in abouts])
    inside = words[:, Word.ELEMENT] - 1
    vectors[:, at.ELEMENT] = np.where(inside < 0, whole, inside)
    vectors[:, at.VALUE] = floats[:, Word.VALUE]
    return vectors
