"""What ``bench host`` measures: for how long a linear layer keeps the host, ours and torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from ..nn import Linear, Recipe
from .contest import Call, turns
from .host import HostCall
from .timing import host_microseconds

__all__ = ["FEATURES", "LAYERS", "ROWS", "layer_calls", "measure_layers"]

#: A layer that the device finishes before the host does; more than the few rows for which operands
#: are read otherwise.
ROWS, FEATURES = 256, 512

#: By name; None is torch.nn.Linear.
LAYERS = {
    "torch.nn.Linear": None,
    "mxfp8": Recipe("mxfp8"),
    "nvfp4": Recipe("nvfp4"),
    "fp8_block": Recipe("fp8_block"),
}
_AT_ONCE = 20  # steps of a layer, of a dozen launches each, that a stream takes


class _HostTimer:
    def microseconds(self, call: Callable[[], object], repeats: int) -> float:
        return host_microseconds(call, repeats * _AT_ONCE, at_once=_AT_ONCE)


def layer_calls(
    rows: int = ROWS, features: int = FEATURES, *, compiled: bool = False, device: str = "cuda"
) -> dict[str, Call]:
    """Forward, and forward and backward, of each layer in bf16, with bias."""
    calls: dict[str, Call] = {}
    x = torch.randn(rows, features, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x, requires_grad=False)
    for name, recipe in LAYERS.items():
        how = {"device": torch.device(device), "dtype": torch.bfloat16}
        layer = (
            nn.Linear(features, features, **how)  # type: ignore[arg-type]
            if recipe is None
            else Linear(features, features, recipe=recipe, **how)  # type: ignore[arg-type]
        )
        run: Callable[[Tensor], Tensor] = torch.compile(layer) if compiled else layer
        what = f"{name}{', compiled' * compiled}"
        calls[f"{what}, forward"] = partial(run, x)
        calls[f"{what}, forward + backward"] = partial(_step, run, layer, x, grad)
    return calls


def _step(run: Callable[[Tensor], Tensor], layer: nn.Linear, x: Tensor, grad: Tensor) -> None:
    x.grad = layer.weight.grad = layer.bias.grad = None
    run(x).backward(grad)


def measure_layers(calls: dict[str, Call], repeats: int = 30) -> Iterator[HostCall]:
    """All in turn, there and back."""
    for what, found in turns(calls, _HostTimer(), repeats).items():
        if isinstance(found, str):
            yield HostCall(what, None, found)
        else:
            yield HostCall(what, found)
