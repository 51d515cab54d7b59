"""One page of what a watch has seen, which needs no other file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .watch_data import Line, WatchData
from .watch_pictures import MAPS, heat_map, histograms

__all__ = ["write_watch_report"]

_ROWS = 20
_COLUMNS = "module", "tensor", "for", "format", "step", "SQNR (dB)", "underflow", "saturated",\
    "spread of scales", "largest |x|"  # fmt: skip
_BAD = "step", "module", "tensor", "for", "blocks", "of", "the first at", "is"


def write_watch_report(jsonl: Path, html: Path) -> None:
    """Write the page of the lines in ``jsonl``, of a run that may have been killed, too.

    >>> bs.debug.write_watch_report(Path("watch.jsonl"), Path("watch.html"))
    """
    html.write_text(_page(WatchData.read(jsonl), jsonl.name), encoding="utf-8")


def _page(data: WatchData, name: str) -> str:
    if not data.lines:
        body = "<p>No step of training was seen: nothing was quantized by a forward with gradients "
        body += (
            "of the model that was watched, or compiled code that has the model in it was called: "
        )
        return _PAGE.format(body=body + "watch the module that torch.compile returned.</p>")
    parts = [
        f"<p>{len(data.modules)} layers in {len(data.steps)} steps, {data.steps[0]} to "
        f"{data.steps[-1]}; {escape(', '.join(data.formats))}. All numbers are in "
        f"{escape(name)}.</p>",
        _nonfinite(data.bad),
        "<h2>The worst</h2>",
        _table(_COLUMNS, map(_cells, data.worst[:_ROWS])),
        '<p class="note">Of each tensor the step with the lowest SQNR. Underflow: elements that '
        "were not 0 and became 0. Saturated: beyond what their block can hold. Spread: octaves "
        "from the least scale of a block to the largest, blocks of zeros left out.</p>",
    ]
    for about in MAPS:
        title = escape(about.title)
        parts += [f"<h2>{title}</h2>", _image(heat_map(data, about), about.title)]
    parts += [
        '<p class="note">Rows are layers in the order of their first call, columns are steps that '
        "were watched. Red: NaN or infinities. Grey: not seen.</p>",
        "<h2>Block scales, and magnitudes in their block</h2>",
        _image(histograms(data), "Histograms of block scales and of magnitudes"),
        '<p class="note">Of all layers. Grey: the first step that was watched; blue: the last.</p>',
    ]
    return _PAGE.format(body="\n".join(parts))


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
    return f'<h2 class="bad">NaN or infinities</h2>{_table(_BAD, rows)}{more}'


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


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def _image(figure: Figure, alt: str) -> str:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    data = base64.b64encode(picture.getvalue()).decode("ascii")
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>blockscale: what was watched</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff;
       max-width: 84rem; margin: 2.5rem auto; padding: 0 1.5rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: 0; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .5rem; }}
p {{ max-width: 56rem; }}
img {{ width: 100%; height: auto; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }}
th, td {{ padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }}
thead th {{ border-bottom: 2px solid #1c1c1c; font-weight: 600; vertical-align: bottom; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
tbody td {{ white-space: nowrap; }}
.note {{ color: #666; font-size: .9rem; }}
.bad {{ color: #e4002b; }}
.good {{ color: #1a7f37; }}
</style>
</head>
<body>
<h1>What quantization does, by layer and step</h1>
{body}
</body>
</html>
"""
