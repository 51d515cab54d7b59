"""Pictures of what quantization did, as matplotlib Figures."""

from __future__ import annotations

from collections import Counter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..formats import formats
from .report import FileReport
from .statistics import ErrorStatistics, error_bin_edges

__all__ = ["errors", "values"]

# Okabe-Ito: told apart by colour-blind readers
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")
_GREY = "#555555"


def errors(report: FileReport) -> Figure:
    """Left, how often each relative error occurs; right, the exponents of the block scales.

    One colour a format, and where there is only one, a line for the tensor that lost most. Raises
    ValueError where no errors are known.
    """
    by_format = report.errors_by_format()
    if not by_format:
        raise ValueError(
            f"path: the errors of {report.path} are not known: its manifest is {report.manifest}; "
            "give source, the file it was made from"
        )
    known = [t for t in report.tensors if t.error is not None and t.error.sqnr_db is not None]
    worst = min(known, key=lambda t: t.error.sqnr_db or 0.0, default=None)  # type: ignore[union-attr]
    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2)
    series = [
        (name, total, colour)
        for (name, total), colour in zip(by_format.items(), _COLOURS, strict=False)
    ]
    filled = len(series) == 1
    for name, total, colour in series:
        label = f"{name}, {_tensors(report, name)}: {_db(total)}"
        _draw_errors(left, total, colour, label, filled)
        _draw_exponents(right, total.scales.counts, colour, label, filled)
    if filled and worst is not None and worst.error is not None and len(known) > 1:
        label = f"worst, {_short(worst.name)}: {_db(worst.error)}"
        _draw_errors(left, worst.error, "black", label, False)
        _draw_exponents(right, worst.error.scales.counts, "black", label, False)
    left.set_title("Relative error of elements")
    left.set_xscale("log", base=2)
    left.set_xlabel("|dequantized $-$ x| / |x|")
    left.set_ylabel("elements per bin, two bins an octave")
    right.set_title("Block scales" + (" times global scale" * _two_levels(by_format)))
    right.set_xlabel("exponent: floor(log2(scale))")
    right.set_ylabel("blocks")
    for axes in (left, right):
        _style(axes)
    if filled:
        total = series[0][1]
        left.text(
            0.02, 0.97, _facts(total), transform=left.transAxes, va="top", fontsize=8, color=_GREY
        )
        drawn = [total] if worst is None or worst.error is None else [total, worst.error]
        top = max(_shares(each)[_bin_of(1.0)] for each in drawn)  # of a line above, too
        if total.flushed / max(total.elements, 1) > 0.002:  # else there is nothing to point at
            left.annotate(
                "flushed\nto 0", (1.2, top), (0, 4), textcoords="offset points", ha="center",
                fontsize=8, color=_GREY,
            )  # fmt: skip
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 2),
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(f"{_short(report.path.name)}: what quantization lost")
    return figure


def values(report: FileReport) -> Figure:
    """Exponents of the values of a file that is not quantized, one colour a dtype.

    Raises ValueError where the file has no floating-point values.
    """
    by_dtype: dict[str, Counter[int]] = {}
    for tensor in report.tensors:
        if tensor.values is not None and tensor.values.exponents.counts:
            by_dtype.setdefault(tensor.format, Counter()).update(tensor.values.exponents.counts)
    if not by_dtype:
        raise ValueError(
            f"path: {report.path} has no floating-point values to draw; leave plot out"
        )
    figure = Figure(figsize=(7, 4.2), layout="constrained", dpi=120)
    axes = figure.subplots()
    for (dtype, counts), colour in zip(by_dtype.items(), _COLOURS, strict=False):
        label = f"{dtype}: {sum(counts.values()):,} values"
        _draw_exponents(axes, counts, colour, label, len(by_dtype) == 1)
    axes.set_title(f"{_short(report.path.name)}: exponents of the values")
    axes.set_xlabel("floor(log2(|x|))")
    axes.set_ylabel("values that are not 0")
    axes.set_yscale("log")
    _style(axes)
    axes.legend(frameon=False, fontsize=9)
    return figure


def _style(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_errors(axes: Axes, stats: ErrorStatistics, colour: str, label: str, filled: bool) -> None:
    _steps(axes, _shares(stats), error_bin_edges(), colour, label, filled)


def _shares(stats: ErrorStatistics) -> list[float]:
    return [n / max(stats.elements, 1) for n in stats.error_bins]


def _bin_of(error: float) -> int:
    """The bin that has this relative error."""
    return max(i for i, edge in enumerate(error_bin_edges()) if edge <= error * (1 + 1e-9))


def _draw_exponents(
    axes: Axes, counts: Counter[int], colour: str, label: str, filled: bool
) -> None:
    if not counts:
        return
    first, last, total = min(counts), max(counts), sum(counts.values())
    share = [counts[e] / total for e in range(first, last + 1)]
    _steps(axes, share, [e - 0.5 for e in range(first, last + 2)], colour, label, filled)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))


def _steps(
    axes: Axes, share: list[float], edges: list[float], colour: str, label: str, filled: bool
) -> None:
    style: dict[str, Any] = (
        {"fill": True, "color": colour, "alpha": 0.75, "linewidth": 0}
        if filled
        else {"fill": False, "color": colour, "linewidth": 1.6}
    )
    axes.stairs(share, edges, label=label, **style)


def _facts(stats: ErrorStatistics) -> str:
    """What the bins do not show."""
    n = max(stats.elements, 1)
    lines = [
        f"exact: {stats.exact / n:.2%}",
        f"flushed to zero: {stats.flushed / n:.3%}",
        f"saturated: {stats.saturated / n:.3%}",
    ]
    return "\n".join(lines + [f"not finite: {stats.nonfinite}"] * bool(stats.nonfinite))


def _percent(share: float, position: int) -> str:
    return f"{100 * share:.8f}".rstrip("0").rstrip(".") + "%"


def _db(stats: ErrorStatistics) -> str:
    return "nothing lost" if stats.sqnr_db is None else f"SQNR {stats.sqnr_db:.2f} dB"


def _tensors(report: FileReport, name: str) -> str:
    count = sum(t.format == name and t.error is not None for t in report.tensors)
    return f"{count} tensor{'s' * (count != 1)}"


def _short(name: str) -> str:
    """A name as text to draw: no formula, no character that the font lacks."""
    name = ascii(name)[1:-1].replace("$", r"\$")
    return name if len(name) <= 48 else f"...{name[-45:]}"


def _two_levels(by_format: dict[str, ErrorStatistics]) -> bool:
    return any(formats[name].has_global_scale for name in by_format)
