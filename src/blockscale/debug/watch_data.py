"""The lines that a watch has written, as a report reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["METRICS", "NOTHING_SEEN", "USES", "Histograms", "Line", "WatchData"]

#: Tensors of a layer, and the product that reads each.
USES = (
    ("activations", "fprop"),
    ("weights", "fprop"),
    ("gradients", "dgrad"),
    ("weights", "dgrad"),
    ("gradients", "wgrad"),
    ("activations", "wgrad"),
)
#: Where there are no lines.
NOTHING_SEEN = (
    "no step of training was seen: nothing was quantized by a forward with gradients of the model "
    "that was watched, or compiled code that calls it was called; watch the module that "
    "torch.compile returned, and call a compiled function of a step as it is written"
)
METRICS = ("sqnr_db", "underflow", "saturated", "spread")
Use = tuple[str, str]
#: A line of the file.
Line = dict[str, Any]


@dataclass
class Histograms:
    """Of all layers in a step: how often exponents of scales occur, and magnitudes in a block."""

    scales: dict[int, int] = field(default_factory=dict)
    magnitudes: list[int] = field(default_factory=list)

    def add(self, line: Line) -> None:
        for exponent, count in line["scale_histogram"].items():
            self.scales[int(exponent)] = self.scales.get(int(exponent), 0) + count
        found = line["magnitude_histogram"] or []
        before = self.magnitudes or [0] * len(found)
        self.magnitudes = [a + b for a, b in zip(before, found, strict=True)] if found else before


@dataclass
class WatchData:
    """What was seen: modules and steps in order, and by use of a tensor (modules, steps) of each of
    METRICS, NaN where nothing was seen.

    Attributes:
        bad: lines with blocks that are not finite.
        worst: of each module and use the line with the lowest SQNR.
        first, last: histograms by use, of the first and the last step.
    """

    modules: list[str]
    steps: list[int]
    values: dict[Use, dict[str, np.ndarray]]
    nonfinite: dict[Use, np.ndarray]
    bad: list[Line]
    worst: list[Line]
    first: dict[Use, Histograms]
    last: dict[Use, Histograms]
    formats: list[str]
    lines: int

    @classmethod
    def read(cls, path: Path) -> WatchData:
        """Two passes over the file, which may be large."""
        modules: dict[str, int] = {}
        steps: dict[int, int] = {}
        formats: dict[str, None] = {}
        count = 0
        for line in _lines(path):
            modules.setdefault(line["module"], len(modules))
            steps.setdefault(line["step"], len(steps))
            formats.setdefault(line["format"])
            count += 1
        shape = len(modules), len(steps)
        values = {use: {m: np.full(shape, math.nan) for m in METRICS} for use in USES}
        nonfinite = {use: np.zeros(shape, bool) for use in USES}
        first: dict[Use, Histograms] = {}
        last: dict[Use, Histograms] = {}
        bad: list[Line] = []
        worst: dict[tuple[str, ...], Line] = {}
        ends = (min(steps), max(steps)) if steps else (0, 0)
        for line in _lines(path):
            use = line["tensor"], line["product"]
            at = modules[line["module"]], steps[line["step"]]
            for metric in METRICS:
                found = _value(line, metric)
                if found is not None:
                    values[use][metric][at] = found
            if line["nonfinite_blocks"]:
                nonfinite[use][at] = True
                bad.append(line)
            for step, histograms in zip(ends, (first, last), strict=True):
                if line["step"] == step:
                    histograms.setdefault(use, Histograms()).add(line)
            key, sqnr = (line["module"], *use), line["sqnr_db"]
            if sqnr is not None and (key not in worst or sqnr < worst[key]["sqnr_db"]):
                worst[key] = line
        ordered = sorted(worst.values(), key=lambda line: line["sqnr_db"])
        named = list(modules), list(steps)
        return cls(*named, values, nonfinite, bad, ordered, first, last, list(formats), count)

    def uses(self) -> Sequence[Use]:
        """Those that were seen."""
        return [use for use in USES if use in self.first or use in self.last]


def _lines(path: Path) -> Any:
    with path.open(encoding="utf-8") as file:
        for text in file:
            if text.endswith("\n"):  # the last one may have been cut
                yield json.loads(text)


def _value(line: Line, metric: str) -> float | None:
    if metric == "spread":
        return line["scale_log2"] and line["scale_log2"]["spread"]
    return line[metric]
