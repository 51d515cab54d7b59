"""Pictures of contests."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from .contest import BASELINE, Row

__all__ = ["draw"]

# Okabe-Ito: told apart by colour-blind readers
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


def draw(rows: Sequence[Row]) -> Figure:
    """A panel for each case: how many times as fast as torch's bf16 product, at each shape, with
    TFLOP/s below the bars. Contests without that product are left out."""
    base = {(r.group, r.case, r.shape): r.microseconds for r in rows if r.who == BASELINE}
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if (row.group, row.case, row.shape) in base and row.who != BASELINE:
            panels.setdefault((row.group, row.case), []).append(row)
    figure = Figure(figsize=(11, 0.5 + 2.6 * max(len(panels), 1)), layout="constrained")
    every = figure.subplots(max(len(panels), 1), squeeze=False)[:, 0]
    for axes, ((group, case), mine) in zip(every, panels.items(), strict=False):
        shapes = list(dict.fromkeys(row.shape for row in mine))
        names = list(dict.fromkeys(row.who for row in mine))
        width = 0.84 / len(names)
        for i, who in enumerate(names):
            of_who = [row for row in mine if row.who == who]
            at = [shapes.index(row.shape) + width * (i + 0.5) - 0.42 for row in of_who]
            times = [base[group, case, row.shape] / row.microseconds for row in of_who]
            axes.bar(at, times, 0.94 * width, color=_COLOURS[i % len(_COLOURS)], label=who)
            below = {"textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 7}
            for x, row in zip(at, of_who, strict=True):
                axes.annotate(f"{row.tflops:.0f}", (x, 0), (0, -3), **below)
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_xticks(range(len(shapes)), shapes, fontsize=8)
        axes.tick_params("x", length=0, pad=12)
        axes.set_title(f"{group}: {case}", fontsize=9, loc="left", pad=19)
        axes.legend(
            fontsize=7,
            ncols=len(names),
            loc="lower right",
            bbox_to_anchor=(1, 1),
            borderaxespad=0,
            frameon=False,
        )
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel("times as fast as torch's bf16 product; TFLOP/s below the bars", fontsize=9)
    return figure
