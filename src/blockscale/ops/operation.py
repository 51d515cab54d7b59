"""``operation``: makes a torch.library op that costs nothing where torch need not see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Signature, signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..watching import unwatched

__all__ = ["composite", "needs_gradient", "operation"]

P = ParamSpec("P")
R = TypeVar("R")

# Not torch.library.custom_op: each call of one by compiled code takes 80 us more on the host
# (docs/lab/launches.md).
_LIBRARY = torch.library.Library("blockscale", "FRAGMENT")

_PLAIN = frozenset(
    {
        *(Tensor, torch.nn.Parameter, torch.Size, torch.dtype),
        *(type(None), str, int, float, bool),
    }
)


def operation(
    fake: Callable[..., R],
    *,
    mutates: Sequence[str] = (),
    tags: Sequence[torch.Tag] = (),
    gradient: tuple[Callable[..., Any], Callable[..., None]] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as ``blockscale::<its name>``; ``fake`` makes what it returns, empty.

    The function takes a tensor first; ``fake`` takes those of its arguments that it names. The
    function changes the arguments that ``mutates`` names, returns none of its arguments, and has no
    gradient unless ``gradient`` is what computes it and what keeps things for that (see
    torch.library.register_autograd). ``tags``: what else compilers have to know.
    """

    def register(run: Callable[P, R]) -> Callable[P, R]:
        name = f"blockscale::{run.__name__}"
        schema = torch.library.infer_schema(run, mutates_args=mutates)
        _LIBRARY.define(run.__name__ + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _LIBRARY.impl(run.__name__, run, "CompositeExplicitAutograd")
        torch.library.register_fake(name, _named(fake, signature(run)), lib=_LIBRARY)
        if gradient is not None:
            torch.library.register_autograd(
                name, gradient[0], setup_context=gradient[1], lib=_LIBRARY
            )
        op = getattr(torch.ops.blockscale, run.__name__).default

        @wraps(run)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = (*args, *kwargs.values())
            plain = _eager(*given) and not (gradient and needs_gradient(*given))
            return (run if plain else op)(*args, **kwargs)

        return call

    return register


def composite(run: Callable[P, R]) -> Callable[P, R]:
    """Register a function of ops as ``blockscale::<its name>``: a compiler records it as one, and
    traces what it is made of, its gradient with it, afterwards."""
    _LIBRARY.define(
        run.__name__ + torch.library.infer_schema(run, mutates_args=()),
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    _LIBRARY.impl(run.__name__, run, "CompositeImplicitAutograd")
    op: Callable[P, R] = getattr(torch.ops.blockscale, run.__name__).default
    return op


def _named(fake: Callable[..., R], whole: Signature) -> Callable[..., R]:
    """``fake``, given all arguments of a function."""
    names = tuple(signature(fake).parameters)

    def call(*args: Any, **kwargs: Any) -> R:
        given = whole.bind(*args, **kwargs)
        given.apply_defaults()
        return fake(**{name: given.arguments[name] for name in names})

    return call


def needs_gradient(*args: Any) -> bool:
    """Whether autograd records what is done with these."""
    for each in args:
        if isinstance(each, Tensor) and each.requires_grad:
            return torch.is_grad_enabled()
    return False


def _eager(*args: Any) -> bool:
    """Whether a function of these may be called at once, without torch's dispatcher.

    The dispatcher costs more than the launch of a kernel. It is needed where something looks on,
    and for tensors that only stand for others: on meta, negated lazily, zeros without memory.
    """
    if not (unwatched() and _PLAIN.issuperset(map(type, args))):
        return False
    x = args[0]
    return not (x.is_meta or x.is_neg() or x._is_zerotensor())
