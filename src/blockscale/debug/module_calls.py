"""Which module of a watched model is being called, by hooks of all of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..nn import observing
from ..nn.names import plain_name

__all__ = ["Calls", "hook_modules"]


class Calls(threading.local):
    """Modules that are being called in a thread."""

    def __init__(self) -> None:
        self.outer: list[Any] = []
        self.trains = True  # else it is a forward for itself, before the backward of another

    def enter(self, name: str) -> None:
        self.outer.append(observing.site() if self.outer else None)
        observing.enter(name)

    def leave(self) -> None:
        if self.outer:
            observing.enter(self.outer.pop())


def hook_modules(model: nn.Module, calls: Calls) -> Callable[[], None]:
    """Tell ``calls`` of each module inside of ``model``, by its name; what is returned ends it.

    As ``register_forward_hook`` does, but with one number for all: a handle of each takes longer
    than all else.
    """

    def enter(name: str, module: nn.Module, args: Any) -> None:
        calls.enter(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        calls.leave()

    number = RemovableHandle(OrderedDict()).id
    hooked = {name: module for name, module in model.named_modules() if module is not model}
    for name, module in hooked.items():
        module._forward_pre_hooks[number] = partial(enter, plain_name(name))
        module._forward_hooks[number] = leave
        module._forward_hooks_always_called[number] = True

    def end() -> None:
        for module in hooked.values():
            del module._forward_pre_hooks[number]
            del module._forward_hooks[number], module._forward_hooks_always_called[number]

    return end
