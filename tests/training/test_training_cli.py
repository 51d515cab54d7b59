"""The command: what it prints and leaves, and one line with exit code 2 for bad input."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import signal
import sys
import threading
from contextlib import contextmanager

import pytest

from blockscale import training
from blockscale.cli import main
from blockscale.training import Corpus, saves


@pytest.fixture
def command(monkeypatch, capsys, tmp_path, small):
    """Calls ``blockscale train``; returns (exit code, stdout, stderr). The model is a small one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        training.Settings,
        "on",
        lambda device, moe, **given: dataclasses.replace(
            small, device=device, **({"experts": 4, "expert_size": 16} if moe else {}), **given
        ),
    )

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["blockscale", "train", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def here(monkeypatch):
    """Runs in this process: a second saved each."""

    def compare(recipes, text, settings, report, folder, stop):
        corpus = Corpus(text, settings.context)
        return [
            training.train(
                name,
                seed,
                corpus,
                settings,
                report,
                training.Saves(folder, name, seed),
                stop,
            )
            for name in recipes
            for seed in range(settings.seeds)
        ]

    monkeypatch.setattr(training, "compare", compare)


def test_experts(command, here, tmp_path):
    """Their recipes, and how evenly tokens went."""
    code, out, _ = command("--moe", "--seeds", 1, "--out", "moe", "--json")
    assert code == 0
    found = json.loads(out)
    assert list(found["recipes"]) == ["bf16", "fp8_block", "mxfp8"]
    for run in found["runs"]:
        for loads in run["loads"]:
            assert sum(loads) / len(loads) == pytest.approx(1)
    page = (tmp_path / "moe" / "report.html").read_text()
    assert "4 in each layer, 2 of them for a token" in page


def test_the_default_recipes_in_processes(command, tmp_path):
    code, out, err = command("--steps", 4, "--seeds", 2)
    assert code == 0
    for name in ("bf16", "mxfp8", "mxfp8_e5m2_grad", "mxfp8_floor"):
        assert f" {name} " in out
        for seed in (0, 1):
            assert f"{name} seed {seed}: step 4/4, loss " in err
    assert "With 95 % confidence over 2 seeds" in out
    folder = tmp_path / "runs" / "train-001"
    assert {p.name for p in folder.iterdir()} == {"loss.png", "report.html", "results.json"}


def test_json_is_all_there_is_on_stdout(command, here, tmp_path):
    code, out, _ = command(
        "--recipe", "mxfp8", "--recipe", "bf16", "--steps", 3, "--seeds", 1, "--json", "--out", "o"
    )
    assert code == 0
    found = json.loads(out)
    assert list(found["recipes"]) == ["bf16", "mxfp8"]
    assert found["settings"]["steps"] == 3
    assert found == json.loads((tmp_path / "o" / "results.json").read_text())


def test_own_data(command, here, tmp_path):
    (tmp_path / "own.bin").write_bytes(bytes(range(256)) * 8)
    code, out, _ = command(
        "--recipe", "nvfp4", "--steps", 2, "--seeds", 1, "--json", "--data", "own.bin"
    )
    assert code == 0
    assert json.loads(out)["text"]["source"] == "own.bin"


def test_minutes_are_turned_into_steps(command, here, monkeypatch):
    monkeypatch.setattr(
        sys.modules["blockscale.cli.train"], "_check_minutes", lambda *_: None
    )  # needs a GPU
    monkeypatch.setattr(training, "steps_within", lambda minutes, *_: int(2 * minutes))
    code, out, _ = command("--recipe", "bf16", "--seeds", 1, "--minutes", 1.5, "--json")
    assert code == 0
    assert json.loads(out)["settings"]["steps"] == 3


def test_a_run_that_fails_leaves_no_folder(command, monkeypatch, tmp_path):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "compare", fail)
    code, out, err = command("--out", "o")
    assert (code, out) == (2, "")
    assert "No space left" in err
    assert not (tmp_path / "o").exists()


def without_times(found):
    """What does not depend on when it was made."""
    found = {k: v for k, v in found.items() if k not in ("created", "seconds", "verdict")}
    for each in [*found["runs"], *found["table"]]:
        for name in ("seconds", "tokens_per_second"):
            each.pop(name, None)
    return found


@pytest.fixture
def stopping(monkeypatch):
    """``--stop-after`` counts looks instead of minutes, of all runs together."""

    @contextmanager
    def told(ends):
        looks = itertools.count(1)
        yield lambda: ends < math.inf and next(looks) >= 3

    monkeypatch.setattr(sys.modules["blockscale.cli.train"], "_told_to_stop", told)


@pytest.mark.parametrize(
    "what",
    [
        ("--recipe", "mxfp8", "--recipe", "bf16", "--moe", "--seeds", 2),
        ("--recipe", "nvfp4_nvidia"),
    ],
)
def test_resume(command, here, stopping, tmp_path, what):
    """Stopped again and again, runs have the losses that they have in one call."""
    given = *what, "--out", "whole"
    code, out, _ = command(*given, "--json")
    assert code == 0
    whole = json.loads(out)
    code, out, err = command(*given[:-1], "parts", "--stop-after", 1e-9)
    assert (code, out) == (0, "")
    assert "go on with: blockscale train --resume parts" in err
    for _ in range(20):
        assert {path.name for path in (tmp_path / "parts").iterdir()} == {"unfinished"}
        code, out, err = command("--resume", "parts", "--stop-after", 1e-9, "--json")
        assert code == 0
        if out:
            break
    assert without_times(json.loads(out)) == without_times(whole)
    assert not (tmp_path / "parts" / "unfinished").exists()


