"""What tests of ranks do and look at: whole tensors, what is sent, and what a call raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from blockscale.distributed import functional_collectives

__all__ = ["WRITES", "counted_gathers", "error_of", "whole"]


#: What changes a parameter that ranks share.
WRITES: dict[str, Any] = {
    "in place": lambda p: p.mul_(0.9),
    "copied": lambda p: p.copy_(p * 1.3),
    "foreach": lambda p: torch._foreach_mul_([p], 1.2),
    "detached": lambda p: p.detach().mul_(1.2),
    "local": lambda p: p.to_local().mul_(1.2),
}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """Bytes of each gather, from this rank."""
    sent: list[int] = []
    gather = functional_collectives._gather

    def count(received: Tensor, message: Tensor, group: Any) -> Any:
        sent.append(message.nbytes)
        return gather(received, message, group)

    with patch.object(functional_collectives, "_gather", count):
        yield sent


def error_of(call: Callable[[], Any]) -> str:
    """What it raises: the kind of error, and its message; or "nothing"."""
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
