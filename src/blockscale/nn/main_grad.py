"""``weight.main_grad``: what the product of a weight's gradient is added to, in place of ``.grad``.

The contract is that of Megatron: a parameter that has this attribute gets its gradient there, and
``grad_added_to_main_grad`` says so. What is looked for, refused and added is the same for linear
layers and for experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from ..watching import is_dtensor

__all__ = [
    "add_product",
    "adds_to_main_grad",
    "apply",
    "leaf_of",
    "open_main_grad",
    "refuse_copied",
]

_DTYPES = torch.float32, torch.bfloat16


def adds_to_main_grad(weight: Tensor | None) -> bool:
    """Whether the backward of this forward is to add to the weight's ``main_grad``."""
    return (
        weight is not None
        and _has_main_grad(weight)
        and weight.requires_grad
        and torch.is_grad_enabled()
    )


def leaf_of(name: str, weight: Tensor | None) -> Tensor | None:
    """What a backward asks for its ``main_grad``: the parameter itself, as hooks of saved tensors
    may give it another one. None where others compute the weight, which is not kept for that.

    Raises, in the forward, where the backward could not add to ``main_grad``.
    """
    if weight is None:
        return None
    if _has_main_grad(weight):
        _check(name, weight)
    return weight if weight.is_leaf else None


def open_main_grad(name: str, weight: Tensor | None) -> Tensor | None:
    """In a backward, the ``main_grad`` that it has to add to, and marks the weight; None: it
    returns the gradient, as where torch.autograd.grad asks for it, or for another one."""
    if weight is None or not _has_main_grad(weight):
        return None
    if torch.is_grad_enabled():  # create_graph, which is refused
        return None
    _check_fit(name, weight, weight.main_grad)  # type: ignore[attr-defined]
    if not _is_accumulated(weight):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]
    return main_grad


def add_product(main_grad: Tensor, a: Tensor, b: Tensor) -> None:
    """``main_grad += a @ b`` of plain matrices of one type, added up in fp32, rounded once."""
    wide = torch.float32
    if main_grad.dtype == a.dtype:
        main_grad.addmm_(a, b)
    elif main_grad.dtype != wide:  # no product of torch adds to a sum of yet another type
        main_grad.add_(a.to(wide) @ b.to(wide))
    elif a.is_cuda:
        torch.addmm(main_grad, a, b, out_dtype=wide, out=main_grad)
    else:
        main_grad.addmm_(a.to(wide), b.to(wide))


def apply(function: Any, weights: tuple[Tensor | None, ...], *args: Any) -> Any:
    """``function.apply(*args)``, which compilers leave to Python where one of ``weights`` has a
    ``main_grad``: they do not record that a backward writes to that and marks the weight."""
    if torch.compiler.is_dynamo_compiling() and any(map(adds_to_main_grad, weights)):
        torch._dynamo.graph_break(
            msg="a backward that adds to weight.main_grad is not recorded; leave out "
            "fullgraph=True, or delete main_grad"
        )
        return torch.compiler.disable(function.apply)(*args)
    return function.apply(*args)


def refuse_copied(name: str, weight: Tensor) -> None:
    """ValueError of a ``main_grad`` where a copy of the weight is multiplied."""
    if adds_to_main_grad(weight):
        raise ValueError(
            f"{name}.main_grad: {name} has strides {weight.stride()}, and a copy of it is "
            "multiplied; make its rows contiguous, or delete main_grad"
        )


def _has_main_grad(weight: Tensor) -> bool:
    return getattr(weight, "main_grad", None) is not None


def _check(name: str, weight: Tensor) -> None:
    _check_fit(name, weight, weight.main_grad)  # type: ignore[attr-defined]
    if not weight.is_leaf:
        raise ValueError(
            f"{name}.main_grad: {name} is computed from other tensors, which would get no "
            "gradient; set main_grad of parameters alone"
        )
    if weight._backward_hooks:
        raise ValueError(
            f"{name}.main_grad: hooks of {name} (register_hook) would see no gradient; remove "
            "them, or delete main_grad"
        )
    if DistributedDataParallel._get_active_ddp_module() is not None:
        raise ValueError(
            f"{name}.main_grad: DistributedDataParallel reduces .grad alone, so that each rank "
            "would keep its own main_grad; delete main_grad, or reduce it yourself without DDP"
        )


def _check_fit(name: str, weight: Tensor, main_grad: Any) -> None:
    if not isinstance(main_grad, Tensor) or is_dtensor(main_grad):
        raise TypeError(
            f"{name}.main_grad: got {type(main_grad).__name__}; expected a torch.Tensor like "
            f"{name}, as torch.zeros_like({name}, dtype=torch.float32)"
        )
    if main_grad.dtype not in _DTYPES:
        raise TypeError(
            f"{name}.main_grad: got {main_grad.dtype}; expected torch.float32 or torch.bfloat16"
        )
    if main_grad.shape != weight.shape or not main_grad.is_contiguous():
        raise ValueError(
            f"{name}.main_grad: has shape {tuple(main_grad.shape)} and strides "
            f"{main_grad.stride()}; expected {tuple(weight.shape)}, contiguous, as {name}"
        )
    if main_grad.device != weight.device:
        raise ValueError(
            f"{name}.main_grad: is on {main_grad.device}, {name} on {weight.device}; move it there"
        )
    if main_grad.requires_grad:
        raise ValueError(f"{name}.main_grad: requires a gradient; pass main_grad.detach()")


def _is_accumulated(weight: Tensor) -> bool:
    """Whether the backward that is running adds to ``weight.grad``: it may be that of some other
    tensor's gradient."""
    node = get_gradient_edge(weight).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch's answer where autograd.grad returns this very gradient
        return False
