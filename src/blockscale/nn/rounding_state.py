"""What layers that round stochastically go on from, to be saved beside a state_dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .names import plain_name
from .seeds import Stepping

__all__ = ["load_rounding_state", "rounding_state", "rounding_step", "set_rounding_step"]

_MOST = 2**62  # forward passes


def rounding_step(model: torch.nn.Module) -> int | None:
    """How many forward passes its layers have counted, to be saved beside a state_dict; None where
    no layer rounds stochastically.

    >>> bs.nn.rounding_step(bs.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), bs.Recipe()))

    Raises ValueError where layers have counted differently: :func:`rounding_state` has it all.
    """
    found = {name: count for name, (_, count) in rounding_state(model).items()}
    if len(set(found.values())) > 1:
        least, most = (pick(found, key=found.__getitem__) for pick in (min, max))
        raise ValueError(
            f"model: {least!r} has counted {found[least]} forward passes and {most!r} "
            f"{found[most]}, as where some blocks are checkpointed; save "
            "blockscale.nn.rounding_state(model), and load_rounding_state(model, it)"
        )
    return next(iter(found.values()), None)


def rounding_state(model: torch.nn.Module) -> dict[str, list[int]]:
    """What layers that round stochastically go on from, to be saved beside a state_dict, as JSON
    too: by name, the number that the layer has of its own, and how many forward passes it has
    counted.

    >>> model = bs.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), bs.Recipe.nvfp4())
    >>> state = bs.nn.rounding_state(model)
    >>> bs.nn.load_rounding_state(model, state)

    Names are without those of wrappers (torch.compile, activation checkpointing, FSDP).
    """
    return {
        name: [each.rounding_start, int(each.rounding_step) - each.rounding_start]
        for name, each in _stepping(model).items()
    }


def load_rounding_state(model: torch.nn.Module, state: Mapping[str, Sequence[int]]) -> None:
    """Let the layers of ``model`` go on from a :func:`rounding_state`.

    >>> layers = [torch.nn.Linear(64, 64) for _ in range(2)]
    >>> model, other = (bs.convert(torch.nn.Sequential(m), bs.Recipe.nvfp4()) for m in layers)
    >>> other.load_state_dict(model.state_dict())
    <All keys matched successfully>
    >>> bs.nn.load_rounding_state(other, bs.nn.rounding_state(model))

    Raises ValueError where it is not of the layers that round stochastically, by their names, or
    has other values than two numbers for each; no layer is changed then.
    """
    found = _stepping(model)
    if found.keys() != state.keys():
        missing, unknown = sorted(found.keys() - state.keys()), sorted(state.keys() - found.keys())
        raise ValueError(
            f"state: is not of this model's layers that round stochastically: it lacks {missing}, "
            f"and has {unknown} that the model has not; convert the model by the recipe of the run "
            "before, and pass what rounding_state gave of the whole model"
        )
    for name, given in state.items():
        if len(given) != 2 or not all(type(n) is int and 0 <= n < _MOST for n in given):
            raise ValueError(
                f"state: has {given!r} for {name!r}; expected [number, count], as rounding_state "
                "gives them"
            )
    for name, module in found.items():
        start, count = state[name]
        module.set_rounding(module.recipe, start)
        module.set_steps(count)


def _stepping(model: torch.nn.Module) -> dict[str, Stepping]:
    """By name, layers that count."""
    return {
        plain_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, Stepping) and module.has_steps
    }


def set_rounding_step(model: torch.nn.Module, step: int) -> None:
    """Let layers that round stochastically go on as after ``step`` forward passes.

    >>> model = bs.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), bs.Recipe.nvfp4())
    >>> bs.nn.set_rounding_step(model, 1000)  # of a run that was saved after as many

    Each forward pass with gradients counts one, and so does one that activation checkpointing
    repeats. :func:`rounding_step` tells the count, which no state_dict has. Raises ValueError where
    no layer rounds stochastically, and for a ``step`` that is no count.
    """
    if type(step) is not int or not 0 <= step < _MOST:
        raise ValueError(f"step: got {step!r}; expected a number of forward passes, 0 or more")
    found = _stepping(model)
    if not found:
        raise ValueError(
            "model: no layer of it rounds stochastically; convert it by a recipe that does, as "
            "blockscale.Recipe.nvfp4()"
        )
    for module in found.values():
        module.set_steps(step)
