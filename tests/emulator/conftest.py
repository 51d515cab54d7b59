"""EMULATOR_POLICY=late or =random:3 runs the suite under another policy than eager."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest

from blockscale import emulator as em

POLICY, _, SEED = os.environ.get("EMULATOR_POLICY", "eager").partition(":")


@pytest.fixture(autouse=POLICY != "eager")
def policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What em.Device does where a test does not say."""
    original = em.Device.__init__

    @functools.wraps(original)
    def init(self: em.Device, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **({"completion": POLICY, "seed": int(SEED or 0)} | kwargs))

    monkeypatch.setattr(em.Device, "__init__", init)
