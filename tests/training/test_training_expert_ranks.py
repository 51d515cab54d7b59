"""Ranks that share experts: the losses of one process, to the bit where sums have its order, saves
that other meshes read, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch
import training_ranks
from torch import Tensor
from training_ranks import Few, by, facts

from blockscale.cli import main
from blockscale.nn import MoE
from blockscale.training import (
    RECIPES,
    Corpus,
    Plan,
    Ranks,
    Settings,
    Stopped,
    Work,
    compare,
    saves,
    started_ranks,
)
from blockscale.training.gpt import mixtures
from blockscale.training.run import _loss, _model, _optimizer

pytestmark = pytest.mark.usefixtures("quick_ranks")


@pytest.fixture
def settings(small) -> Settings:
    """Two ranks have four experts each, four have two."""
    sizes = {"width": 128, "layers": 2, "heads": 4, "context": 64, "batch": 4, "steps": 4}
    return dataclasses.replace(small, **sizes, experts=8, expert_size=64)


# --- losses ---------------------------------------------------------------------------------------


def losses_of_two(name: str, text, settings: Settings, shares: bool) -> list[float]:
    """One process that adds up the gradients of halves of each batch, as two ranks have them, and
    of experts' load in both. ``shares``: gradients of experts are those of the whole batch."""
    corpus = Corpus(text, settings.context)
    model = _model(RECIPES[name], 0, settings)
    moes = list(mixtures(model))
    experts = [p for each in moes for p in each.experts.parameters()]
    optimizer, losses = _optimizer(model, settings), []
    for step, starts in enumerate(corpus.batches(settings.steps, settings.batch, 0), 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        batch = corpus.sequences(corpus.train, starts)
        (_loss(model, *batch) + settings.balance * sum(each.loss for each in moes)).backward()
        of_whole = [p.grad for p in experts]
        optimizer.zero_grad()
        halves, loads, scores = [], [], []
        for half in zip(*(x.chunk(2) for x in batch), strict=True):
            halves.append(_loss(model, *half))
            loads.append(torch.stack([each.load for each in moes]))
            scores.append(torch.stack([each.mean_scores for each in moes]))
        share = sum(loads) / sum(loads).sum(1, keepdim=True)
        for loss, of_half in zip(halves, scores, strict=True):
            balancing = (settings.experts * (share * of_half).sum(1)).sum()
            (loss + settings.balance * balancing).backward()
        for parameter in model.parameters():
            parameter.grad /= 2
        if shares:
            for parameter, grad in zip(experts, of_whole, strict=True):
                parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(halves).detach().mean().item())
    return losses


@pytest.mark.parametrize(
    ("mesh", "recipes"),
    [({"fsdp": 2}, ("bf16", "mxfp8", "nvfp4")), ({"ep": 2}, ("bf16", "mxfp8"))],
    ids=str,
)
def test_two_ranks_have_the_losses_of_halves(mesh, recipes, settings, text):
    """Bit for bit where nothing is clipped: the sum of two has one order. An expert that ranks
    share has the tokens of both in one product, and blocks along them; of NVFP4 a scale of both,
    which halves do not have."""
    settings = dataclasses.replace(settings, clip=1e9)
    for run in by(mesh, settings, text, recipes):
        assert run.train_loss == losses_of_two(run.recipe, text, settings, "ep" in mesh)


#: Of gradients, in which elements go to the other side of a rounding by another order of sums.
CLOSE = {"bf16": 2e-6, "mxfp8": 1e-3}


def in_order_of(mesh: dict[str, int]):
    """A forward whose experts have tokens in the order of ranks: of a part of the batch, then of a
    part of its sequences."""
    forward = MoE.forward

    def ordered(moe: MoE, x: Tensor) -> Tensor:
        cut = x.unflatten(0, (mesh["ep"], -1)).unflatten(2, (mesh["tp"], -1)).transpose(1, 2)
        return forward(moe, cut.contiguous()).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    return patch.object(MoE, "forward", ordered)


def test_gradients_in_fp32(settings, text, monkeypatch):
    """Where activations are not rounded to bf16 every gradient is that of one process, and so are
    norm, losses and statistics."""
    settings, mesh = dataclasses.replace(settings, balance=1.0), {"ep": 2, "tp": 2}
    monkeypatch.setattr(started_ranks, "_be_rank", training_ranks.in_fp32)
    work = Work(tuple(CLOSE), text, dataclasses.replace(settings, **mesh))
    shared = started_ranks.train_by_started(work, lambda _: None, lambda: False)
    with in_order_of(mesh):
        alone = training_ranks.learned(
            dataclasses.replace(work, settings=settings), Ranks(torch.device("cpu"))
        )
    for name, close in CLOSE.items():
        one, other = alone[name], shared[name]
        assert other["norm"] == pytest.approx(one["norm"], rel=close)
        assert other["losses"] == pytest.approx(one["losses"], rel=max(close, 1e-5))
        for parameter, grad in one["gradients"].items():
            error = np.linalg.norm(grad - other["gradients"][parameter])
            assert error <= close * np.linalg.norm(grad), parameter
        for role, seen in one["statistics"].items():
            found = other["statistics"][role]
            assert found["elements"] == seen["elements"]
            # parts of a batch are tensors of their own, but for experts
            assert found["sqnr_db"] == pytest.approx(seen["sqnr_db"], abs=0.1)


