"""What a conversion of a model did, and what it left alone and why."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .parametrized import parameters_of

__all__ = ["ConversionReport", "Entry", "grouped", "matrices", "publish"]

_logger = logging.getLogger("blockscale")

_SHOWN = 2  # names of a group of entries


@dataclass(frozen=True)
class Entry:
    """A module: its name, its type, how many parameters it has, and why it was left, or how
    converted. ``sizes`` are those of its parameters, by identity: modules may share some."""

    name: str
    type: str
    parameters: int
    why: str
    sizes: dict[int, int] = field(default_factory=dict, repr=False, compare=False)


@dataclass
class ConversionReport:
    """What :func:`blockscale.convert` or :func:`blockscale.quantize_` did to a model.

    >>> report = bs.nn.ConversionReport()
    >>> bs.convert(model, bs.Recipe("mxfp8"), report=report)
    >>> print(report)

    Attributes:
        converted: layers that were changed.
        left: modules with matrices of their own that were not.
        converted_parameters, product_parameters: of matrices in layers that were changed, and of
            all matrices outside embeddings; what modules share counts once.
    """

    converted: list[Entry] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    converted_parameters: int = 0
    product_parameters: int = 0

    @property
    def share(self) -> float:
        """Of the parameters of matrix products, those in layers that were changed; 0 to 1."""
        return self.converted_parameters / max(self.product_parameters, 1)

    def __str__(self) -> str:
        lines = [
            f"{len(self.converted)} layers converted: {self.converted_parameters:,} of "
            f"{self.product_parameters:,} parameters of matrix products ({self.share:.0%})"
        ]
        for title, entries in (("converted", self.converted), ("not converted", self.left)):
            lines += [f"{title}: {line}" for line in grouped(entries)]
        return "\n".join(lines)


def grouped(entries: Iterable[Entry]) -> list[str]:
    """A line for entries of the same type and for the same reason; what they share counts once."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.type, entry.why), []).append(entry)
    lines = []
    for (type_name, why), each in groups.items():
        names = [entry.name or "the model itself" for entry in each[:_SHOWN]]
        if len(each) > _SHOWN:
            names.append("...")
        count = sum({key: size for e in each for key, size in e.sizes.items()}.values())
        lines.append(
            f"{len(each)} {type_name}, {count:,} parameters ({', '.join(names)})"
            + (f": {why}" if why else "")
        )
    return lines


def matrices(modules: Iterable[torch.nn.Module]) -> dict[int, Tensor]:
    """Parameters with two dimensions or more that modules hold themselves, by identity."""
    return {
        id(parameter): parameter
        for module in modules
        for parameter in parameters_of(module)
        if not torch.nn.parameter.is_lazy(parameter) and parameter.dim() > 1
    }


def publish(
    made: ConversionReport, report: ConversionReport | None, *, complain: bool = True
) -> None:
    """Log it, as a warning where less than half was converted, and copy it to the caller's."""
    poor = complain and 2 * made.converted_parameters < made.product_parameters
    _logger.log(logging.WARNING if poor else logging.INFO, "%s", made)
    if report is not None:
        report.__dict__.update(made.__dict__)
