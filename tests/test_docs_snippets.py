"""What README and docs show runs, page by page, from top to bottom, on a CPU.

A fence behind ``<!-- sketch: not run -->`` needs what its page does not have (a kernel, a GPU): it
is compiled only. Commands are checked for their names and options.
"""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from inspect import ismodule
from pathlib import Path

import pytest
import typer

import blockscale as bs
from blockscale import checkpoint, emulator, measure, model, training
from blockscale.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?P<sketch><!-- sketch: not run -->\n)?^(?P<indent> *)```(?P<language>\w+)[^\n]*\n"
    r"(?P<code>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)


def fences(page: Path, *languages: str) -> list[re.Match[str]]:
    return [m for m in FENCE.finditer(page.read_text()) if m["language"] in languages]


def named(pages: list[Path], *languages: str) -> list[object]:
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)))
        for page in pages
        if fences(page, *languages)
    ]


@pytest.mark.parametrize("page", named(PAGES, "python", "py"))
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("transformers_restored")
def test_python(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for fence in fences(page, "python", "py"):
        line = page.read_text()[: fence.start("code")].count("\n")
        code = compile("\n" * line + fence["code"], str(page), "exec")
        if not fence["sketch"]:
            exec(code, names)
    if page.parent.name == "howto":  # what it says is printed is printed
        printed = "".join(capsys.readouterr().out.split())
        for fence in fences(page, "text"):
            assert "".join(fence["code"].split()) in printed


#: What a person imports and calls.
formats, layouts = (import_module(f"blockscale.{name}") for name in ("formats", "layouts"))
PUBLIC = (bs, bs.nn, checkpoint, training, model, measure, emulator, formats, layouts)


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(package):
    pages = (ROOT / "docs" / "reference").glob("*.md")
    shown = {
        line.rsplit(".", 1)[-1]
        for page in pages
        for line in page.read_text().splitlines()
        if line.startswith("::: ")
    }
    modules = {name for name in package.__all__ if ismodule(getattr(package, name))}
    assert {*package.__all__} - modules <= shown


COMMAND = typer.main.get_command(app)


def commands(page: Path) -> list[list[str]]:
    """What ``blockscale`` is called with."""
    text = "".join(fence["code"] for fence in fences(page, "sh", "bash", "shell", "console"))
    lines = text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line and line[0] == "blockscale"]


@pytest.mark.parametrize("page", named(PAGES, "sh", "bash", "shell", "console"))
def test_commands(page):
    for words in commands(page):
        command = COMMAND
        while commands_of := getattr(command, "commands", {}):
            if not words or words[0].startswith("-"):
                break  # of the group itself
            name = words.pop(0) if words[0] in commands_of else "run"
            assert name in commands_of, f"no such command: {words}"
            command = commands_of[name]
        known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
        given = {word.split("=")[0] for word in words if word.startswith("--")}
        assert given <= {*known, "--help"}, (command.name, given - known)
