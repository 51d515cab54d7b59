"""The blocks of a model, by name, in the order in which they are called."""

from __future__ import annotations

import torch

__all__ = ["block_names"]

_LISTS = torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict


def block_names(model: torch.nn.Module) -> list[str]:
    """Names of the blocks that most of a model's parameters are in, for overrides of a recipe.

    >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(24)])
    >>> last = {f"{name}*": None for name in bs.nn.block_names(model)[-3:]}
    >>> recipe = bs.Recipe.nvfp4(overrides=last)  # these three stay in high precision

    They are the children of a ModuleList, a Sequential or a ModuleDict: of that which has the most
    parameters, the innermost of such. Raises TypeError for what is no model, and ValueError where
    it has no list of two blocks or more.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; expected a torch.nn.Module")
    found, most = "", 0
    for name, module in model.named_modules():
        size = sum(p.numel() for p in module.parameters())
        # an inner list of a block has fewer than the list of blocks, one around it as many or more
        if isinstance(module, _LISTS) and len(module) > 1 and _is_even(module) and size > most:
            found, most = name, size
    if not most:
        raise ValueError(
            "model: has no list of blocks (torch.nn.ModuleList, Sequential or ModuleDict); name "
            "its layers in overrides by hand"
        )
    prefix = f"{found}." if found else ""
    return [prefix + name for name, _ in model.get_submodule(found).named_children()]


def _is_even(module: torch.nn.Module) -> bool:
    """Whether no child has more than half of the parameters: else that is where the blocks are."""
    sizes = [sum(p.numel() for p in child.parameters()) for child in module.children()]
    return 2 * max(sizes) <= sum(sizes)
