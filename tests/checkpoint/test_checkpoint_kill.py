"""kill -9: at every write, in the middle of writes, and at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import small_file
import torch
from safetensors.torch import save_file
from small_file import QUANTIZED

import blockscale as bs
from blockscale import checkpoint
from blockscale.checkpoint import tasks, writer

CALLS = ("pwrite", "write", "fsync", "replace", "unlink", "open", "posix_fallocate")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are many writes to die at."""
    monkeypatch.setattr(tasks, "CHUNK", 1 << 12)
    monkeypatch.setattr(tasks, "PIECE", 1 << 14)


def tensors() -> dict[str, torch.Tensor]:
    """Those of the other tests, cut down."""
    return {n: t[:2, :9] if t.dim() == 3 else t[:36] for n, t in small_file.tensors().items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    save_file({n: t.contiguous() for n, t in tensors().items()}, path)
    return path


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> bytes:
    checkpoint.quantize_file(source, tmp_path / "whole", "nvfp4")
    return (tmp_path / "whole").read_bytes()


def in_child(body: Callable[[], None]) -> int:
    """Run ``body`` in a fork (no import to wait for) and return its wait status."""
    child = os.fork()
    if not child:
        try:
            body()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def die_at(n: int) -> None:
    """From now on, SIGKILL at the n-th call that changes files; a write is half done by then."""
    left = n

    def dying(name: str, honest: Callable) -> Callable:
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                if name in ("pwrite", "write") and len(arguments[1]) > 1:
                    honest(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return honest(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, dying(name, getattr(os, name)))


def finished(target: Path) -> list[str]:
    """Tensors that the journal calls finished."""
    journal = target.with_name(target.name + ".journal")
    if not journal.exists() or not target.with_name(target.name + ".partial").exists():
        return []
    return [line["name"] for line in writer._lines(journal) if "name" in line]


class Watch:
    """Runs quantize_file and records which tensors it works on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        for kind in (tasks.Quantize, tasks.Copy):
            monkeypatch.setattr(kind, "run", self._seen(kind.run))

    def _seen(self, honest: Callable) -> Callable:
        def call(task, *rest):
            self.done.append(task.name)
            return honest(task, *rest)

        return call


def check(target: Path, expected: bytes) -> None:
    """What must hold at any time: nothing under the final name but the whole file."""
    if target.exists():
        assert target.read_bytes() == expected
        manifest = json.loads(target.with_name(target.name + ".manifest.json").read_text())
        assert set(manifest["tensors"]) == set(tensors())


def test_at_every_call(
    source: Path, tmp_path: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
):
    """Killed at the first call that changes a file, at the second, and so on to the last; half of
    them are killed once more while they go on."""
    watch = Watch(monkeypatch)
    resumed, kills = 0, 0
    for n in range(400):
        target = tmp_path / f"out{n}"

        def body(n: int, target: Path = target) -> None:
            die_at(n)
            checkpoint.quantize_file(source, target, "nvfp4")

        status = in_child(partial(body, n))
        if not os.WIFSIGNALED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        kills += 1
        check(target, expected)
        if n % 2:
            in_child(partial(body, n // 2))
            check(target, expected)
        before, complete = finished(target), target.exists()
        watch.done.clear()
        manifest = checkpoint.quantize_file(source, target, "nvfp4")
        assert target.read_bytes() == expected
        assert sorted(watch.done) == sorted([] if complete else set(tensors()) - set(before))
        resumed += bool(before)
        assert (
            manifest["tensors"]
            == json.loads((tmp_path / "whole.manifest.json").read_text())["tensors"]
        )
        left = {p.name for p in tmp_path.iterdir() if p.name.startswith(target.name)}
        assert left == {target.name, target.name + ".manifest.json"}
        for path in left:
            (tmp_path / path).unlink()
    else:
        pytest.fail("never came through")
    assert kills > 40
    assert resumed > 20


def test_at_any_moment(source: Path, tmp_path: Path, expected: bytes):
    """SIGKILL from outside after random times, again and again until it comes through."""
    rng, target, kills = random.Random(5), tmp_path / "out", 0
    honest = os.pwrite

    def slow(*arguments):
        time.sleep(0.002)
        return honest(*arguments)

    for _ in range(6):
        for attempt in range(200):
            child = os.fork()
            if not child:
                try:
                    os.pwrite = slow
                    checkpoint.quantize_file(source, target, "nvfp4")
                finally:
                    os._exit(0)
            time.sleep(rng.uniform(0, 0.02 + 0.01 * attempt))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            check(target, expected)
            kills += os.WIFSIGNALED(status)
            if target.exists():
                break
        checkpoint.quantize_file(source, target, "nvfp4")
        assert target.read_bytes() == expected
        for path in tmp_path.glob("out*"):
            path.unlink()
    assert kills > 20


@pytest.fixture
def stopped(source: Path, tmp_path: Path) -> Path:
    """An attempt at mxfp8 that was killed half way."""
    target = tmp_path / "out"

    def stop(event: checkpoint.Progress) -> None:
        if event.tensors == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    in_child(lambda: checkpoint.quantize_file(source, target, "mxfp8", progress=stop))
    assert len(finished(target)) == 6
    return target


def notes(*arguments, **options) -> str:
    seen: list[str] = []
    checkpoint.quantize_file(*arguments, **options, progress=lambda event: seen.append(event.note))
    return seen[-1]


def whole(source: Path, tmp_path: Path, **options) -> bytes:
    checkpoint.quantize_file(source, tmp_path / "reference", "mxfp8", **options)
    return (tmp_path / "reference").read_bytes()


def test_the_same_job_is_resumed(source: Path, stopped: Path, tmp_path: Path):
    assert notes(source, stopped, "mxfp8") == "resumed: 6 tensors are finished"
    assert stopped.read_bytes() == whole(source, tmp_path)
    assert notes(source, stopped, "mxfp8") == f"nothing to do: {stopped} is finished already"


def test_another_format_is_started_anew(source: Path, stopped: Path, tmp_path: Path):
    note = notes(source, stopped, "nvfp4")
    assert note == "started anew: the unfinished file was made with another format, header"
    loaded = checkpoint.load_file(stopped)
    for name in QUANTIZED:
        assert torch.equal(loaded[name], bs.quantize(tensors()[name], "nvfp4"))


def test_other_options_are_started_anew(source: Path, stopped: Path, tmp_path: Path):
    note = notes(source, stopped, "mxfp8", exclude="*attn*")
    assert note == "started anew: the unfinished file was made with another exclude, header"
    assert stopped.read_bytes() == whole(source, tmp_path, exclude="*attn*")


def test_what_changed_in_the_source_is_done_anew(source: Path, stopped: Path, tmp_path: Path):
    changed = {n: -t if t.dtype == torch.float32 else t for n, t in tensors().items()}
    changed = {n: t.contiguous() for n, t in changed.items()}
    same = [name for name in finished(stopped) if torch.equal(changed[name], tensors()[name])]
    save_file(changed, source)  # same names, sizes, header
    assert 0 < len(same) < 6
    assert notes(source, stopped, "mxfp8") == f"resumed: {len(same)} tensors are finished"
    assert stopped.read_bytes() == whole(source, tmp_path)


def test_another_version_is_started_anew(
    source: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bs, "__version__", "99")
    assert notes(source, stopped, "mxfp8").endswith("made with another blockscale")


def test_damage_to_a_finished_tensor_is_seen(source: Path, stopped: Path, tmp_path: Path):
    """As after a power cut that kept the journal and lost some data: only that tensor is redone."""
    unfinished = stopped.with_name("out.partial")
    record = writer._lines(stopped.with_name("out.journal"))[1]
    from blockscale.checkpoint.reader import Reader

    with Reader(unfinished) as file:
        at = file.header.tensors[next(iter(record["record"]["checksums"]))].offset
    with open(unfinished, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0xFF]))
    assert notes(source, stopped, "mxfp8") == "resumed: 5 tensors are finished"
    assert stopped.read_bytes() == whole(source, tmp_path)


@pytest.mark.parametrize("damage", ["cut", "empty", "header"])
def test_a_damaged_partial_is_started_anew(
    damage: str, source: Path, stopped: Path, tmp_path: Path
):
    unfinished = stopped.with_name("out.partial")
    content = unfinished.read_bytes()
    unfinished.write_bytes(
        {"cut": content[:-1], "empty": b"", "header": b"\0" * 100 + content[100:]}[damage]
    )
    assert "started anew: the unfinished file is damaged" in notes(source, stopped, "mxfp8")
    assert stopped.read_bytes() == whole(source, tmp_path)


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "first line"])
def test_a_damaged_journal(damage: str, source: Path, stopped: Path, tmp_path: Path):
    journal = stopped.with_name("out.journal")
    content = journal.read_bytes()
    journal.write_bytes(
        {
            "cut": content[:-20],
            "garbage": content + b"\xff\xfe{[\n\nnull\n3\n" + b"[" * 100_000,
            "empty": b"",
            "first line": content[30:],
        }[damage]
    )
    note = notes(source, stopped, "mxfp8")
    assert note.startswith(
        {"cut": "resumed: 5", "garbage": "resumed: 6"}.get(damage, "started anew")
    )
    assert stopped.read_bytes() == whole(source, tmp_path)


def _damaged(content: bytes, rng: random.Random) -> bytes:
    """A journal that was cut, or has other bits, bytes, lines, or lines of another shape."""
    lines, at = content.splitlines(keepends=True), rng.randrange(len(content))
    kind = rng.randrange(6)
    if kind == 0:
        return content[:at]
    if kind == 1:
        flipped = bytearray(content)
        for _ in range(rng.choice((1, 1, 5))):
            flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 2:
        return content[:at] + rng.randbytes(rng.randrange(40)) + content[at:]
    if kind == 3:
        del lines[rng.randrange(len(lines))]
        return b"".join(lines)
    shapes = (
        b"{}", b"[]", b"3", b'{"record": {}}', b'{"name": "norm.weight"}',
        b'{"name": [], "record": 3}',
        b'{"name": "norm.weight", "record": {}}',
        b'{"name": "no such", "record": {"checksums": {}}}',

        b'{"name": "norm.weight", "record": {"checksums": {}}}',
        b'{"name": "norm.weight", "record": {"checksums": {}, "source": {"norm.weight": "00"}}}',
        b'{"name": "norm.weight", "record": {"checksums": {"no such": "00"}}}',
    )  # fmt: skip
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(shapes) + b"\n")
    if kind == 4:
        lines[rng.randrange(len(lines))] = rng.choice(shapes) + b"\n"
    return b"".join(lines)


def test_any_damage_to_a_journal(source: Path, stopped: Path, tmp_path: Path):
    """The work is resumed or started anew, and says so; the file is right."""
    expected, rng = whole(source, tmp_path), random.Random(0)
    journal, unfinished = (stopped.with_name("out" + s) for s in (".journal", ".partial"))
    before = journal.read_bytes(), unfinished.read_bytes()
    manifest, anew = json.loads((tmp_path / "reference.manifest.json").read_text()), 0
    for _ in range(150):
        journal.write_bytes(_damaged(before[0], rng))
        unfinished.write_bytes(before[1])
        note = notes(source, stopped, "mxfp8")
        assert note.startswith(("resumed: ", "started anew: ")) or not note
        anew += note == "started anew: the journal of the unfinished file is damaged"
        assert stopped.read_bytes() == expected
        made = json.loads(stopped.with_name("out.manifest.json").read_text())
        assert made["tensors"] == manifest["tensors"]
        for path in tmp_path.glob("out*"):
            path.unlink()
    assert anew > 5


def test_interrupt_keeps_what_is_finished(source: Path, tmp_path: Path):
    def interrupt(event: checkpoint.Progress) -> None:
        if event.tensors == 6:
            raise KeyboardInterrupt

    target = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        checkpoint.quantize_file(source, target, "mxfp8", progress=interrupt)
    assert not target.exists()
    assert not target.with_name("out.lock").exists()
    assert notes(source, target, "mxfp8") == "resumed: 6 tensors are finished"


_SLOW = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from blockscale.checkpoint import tasks
honest = tasks.Quantize.run
def slow(task, source, *rest):
    print(task.name, flush=True)
    for _ in range(int(0.3 * 50)):
        time.sleep(0.02)
        source._seen(0)  # a thread is stopped between pieces
    return honest(task, source, *rest)
tasks.Quantize.run = slow
from blockscale.cli import main
main()
"""
#: The same, held up in the second matrix until somebody ends it, however busy the machine is.
_HELD_UP = _SLOW.replace("0.3", "waits.pop()").replace("import os", "waits = [60, 0.1]\nimport os")


def test_the_command(source: Path, tmp_path: Path):
    """The command in a process of its own, killed while it works on its second matrix."""
    arguments = ["quantize", str(source), str(tmp_path / "out"), "--format", "mxfp8"]
    with subprocess.Popen(
        [sys.executable, "-c", _HELD_UP, *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        started = [process.stdout.readline().strip() for _ in range(2)]
        process.kill()
    assert not (tmp_path / "out").exists()
    ran = subprocess.run(
        [sys.executable, "-c", _SLOW, *arguments],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "resumed: " in ran.stderr
    redone = [line for line in ran.stdout.splitlines() if line in QUANTIZED]
    assert redone == [name for name in sorted(QUANTIZED, key=_order(source)) if name != started[0]]
    assert (tmp_path / "out").read_bytes() == whole(source, tmp_path)


def test_control_c(source: Path, tmp_path: Path):
    """The command says that the work goes on when it runs again; so it does."""
    arguments = ["quantize", str(source), str(tmp_path / "out"), "--format", "mxfp8"]
    with subprocess.Popen(
        [sys.executable, "-c", _HELD_UP, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run the same command again, and it goes on" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert notes(source, tmp_path / "out", "mxfp8").startswith("resumed: ")
    assert (tmp_path / "out").read_bytes() == whole(source, tmp_path)


def _order(source: Path) -> Callable[[str], int]:
    from blockscale.checkpoint.reader import Reader

    with Reader(source) as file:
        return list(file.header.tensors).index
