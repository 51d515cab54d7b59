"""Folders of which a run ended by an error: nothing stays open, and the next run makes them."""

from __future__ import annotations

import os
from pathlib import Path

import folders
import pytest
from folders import FILES

from blockscale import checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folders.make(tmp_path / "in")


class Stop(Exception):
    """Raised by a caller's progress."""


def at_seven(event: checkpoint.Progress) -> None:
    """Raise when seven of ten tensors are finished: those of the first file, and some more."""
    if event.tensors == 7:
        raise Stop


def test_whoever_is_given_a_manifest_fails(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Files were closed twice: the numbers may be those of others by then."""

    def fail(self: object, manifest: object) -> None:
        raise KeyError("manifest")

    from blockscale.checkpoint.summary import Summary

    monkeypatch.setattr(Summary, "add", fail)
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    with pytest.raises(KeyError, match="manifest"):
        checkpoint.quantize_folder(source, tmp_path / "out", "nvfp4", "modelopt")
    monkeypatch.undo()
    if before:
        assert len(os.listdir("/proc/self/fd")) <= len(before)
    checkpoint.quantize_folder(source, tmp_path / "out", "nvfp4", "modelopt")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files there")
def test_nothing_stays_open_where_progress_fails(source: Path, tmp_path: Path):
    def stop(event: checkpoint.Progress) -> None:
        if event.note or event.tensors == 2:  # of the second run: on the way to the threads
            raise Stop

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(Stop):
            checkpoint.quantize_folder(source, tmp_path / "out", "nvfp4", progress=stop)
        assert len(os.listdir("/proc/self/fd")) == before


def test_resumed(source: Path, tmp_path: Path):
    whole = tmp_path / "whole"
    checkpoint.quantize_folder(source, whole, "nvfp4", "modelopt")
    with pytest.raises(Stop):
        checkpoint.quantize_folder(source, tmp_path / "out", "nvfp4", "modelopt", progress=at_seven)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial" / FILES[0]).exists()
    notes: set[str] = set()
    checkpoint.quantize_folder(
        *(source, tmp_path / "out", "nvfp4", "modelopt"),
        progress=lambda event: notes.add(event.note),
    )
    assert any("nothing to do" in note for note in notes)
    assert any("resumed: " in note for note in notes)
    for path in whole.iterdir():
        if path.is_file():
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_a_file_that_another_run_finished(source: Path, tmp_path: Path):
    """With other options a run ended at a file in ``OUT.partial``; others start anew."""
    with pytest.raises(Stop):
        checkpoint.quantize_folder(source, tmp_path / "out", "nvfp4", progress=at_seven)
    assert (tmp_path / "out.partial" / FILES[0]).exists()
    notes: set[str] = set()
    checkpoint.quantize_folder(
        source, tmp_path / "out", "mxfp8", progress=lambda event: notes.add(event.note)
    )
    assert f"started anew: {FILES[0]} was made with another format" in notes
    checkpoint.quantize_folder(source, tmp_path / "whole", "mxfp8")
    for path in (tmp_path / "whole").iterdir():
        if path.is_file():
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "out").iterdir())) == len(list((tmp_path / "whole").iterdir()))
