"""What torch.jit.script says of layers."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["Unscripted"]


class Unscripted:
    """A base of layers: torch.jit.script, which asks each module, is refused with the remedy."""

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError(
            "torch.jit.script cannot compile block-scaled products; use torch.export or "
            "torch.compile"
        )