@pytest.mark.parametrize(
    ("mesh", "experts"),
    [({"ep": 1}, 8), ({"fsdp": 2, "tp": 2}, 8), ({"fsdp": 2, "ep": 2}, 6)],
    ids=str,
)
def test_losses_of_one_process(mesh, experts, settings, text):
    """One rank has all of its bits; of more sums have another order, and parts of them are rounded
    to bf16. The loads of experts are those of all ranks' tokens. FSDP2 may cut a rank's experts
    unevenly."""
    settings = dataclasses.replace(settings, experts=experts)
    runs = compare(("bf16", "mxfp8"), text, settings), by(mesh, settings, text)
    for one, shared in zip(*runs, strict=True):
        if mesh == {"ep": 1}:
            assert facts([one]) == facts([shared])
            assert one.loads == shared.loads
        near = {"bf16": 1e-4, "mxfp8": 4e-4}[one.recipe]
        assert shared.train_loss == pytest.approx(one.train_loss, rel=near)
        assert shared.final_validation_loss == pytest.approx(one.final_validation_loss, rel=near)
        assert shared.parameters == one.parameters
        for block, other in zip(one.loads, shared.loads, strict=True):
            assert sum(other) == pytest.approx(settings.experts)
            assert other == pytest.approx(block, abs=0.1)


# --- saves ----------------------------------------------------------------------------------------


def some_steps(mesh, settings, text, folder, steps=3):
    few = Few(steps)
    with pytest.raises(Stopped):
        by(mesh, settings, text, ("mxfp8",), report=few.report, folder=folder, stop=few.stop)


def test_resumed(settings, text, folder, tmp_path):
    """By the same ranks to the same bits, by 4, 2 and 1 to their losses."""
    settings = dataclasses.replace(settings, steps=12, layers=1, validations=1)
    mesh = {"ep": 2, "tp": 2}
    (whole,) = by(mesh, settings, text, ("mxfp8",))
    some_steps(mesh, settings, text, folder)
    other = tmp_path / "other"
    (other / "unfinished").mkdir(parents=True)
    (saved,) = saves.saved_runs(folder)
    shutil.copytree(saved, other / "unfinished" / saved.name)
    (same,) = by(mesh, settings, text, ("mxfp8",), folder=other)
    assert facts([same]) == facts([whole])
    assert same.loads == whole.loads

    some_steps({"ep": 2}, settings, text, folder)
    (run,) = by({"fsdp": 1}, settings, text, ("mxfp8",), folder=folder)
    assert run.train_loss[:3] == whole.train_loss[:3]
    assert run.train_loss == pytest.approx(whole.train_loss, rel=5e-4)


# --- the command, and arguments -------------------------------------------------------------------


def test_command(monkeypatch, capsys, tmp_path):
    given = "--moe", "--ep", "2", "--steps", "1", "--recipe", "mxfp8", "--json"
    monkeypatch.setattr(sys, "argv", ["blockscale", "train", *given, "--out", str(tmp_path / "o")])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    found = json.loads(capsys.readouterr().out)
    settings = found["settings"]
    assert [settings[name] for name in ("fsdp", "ep", "tp", "experts")] == [None, 2, None, 8]
    assert len(found["runs"][0]["loads"]) == settings["layers"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ep": 0}, "ep: got 0; give 1 or more"),
        (
            {"ep": 1, "experts": 0},
            "ep: is given without moe, and ranks share no experts; ",
        ),
        (
            {"ep": 4, "experts": 6},
            "ep: got 4, but ranks share 6 experts evenly; choose one of 1, 2, 3, 6",
        ),
        (
            {"ep": 2, "tp": 4, "experts": 12},
            "ep and tp: got 2 x 4, but ranks share 12 experts evenly; choose numbers whose product "
            "is one of 1, 2, 3, 4, 6, 12",
        ),
        (
            {"fsdp": 2, "ep": 4},
            "fsdp and ep: got 2 x 4, but ranks share a batch of 4 sequences evenly; choose numbers "
            "whose product is one of 1, 2, 4",
        ),
        ({"tp": 4, "experts": 6}, "tp: got 4, but ranks share 6 experts evenly; choose one of 1, "),
        ({"ep": 2, "tp": 3}, "tp: got 3, but ranks share 4 heads evenly; choose one of 1, 2, 4"),
        ({"ep": 2, "compile": True}, "compile: is given with moe beside ep"),
    ],
)
def test_settings_of_ranks(settings, given, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        dataclasses.replace(settings, **given)


def test_plan_by_other_ranks(settings):
    plan = Plan(("mxfp8",), dataclasses.replace(settings, ep=2, tp=2), None, "")
    assert plan.by_ranks(fsdp=2, ep=None, tp=None).settings.mesh == {"fsdp": 2}
    with pytest.raises(ValueError, match=r"^ep: got 3, but ranks share a batch of 4"):
        plan.by_ranks(fsdp=None, ep=3, tp=None)
