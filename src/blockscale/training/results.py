"""From runs to a comparison: one row a recipe, what may be concluded, and the JSON of it all."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .data import Text
from .recipes import BASELINE, RECIPES
from .run import Run
from .saves import digest
from .settings import Settings
from .statistics import ROLES

__all__ = ["Comparison", "Row"]

#: What these are held to: the part of the validation loss by which they may differ from BF16.
PARITY_PERCENT = 0.5
_HELD_TO_PARITY = ("mxfp8", "fp8_block")

#: Student's t, two-sided 95 %, by degrees of freedom.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Row:
    """A recipe's results, means over the seeds. None: no baseline, one seed, nothing quantized."""

    recipe: str
    train_loss: float
    validation_loss: float
    difference: float | None  # of the validation loss to that of bf16 with the same seed
    difference_percent: float | None
    spread_percent: float | None  # standard deviation of difference_percent over the seeds
    saturated_per_million: float | None  # of all elements quantized
    sqnr_db: dict[str, float] | None  # by role
    tokens_per_second: float
    peak_memory: int | None  # bytes; None on a CPU


class Comparison:
    """The runs of several recipes with the same seeds, and what they ran on."""

    def __init__(self, runs: Sequence[Run], settings: Settings, text: Text, seconds: float) -> None:
        self.runs = list(runs)
        self.settings = settings
        self.seconds = seconds
        self.text = {
            "source": text.source,
            "bytes": len(text),
            "sha256": digest(text),
            "held_out": text.held_out,
            "held_out_bytes": len(text.validation),
        }
        self.created = datetime.now(UTC).isoformat(timespec="seconds")
        self.versions = _versions(settings.device)

    @property
    def recipes(self) -> list[str]:
        return list(dict.fromkeys(run.recipe for run in self.runs))

    def of(self, recipe: str) -> list[Run]:
        """The runs of a recipe, by seed."""
        return [run for run in self.runs if run.recipe == recipe]

    def percent(self, recipe: str, other: str) -> list[float]:
        """By how many percent the final validation loss is above that of ``other``, by seed."""
        return [
            100 * (a.final_validation_loss / b.final_validation_loss - 1)
            for a, b in zip(self.of(recipe), self.of(other), strict=True)
        ]

    def rows(self) -> list[Row]:
        return [self._row(recipe) for recipe in self.recipes]

    def _row(self, recipe: str) -> Row:
        runs = self.of(recipe)
        validation = statistics.fmean(run.final_validation_loss for run in runs)
        difference = percent = spread = None
        if recipe != BASELINE and BASELINE in self.recipes:
            base = statistics.fmean(run.final_validation_loss for run in self.of(BASELINE))
            difference = validation - base
            each = self.percent(recipe, BASELINE)
            percent = statistics.fmean(each)
            spread = _stdev(each) if len(each) > 1 else None
        seen = [run.statistics[role] for run in runs for role in ROLES if role in run.statistics]
        elements = sum(s["elements"] for s in seen)
        saturated = sum(s["elements"] * s["saturated_per_million"] for s in seen)
        return Row(
            recipe,
            statistics.fmean(run.final_train_loss for run in runs),
            validation,
            difference,
            percent,
            spread,
            saturated / elements if elements else None,
            {
                role: statistics.fmean(run.statistics[role]["sqnr_db"] for run in runs)
                for role in ROLES
                if all(role in run.statistics for run in runs)
            }
            if elements
            else None,
            statistics.fmean(run.tokens_per_second for run in runs),
            max((run.peak_memory for run in runs if run.peak_memory is not None), default=None),
        )

    def verdict(self) -> list[str]:
        """What the numbers say, and what they do not, one sentence each."""
        sentences = [
            self._parity(name) for name in _HELD_TO_PARITY if {BASELINE, name} <= set(self.recipes)
        ]
        others = [name for name in self.recipes if name not in (BASELINE, "mxfp8")]
        if "mxfp8" in self.recipes and others:
            sentences.append(self._separation(others))
        if self.settings.device != "cpu":  # there runs share the cores
            sentences.append(self._speed())
        return sentences

    def _parity(self, name: str) -> str:
        seeds, each = self.settings.seeds, self.percent(name, BASELINE)
        mean = statistics.fmean(each)
        where = "within" if abs(mean) < PARITY_PERCENT else "outside"
        spread = f" (spread over {seeds} seeds {_stdev(each):.2f} %)" if seeds > 1 else ""
        return (
            f"{name} ends {mean:+.2f} % from {BASELINE} in validation loss{spread}, "
            f"{where} {PARITY_PERCENT} %."
        )

    def _speed(self) -> str:
        rows = self.rows()
        base = next((r.tokens_per_second for r in rows if r.recipe == BASELINE), None)
        values = []
        for row in rows:
            of_base = "" if base is None else f" ({row.tokens_per_second / base:.2f}x)"
            memory = "" if row.peak_memory is None else f", {row.peak_memory / 2**30:.1f} GiB"
            values.append(f"{row.recipe} {row.tokens_per_second:,.0f} tokens/s{of_base}{memory}")
        return f"Speed and peak memory: {'; '.join(values)}."

    def _separation(self, others: list[str]) -> str:
        seeds = self.settings.seeds
        each = {name: self.percent(name, "mxfp8") for name in others}
        if seeds == 1:
            values = ", ".join(f"{name} {v[0]:+.2f} %" for name, v in each.items())
            return (
                f"Against mxfp8: {values}. One seed has no spread, so this does not say whether "
                "they differ: run with --seeds 3."
            )
        values = ", ".join(
            f"{name} {statistics.fmean(v):+.2f} % (spread {_stdev(v):.2f} %)"
            for name, v in each.items()
        )
        apart = [name for name, v in each.items() if _is_separated(v)]
        level = [name for name in others if name not in apart]
        verdicts = []
        if apart:
            verdicts.append(f"separated from mxfp8 by more than the spread: {', '.join(apart)}")
        if level:
            verdicts.append(f"not separated from mxfp8 at this scale: {', '.join(level)}")
        return (
            f"Against mxfp8, seed by seed: {values}. With 95 % confidence over {seeds} seeds, "
            f"{'; '.join(verdicts)}."
        )

    def to_json(self) -> dict[str, Any]:
        """Everything that was measured, as plain values."""
        found = {
            "schema": 1,
            "created": self.created,
            "seconds": round(self.seconds, 1),
            "settings": asdict(self.settings),
            "parameters": self.runs[0].parameters,
            "text": self.text,
            "versions": self.versions,
            "recipes": {
                name: None if (recipe := RECIPES[name]) is None else asdict(recipe)
                for name in self.recipes
            },
            "table": [asdict(row) for row in self.rows()],
            "verdict": self.verdict(),
            "runs": [asdict(run) for run in self.runs],
        }
        return _without_nan(found)


def _without_nan(value: Any) -> Any:
    """A diverged loss is null in JSON, which knows no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _stdev(values: list[float]) -> float:
    """Standard deviation of a sample; NaN where a run diverged."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _is_separated(differences: list[float]) -> bool:
    """Whether the mean of paired differences is not zero, by Student's t at 95 %."""
    n = len(differences)
    t = _T95[min(n - 1, len(_T95)) - 1]
    return abs(statistics.fmean(differences)) > t * _stdev(differences) / n**0.5


def _versions(device: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("blockscale", "torch", "numba", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if found["blockscale"] == "not installed":  # run from a source tree
        from .. import __version__

        found["blockscale"] = __version__
    found["platform"] = f"{platform.system()} {platform.machine()}"
    found["processor"] = f"{_processor()}, {os.cpu_count()} cores"
    if device != "cpu":
        found["gpu"] = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
