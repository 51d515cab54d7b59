"""Ranks of the tests: processes that start quickly, and what they do otherwise than the command."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import sys
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from blockscale.training import (
    RECIPES,
    Corpus,
    Statistics,
    compare,
    gpt,
    launch,
    ranks,
    started_ranks,
)
from blockscale.training.run import _eager, _model, _optimizer
from blockscale.training.tensor_plan import by_kind, whole
from blockscale.training.workers import become_worker, leave

be_rank = started_ranks._be_rank

_context = multiprocessing.get_context("forkserver")

_PRELOADED = ["blockscale.training", "blockscale.training.sharded_saves", "torch.distributed.fsdp"]

#: What Python tells of files that are written, renamed and removed.
_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Few:
    """Stops a comparison after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def report(self, progress: object) -> None:
        self.left -= 1

    def stop(self) -> bool:
        return self.left <= 0


def facts(runs: Any) -> list[Any]:
    """What does not depend on when it was made."""
    return [(run.recipe, run.train_loss, run.validation, run.statistics) for run in runs]


def by(
    mesh: dict[str, int], settings: Any, text: Any, recipes: Any = ("bf16", "mxfp8"), **given: Any
) -> Any:
    """Runs of ranks that share a mesh."""
    whole = {"fsdp": None, "ep": None, "tp": None} | mesh
    return compare(recipes, text, dataclasses.replace(settings, **whole), **given)


def quick_context(_: str) -> Any:
    """Forks of a process that has imported all and has no threads."""
    _context.set_forkserver_preload(_PRELOADED)
    return _context


def gather_as_they_are(pipe: Any, place: Any, work: Any) -> None:
    """FSDP2 gathers weights without blockscale."""
    ranks.gather_quantized = lambda model: model
    be_rank(pipe, place, work)


def be_impatient(pipe: Any, place: Any, work: Any) -> None:
    launch._START = launch._ASK = timedelta(seconds=2)
    be_rank(pipe, place, work)


def die_while_saving(pipe: Any, place: Any, work: Any, *, rank: int, moment: int) -> None:
    """``rank`` is killed before what it does to files of its second save, ``moment`` things later
    than the first."""
    seen = {"renamed": 0, "events": 0}

    def look(event: str, given: Any) -> None:
        if event not in _EVENTS or "unfinished" not in str(given[0]):
            return
        if "writing" in str(given[0]) and event == "open" and "_0.distcp" in str(given[0]):
            seen["renamed"] += 1  # each rank opens its file once a save
        if seen["renamed"] >= 2:
            if seen["events"] == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            seen["events"] += 1

    if place.rank == rank:
        sys.addaudithook(look)
    be_rank(pipe, place, work)


def in_fp32(pipe: Any, place: Any, work: Any) -> None:
    """A rank that sends what it has learned."""
    become_worker()
    with launch.joined(place, work) as of:
        pipe.send(learned(work, of))
    leave()


def learned(work: Any, of: Any) -> dict[str, Any]:
    """Under each recipe, with activations in fp32, perhaps compiled: losses of three steps, the
    norm of all gradients of the first one, each of these, and statistics."""

    def norm(module: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, module.weight.shape, module.weight)

    def compile(module: Any, **given: Any) -> None:
        given_backend(module, backend="aot_eager", **given)

    given_backend = torch.nn.Module.compile
    with patch.object(gpt.Norm, "forward", norm), patch.object(torch.nn.Module, "compile", compile):
        return {name: _learned(name, work, of) for name in work.recipes}


def _learned(name: str, work: Any, of: Any) -> dict[str, Any]:
    settings = work.settings
    corpus = Corpus(work.text, settings.context)
    model = _model(RECIPES[name], 0, settings)
    model.rotary = model.rotary.float()
    of.shard(model)
    optimizer, statistics = _optimizer(model, settings), Statistics(of)

    def loss(starts: Tensor) -> Tensor:
        inputs, targets = corpus.sequences(corpus.train, of.part(starts))
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    found: dict[str, Any] = {"losses": []}
    for step, starts in enumerate(corpus.batches(3, settings.batch, 0)):
        if not step:
            with _eager(settings), statistics.watch(model):
                loss(starts).backward()
            optimizer.zero_grad()
        value = loss(starts)
        (value + settings.balance * of.balancing(model)).backward()
        total = of.clip(model, settings.clip)
        if not step:
            found["norm"] = total.item()
            found["gradients"] = {
                name: _as_one(name, p.grad, settings.tp or 1).numpy()
                for name, p in model.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(of.mean(value.detach()).item())
    return found | {"statistics": statistics.summary()}


def _as_one(name: str, grad: Any, ranks: int) -> Tensor:
    """The gradient as one process has it."""
    made = whole(grad) if hasattr(grad, "placements") else grad
    return by_kind(made, ranks) if "qkv" in name else made
