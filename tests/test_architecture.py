"""Rules of the source that no linter has: read as text, nothing is run."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

import blockscale

ROOT = Path(blockscale.__file__).parent
MOST_PARAMETERS = 8

#: Packages whose ``__all__`` is what users call: an argument there has a default and a name.
PUBLIC = ("", "nn", "reference", "emulator", "distributed", "checkpoint", "jax")

#: Decorators of functions whose parameters another program reads.
DECORATORS = {
    "operation": "torch.library: the schema of an op is flat",
    "command": "typer: an option of a command is a parameter",
}

#: Other functions that may have more, as ``file:qualified name``, and why.
EXEMPT = {
    "kernels/sm*/*.py:*.__call__": "CuTe DSL: the compiled function takes one tensor a parameter",
    "kernels/cpu/*.py:*_tiles": "numba: one array a parameter",
    "kernels/cpu/*.py:multiply_rows": "the same",
    "kernels/cpu/packing.py:pack_columns": "the same",
    "kernels/cpu/decoding.py:decode_line": "the same",
    "kernels/cpu/decoding.py:_exact_row": "the same",
    "ops/fused.py:_fake_swiglu": "torch.library: the fake of an op takes its arguments by name",
    "ops/norms.py:_fake_norm_quantize": "the same",
    "distributed/shard_ops.py:_fake_gather_scaled": "the same",
    "cli/emulate*.py:*": "typer: commands, registered where they are gathered",
    "cli/train.py:train": "typer: a command, registered where they are gathered",
    "cli/quantize.py:quantize": "the same",
}


@dataclass(frozen=True)
class Function:
    """``name``: with its classes; ``decorators``: their last names."""

    path: str
    name: str
    parameters: int
    decorators: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{self.path}:{self.name}"


def functions() -> Iterator[Function]:
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield from _within(tree, path.relative_to(ROOT).as_posix(), "")


def _within(node: ast.AST, path: str, prefix: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = child.args
            names = [x.arg for x in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            count = len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))
            decorators = tuple(_last_name(each) for each in child.decorator_list)
            yield Function(path, prefix + child.name, count, decorators)
        named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        yield from _within(child, path, f"{prefix}{child.name}." if named else prefix)


def _last_name(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def public() -> set[str]:
    """``file:name`` of what packages of PUBLIC import from their modules and list."""
    found = set()
    for package in PUBLIC:
        tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
        listed: set[str] = set()
        for node in tree.body:
            if isinstance(node, ast.Assign) and _last_name(node.targets[0]) == "__all__":
                listed = set(ast.literal_eval(node.value))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                path = Path(package, *node.module.split(".")).as_posix() + ".py"
                found |= {f"{path}:{each.name}" for each in node.names if each.name in listed}
    return found


def test_few_parameters():
    """More belong together in a value that means something: ``Request``, ``GemmCall``, ..."""
    known, wrong = public(), []
    for each in functions():
        allowed = (
            f"{each.path}:{each.name.split('.')[0]}" in known
            or DECORATORS.keys() & set(each.decorators)
            or any(fnmatch(each.place, pattern) for pattern in EXEMPT)
        )
        if each.parameters > MOST_PARAMETERS and not allowed:
            wrong.append(f"{each.place} has {each.parameters}")
    assert not wrong, f"more than {MOST_PARAMETERS} parameters: {wrong}"


def test_exemptions_are_needed():
    many = [each for each in functions() if each.parameters > MOST_PARAMETERS]
    assert {f"{each.path}:{each.name}" for each in many} & public() >= {"quantize.py:quantize"}
    for pattern in EXEMPT:
        assert any(fnmatch(each.place, pattern) for each in many), pattern
    for name in DECORATORS:
        assert any(name in each.decorators for each in many), name


def test_names_of_modules_of_tests_are_unique():
    """pytest and started ranks import them by their bare names, from many folders at once."""
    files = [*Path(__file__).parent.rglob("*.py")]
    names = Counter(path.name for path in files if path.name not in ("conftest.py", "__init__.py"))
    assert [name for name, count in names.items() if count > 1] == []


#: Packages that say which file does what, and how they mark names of files.
MAPS = {"distributed": r"``(\w+)``", "hf": r"^ {4}(\w+)  ", "vllm": r"^ {4}(\w+)  "}


@pytest.mark.parametrize("package", MAPS)
def test_says_what_each_file_does(package):
    folder = ROOT / package
    told = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert set(re.findall(MAPS[package], told or "", re.MULTILINE)) == files
