"""One page of what a watch has seen, which needs no other file."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from ..page import image, page, table
from .watch_data import NOTHING_SEEN, Line, WatchData
from .watch_pictures import MAPS, heat_map, histograms

__all__ = ["write_watch_report"]

_ROWS = 20
_COLUMNS = "module", "tensor", "for", "format", "step", "SQNR (dB)", "underflow", "saturated",\
    "spread of scales", "largest |x|"  # fmt: skip
_BAD = "step", "module", "tensor", "for", "blocks", "of", "the first at", "is"


def write_watch_report(jsonl: str | os.PathLike[str], html: str | os.PathLike[str]) -> None:
    """Write the page of the lines in ``jsonl``, of a run that may have been killed, too.

    >>> bs.debug.write_watch_report("watch.jsonl", "watch.html")
    """
    lines = WatchData.read(Path(jsonl))
    Path(html).write_text(_page(lines, Path(jsonl).name), encoding="utf-8")


def _page(data: WatchData, name: str) -> str:
    if not data.lines:
        return _whole(f"<p>{escape(NOTHING_SEEN[0].upper() + NOTHING_SEEN[1:])}.</p>")
    parts = [
        f"<p>{len(data.modules)} layers in {len(data.steps)} steps, {data.steps[0]} to "
        f"{data.steps[-1]}; {escape(', '.join(data.formats))}. All numbers are in "
        f"{escape(name)}.</p>",
        _nonfinite(data.bad),
        "<h2>The worst</h2>",
        table(_COLUMNS, map(_cells, data.worst[:_ROWS])),
        '<p class="note">Of each tensor the step with the lowest SQNR. It is of 4096 elements, in '
        "blocks spread over the tensor, or of all where there are no more; operands that a "
        "transform changes first are not here: nobody has their values. Underflow: elements that "
        "were not 0 and became 0. Saturated: beyond what their block can hold. Spread: octaves "
        "from the least scale of a block to the largest, blocks of zeros left out.</p>",
    ]
    for about in MAPS:
        title = escape(about.title)
        parts += [f"<h2>{title}</h2>", _picture(heat_map(data, about), about.title)]
    parts += [
        '<p class="note">Rows are layers in the order of their first call, columns are steps that '
        "were watched. Red: NaN or infinities. Grey: not seen.</p>",
        "<h2>Block scales, and magnitudes in their block</h2>",
        _picture(histograms(data), "Histograms of block scales and of magnitudes"),
        '<p class="note">Of all layers. Grey: the first step that was watched; blue: the last.</p>',
    ]
    return _whole(*parts)


def _whole(*parts: str) -> str:
    return page("blockscale: what was watched", "What quantization does, by layer and step", *parts)


def _nonfinite(bad: Sequence[Line]) -> str:
    if not bad:
        return '<p class="good">No NaN, no infinity.</p>'
    rows = (
        [
            str(line["step"]),
            line["module"] or "(the model)",
            line["tensor"],
            line["product"],
            f"{line['nonfinite_blocks']:,}",
            f"{line['blocks']:,}",
            str(line["first_nonfinite"]),
            line["first_nonfinite_value"] or "–",
        ]
        for line in bad[:_ROWS]
    )
    more = f'<p class="note">And {len(bad) - _ROWS:,} more.</p>' if len(bad) > _ROWS else ""
    return f'<h2 class="bad">NaN or infinities</h2>{table(_BAD, rows)}{more}'


def _cells(line: Line) -> list[str]:
    scales, amax = line["scale_log2"], line["amax"]
    return [
        line["module"] or "(the model)",
        line["tensor"],
        line["product"],
        line["format"],
        str(line["step"]),
        f"{line['sqnr_db']:.1f}",
        f"{line['underflow']:.2%}",
        f"{line['saturated']:.2%}",
        "–" if scales is None else str(scales["spread"]),
        "–" if amax is None else f"{amax:.3g}",
    ]


def _picture(figure: Figure, alt: str) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return image(file.getvalue(), alt)
