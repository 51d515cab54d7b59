"""One run: a model trained under one recipe with one seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..nn import Recipe, convert, rounding_step, set_rounding_step
from .data import Corpus
from .gpt import GPT, VOCABULARY, in_block, mixture, mixtures
from .meter import Meter
from .ranks import Ranks
from .recipes import RECIPES
from .saves import RunSaves, State, Stopped
from .settings import Settings
from .statistics import Statistics

__all__ = ["Progress", "Run", "train"]


@dataclass
class Run:
    """What a run measured. Losses are mean cross-entropies in nats per byte."""

    recipe: str
    seed: int
    parameters: int = 0
    train_loss: list[float] = field(default_factory=list)  # of each step
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    seconds: float = 0.0
    tokens_per_second: float = 0.0  # in training steps, the rest left out
    peak_memory: int | None = None  # bytes of tensors in training steps; None on a CPU
    statistics: dict[str, dict[str, float]] = field(default_factory=dict)
    loads: list[list[float]] = field(default_factory=list)  # of each block's experts; 1: the mean

    @property
    def final_train_loss(self) -> float:
        """Mean of the last tenth of the steps (each is the loss of one small batch)."""
        last = self.train_loss[-max(1, len(self.train_loss) // 10) :]
        return sum(last) / len(last)

    @property
    def final_validation_loss(self) -> float:
        return self.validation[-1][1]


@dataclass(frozen=True)
class Progress:
    """Where a run stands, sent after each step that the losses are looked at."""

    recipe: str
    seed: int
    step: int
    loss: float
    tokens_per_second: float
    validation_loss: float | None = None  # after a step that was followed by a validation


def train(
    name: str,
    seed: int,
    corpus: Corpus,
    settings: Settings,
    report: Callable[[Progress], None] = lambda progress: None,
    saves: RunSaves | None = None,
    stop: Callable[[], bool] = lambda: False,
    ranks: Ranks | None = None,
) -> Run:
    """Train a GPT under the recipe ``name`` and return what was measured.

    ``corpus`` lies on the device of ``settings``. ``seed`` decides initial parameters and batches,
    the same for every recipe. With ``saves`` a run goes on from where it was, with the losses that
    it would have had. When ``stop`` says so after a step, it is saved and :class:`Stopped` raised.
    Of ``ranks`` that share the run all call this, and all return what was measured.
    """
    began = time.perf_counter()
    if settings.compile:  # graphs of other recipes count against the limit of a block's
        torch.compiler.reset()
    ranks = ranks or Ranks(torch.device(settings.device))
    model = _model(RECIPES[name], seed, settings).to(ranks.device)
    ranks.shard(model)
    optimizer = _optimizer(model, settings)
    run = Run(name, seed, sum(p.numel() for p in model.parameters()))
    statistics = Statistics(ranks)
    meter = Meter(ranks.device)
    found = None if saves is None else saves.load(model, optimizer)
    done = 0
    if found is not None:
        run, done = Run(**found["run"]), found["step"]
        if done == settings.steps:
            return run
        statistics.restore(found["statistics"])
        meter.restore(found["meter"])
        if found["rounding_step"] is not None:
            set_rounding_step(model, found["rounding_step"])
        began -= run.seconds

    def state(step: int) -> State:
        run.seconds = time.perf_counter() - began
        return {
            "step": step,
            "run": asdict(run),
            "statistics": statistics.state(),
            "meter": meter.state(),
            "rounding_step": rounding_step(model),
        }

    losses: list[Tensor] = []  # not looked at yet
    batches = enumerate(corpus.batches(settings.steps, settings.batch, seed), 1)
    for step, starts in islice(batches, done, None):
        inputs, targets = corpus.sequences(corpus.train, ranks.part(starts))
        if settings.is_due(step, settings.samples):
            with meter.paused(), _eager(settings), statistics.watch(model):
                _loss(model, inputs, targets).backward()
                optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        loss = _loss(model, inputs, targets)
        (loss + settings.balance * ranks.balancing(model)).backward()
        ranks.clip(model, settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        last, stopping = step == settings.steps, ranks.any(stop())
        validates = settings.is_due(step, settings.validations)
        saving = saves is not None and not last and settings.is_due(step, settings.saves)
        if not (validates or saving or stopping or last or step % settings.log_every == 0):
            continue
        run.train_loss += ranks.mean(torch.stack(losses)).tolist()
        meter.lap(len(losses) * starts.numel() * settings.context)
        losses.clear()
        run.tokens_per_second = meter.tokens_per_second
        validated = None
        if validates:
            with meter.paused():
                validated, run.loads = _validate(model, corpus, settings, ranks)
            run.validation.append((step, validated))
        report(Progress(name, seed, step, run.train_loss[-1], run.tokens_per_second, validated))
        if saves is not None and not last and (saving or stopping):
            with meter.paused():
                saves.write(state(step), model, optimizer)
        if stopping and not last:
            raise Stopped
    run.peak_memory = max(ranks.gathered(meter.peak_memory), key=lambda peak: peak or 0)
    run.statistics = statistics.summary()
    run.seconds = time.perf_counter() - began
    if saves is not None:
        saves.finish({"step": settings.steps, "run": asdict(run)})
    return run


def _eager(settings: Settings) -> AbstractContextManager[Any]:
    """Compiled blocks run as they are written, so that their layers can be watched."""
    return torch.compiler.set_stance("force_eager") if settings.compile else nullcontext()


def _model(recipe: Recipe | None, seed: int, settings: Settings) -> GPT:
    sizes = {"experts": settings.experts, "top_k": settings.top_k, "size": settings.expert_size}
    experts = partial(mixture, **sizes)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = GPT(
            settings.width,
            settings.layers,
            settings.heads,
            settings.context,
            settings.fused_attention,
            experts if settings.experts else None,
        )
    if recipe is not None:
        convert(model, recipe, in_block)
    if settings.compile:
        for block in model.blocks:  # one graph, compiled once, for all of them
            block.compile(fullgraph=True)
    return model


def _optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.AdamW:
    experts = {p: None for each in mixtures(model) for p in each.experts.parameters()}
    others = [p for p in model.parameters() if p not in experts]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.dim() > 1]},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    if experts:  # of ranks on a mesh of their own, where the fused step takes one; without biases
        groups.append({"params": list(experts)})
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _loss(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(inputs.device.type, torch.bfloat16):
        logits = model(inputs)
    return F.cross_entropy(logits.view(-1, VOCABULARY), targets.flatten())


@torch.no_grad()
def _validate(
    model: GPT, corpus: Corpus, settings: Settings, ranks: Ranks
) -> tuple[float, list[list[float]]]:
    """The loss, and how many tokens each expert had, over the mean."""

    def look(starts: Tensor) -> tuple[float, int, list[Any]]:
        inputs, targets = corpus.sequences(corpus.validation, starts)
        loss = _loss(model, inputs, targets).item() * inputs.numel()
        return loss, inputs.numel(), ranks.loads(model)

    batches = corpus.validation_starts(settings.validation_sequences)
    seen = ranks.each(look, batches.split(settings.validation_batch))
    losses, counts, loads = zip(*seen, strict=True)
    of_blocks = [torch.stack(each).sum(0, dtype=torch.float32) for each in zip(*loads, strict=True)]
    return sum(losses) / sum(counts), [(load / load.mean()).tolist() for load in of_blocks]
