"""CONTRIBUTING.md names files and folders that exist, and marks that tests carry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w./-]+(?:\.\w+|/))`", TEXT)))
IN_COMMANDS = re.findall(r"\b(?:tests|src|docs|benchmarks)/[\w./-]+", TEXT)


def exists(name: str, below: Path) -> bool:
    """In ``below``, or in a folder that CONTRIBUTING names, as ``cpu/`` in ``kernels/``."""
    folders = [below, *(below / folder for folder in NAMED if folder.endswith("/"))]
    return any((folder / name).exists() for folder in folders)


@pytest.mark.parametrize("name", [*NAMED, *IN_COMMANDS])
def test_files_exist(name):
    if name != "torch.library":
        assert exists(name, ROOT) or exists(name, ROOT / "src" / "blockscale")


def test_the_names_are_found():
    """Of the table, where a file is next to others; so that none would be looked for in vain."""
    assert {"checks.py", "kernels/common/builders.py", "emulator/", "docs/decisions.md"} <= {*NAMED}
    assert not exists("ops.py", ROOT / "src" / "blockscale")


def test_folders_of_tests_are_packages():
    """``tests/`` mirrors ``src/blockscale/``, but for what is checked from outside of it."""
    # of vllm and of jax: folders of these names here would be taken for them
    others = {"gpu", "hardware", "oracles", "serving", "with_jax"}
    folders = {p.parent.name for p in (ROOT / "tests").glob("*/*.py")} - others
    assert all((ROOT / "src/blockscale" / f).is_dir() or (ROOT / f).is_dir() for f in folders)
