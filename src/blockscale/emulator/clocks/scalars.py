"""The scalars of accesses: each is an operation of its own (PTX ISA 8.2.4)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

__all__ = ["of_one_write", "scalars", "whole"]


def scalars(
    where: np.ndarray, size: int, width: int, words: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Accesses (n,) of ``size`` bytes, one scalar of each after the other: addresses, and what is
    said of its words."""
    each = max(size // width, 1)
    for i in range(each):
        at = where + np.uint64(i * width) if i else where
        if words is None:
            yield at, None
        else:
            count = max(words.shape[1] // each, 1)
            yield (
                at,
                words[:, i * count : (i + 1) * count]
                if count * (i + 1) <= words.shape[1]
                else words,
            )


def whole(words: np.ndarray) -> list[int]:
    """The number that all words of a scalar have, or 0."""
    if words.shape[1] == 1:
        return words[:, 0].tolist()
    return np.where((words == words[:, :1]).all(axis=1), words[:, 0], 0).tolist()


def of_one_write(words: np.ndarray, each: int) -> np.ndarray:
    """Words (n, k), 0 for those of scalars of ``each`` words that have several numbers."""
    if each == 1:
        return words
    parts = words.reshape(len(words), -1, each)
    alike = np.all(parts == parts[..., :1], axis=-1, keepdims=True)
    return np.where(alike, parts, 0).reshape(words.shape)
