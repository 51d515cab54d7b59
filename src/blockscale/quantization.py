"""What is done to a tensor on its way to a format, beside rounding each element to nearest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .checks import check_flag, check_saved, choose
from .formats import Format, get_format
from .hadamard import Hadamard

__all__ = [
    "PLAIN",
    "SCALINGS",
    "Quantization",
    "check_eden",
    "check_groups",
    "check_rounding",
    "check_scaling",
    "check_scaling_of_weights",
    "check_square",
]

#: How a block's scale is chosen.
SCALINGS = ("amax", "four_over_six", "search", "ms_eden")
_WITHOUT_TRANSFORM = SCALINGS[:3]


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
        random_signs: of the transform, drawn anew in each step.
        scaling: how a block of NVFP4 gets its scale. ``"amax"``: its largest element becomes 6.
            ``"four_over_six"``: 6, or 4 where the squared error is then smaller (arXiv 2512.02010).
            ``"search"``: the best of eight such scales, from 3.7 to 6.4, for weights that are kept.
            ``"ms_eden"``: by a factor for each block of the transform, which makes it as long as it
            was along what it was, and rounded stochastically, the elements to nearest: on average
            over signs that is right, with a smaller error than that of ``stochastic``
            (arXiv 2601.22813).

    :func:`blockscale.quantize` takes the same one by one: ``seed``, ``square``, ``hadamard``,
    ``scaling``. Raises TypeError for a ``hadamard`` that is none and for flags that are none,
    ValueError for what cannot be together.
    """

    stochastic: bool = False
    square: bool = False
    hadamard: Hadamard | None = None
    random_signs: bool = False
    scaling: str = "amax"

    def __post_init__(self) -> None:
        check_flag("stochastic", self.stochastic)
        check_flag("square", self.square)
        check_flag("random_signs", self.random_signs)
        choose("scaling", self.scaling, dict.fromkeys(SCALINGS))
        if not isinstance(self.hadamard, Hadamard | None):
            raise TypeError(
                f"hadamard: got {self.hadamard!r}; expected blockscale.Hadamard(...) or None"
            )
        if self.square and self.hadamard is not None:
            raise ValueError(
                "square, hadamard: a transform goes along one side of a square, and both sides "
                "have its scale; leave out one of them"
            )
        if self.hadamard is not None and self.hadamard.draws:
            raise ValueError(
                "hadamard: draws signs by a tensor, and a recipe is made of values; give it size "
                "alone, with random_signs=True"
            )
        if self.random_signs and (self.hadamard is None or self.hadamard.signs):
            raise ValueError(
                "random_signs: are those of a transform that has none of its own; give a "
                "hadamard=blockscale.Hadamard(size)"
            )
        if self.scaling != "amax" and self.stochastic:
            raise ValueError(
                f"scaling, stochastic: {self.scaling!r} rounds elements to nearest; leave out one "
                "of them"
            )
        check_eden(self.scaling, self.hadamard)

    @property
    def draws(self) -> bool:
        """Whether elements, or scales, are rounded by random numbers."""
        return self.stochastic or self.scaling == "ms_eden"

    @property
    def is_random(self) -> bool:
        """Whether it depends on a seed."""
        return self.draws or self.random_signs

    @property
    def transform(self) -> tuple[Hadamard | None, bool]:
        """In which both operands of a product agree."""
        return self.hadamard, self.random_signs

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
        check_saved(values, (f.name for f in fields(cls)))
        given = dict(values)
        if isinstance(given.get("hadamard"), Mapping):
            given["hadamard"] = Hadamard(**given["hadamard"])
        return cls(**given)


def check_eden(scaling: str, hadamard: Hadamard | None, seeded: bool = True) -> None:
    """ValueError for corrections of nothing, or that nothing rounds."""
    if scaling == "ms_eden" and (hadamard is None or hadamard.size < 16):
        raise ValueError(
            "scaling: 'ms_eden' corrects blocks that are transformed; give a "
            "hadamard=blockscale.Hadamard(128), or one of 16, 32 or 64"
        )
    if scaling == "ms_eden" and not seeded:
        raise ValueError("seed: got None, and scaling='ms_eden' rounds scales by it; pass one")


def check_rounding(scaling: str, square: bool, seeded: bool) -> None:
    """ValueError for a seed that rounds nothing, and for squares whose sides are corrected."""
    if seeded and scaling in ("four_over_six", "search"):
        raise ValueError(
            f"seed: is given, and scaling={scaling!r} rounds to nearest; leave out one of them"
        )
    if square and scaling == "ms_eden":
        raise ValueError(
            "square, scaling: 'ms_eden' corrects blocks along one side of a square, and both sides "
            "have its scale; leave out one of them"
        )


def check_scaling(scaling: str, format: Format) -> None:
    """ValueError for unknown names, and for formats whose scales are not chosen so."""
    choose("scaling", scaling, dict.fromkeys(SCALINGS))
    if scaling != "amax" and not format.has_global_scale:
        raise ValueError(
            f"scaling: {scaling!r} is for scales of {get_format('nvfp4').scale.name}, "
            f"{format.name!r} has {format.scale.name}; leave it out"
        )


def check_square(shape: Sequence[int], format: Format, grouped: bool) -> None:
    """ValueError for what has no squares, or has them without being told."""
    if format.block[0] > 1:
        raise ValueError(f"square: blocks of {format.name!r} are squares; leave it out")
    if grouped:
        raise ValueError("square: groups of offsets would cut squares; leave out one of them")
    if len(shape) < 2:
        raise ValueError(f"square: x has shape {tuple(shape)}; a square needs rows and columns")


def check_groups(shape: Sequence[int], format: Format) -> None:
    """ValueError for what has no groups of rows."""
    if len(shape) != 2:
        raise ValueError(f"offsets: x has shape {tuple(shape)}; groups cut the rows of a matrix")
    if format.block[0] > 1:
        raise ValueError(
            f"offsets: blocks of {format.name!r} span {format.block[0]} rows; groups cannot cut "
            "them"
        )


PLAIN = Quantization()


def check_scaling_of_weights(scaling: str, format: Format) -> None:
    """ValueError unless weights that are kept can have such scales: no transform comes before."""
    choose("scaling", scaling, dict.fromkeys(_WITHOUT_TRANSFORM))
    if scaling != "amax" and not format.has_global_scale:
        raise ValueError(f"scaling: {scaling!r} is for nvfp4, not {format.name}; leave it out")
