"""Whether somebody has written to a tensor that is kept."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = ["Version"]


class Version:
    """Of a tensor: its number, or while a graph is traced the value that functionalization has for
    it, as numbers do not count ``_foreach_`` operations there."""

    def __init__(self, x: Tensor) -> None:
        self._found = _version(x)

    def is_of(self, x: Tensor) -> bool:
        """Nobody has written to ``x`` since."""
        found = _version(x)
        return found is self._found if isinstance(found, Tensor) else found == self._found


def _version(x: Tensor) -> Any:
    if isinstance(x, FunctionalTensor):
        return x.from_functional()
    return None if x.is_inference() else x._version
