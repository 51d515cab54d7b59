"""Pictures of what a watch has seen, as matplotlib Figures."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .watch_data import Histograms, WatchData

__all__ = ["MAPS", "heat_map", "histograms"]

_RED, _UNSEEN = "#E4002B", "#E6E6E6"
_FIRST, _LAST = "#B8B8B8", "#0072B2"
_MOST_NAMES = 60
_LEAST_SHARE = 1e-4


class Map(NamedTuple):
    """Says how a metric is drawn: ``colours`` go from good to bad."""

    metric: str
    title: str
    colours: str
    is_share: bool = False


MAPS = (
    Map("sqnr_db", "SQNR (dB): signal over what quantization changed", "viridis"),
    Map("underflow", "Underflow: elements that were not 0 and became 0", "YlOrBr", True),
    Map("saturated", "Saturation: elements beyond what their block can hold", "PuRd", True),
    Map("spread", "Spread of block scales: octaves from the least to the largest", "cividis"),
)


def heat_map(data: WatchData, about: Map) -> Figure:
    """Modules by steps, a panel for each tensor and the product that reads it. Red: blocks that are
    not finite; grey: not seen."""
    uses, count = data.uses(), len(data.modules)
    row = 0.21 if count <= _MOST_NAMES else max(0.075, 12.6 / count)
    figure = Figure(figsize=(13, 1.5 + row * count), layout="constrained", dpi=110)
    panels = figure.subplots(1, len(uses), sharey=True, squeeze=False)[0]
    norm, colours = _scale(data, about)
    image: Any = None
    for axes, use in zip(panels, uses, strict=True):
        values = data.values[use][about.metric]
        shown = np.ma.masked_invalid(values)
        how: Any = {"aspect": "auto", "interpolation": "nearest"}
        image = axes.imshow(shown, norm=norm, cmap=colours, **how)
        marks = np.zeros((*values.shape, 4))
        marks[data.nonfinite[use]] = *(int(_RED[i : i + 2], 16) / 255 for i in (1, 3, 5)), 1
        axes.imshow(marks, **how)
        axes.set_title(f"{use[1]}\n{use[0]}", fontsize=10)
        _mark_steps(axes, data.steps)
        axes.tick_params(labelsize=8, length=2)
        axes.set_facecolor(_UNSEEN)
    apart = -(-count // _MOST_NAMES)
    panels[0].set_yticks(range(0, count, apart), [_short(m) for m in data.modules[::apart]])
    panels[0].tick_params(axis="y", labelsize=8 if apart == 1 else 7)
    figure.supxlabel("step", fontsize=9)
    bar = figure.colorbar(image, ax=panels, shrink=min(1.0, 3 / (row * count)), pad=0.01)
    bar.ax.tick_params(labelsize=8)
    if about.is_share:
        bar.ax.yaxis.set_major_formatter(FuncFormatter(_percent))
        bar.ax.set_title("white:\nnone", fontsize=8)
    bar.outline.set_visible(False)
    return figure


def _scale(data: WatchData, about: Map) -> tuple[Normalize, Colormap]:
    """The same for all panels."""
    colours = colormaps[about.colours].with_extremes(bad=_UNSEEN, under="white")
    found = np.concatenate([data.values[use][about.metric].ravel() for use in data.uses()])
    found = found[np.isfinite(found)]
    if about.is_share:
        most = max(float(found.max(initial=0)), 10 * _LEAST_SHARE)
        return LogNorm(_LEAST_SHARE, most), colours
    if not found.size:
        return Normalize(0, 1), colours
    low, high = map(float, np.percentile(found, (1, 99)))  # one cell takes no range from others
    return Normalize(low, high if high > low else low + 1), colours


def _mark_steps(axes: Axes, steps: list[int]) -> None:
    last = len(steps) - 1
    places = sorted({0, last // 2, last}) if last < 40 else [0, last // 2, last]
    axes.set_xticks(places, [str(steps[i]) for i in places])


def histograms(data: WatchData) -> Figure:
    """Above, exponents of block scales; below, magnitudes over the largest of their block. Grey: in
    the first step; blue: in the last one."""
    uses = data.uses()
    figure = Figure(figsize=(13, 4.6), layout="constrained", dpi=110)
    panels = figure.subplots(2, len(uses), sharex="row", squeeze=False)
    for i, use in enumerate(uses):
        above, below = panels[0][i], panels[1][i]
        for found, is_last in ((data.first.get(use), False), (data.last.get(use), True)):
            if found is not None:
                _draw_scales(above, found, is_last)
                _draw_magnitudes(below, found, is_last)
        above.set_title(f"{use[1]}\n{use[0]}", fontsize=10)
        for axes in (above, below):
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.set_yticks([])
            axes.tick_params(labelsize=8, length=2)
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    panels[0][0].set_ylabel("blocks", fontsize=9)
    panels[1][0].set_ylabel("elements", fontsize=9)
    middle = len(uses) // 2
    panels[0][middle].set_xlabel("log2 of the scale", fontsize=9)
    panels[1][middle].set_xlabel("log2 of |x| over the largest of the block", fontsize=9)
    steps = [f"step {data.steps[0]}", f"step {data.steps[-1]}"]
    handles = panels[0][0].patches[:2]
    if len(handles) == 2:
        figure.legend(handles, steps, loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    return figure


def _draw_scales(axes: Axes, found: Histograms, is_last: bool) -> None:
    if not found.scales:
        return
    first, last, total = min(found.scales), max(found.scales), sum(found.scales.values())
    share = [found.scales.get(e, 0) / total for e in range(first, last + 1)]
    _steps(axes, share, [e - 0.5 for e in range(first, last + 2)], is_last)


def _draw_magnitudes(axes: Axes, found: Histograms, is_last: bool) -> None:
    total = sum(found.magnitudes)
    if not total:
        return
    share = [count / total for count in reversed(found.magnitudes)]
    least = -len(share) + 1
    _steps(axes, share, [e - 0.5 for e in range(least, 2)], is_last)


def _steps(axes: Axes, share: list[float], edges: list[float], is_last: bool) -> None:
    style: dict[str, Any] = (
        {"fill": False, "color": _LAST, "linewidth": 1.5}
        if is_last
        else {"fill": True, "color": _FIRST, "linewidth": 0}
    )
    axes.stairs(share, edges, **style)


def _percent(share: float, position: int) -> str:
    return f"{100 * share:.6f}".rstrip("0").rstrip(".") + "%"


def _short(name: str) -> str:
    """A name as text to draw: no formula, no character that the font lacks."""
    name = ascii(name)[1:-1].replace("$", r"\$") or "(the model)"
    return name if len(name) <= 36 else f"...{name[-33:]}"
