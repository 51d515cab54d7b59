"""Ranks of FSDP2: the losses of one process, saves that any number of them reads, and sentences on
ranks that differ, do not come or die."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import training_ranks
from training_ranks import Few, facts

from blockscale.training import (
    RECIPES,
    Corpus,
    RankLost,
    Settings,
    Stopped,
    Work,
    compare,
    launch,
    saves,
    started_ranks,
    torchrun_place,
)
from blockscale.training.launch import Place, open_store
from blockscale.training.run import _loss, _model, _optimizer

pytestmark = pytest.mark.usefixtures("quick_ranks")

RECIPE_NAMES = ("bf16", "mxfp8")


@pytest.fixture
def settings(small) -> Settings:
    """Whose shards are whole blocks: of two ranks all of MXFP8's."""
    return dataclasses.replace(small, width=64, layers=2, heads=2, batch=4)


def by(ranks, settings, text, recipes=RECIPE_NAMES, **given):
    return compare(recipes, text, dataclasses.replace(settings, fsdp=ranks), **given)


# --- losses ---------------------------------------------------------------------------------------


def losses_of_parts(name: str, corpus: Corpus, settings: Settings, parts: int) -> list[float]:
    """One process that adds up gradients of parts of each batch, as ranks have them."""
    model = _model(RECIPES[name], 0, settings)
    optimizer = _optimizer(model, settings)
    losses = []
    for step, starts in enumerate(corpus.batches(settings.steps, settings.batch, 0), 1):
        optimizer.param_groups[0]["lr"] = settings.learning_rate_at(step)
        optimizer.param_groups[1]["lr"] = settings.learning_rate_at(step)
        each = [_loss(model, *corpus.sequences(corpus.train, x)) for x in starts.chunk(parts)]
        for loss in each:
            (loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(each).mean().item())
    return losses


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4"])
def test_two_ranks_have_the_losses_of_parts(name, settings, text, corpus):
    """Bit for bit where nothing is clipped: the sum of two has one order."""
    settings = dataclasses.replace(settings, clip=1e9)
    (run,) = by(2, settings, text, (name,))
    assert run.train_loss == losses_of_parts(name, corpus, settings, 2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_have_the_losses_of_one_process(ranks, settings, text):
    """One rank all of its bits; more but for the order of sums and the rounding of parts."""
    runs = compare(RECIPE_NAMES, text, settings), by(ranks, settings, text)
    for one, shared in zip(*runs, strict=True):
        if ranks == 1:
            assert facts([one]) == facts([shared])
        assert shared.train_loss == pytest.approx(one.train_loss, rel=1e-4)
        assert shared.final_validation_loss == pytest.approx(one.final_validation_loss, rel=1e-4)
        assert shared.parameters == one.parameters
        for role, seen in one.statistics.items():
            assert shared.statistics[role]["elements"] == seen["elements"]
            assert shared.statistics[role]["sqnr_db"] == pytest.approx(seen["sqnr_db"], abs=0.1)


def test_weights_gathered_quantized_change_nothing(settings, text, monkeypatch):
    quantized = by(2, settings, text)
    monkeypatch.setattr(started_ranks, "_be_rank", training_ranks.gather_as_they_are)
    assert facts(by(2, settings, text)) == facts(quantized)


# --- saves ----------------------------------------------------------------------------------------


def some_steps(ranks, settings, text, folder, steps=3):
    few = Few(steps)
    with pytest.raises(Stopped):
        by(ranks, settings, text, report=few.report, folder=folder, stop=few.stop)


def test_a_stopped_run_goes_on(settings, text, folder):
    settings = dataclasses.replace(settings, steps=20, samples=10)
    whole = by(2, settings, text)
    for _ in range(2):
        some_steps(2, settings, text, folder)
    assert [path.suffix[:5] for path in saves.saved_runs(folder)] == [".step"]
    assert facts(by(2, settings, text, folder=folder)) == facts(whole)
    assert [path.name for path in saves.saved_runs(folder)] == ["bf16-0.pt", "mxfp8-0.pt"]


def test_other_numbers_of_ranks_go_on(settings, text, folder):
    settings = dataclasses.replace(settings, steps=20)
    whole = by(4, settings, text, ("mxfp8",))
    few = Few(3)
    for ranks in (4, 2):
        few.left = 3
        with pytest.raises(Stopped):
            by(ranks, settings, text, ("mxfp8",), report=few.report, folder=folder, stop=few.stop)
    for one, other in zip(by(1, settings, text, ("mxfp8",), folder=folder), whole, strict=True):
        assert one.train_loss[:3] == other.train_loss[:3]
        assert one.train_loss == pytest.approx(other.train_loss, rel=3e-4)
        assert [step for step, _ in one.validation] == [step for step, _ in other.validation]


def test_a_rank_is_killed_while_it_saves(settings, text, folder, monkeypatch):
    """Before each thing it does to files: what was saved before is there, or what comes after."""
    settings = dataclasses.replace(settings, steps=3, samples=0, validations=1, layers=1)
    whole = facts(by(2, settings, text, ("mxfp8",)))
    found = []
    for rank, moment in ((1, 0), *((0, moment) for moment in range(8))):
        where = folder / f"{rank}-{moment}"
        (where / "unfinished").mkdir(parents=True)
        die = partial(training_ranks.die_while_saving, rank=rank, moment=moment)
        with monkeypatch.context() as patched:
            patched.setattr(started_ranks, "_be_rank", die)
            with pytest.raises(RankLost, match=f"^rank {rank} was killed by signal 9, and the "):
                by(2, settings, text, ("mxfp8",), folder=where)
        found.append(max(saves.saved_runs(where)).suffix)
        assert facts(by(2, settings, text, ("mxfp8",), folder=where)) == whole
        assert "mxfp8-0.pt" in [path.name for path in saves.saved_runs(where)]
    older, newer = ".step000000001", ".step000000002"
    assert found == [older] * found.count(older) + [newer] * found.count(newer)
    assert found.count(older) >= 5
    assert found.count(newer) >= 2


# --- ranks that differ, do not come, or die -------------------------------------------------------


def start(settings, works):
    """A rank for each of ``works``."""
    store = open_store("127.0.0.1", 0, serves=True)
    ranks = settings.fsdp
    return store, [
        started_ranks.Started(Place(i, ranks, i, "127.0.0.1", store.port), work)
        for i, work in enumerate(works)
    ]


def errors(started):
    """What each of them raised."""
    while not all(each.error for each in started):
        started_ranks._listen(started, lambda progress: None)
    for each in started:
        each.end()
    return [each.error for each in started]


def test_ranks_differ(settings, text):
    settings = dataclasses.replace(settings, fsdp=4)
    work = Work(("mxfp8",), text, settings)
    other = dataclasses.replace(text, train=text.train[1:])
    store, started = start(
        settings,
        [
            work,
            dataclasses.replace(work, recipes=("mxfp8", "nvfp4")),
            work,
            dataclasses.replace(work, text=other, settings=dataclasses.replace(settings, steps=7)),
        ],
    )
    for error in errors(started):
        assert isinstance(error, ValueError)
        said = str(error)
        assert "recipes (rank 1 has mxfp8, nvfp4, most have mxfp8)" in said
        assert "steps (rank 3 has 7, most have 6)" in said
        assert "text (rank 3 has " in said
        assert "start all of them with the same" in said
    del store


def test_a_rank_does_not_come(settings, text, monkeypatch):
    monkeypatch.setattr(started_ranks, "_be_rank", training_ranks.be_impatient)
    settings = dataclasses.replace(settings, fsdp=2)
    store, started = start(settings, [Work(("mxfp8",), text, settings)])
    (error,) = errors(started)
    assert str(error).startswith("ranks: rank 1 did not come within 2 s; start 2 ranks")
    del store


def test_ranks_that_are_left_name_the_one_that_died(settings, text, monkeypatch):
    monkeypatch.setattr(started_ranks, "_be_rank", training_ranks.be_impatient)
    settings = dataclasses.replace(settings, fsdp=4, steps=10**6)
    store, started = start(settings, [Work(("mxfp8",), text, settings)] * 4)
    started[0].pipe.recv()  # it trains
    started[2].process.kill()
    left = [each for each in started if each.rank != 2]
    for error in errors(left):
        assert isinstance(error, RankLost)
        assert str(error).startswith("rank 2 ended before its work did (")
    started[2].end()
    del store


def test_what_a_rank_raises_is_raised_here(settings, text):
    with pytest.raises(RuntimeError, match="multiply up to the size") as raised:
        by(2, dataclasses.replace(settings, width=33), text)
    assert re.search(r"on rank [01]:\nTraceback", "".join(raised.value.__notes__))


# --- the command ----------------------------------------------------------------------------------


def blockscale(*arguments, launcher=()):
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "blockscale", "train", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ranks_of_torchrun_are_joined(tmp_path):
    """The first one alone prints and writes."""
    torchrun = "-m", "torch.distributed.run", "--nproc-per-node", "2"
    given = "--fsdp", 2, "--steps", 2, "--seeds", 1, "--recipe", "mxfp8", "--json"
    out, err = blockscale(*given, "--out", tmp_path / "o", launcher=torchrun).communicate()
    found = json.loads(out)
    assert found["settings"]["fsdp"] == 2
    assert err.count("step 2/2") == 1
    assert {x.name for x in (tmp_path / "o").iterdir()} == {
        "loss.png", "report.html", "results.json"
    }  # fmt: skip


def test_a_killed_rank_ends_the_command(tmp_path):
    folder = tmp_path / "o"
    given = "--fsdp", 2, "--steps", 10, "--seeds", 1, "--recipe", "mxfp8", "--out", folder
    process = blockscale(*given)
    while process.poll() is None and not saves.saved_runs(folder):
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)  # started last
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    *progress, last = err.splitlines()
    assert last == (
        "blockscale: rank 1 was killed by signal 9, and the others have been ended; "
        f"go on with: blockscale train --resume {folder}"
    )
    assert all(line.startswith("mxfp8 seed 0: step ") for line in progress)
    process = blockscale("--resume", folder, "--fsdp", 1, "--json")
    found = json.loads(process.communicate()[0])
    assert found["settings"]["fsdp"] == 1
    assert len(found["runs"][0]["train_loss"]) == 10
    assert not (folder / "unfinished").exists()


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fsdp": 0}, "fsdp: got 0; give 1 or more"),
        ({"fsdp": -2}, "fsdp: got -2; give 1 or more"),
        (
            {"fsdp": 3},
            "fsdp: got 3, but ranks share a batch of 4 sequences evenly; choose one of 1, 2, 4",
        ),
        ({"fsdp": 8}, "fsdp: got 8, but ranks share a batch of 4"),
    ],
)
def test_settings_of_ranks(settings, given, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        dataclasses.replace(settings, **given)


def test_each_rank_has_a_gpu(settings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    two, four = (dataclasses.replace(settings, device="cuda", fsdp=n) for n in (2, 4))
    assert torchrun_place(two) is None
    with pytest.raises(ValueError, match=r"^fsdp: 4 ranks need a GPU each, and torch sees 2; "):
        torchrun_place(four)
    with pytest.raises(ValueError, match=r"^device: got 'cuda:1' beside fsdp; give cuda"):
        dataclasses.replace(two, device="cuda:1")


def test_ranks_of_torchrun(settings, monkeypatch):
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert torchrun_place(settings) is None  # without --fsdp
    place = torchrun_place(dataclasses.replace(settings, fsdp=4))
    assert (place.rank, place.ranks, place.local, place.serves) == (3, 4, 1, False)
    with pytest.raises(ValueError, match=r"^fsdp: got 2, but torchrun has started 4 ranks; give "):
        torchrun_place(dataclasses.replace(settings, fsdp=2))


def test_torch_without_ranks(settings):
    with (
        patch.object(launch.dist, "is_available", lambda: False),
        pytest.raises(ValueError, match=r"^fsdp: torch .* was built without torch.distributed; "),
    ):
        torchrun_place(dataclasses.replace(settings, fsdp=2))
