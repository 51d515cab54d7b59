"""``calibrate``: how large the inputs of a model's layers get on data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .measure import amax
from .nn.hf_experts import is_experts

__all__ = ["calibrate", "run", "watch_inputs"]

#: Takes the name of a layer and what it is called with.
Look = Callable[[str, Tensor], None]


def calibrate(model: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """The largest magnitude of what each linear layer of ``model`` is given.

    >>> found = bs.calibrate(model, [batch])
    >>> found["0"] == batch.abs().max().item()
    True

    For NVFP4 activations that servers quantize with one scale of a file, ``input_scale``:
    :func:`blockscale.checkpoint.quantize_folder` takes the result as ``activations``.

    Args:
        model: with ``torch.nn.Linear`` layers, and experts of transformers 5 (stacked parameters).
            It runs as it is: call ``model.eval()`` before.
        batches: what it is called with: a tensor, or keyword arguments as a mapping (what a
            tokenizer returns), each.

    Returns:
        name of the layer -> amax; expert ``e`` of ``"...experts"`` is ``"...experts.e.gate_proj"``,
        ``up_proj`` and ``down_proj``. Layers and experts that no batch reached are missing.

    Raises ValueError where there are no batches, no layer was reached, or one is given what is not
    finite.
    """
    found: dict[str, float] = {}

    def note(name: str, x: Tensor) -> None:
        if not x.isfinite().all():  # amax would be that of the others
            raise ValueError(
                f"batches: {name} is given NaN or infinities; leave those out, or run the model in "
                "a dtype with more range"
            )
        if x.numel():
            found[name] = max(found.get(name, 0.0), amax(x).item())

    with watch_inputs(model, note):
        count = run(model, batches)
    if not found:
        what = "no linear layer saw a batch" if count else "there are none"
        raise ValueError(f"batches: {what}; pass inputs that the model is called with")
    return found


def run(model: torch.nn.Module, batches: Iterable[Any]) -> int:
    """Call the model with each batch, without gradients; returns how many there were.

    TypeError for a batch where batches should be: of a mapping, Python goes through the keys.
    """
    if isinstance(batches, Mapping):
        raise TypeError("batches: got a mapping, which is one batch; pass a list of such")
    count = 0
    with torch.no_grad():
        for batch in batches:
            count += 1
            model(**batch) if isinstance(batch, Mapping) else model(batch)
    return count


@contextmanager
def watch_inputs(model: torch.nn.Module, look: Look) -> Iterator[None]:
    """``look`` sees what each linear layer is called with, and what experts multiply."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            hook = partial(_linear, look, name) if isinstance(module, torch.nn.Linear) else None
            if is_experts(module):
                hook = partial(_experts, look, name)
            if hook is not None:
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _linear(
    look: Look, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    (x,) = (*args, *kwargs.values())
    look(name, x)


def _experts(
    look: Look, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Compute what each expert has between its products, beside the forward of the module."""
    hidden, index, *_ = (*args, *kwargs.values())
    hidden = hidden.reshape(-1, hidden.shape[-1])
    index = index.reshape(len(hidden), -1)
    gated = module.has_gate
    for expert in index.unique().tolist():
        x = hidden[(index == expert).any(-1)]
        between = _product(module, "gate_up_proj" if gated else "up_proj", expert, x)
        between = module._apply_gate(between) if gated else module.act_fn(between)
        for part in ("gate_proj", "up_proj") if gated else ("up_proj",):
            look(f"{name}.{expert}.{part}", x)
        look(f"{name}.{expert}.down_proj", between)


def _product(module: Any, parameter: str, expert: int, x: Tensor) -> Tensor:
    weight = getattr(module, parameter)[expert]
    bias = getattr(module, f"{parameter}_bias")[expert] if module.has_bias else None
    return linear(x, weight.mT if module.is_transposed else weight, bias)
