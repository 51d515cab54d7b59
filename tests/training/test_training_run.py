"""Runs: the same seed gives the same losses; recipes share all but the products."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from blockscale.training import Corpus, Settings, check_recipes, compare, read_text, train


def test_a_run_is_reproducible(small, corpus):
    runs = [train("mxfp8", 1, corpus, small) for _ in range(2)]
    assert runs[0].train_loss == runs[1].train_loss
    assert runs[0].validation == runs[1].validation
    assert runs[0].statistics == runs[1].statistics
    other = train("mxfp8", 2, corpus, small)
    assert other.train_loss != runs[0].train_loss


def test_what_a_run_holds(small, corpus):
    seen = []
    run = train("mxfp8", 0, corpus, small, seen.append)
    assert (run.recipe, run.seed) == ("mxfp8", 0)
    assert len(run.train_loss) == small.steps
    assert [step for step, _ in run.validation] == [3, 6]
    assert run.final_train_loss == run.train_loss[-1]
    assert run.final_validation_loss == run.validation[-1][1]
    assert [p.step for p in seen] == [1, 2, 3, 4, 5, 6]
    assert [p.loss for p in seen] == run.train_loss
    assert [(p.step, p.validation_loss) for p in seen if p.validation_loss] == run.validation
    assert run.tokens_per_second > 0
    assert run.seconds > 0
    assert run.statistics.keys() == {"activations", "weights", "gradients"}


def test_every_recipe_sees_the_same_batches(small, corpus, monkeypatch):
    seen = []
    cut = Corpus.sequences

    def record(self, part, starts):
        seen[-1].append(starts.tolist())
        return cut(self, part, starts)

    monkeypatch.setattr(Corpus, "sequences", record)
    losses = set()
    for name in ("bf16", "mxfp8", "mxfp8_floor", "nvfp4"):
        seen.append([])
        losses.add(tuple(train(name, 0, corpus, small).train_loss))
    assert all(batches == seen[0] for batches in seen)
    assert len(losses) == 4


def test_sampling_statistics_does_not_change_the_run(small, corpus):
    none = dataclasses.replace(small, samples=0)
    watched, plain = (train("mxfp8", 0, corpus, s) for s in (small, none))
    assert watched.train_loss == plain.train_loss
    assert watched.validation == plain.validation
    assert plain.statistics == {}


@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
def test_it_learns(small, corpus, name):
    settings = dataclasses.replace(small, steps=80, batch=8, learning_rate=3e-3)
    run = train(name, 0, corpus, settings)
    assert run.final_train_loss < 3.2
    assert run.final_validation_loss < 3.2


def test_processes_give_what_one_process_gives(small, text, corpus):
    """Order of runs, losses, and every step reported."""
    settings, seen = dataclasses.replace(small, seeds=2), []
    runs = compare(("bf16", "mxfp8"), text, settings, seen.append)
    assert [(run.recipe, run.seed) for run in runs] == [
        ("bf16", 0), ("bf16", 1), ("mxfp8", 0), ("mxfp8", 1)
    ]  # fmt: skip
    for run in runs:
        steps = [p for p in seen if (p.recipe, p.seed) == (run.recipe, run.seed)]
        assert [p.loss for p in steps] == run.train_loss
    alone = train("mxfp8", 1, corpus, settings)
    assert alone.train_loss == runs[-1].train_loss
    assert alone.validation == runs[-1].validation


def test_what_fails_in_a_process_is_raised_here(small, text):
    settings = dataclasses.replace(small, width=33)  # not a multiple of the heads' rotations
    with pytest.raises(RuntimeError):
        compare(("bf16",), text, settings)


def test_an_error_while_reporting_ends_all_runs(small, text):
    def fail(progress):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compare(("bf16",), text, dataclasses.replace(small, steps=10**6), fail)


# --- settings and recipes -------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 200])
def test_events_are_spread_and_the_last_step_has_one(steps):
    settings = Settings(steps=steps)
    due = [step for step in range(1, steps + 1) if settings.is_due(step, 5)]
    assert len(due) == min(steps, 5)
    assert due[-1] == steps


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 200])
def test_the_learning_rate_rises_and_falls(steps):
    settings = Settings(steps=steps)
    rates = [settings.learning_rate_at(step) for step in range(1, steps + 1)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert max(rates) == settings.learning_rate
    assert min(rates) > 0


@pytest.mark.parametrize("name", ["steps", "seeds"])
@pytest.mark.parametrize("value", [0, -3])
def test_counts_are_positive(name, value):
    with pytest.raises(ValueError, match=f"{name}: got {value}; give 1 or more"):
        Settings(**{name: value})


@pytest.mark.parametrize(
    "device", ["tpu", "", "cpu:", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "mps"]
)
def test_devices_are_named(device):
    with pytest.raises(ValueError, match=r"device: got .*; choose 'cpu', 'cuda' or 'cuda:0'"):
        Settings(device=device)


def test_cuda_without_cuda():
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ValueError, match=rf"device: '{missing}' is asked for.*use --device cpu"):
        Settings(device=missing)


def test_recipes_are_values():
    assert check_recipes(["mxfp8", "bf16", "mxfp8"]) == ("bf16", "mxfp8")
    assert check_recipes(["mxfp8_floor", "nvfp4"]) == ("mxfp8_floor", "nvfp4")
    with pytest.raises(ValueError, match=r"recipe: got 'fp9'; choose one of 'bf16', 'mxfp8'"):
        check_recipes(["bf16", "fp9"])


def test_gpu_run(small):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    runs = compare(("bf16", "mxfp8"), read_text(), dataclasses.replace(small, device="cuda"))
    assert [len(run.train_loss) for run in runs] == [small.steps] * 2