def test_resume_in_processes_after_a_signal(command, tmp_path):
    """Ctrl-C saves, a run that was killed goes on from what it had saved."""
    given = "--steps", 6, "--seeds", 2, "--recipe", "bf16", "--recipe", "mxfp8"
    code, out, _ = command(*given, "--json", "--out", "whole")
    whole = json.loads(out)
    timer = threading.Timer(5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    code, out, err = command(*given, "--out", "parts", "--json")
    timer.cancel()
    if code:  # it was not over before
        assert code == 130
        assert "stopping after this step" in err
        code, out, _ = command("--resume", "parts", "--json")
    assert code == 0
    assert without_times(json.loads(out)) == without_times(whole)


def test_bad_resume(command, here, stopping, tmp_path):
    (tmp_path / "own.txt").write_bytes(bytes(range(256)) * 8)
    command("--recipe", "bf16", "--data", "own.txt", "--out", "parts", "--stop-after", 1e-9)
    for arguments, message in (
        (["--resume", "nowhere"], "resume: nowhere has no unfinished runs; "),
        (["--resume", "parts", "--steps", 0, "--moe"], "resume: is given beside steps, moe; "),
        (
            ["--resume", "parts", "--fsdp", 2],
            "resume: is given beside fsdp, but one process ",
        ),
        (["--out", "parts"], "out: parts holds unfinished runs; go on with --resume parts"),
        (["--stop-after", 0], "stop-after: got 0; "),
    ):
        code, _, err = command(*arguments)
        assert code == 2
        assert err.startswith(f"blockscale: {message}")
    with saves.alone(tmp_path / "parts"):
        code, _, err = command("--resume", "parts")
    assert code == 2
    assert "resume: another process goes on with the runs of parts" in err
    plan = tmp_path / "parts" / "unfinished" / "plan.json"
    written = plan.read_text()
    plan.write_text(written.replace('"width"', '"breadth"'))
    code, _, err = command("--resume", "parts")
    assert "is damaged, or of another version" in err
    plan.write_text(written[:100])
    code, _, err = command("--resume", "parts")
    assert f"resume: {plan.relative_to(tmp_path)} is damaged" in err
    plan.write_text(written)
    saved = plan.parent / "bf16-0.pt"
    whole = saved.read_bytes()
    for size in (0, 3000):
        saved.write_bytes(whole[:size])
        code, _, err = command("--resume", "parts")
        assert code == 2
        assert "resume: cannot read parts/unfinished/bf16-0.pt" in err
        assert "remove it to train that run from the start" in err
    saved.write_bytes(whole)
    (tmp_path / "own.txt").write_bytes(bytes(range(255)) * 8)
    code, _, err = command("--resume", "parts")
    assert "own.txt has changed since the runs began" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "fp9"], "recipe: got 'fp9'; choose one of 'bf16', 'mxfp8', "),
        (["--steps", "0"], "steps: got 0; give 1 or more"),
        (["--steps", "-5"], "steps: got -5; give 1 or more"),
        (["--steps", "many"], "Invalid value for '--steps': "),
        (["--seeds", "0"], "seeds: got 0; give 1 or more"),
        (["--fsdp", "0"], "fsdp: got 0; give 1 or more"),
        (["--fsdp", "4"], "fsdp: got 4, but ranks share a batch of 2 sequences evenly; choose "),
        (["--ep", "2"], "ep: is given without moe, and ranks share no experts; give --moe, or "),
        (["--fsdp", "2", "--minutes", "1"], "minutes: is given beside fsdp; give one of them"),
        (["--minutes", "0"], "minutes: got 0; give more than 0"),
        (["--minutes", "1"], "minutes: on a CPU runs share the cores; give --steps"),
        (["--minutes", "1", "--steps", "2"], "minutes: is given beside steps; give one"),
        (["--device", "tpu"], "device: got 'tpu'; choose 'cpu', 'cuda' or 'cuda:0'"),
        (["--device", "cuda:99"], "device: 'cuda:99' is asked for, but torch "),
        (["--data", "missing.txt"], "data: cannot read missing.txt (No such file or directory)"),
        (["--data", "."], "data: cannot read ."),
        (["--data", "empty"], "data: empty is empty; name a file with text"),
        (["--data", "short"], "data: 100 bytes are too few; "),
        (["--data", "broken.gz"], "data: broken.gz is not a whole gzip file"),
        (["--out", "full"], "out: full holds other files; name a new or an empty folder"),
        (["--out", "short"], "out: short is a file; name a new or an empty folder"),
        (["--colour", "red"], "No such option: --colour"),
    ],
)
def test_bad_input(command, tmp_path, arguments, message):
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(bytes(100))
    (tmp_path / "broken.gz").write_bytes(b"not gzip")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"blockscale: {message}")
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
