"""Sizes given as text: 16384x7168."""

from __future__ import annotations

__all__ = ["parse_size", "parse_sizes"]


def parse_size(argument: str, text: str, meaning: str, example: str) -> tuple[int, ...]:
    """As many positive numbers as the example has; ValueError otherwise."""
    parts = text.lower().split("x")
    good = all(part.isdigit() and int(part) for part in parts)
    if len(parts) != len(example.split("x")) or not good:
        raise ValueError(f"{argument}: got {text!r}; expected {meaning} like {example}")
    return tuple(map(int, parts))


def parse_sizes(argument: str, text: str, meaning: str, example: str) -> list[tuple[int, ...]]:
    """Several with commas between them."""
    return [parse_size(argument, part, meaning, example) for part in text.split(",")]
