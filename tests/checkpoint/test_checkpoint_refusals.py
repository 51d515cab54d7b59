"""quantize: everything that is refused, and a disk that is full; one line, nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file
from small_file import Ran, tensors
from test_checkpoint_header import HOSTILE

from blockscale import checkpoint

Cli = Callable[..., Ran]


def left_over(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"in.safetensors"}


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--format", "mxfp9"], "format: got 'mxfp9'; choose one of 'mxfp8', 'mxfp8_e5m2'"),
        (["--format", ""], "format"),
        ([], "--format"),
        (["--format", "mxfp8", "--include", "nope*"], "include: 'nope*' matches none of the 10"),
        (["--format", "mxfp8", "--exclude", "nope*"], "exclude: 'nope*' matches none"),
        (["--format", "mxfp8", "--include", "norm.weight", "--include", "x"], "include: 'x'"),
        (["--format", "mxfp8", "--include", "position_ids"], "include: 'position_ids' cannot be"),
        (
            ["--format", "mxfp8", "--include", "layers.0.odd.weight"],
            "100 is not a multiple of mxfp8's",
        ),
        (["--format", "mxfp8", "--include", "layers.0.attn.bias"], "not a matrix"),
        (["--format", "mxfp8", "--include", "nothing"], "empty"),
        (["--format", "mxfp8", "--exclude", "layers.*"], "source: nothing in"),
        (["--format", "mxfp8", "--frobnicate"], "--frobnicate"),
    ],
)
def test_wrong_options(
    arguments: list[str], why: str, source: Path, tmp_path: Path, blockscale: Cli
):
    ran = blockscale("quantize", source, tmp_path / "out", *arguments)
    _refused(ran, why)
    assert not left_over(tmp_path)


def _refused(ran: Ran, why: str) -> None:
    assert ran.code == 2, ran
    assert why in ran.err
    assert ran.err.startswith("blockscale: ")
    assert ran.err.count("\n") == 1, "one line"
    assert "Traceback" not in ran.err
    assert not ran.out


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_sources(case: str, tmp_path: Path, blockscale: Cli):
    path = tmp_path / "in.safetensors"
    path.write_bytes(HOSTILE[case][0])
    _refused(blockscale("quantize", path, tmp_path / "out", "--format", "mxfp8"), "source: ")
    _refused(blockscale("inspect", path), "path: ")
    assert not left_over(tmp_path)


def test_wrong_paths(source: Path, tmp_path: Path, blockscale: Cli):
    def run(a: Path, b: Path) -> Ran:
        return blockscale("quantize", a, b, "--format", "mxfp8")

    _refused(run(tmp_path / "missing", tmp_path / "out"), "does not exist; name a")
    _refused(run(tmp_path, tmp_path / "out"), "lies in it")
    _refused(run(source, tmp_path), "target: ")
    _refused(run(source, tmp_path / "no" / "out"), "make it first")
    _refused(run(source, source), "would destroy the source")
    _refused(run(source, source.parent / "." / source.name), "would destroy the source")
    (tmp_path / "link").symlink_to(source)
    _refused(run(source, tmp_path / "link"), "would destroy the source")
    _refused(run(tmp_path / "link", source), "would destroy the source")
    os.link(source, tmp_path / "hard")
    _refused(run(source, tmp_path / "hard"), "would destroy the source")
    shutil.copy(source, tmp_path / "out.partial")
    _refused(run(tmp_path / "out.partial", tmp_path / "out"), "would destroy the source")
    _refused(run(source, tmp_path / "out"), "out.partial is in the way and has no journal")
    assert left_over(tmp_path) == {"link", "hard", "out.partial"}
    assert (tmp_path / "out.partial").read_bytes() == source.read_bytes()
    _refused(blockscale("quantize", source, "--format", "mxfp8"), "target")


def test_nothing_to_quantize(tmp_path: Path, blockscale: Cli):
    for i, state in enumerate(({}, {"b": torch.ones(64)}, {"odd": torch.ones(3, 33)})):
        save_file(state, tmp_path / f"{i}")
        ran = blockscale("quantize", tmp_path / f"{i}", tmp_path / "out", "--format", "mxfp8")
        _refused(ran, "source: nothing in")


def test_a_file_that_is_quantized_already(tmp_path: Path, blockscale: Cli):
    """That is why, not the head that is left alone by default."""
    state = {"lm_head.weight": torch.ones(64, 64), "up.weight": torch.ones(64, 64).bfloat16()}
    save_file(state, tmp_path / "in")
    checkpoint.quantize_file(tmp_path / "in", tmp_path / "q")
    ran = blockscale("quantize", tmp_path / "q", tmp_path / "out", "--format", "nvfp4")
    _refused(
        ran, "would be quantized to nvfp4 (quantized already); pass the file in high precision"
    )
    ran = blockscale(
        "quantize", tmp_path / "q", tmp_path / "out", "--format", "nvfp4", "--include", "lm_head*"
    )
    assert ran.code == 0, "what it says works"


def test_the_index_of_a_checkpoint(tmp_path: Path, blockscale: Cli):
    index = tmp_path / "model.safetensors.index.json"
    for indent in None, 2:
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "b"}}, indent=indent))
        ran = blockscale("quantize", index, tmp_path / "out", "--format", "mxfp8")
        _refused(ran, f"source: {index} is the index of a checkpoint, which says what is in which")
        assert f"pass each of these by itself: {tmp_path}/*.safetensors" in ran.err
        _refused(blockscale("inspect", index), f"path: {index} is the index of a checkpoint")


def test_names_that_collide(tmp_path: Path, blockscale: Cli):
    save_file({"w": torch.ones(32, 32), "w_scale": torch.ones(3)}, tmp_path / "in.safetensors")
    ran = blockscale("quantize", tmp_path / "in.safetensors", tmp_path / "out", "--format", "mxfp8")
    _refused(ran, "two tensors would be stored as 'w_scale'")
    assert not left_over(tmp_path)


def test_output_that_exists(source: Path, tmp_path: Path, blockscale: Cli):
    target = tmp_path / "out"

    def run(*more: str) -> Ran:
        return blockscale("quantize", source, target, *(more or ("--format", "mxfp8")))

    target.write_text("precious")
    _refused(run(), "exists and has no manifest; remove it, or choose another name")
    assert target.read_text() == "precious"
    target.unlink()
    assert run().code == 0
    before = target.stat()
    ran = run()  # the same result is no error, and not made again
    assert ran.code == 0
    assert "3 tensors in mxfp8" in ran.out
    assert (target.stat().st_ino, target.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    _refused(run("--format", "nvfp4"), "made with another format; remove it")
    _refused(run("--format", "mxfp8", "--exclude", "*attn*"), "another exclude")
    content = target.read_bytes()
    target.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    _refused(run(), "is not what its manifest says")
    target.write_bytes(content[:-1])
    _refused(run(), "truncated")
    target.write_bytes(content)
    changed = {**tensors(), "mask": torch.zeros(3, dtype=torch.bool)}
    save_file(changed, source)
    _refused(run(), "another source")
    assert left_over(tmp_path) == {"out", "out.manifest.json"}
    target.unlink()
    target.symlink_to(tmp_path / "nowhere")
    _refused(run(), "exists and")


def test_two_writers(source: Path, tmp_path: Path, blockscale: Cli):
    with FileLock(tmp_path / "out.lock"):
        ran = blockscale("quantize", source, tmp_path / "out", "--format", "mxfp8")
        _refused(ran, "is being written by another process; wait for it")
        assert left_over(tmp_path) == {"out.lock"}
    inside = []

    def second(event: checkpoint.Progress) -> None:
        with pytest.raises(ValueError, match="being written"):
            checkpoint.quantize_file(source, tmp_path / "out", "mxfp8")
        inside.append(event)

    checkpoint.quantize_file(source, tmp_path / "out", "mxfp8", progress=second)
    assert inside
    assert left_over(tmp_path) == {"out", "out.manifest.json"}


def test_a_source_that_changes(source: Path, tmp_path: Path):
    def touch(event: checkpoint.Progress) -> None:
        if event.bytes:
            with open(source, "r+b") as file:
                file.truncate(source.stat().st_size - 100)

    with pytest.raises(OSError, match=r"source: .*(shorter|changed) while it was read"):
        checkpoint.quantize_file(source, tmp_path / "out", "mxfp8", progress=touch)
    assert not (tmp_path / "out").exists()


# --- a full disk ----------------------------------------------------------------------------------


def test_too_little_space_is_seen_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blockscale: Cli
):
    usage = type(shutil.disk_usage(tmp_path))(10**9, 10**9, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    ran = blockscale("quantize", source, tmp_path / "out", "--format", "mxfp8")
    _refused(ran, "target: ")
    assert "but only 1.0 kB are free there; free some space" in ran.err
    assert not left_over(tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "write", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_call_that_fails(
    call: str,
    number: int,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blockscale: Cli,
):
    """At its first, then at its second, ... until it comes through; each time it goes on."""
    honest = getattr(os, call)
    for allowed in range(100):
        left = allowed

        def fail(*arguments):
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(number, os.strerror(number))
            return honest(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            ran = blockscale("quantize", source, tmp_path / "out", "--format", "nvfp4")
        if ran.code == 0:
            break
        assert ran.code == 2
        *resumed, line = ran.err.splitlines()
        assert line.startswith("blockscale: target: writing ")
        assert os.strerror(number) in line
        assert len(resumed) == any("resumed: " in note for note in resumed)
        assert not (tmp_path / "out").exists()
    assert ran.code == 0
    assert call == "posix_fallocate" or allowed > 0
    checkpoint.quantize_file(source, tmp_path / "fresh", "nvfp4")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "fresh").read_bytes()
    assert left_over(tmp_path) == {
        "out", "out.manifest.json", "fresh", "fresh.manifest.json"
    }  # fmt: skip


_SCRIPT = """
import resource, sys
from blockscale import ops
{setup}
from blockscale.cli import main
sys.argv[0] = "blockscale"
main()
"""


def run_apart(setup: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(setup=setup), *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(source: Path, tmp_path: Path):
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    ran = run_apart(limit, "quantize", source, tmp_path / "out", "--format", "mxfp8")
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "File too large" in ran.stderr
    assert not left_over(tmp_path)


_PEAKS = """
import resource, sys
from blockscale.checkpoint import quantize_file, tasks
tasks.CHUNK = 1 << 16
for path in sys.argv[1:]:
    quantize_file(path, path + ".out", "nvfp4")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensor(tmp_path: Path):
    """The peak of a process after a tensor of 2 and after one of 40 MB, in small chunks."""
    files = [tmp_path / "small", tmp_path / "large"]
    for path, rows in zip(files, (1024, 20480), strict=True):
        save_file({"w": torch.full((rows, 512), 0.1)}, path)
    ran = subprocess.run(
        [sys.executable, "-c", _PEAKS, *map(str, files)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    small, large = (int(line) / 1024 for line in ran.stdout.split())
    assert large - small < 12, (small, large)
