"""What every run of a comparison has in common."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

__all__ = ["Settings", "check_device"]


@dataclass(frozen=True)
class Settings:
    """Model, schedule and measurements; the defaults fit four recipes and three seeds in minutes.

    Raises ValueError for ``steps`` and ``seeds`` below 1 and for a device that is not there.
    """

    steps: int = 200
    seeds: int = 3
    device: str = "cpu"
    # the model: 1.4 million parameters
    width: int = 192
    layers: int = 3
    heads: int = 3
    context: int = 128
    # the optimizer: AdamW, linear warmup, then a cosine down to zero
    batch: int = 4
    learning_rate: float = 1e-3  # three times this learns faster, but drowns what is compared
    warmup: float = 0.3  # of the steps; a shorter one makes equal runs drift further apart
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    # what is measured
    validations: int = 5  # evenly spread, the last after the last step
    validation_sequences: int = 96
    validation_batch: int = 16
    samples: int = 4  # steps whose tensors are looked at, evenly spread

    def __post_init__(self) -> None:
        for name in ("steps", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; give 1 or more")
        check_device(self.device)

    def is_due(self, step: int, times: int) -> bool:
        """Whether one of ``times`` evenly spread events falls on ``step``; one does on the last."""
        return step * times // self.steps != (step - 1) * times // self.steps

    def learning_rate_at(self, step: int) -> float:
        """For ``step``, counted from 1: linear warmup, then a cosine down to nearly zero."""
        warmup = max(1, round(self.warmup * self.steps))
        if step <= warmup:
            return self.learning_rate * step / warmup
        done = (step - warmup) / (self.steps - warmup + 1)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def check_device(device: str) -> None:
    """ValueError unless ``device`` is ``cpu`` or a CUDA device that torch sees."""
    named = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if named is None:
        raise ValueError(f"device: got {device!r}; choose 'cpu', 'cuda' or 'cuda:0'")
    if device != "cpu" and int(named[1] or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device: {device!r} is asked for, but torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
