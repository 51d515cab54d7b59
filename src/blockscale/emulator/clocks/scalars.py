"""The scalars of accesses: each is an operation of its own (PTX ISA 8.2.4)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

__all__ = ["of_one_write", "scalars", "whole"]


def scalars(
    where: np.ndarray, size: int, width: int, words: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """The scalars of accesses (n,) of ``size`` bytes: first that of the lowest address of each,
    then the next one of each.

    Args:
        where: addresses of the accesses.
        width: bytes of a scalar.
        words: (n, k), something about each word of the accesses; a word may be wider than a
            scalar.

    Yields:
        The addresses (n,) of the scalars, and what is said of their words.
    """
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
    """Of each row (n, k) the number that all words of a scalar have, or 0 if they differ: then
    several writes have made what it holds."""
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
