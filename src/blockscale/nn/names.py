"""Names of layers as their model has them, whatever wraps it."""

from __future__ import annotations

__all__ = ["plain_name"]

#: What torch puts into the names of modules that it wraps.
_WRAPPERS = "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."


def plain_name(name: str) -> str:
    """Without the wrappers of torch.compile, activation checkpointing and FSDP."""
    for wrapper in _WRAPPERS:
        name = f"{name}.".replace(wrapper, "").removesuffix(".")
    return name
