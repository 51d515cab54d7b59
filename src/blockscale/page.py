"""HTML pages that need no other file: what the reports of training and of a watch are made of."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["facts", "image", "page", "table"]


def page(title: str, heading: str, *parts: str) -> str:
    """A whole page of ``parts``, HTML."""
    body = "\n".join((f"<h1>{escape(heading)}</h1>", *parts))
    return _PAGE.replace("{title}", escape(title)).replace("{body}", body)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def facts(named: Mapping[str, Any]) -> str:
    """A table of a line for each, without a head."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>\n"
        for name, value in named.items()
    )
    return f'<div class="wide"><table class="facts">\n{rows}</table></div>'


def image(png: bytes, alt: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff;
       max-width: 84rem; margin: 2.5rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { max-width: 56rem; }
img { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
thead th { border-bottom: 2px solid #1c1c1c; font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child, .facts th, .facts td { text-align: left; padding-left: 0; }
tbody td { white-space: nowrap; }
.facts th { font-weight: 500; color: #666; white-space: nowrap; vertical-align: top; }
.facts td { overflow-wrap: anywhere; white-space: normal; }
.note { color: #666; font-size: .9rem; }
.bad { color: #e4002b; }
.good { color: #1a7f37; }
</style>
</head>
<body>
{body}
</body>
</html>
"""
