"""Docstrings as the site shows them: examples in a box of code, names of the library as links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

_ROLE = re.compile(r":[a-z]+:`~?([\w.]+)`")
_DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is rendered."""

    def __init__(self) -> None:
        pages = (Path(__file__).parent / "reference").glob("*.md")
        found = (path for page in pages for path in _DIRECTIVE.findall(page.read_text()))
        self._paths = {path.rsplit(".", 1)[-1]: path for path in found}

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = self._linked(fenced(obj.docstring.value))

    def _linked(self, text: str) -> str:
        """Roles such as ``:func:`gemm```, as links where a page has the name."""

        def replace(role: re.Match[str]) -> str:
            name = role[1].rsplit(".", 1)[-1]
            path = self._paths.get(name)
            return f"[`{name}`][{path}]" if path else f"`{name}`"

        return _ROLE.sub(replace, text)


def fenced(text: str) -> str:
    """Examples, which begin with ``>>>`` and end with their paragraph, between fences."""
    lines: list[str] = []
    indent: str | None = None
    for line in [*text.split("\n"), ""]:
        if indent is None and line.lstrip().startswith(">>>"):
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}```pycon")
        if indent is not None and not line.strip():
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    return "\n".join(lines[:-1])
