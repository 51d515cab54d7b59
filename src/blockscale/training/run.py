"""One run: a model trained under one recipe with one seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..nn import Recipe, convert
from .data import Corpus
from .gpt import GPT, VOCABULARY, in_block
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
    statistics: dict[str, dict[str, float]] = field(default_factory=dict)

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
    """Where a run stands, sent after each step."""

    recipe: str
    seed: int
    step: int
    loss: float
    tokens_per_second: float
    validation_loss: float | None = None  # after a step that was followed by a validation


def train(
    name: str,
    recipe: Recipe | None,
    seed: int,
    corpus: Corpus,
    settings: Settings,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Run:
    """Train a GPT under ``recipe`` (None: bfloat16) and return what was measured.

    ``seed`` decides initial parameters and batches, the same for every recipe.
    """
    began, spent = time.perf_counter(), 0.0
    device = torch.device(settings.device)
    model = _model(recipe, seed, settings).to(device)
    optimizer = _optimizer(model, settings)
    run = Run(name, seed, sum(p.numel() for p in model.parameters()))
    statistics = Statistics()
    for step, starts in enumerate(corpus.batches(settings.steps, settings.batch, seed), 1):
        tick = time.perf_counter()
        inputs, targets = corpus.sequences(corpus.train, starts)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        if settings.is_due(step, settings.samples):
            with statistics.watch(model):
                loss = _loss(model, inputs, targets, device)
                loss.backward()
        else:
            loss = _loss(model, inputs, targets, device)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        run.train_loss.append(loss.item())
        spent += time.perf_counter() - tick
        run.tokens_per_second = step * inputs.numel() / spent
        validated = None
        if settings.is_due(step, settings.validations):
            validated = _validate(model, corpus, settings, device)
            run.validation.append((step, validated))
        report(Progress(name, seed, step, run.train_loss[-1], run.tokens_per_second, validated))
    run.statistics = statistics.summary()
    run.seconds = time.perf_counter() - began
    return run


def _model(recipe: Recipe | None, seed: int, settings: Settings) -> torch.nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = GPT(settings.width, settings.layers, settings.heads, settings.context)
    return model if recipe is None else convert(model, recipe, in_block)


def _optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() == 2]},
        {"params": [p for p in model.parameters() if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _loss(model: torch.nn.Module, inputs: Tensor, targets: Tensor, device: torch.device) -> Tensor:
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(inputs.to(device))
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.to(device).flatten())


@torch.no_grad()
def _validate(
    model: torch.nn.Module, corpus: Corpus, settings: Settings, device: torch.device
) -> float:
    total, count = 0.0, 0
    all_starts = corpus.validation_starts(settings.validation_sequences)
    for starts in all_starts.split(settings.validation_batch):
        inputs, targets = corpus.sequences(corpus.validation, starts)
        total += _loss(model, inputs, targets, device).item() * inputs.numel()
        count += inputs.numel()
    return total / count
