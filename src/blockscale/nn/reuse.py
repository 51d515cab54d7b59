"""Quantized weights: made in every pass, and kept only where ``reuse_weights`` asks for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from ..watching import is_faked, unwatched
from .forms import Forms, quantize_forms
from .operand import Operand
from .seeds import OperandSeed

__all__ = [
    "ForgetsWeights",
    "clear_weight_cache",
    "forget_weights",
    "hint_at_reuse",
    "is_reusing",
    "kept_with",
    "quantized_weight",
    "reuse_weights",
]

_HINT_AT = 100  # passes without gradients
_COUNTED = 4096  # weights

_blocks = 0  # reuse_weights blocks that are open, one in another
_number = 0  # of the outermost; nothing of one before is used again


class _Kept(NamedTuple):
    """What was made of a weight while it was in this state."""

    state: tuple[Any, ...]
    memory: Tensor  # keeps the weight's address from being given to another tensor
    forms: dict[Any, Any]  # Forms, or what ``kept_with`` made


_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weight -> _Kept
# Id of a parameter -> its state, count; None: all is said. Of no other weights: as they go, their
# ids do. No weak references: torch.utils.swap_tensors refuses tensors that have some.
_passes: dict[int, tuple[Any, int]] | None = {}


@contextmanager
def reuse_weights() -> Iterator[None]:
    """Quantize each weight once inside the block, for the micro-batches of a step.

    Outside, layers quantize their weight in every forward, and for the gradient of x again in the
    backward. Inside, what was made is kept until the block ends, two bytes an element in 8-bit
    formats, and a forward that such a backward will follow makes both forms from one read. (Under
    FSDP they are the gathered weight's, on each rank: with resharding, leave the block out, or let
    ``distributed.gather_quantized`` keep each rank's shard quantized in place of them.)

    >>> for step in range(steps):
    ...     with bs.reuse_weights():
    ...         for x, y in micro_batches:
    ...             loss(model(x), y).backward()
    ...     optimizer.step()

    Weights must not change inside the block. Optimizer steps, ``load_state_dict``, in-place
    operations and another tensor in place of the weight are seen all the same, and quantize anew.
    Not seen are writes behind torch's back: through ``.data``, storages, NumPy or another process,
    and into the shards of a weight that FSDP has gathered in high precision. Blocks nest: the
    outermost ends the reuse. A block that is open in one thread holds in all of them.
    Compiled code, captured CUDA graphs and torch.func transforms quantize in every pass; shards
    that FSDP gathers for compiled code are kept, as they are quantized outside of it. Weights that
    a recipe rounds stochastically, or gives random signs (``"ms_eden"``), are made in every pass.
    """
    global _blocks, _number
    _number += not _blocks
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1
        if not _blocks and not torch.compiler.is_compiling():
            forget_weights()


def is_reusing() -> bool:
    """Whether a block of ``reuse_weights`` is open."""
    return bool(_blocks)


def quantized_weight(
    weight: Tensor,
    operand: Operand,
    *,
    rows: bool = False,
    columns: bool = False,
    global_scale: Tensor | None = None,
    dgrad: bool = False,
    seed: OperandSeed | None = None,
) -> Forms:
    """``weight`` (N, K) quantized: the forms that are asked for, and those kept beside them.

    ``dgrad``: a backward will ask for the other form; where it is kept until then, both are made
    from one read.
    """
    gathered = getattr(weight, "quantized_forms", None)  # of one that ranks have quantized
    if gathered is not None:
        forms: Forms | None = gathered(operand, rows=rows, columns=columns)
        if forms is not None:
            return forms
        weight = weight.master  # type: ignore[attr-defined]
    given: Any = {"global_scale": global_scale, "seed": seed}
    # what is drawn anew in each pass has the signs of the other operand, of this pass alone
    keeps = unwatched() and _blocks and not operand.is_random and _can_be_kept(weight)
    if not keeps:
        return quantize_forms(weight, operand, rows=rows, columns=columns, **given)
    rows, columns = rows or dgrad, columns or dgrad
    kept, key = _kept_of(weight), (operand, _stream(weight))
    have: Forms = kept.forms.get(key, Forms())
    made = quantize_forms(
        weight,
        operand,
        rows=rows and have.rows is None,
        columns=columns and have.columns is None,
        **given,
    )
    forms = kept.forms[key] = Forms(
        have.rows if made.rows is None else made.rows,
        have.columns if made.columns is None else made.columns,
    )
    return forms


def kept_with(weight: Tensor, state: Hashable, make: Callable[[], Any]) -> Any:
    """What ``make`` makes of a shard of a weight, inside the block once for the shard and ``state``
    (and stream), which tells all that ``make`` reads but the values, and whether those changed.

    Modes that look on do not matter here, as ranks that have none would then leave out a collective
    that others call; only those whose tensors have no values do.
    """
    if not _blocks or is_faked() or not _can_be_kept(weight):
        return make()
    forms, key = _kept_of(weight).forms, (state, _stream(weight))
    if key not in forms:
        forms[key] = make()
    return forms[key]


def _kept_of(weight: Tensor) -> _Kept:
    """What is kept of the weight as it is now."""
    place = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
    state = _number, weight._version, *place
    kept = _kept.get(weight)
    if kept is None or kept.state != state:
        kept = _kept[weight] = _Kept(state, weight.detach(), {})
    return kept


def _can_be_kept(weight: Tensor) -> bool:
    """Not where the weight has no version, nor in the capture of a CUDA graph, whose replays are to
    see what the weight is then."""
    return not weight.is_inference() and not _is_captured(weight)


def _is_captured(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _stream(weight: Tensor) -> int:
    """The stream that work is queued on: another one does not wait for what was made here."""
    return torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0


def hint_at_reuse(weight: Tensor) -> None:
    """Say once how to reuse weights, where the same one is quantized again and again, in passes
    without gradients: in others it changes, which fused optimizers do without a new version."""
    global _passes
    passes = _passes  # another thread may say the hint meanwhile
    if not unwatched() or passes is None or _blocks or not isinstance(weight, torch.nn.Parameter):
        return
    state = weight.data_ptr(), weight.shape, None if weight.is_inference() else weight._version
    before, count = passes.get(id(weight), (state, 0))
    count = count + 1 if before == state else 1
    if len(passes) >= _COUNTED:
        passes.clear()
    passes[id(weight)] = state, count
    if count >= _HINT_AT:
        _passes = None
        warnings.warn(
            f"a weight {tuple(weight.shape)} was quantized for the {count}th time without "
            "gradients. Quantize it once: blockscale.quantize_(model, recipe) "
            "for inference, or `with blockscale.reuse_weights():` around the loop. (Said once.)",
            UserWarning,
            stacklevel=2,
        )


def forget_weights(*_: Any) -> None:
    """Quantize every weight anew, inside ``reuse_weights`` too."""
    _kept.clear()


class ForgetsWeights:
    """A base of layers whose weights are remembered: loading a state_dict forgets them."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        forget_weights()  # torch.utils.swap_tensors refuses a weight that is remembered
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        forget_weights()  # what was loaded may be the shards of a weight that is gathered


def clear_weight_cache() -> None:
    """Deprecated: layers keep no quantized weight any more, unless ``reuse_weights`` is open."""
    warnings.warn(
        "clear_weight_cache: layers quantize their weight in every forward, there is nothing to "
        "clear; leave the call out (inside blockscale.reuse_weights, close the block instead)",
        DeprecationWarning,
        stacklevel=2,
    )
    forget_weights()


# Fused optimizers leave the version alone, and those of sharded weights never see the gathered one.
# A step that fails halfway ends without the second hook.
register_optimizer_step_pre_hook(forget_weights)
register_optimizer_step_post_hook(forget_weights)
