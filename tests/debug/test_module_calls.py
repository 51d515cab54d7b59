"""Modules that are being called are told by name, and no hook of a watch stays or takes another's
place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from blockscale.debug.module_calls import Calls, hook_modules


class Told(Calls):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str | None] = []

    def enter(self, name: str) -> None:
        self.told.append(name)

    def leave(self) -> None:
        self.told.append(None)


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


def hooks_of(model: nn.Module) -> list[list[Any]]:
    return [
        [*module._forward_pre_hooks, *module._forward_hooks, *module._forward_hooks_always_called]
        for module in model.modules()
    ]


def test_calls_are_told_and_end_with_their_hooks():
    inner = nn.Sequential(nn.Identity())
    model, calls, own = nn.Sequential(inner, nn.Identity()), Told(), []
    inner.register_forward_pre_hook(lambda *given: own.append("before"))
    hooks = hooks_of(model)
    end = hook_modules(model, calls)
    inner.register_forward_hook(lambda *given: own.append("after")).remove()  # a number of its own
    model(torch.zeros(1))
    assert calls.told == ["0", "0.0", None, None, "1", None]
    assert own == ["before"]
    end()
    assert hooks_of(model) == hooks
    model(torch.zeros(1))
    assert len(calls.told) == 6


def test_a_call_that_fails_is_over():
    model, calls = nn.Sequential(Fails()), Told()
    hook_modules(model, calls)
    with pytest.raises(ArithmeticError):
        model(torch.zeros(1))
    assert calls.told == ["0", None]


def test_replicas_have_the_names_of_their_modules():
    """torch.nn.DataParallel calls these, in threads."""
    model, calls = nn.Sequential(nn.Identity()), Told()
    hook_modules(model, calls)
    model[0]._replicate_for_data_parallel()(torch.zeros(1))
    assert calls.told == ["0", None]
