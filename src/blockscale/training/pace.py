"""How many steps fit into a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .data import Corpus, Text
from .run import train
from .settings import Settings

__all__ = ["steps_within"]

_PROBED = 7  # laps


def steps_within(minutes: float, recipes: Sequence[str], text: Text, settings: Settings) -> int:
    """Steps that the slowest of ``recipes`` makes in ``minutes``, the same number for all of them.

    A short run under each measures its speed, and leaves its kernels compiled. Validation is not
    counted.
    """
    corpus = Corpus(text, settings.context, settings.device)
    probe = replace(settings, steps=_PROBED * settings.log_every, validations=0, samples=0)
    slowest = min(train(n, 0, corpus, probe).tokens_per_second for n in recipes)
    return max(1, int(60 * minutes * slowest / (settings.batch * settings.context)))
