"""kill -9 in the midst of a folder's conversion: nothing lost, nothing half-written."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import folders
import pytest
from test_checkpoint_kill import die_at, in_child

from blockscale import checkpoint
from blockscale.checkpoint import tasks

#: Points of both conversions together, and with --exhaustive.
KILLS, ALL = 60, 200


def content(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.mark.parametrize("kind", ["quantize", "convert"])
def test_killed_anywhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """At random calls that change files, also while it goes on after a kill."""
    points = (ALL if request.config.option.exhaustive else KILLS) // 2
    monkeypatch.setattr(tasks, "CHUNK", 1 << 12)
    monkeypatch.setattr(tasks, "PIECE", 1 << 14)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # is for machines that lose power
    source = folders.make(tmp_path / "in")
    before = content(source)
    run: Callable[[Path], object] = partial(_quantize, source)
    if kind == "convert":
        checkpoint.quantize_folder(source, tmp_path / "q", "nvfp4", "compressed-tensors")
        run = partial(_convert, tmp_path / "q")
    run(tmp_path / "whole")
    expected = content(tmp_path / "whole")
    rng, kills, resumed, target = random.Random(0), 0, 0, tmp_path / "out"

    def body(n: int) -> None:
        die_at(n)
        run(target)

    while kills < points:
        for _ in range(rng.choice((1, 1, 2, 5))):
            status = in_child(partial(body, rng.randrange(250)))
            kills += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            if target.exists():  # whole, or not at all
                assert content(target) == expected
            resumed += (tmp_path / "out.partial").exists()
        run(target)
        assert content(target) == expected
        assert {p.name for p in tmp_path.iterdir()} <= {"in", "whole", "out", "q"}
        for path in sorted(target.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        target.rmdir()
    assert resumed > points // 2
    assert content(source) == before


def _quantize(source: Path, target: Path) -> object:
    return checkpoint.quantize_folder(source, target, "nvfp4", "modelopt")


def _convert(source: Path, target: Path) -> object:
    return checkpoint.convert_folder(source, target, "modelopt")
