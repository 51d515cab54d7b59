"""A recipe for the length of a ``with`` block."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.backends import mha
from torch.overrides import TorchFunctionMode

from ..checks import check_flag
from .linear import linear
from .recipe import Recipe, check_training_recipe

__all__ = ["autocast"]

_CHECKPOINT = torch.utils.checkpoint.__file__

_switch = threading.local()  # off: an inner autocast(enabled=False) has turned off those around it


class autocast(TorchFunctionMode):
    """``with autocast(recipe): ...``: torch.nn.functional.linear multiplies as ``recipe`` says.

    For models that cannot be changed. It reaches what calls this function: torch.nn.Linear, and
    the projections of torch.nn.MultiheadAttention. torch's fused paths for evaluation, which take
    weights as they are, are off as long. It knows no names, so that the output head, routers and
    adapters are quantized too, which :func:`convert` leaves alone. Layers made by :func:`convert`
    keep their own recipe. It composes with torch.autocast, which decides the dtype of the output.
    As there, ``enabled=False`` quantizes nothing, whatever autocast is around it.

    >>> with bs.autocast(bs.Recipe("mxfp8")):
    ...     y = model(batch)
    ...     with bs.autocast(bs.Recipe("mxfp8"), enabled=False):
    ...         exact = other(batch)  # in high precision

    Raises TypeError for a recipe that is none and for an ``enabled`` that is not True or False,
    ValueError for a recipe that quantizes weights only, and for one that rounds stochastically.
    A product in torch.utils.checkpoint raises RuntimeError where autocast was entered outside: the
    backward computes the product again, and outside of it. Convert the model, or enter it inside:

    >>> def contexts():
    ...     return bs.autocast(bs.Recipe("mxfp8")), bs.autocast(bs.Recipe("mxfp8"))
    >>> checkpoint = torch.utils.checkpoint.checkpoint
    >>> y = checkpoint(model, batch, use_reentrant=False, context_fn=contexts)
    """

    def __init__(self, recipe: Recipe, enabled: bool = True) -> None:
        check_training_recipe(recipe)
        check_flag("enabled", enabled)
        if recipe.is_random:
            raise ValueError(
                f"recipe: {recipe} rounds stochastically, and autocast knows no layers that could "
                "count steps; call blockscale.convert"
            )
        super().__init__()
        self.recipe = recipe
        self.enabled = enabled
        self._turned_off: list[bool] = []
        self._entered_in: list[int | None] = []  # so many checkpoint frames; compiled: not known

    def __enter__(self) -> autocast:
        known = not torch.compiler.is_compiling()
        self._entered_in.append(_checkpoint_frames() if known else None)
        # Eager code sees the mode and leaves them; code that is compiled does not. Through the
        # variable, as torch.compile does not trace the function that sets it.
        self._turned_off.append(self.enabled and mha._is_fastpath_enabled)
        if self.enabled:
            mha._is_fastpath_enabled = False
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered_in.pop()
        if self._turned_off.pop():  # whoever did: of several threads, too, it is on in the end
            mha._is_fastpath_enabled = True

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (F.linear, F.multi_head_attention_forward) or getattr(_switch, "off", False):
            return func(*args, **kwargs)
        if not self.enabled:
            _switch.off = True
            try:
                return func(*args, **kwargs)
            finally:
                _switch.off = False
        self._check_recomputed()
        if func is F.linear:
            return linear(*_linear_arguments(*args, **kwargs), recipe=self.recipe)
        with self:  # torch has switched it off for what func calls
            return _attention(*args, **kwargs)

    def _check_recomputed(self) -> None:
        entered_in = self._entered_in[-1]
        if entered_in is not None and _checkpoint_frames() > entered_in:
            raise RuntimeError(
                "bs.autocast: torch.utils.checkpoint computes this product again in the backward, "
                "outside of autocast and in high precision; use bs.convert(model, recipe), enter "
                "autocast in the function that is checkpointed, or pass use_reentrant=False, "
                "context_fn=lambda: (bs.autocast(recipe), bs.autocast(recipe)) to checkpoint"
            )


def _checkpoint_frames() -> int:
    """How many frames of torch.utils.checkpoint are on the stack."""
    count, frame = 0, sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        count += frame.f_code.co_filename == _CHECKPOINT
    return count


# As torch.compiler.assume_constant_result does, which takes a second to import torch._dynamo.
_checkpoint_frames._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _project(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None = None
) -> list[Tensor]:
    """As torch's ``_in_projection_packed``: one product for inputs that are the same tensor.

    Written anew as torch.compile cannot trace that one under a mode.
    """
    if q is k and k is v:
        return [each.contiguous() for each in F.linear(q, weight, bias).chunk(3, -1)]
    size = q.shape[-1]
    w_q, w_kv = weight.split([size, 2 * size])
    b_q, b_kv = (None, None) if bias is None else bias.split([size, 2 * size])
    query = F.linear(q, w_q, b_q)
    if k is v:
        return [query, *(each.contiguous() for each in F.linear(k, w_kv, b_kv).chunk(2, -1))]
    w_k, w_v = w_kv.chunk(2)
    b_k, b_v = (None, None) if b_kv is None else b_kv.chunk(2)
    return [query, F.linear(k, w_k, b_k), F.linear(v, w_v, b_v)]


def _with_globals(function: Any, **changes: Any) -> Callable[..., Any]:
    """A copy of a Python function that finds other things under some names."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **changes},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# The whole function is handed to modes by its first step; here they see the products in it.
_attention = _with_globals(
    F.multi_head_attention_forward,
    has_torch_function=lambda tensors: False,
    _in_projection_packed=_project,
)
