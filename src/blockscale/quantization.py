"""What is done to a tensor on its way to a format, beside rounding each element to nearest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .checks import check_flag, choose
from .hadamard import Hadamard

__all__ = ["PLAIN", "Quantization"]


@dataclass(frozen=True)
class Quantization:
    """How one operand of a product is quantized, for ``Recipe(quantization=...)``.

    >>> bs.Quantization(stochastic=True, hadamard=bs.Hadamard.random(seed=1))
    Quantization(stochastic=True, hadamard=Hadamard(size=16, signs=21208))

    Args:
        stochastic: round elements up or down by chance, so that they are right on average.
        square: one scale for each square of elements (16 x 16 in NVFP4): both forms of a matrix,
            along rows and along columns, then have the same elements.
        hadamard: transform along the contraction before, both operands of a product alike.

    :func:`blockscale.quantize` takes the same one by one: ``seed``, ``square``, ``hadamard``.
    Raises TypeError for a ``hadamard`` that is none, ValueError for flags that are none, and for a
    transform of squares, which would go along one of their sides.
    """

    stochastic: bool = False
    square: bool = False
    hadamard: Hadamard | None = None

    def __post_init__(self) -> None:
        check_flag("stochastic", self.stochastic)
        check_flag("square", self.square)
        if not isinstance(self.hadamard, Hadamard | None):
            raise TypeError(
                f"hadamard: got {self.hadamard!r}; expected blockscale.Hadamard(...) or None"
            )
        if self.square and self.hadamard is not None:
            raise ValueError(
                "square, hadamard: a transform goes along one side of a square, and both sides "
                "have its scale; leave out one of them"
            )

    def __repr__(self) -> str:
        given = (f"{name}={getattr(self, name)!r}" for name in self._given())
        return f"Quantization({', '.join(given)})"

    def _given(self) -> list[str]:
        """Fields that are no defaults."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold, of what is not the default.

        >>> bs.Quantization(square=True).to_dict()
        {'square': True}
        """
        values = {name: getattr(self, name) for name in self._given()}
        if self.hadamard is not None:
            values["hadamard"] = {"size": self.hadamard.size, "signs": self.hadamard.signs}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Quantization:
        """What :meth:`to_dict` gave.

        >>> bs.Quantization.from_dict({"square": True})
        Quantization(square=True)

        Raises TypeError for what is no mapping, ValueError for fields that there are not.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"values: got {type(values).__name__}; expected what to_dict() gives")
        for name in values:
            choose("values", name, dict.fromkeys(f.name for f in fields(cls)))
        given = dict(values)
        if isinstance(given.get("hadamard"), Mapping):
            given["hadamard"] = Hadamard(**given["hadamard"])
        return cls(**given)


PLAIN = Quantization()
