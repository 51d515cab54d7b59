"""The loss curves of a comparison, drawn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .recipes import BASELINE
from .results import PARITY_PERCENT, Comparison

__all__ = ["draw"]

# Okabe-Ito, told apart by colour-blind readers; the baseline is grey
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F5539", "#999999")
_MARKERS = "osD^vP*X"


def draw(comparison: Comparison) -> Figure:
    """Training and validation loss on the left; on the right, what each recipe adds to bf16's."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    quantized = [name for name in comparison.recipes if name != BASELINE]
    compares = BASELINE in comparison.recipes and bool(quantized)
    axes = figure.subplots(1, 2 if compares else 1, squeeze=False)[0]
    style = {BASELINE: ("#C4C4C4", "")} | {
        name: (_COLOURS[i % len(_COLOURS)], _MARKERS[i % len(_MARKERS)])
        for i, name in enumerate(quantized)
    }
    _losses(axes[0], comparison, style)
    if compares:
        _differences(axes[1], comparison, quantized, style)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="#E5E5E5", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _losses(ax: Axes, comparison: Comparison, style: dict[str, tuple[str, str]]) -> None:
    for name in comparison.recipes:
        colour, marker = style[name]
        broad = name == BASELINE  # the others lie on it
        runs = comparison.of(name)
        train = _smooth(
            [statistics.fmean(s) for s in zip(*(r.train_loss for r in runs), strict=True)]
        )
        ax.plot(range(1, len(train) + 1), train, color=colour, alpha=0.4, linewidth=1)
        steps, losses = _validation(comparison, name)
        ax.plot(
            steps, losses, color=colour, marker=marker, markersize=5, markerfacecolor="white",
            linewidth=6 if broad else 1.6, label=name,
        )  # fmt: skip
    ax.set_title("loss: validation (marks) and training (thin)", loc="left", fontsize=11)
    ax.set_ylabel("nats per byte")
    values = [loss for name in comparison.recipes for loss in _validation(comparison, name)[1]]
    values = [loss for loss in values if math.isfinite(loss)]
    if values:  # the first training steps would press the rest together
        low, high = min(values), max(values)
        ax.set_ylim(low - 0.1 * (high - low) - 0.05, high + 0.5 * (high - low) + 0.1)


def _differences(
    ax: Axes, comparison: Comparison, names: list[str], style: dict[str, tuple[str, str]]
) -> None:
    ax.axhspan(-PARITY_PERCENT, PARITY_PERCENT, color="#F1F1F1", zorder=0)
    ax.axhline(0, color="black", linewidth=1)
    for name in names:
        colour, marker = style[name]
        steps = [step for step, _ in comparison.of(name)[0].validation]
        each = [
            [100 * (a[1] / b[1] - 1) for a, b in zip(run.validation, base.validation, strict=True)]
            for run, base in zip(comparison.of(name), comparison.of(BASELINE), strict=True)
        ]
        mean = [statistics.fmean(values) for values in zip(*each, strict=True)]
        ax.plot(
            steps, mean, color=colour, marker=marker, markersize=5, linewidth=1.8,
            markerfacecolor="white",
        )  # fmt: skip
        if len(each) > 1:
            low, high = ([f(v) for v in zip(*each, strict=True)] for f in (min, max))
            ax.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
    seeds = comparison.settings.seeds
    shade = f" (shade: range of {seeds} seeds)" if seeds > 1 else ""
    ax.set_title(f"validation loss above that of bf16{shade}", loc="left", fontsize=11)
    ax.set_ylabel("percent")
    ax.annotate(
        f"±{PARITY_PERCENT} %", (0.01, PARITY_PERCENT), xycoords=("axes fraction", "data"),
        va="bottom", fontsize=9, color="#777777",
    )  # fmt: skip


def _validation(comparison: Comparison, name: str) -> tuple[list[int], list[float]]:
    runs = comparison.of(name)
    steps = [step for step, _ in runs[0].validation]
    return steps, [
        statistics.fmean(run.validation[i][1] for run in runs) for i in range(len(steps))
    ]


def _smooth(values: Sequence[float], window: int = 10) -> list[float]:
    """Mean of each value and those before it, ``window`` of them at most."""
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
