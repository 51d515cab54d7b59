"""``main_grad`` of a model's weights, for optimizers that know ``.grad`` alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..watching import is_dtensor
from .kinds import GROUPED
from .linear import Linear

__all__ = ["MainGradients"]


class MainGradients:
    """Adds the gradients of a model's block-scaled weights up in fp32, inside of their products.

    >>> model = bs.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), bs.Recipe("mxfp8"))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> main = bs.nn.MainGradients(model)
    >>> for x in torch.randn(4, 32, 64):  # micro-batches
    ...     model(x).square().mean().backward()
    >>> with main.as_grad():
    ...     optimizer.step()
    >>> optimizer.zero_grad()  # of biases, norms and all others

    Gives the weights of linear layers and experts that this package multiplies ``main_grad``,
    zeros in fp32; biases and all others keep ``.grad``. A backward adds the gradient of such a
    weight to it in the product (:func:`blockscale.gemm` with ``accumulate``) and leaves ``.grad``
    as it is: micro-batches are added up in fp32, and no gradient of the weight's size is made
    beside. Frozen weights get none.

    The attribute alone is what layers look for, as those of Megatron and TransformerEngine do: who
    sets ``weight.main_grad`` (fp32 or bf16, contiguous, like the weight) needs none of this. A
    backward sets ``weight.grad_added_to_main_grad = True``.

    Raises TypeError where weights are DTensors (of FSDP2 or tensor parallelism), ValueError where
    ``module`` has no such weights. Layers raise ValueError or TypeError in the forward where
    ``main_grad`` does not fit, for weights with hooks of their gradient, and inside
    DistributedDataParallel, which reduces ``.grad`` alone.

    Source: Megatron-LM, ``gradient_accumulation_fusion``; TransformerEngine,
    ``fuse_wgrad_accumulation``.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        weights = list(_weights(module))
        if not weights:
            raise ValueError(
                "module: has no weight that block-scaled layers train; call blockscale.convert "
                "first, and unfreeze the weights"
            )
        for name, weight in weights:
            if is_dtensor(weight):
                raise TypeError(
                    f"module: {name} is a DTensor, and layers multiply by what is gathered of it, "
                    "which has no main_grad; leave the gradients of sharded weights to FSDP"
                )
            weight.main_grad = torch.zeros_like(  # type: ignore[attr-defined]
                weight, dtype=torch.float32, memory_format=torch.contiguous_format
            )
            weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    @contextmanager
    def as_grad(self) -> Iterator[None]:
        """Inside ``.grad`` is ``main_grad``, for ``optimizer.step()`` and clipping; after it the
        former is None, the latter zeros.

        What ``.grad`` had is added first: of a weight that an embedding reads, too, or that was
        multiplied outside of block-scaled layers. A weight that no backward has reached has a
        gradient of zeros, which weight decay and momentum go on with; one that was frozen since has
        none.

        TypeError for weights that are not fp32: torch's optimizers take gradients of the weight's
        type alone; one of yours reads ``main_grad``. RuntimeError at the end where a backward has
        added to a ``main_grad`` that ``.grad`` was no more, as after the ``zero_grad()`` of a
        closure, so that the optimizer has not seen it.
        """
        weights = [weight for weight in self._held() if weight.requires_grad]
        for weight in weights:
            if weight.dtype != torch.float32:
                raise TypeError(
                    f"as_grad: a weight {tuple(weight.shape)} is {weight.dtype}, its main_grad "
                    "torch.float32; keep weights in float32 (torch.autocast casts what layers "
                    "return), or give main_grad to an optimizer that keeps masters, and call zero_"
                )
        for weight in weights:
            main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]
            if weight.grad is not None and weight.grad is not main_grad:
                main_grad.add_(weight.grad)
            weight.grad = main_grad
            weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        try:
            yield
            _check_seen(weights)
        finally:
            for weight in weights:
                weight.grad = None
            self.zero_()

    def zero_(self) -> None:
        """Zero every ``main_grad``, for the next step."""
        for weight in self._held():
            weight.main_grad.zero_()  # type: ignore[attr-defined]
            weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def _held(self) -> list[torch.nn.Parameter]:
        """Weights with a ``main_grad``; who replaces a weight gives up that of the one before."""
        return [p for p in self._module.parameters() if getattr(p, "main_grad", None) is not None]


def _check_seen(weights: list[torch.nn.Parameter]) -> None:
    """RuntimeError where a backward added to what ``.grad`` was no more."""
    for weight in weights:
        if weight.grad_added_to_main_grad and weight.grad is not weight.main_grad:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"as_grad: a backward inside of it added to main_grad of a weight "
                f"{tuple(weight.shape)} whose .grad zero_grad() had dropped, so that the optimizer "
                "did not see it; call backward before as_grad, or zero_grad(set_to_none=False)"
            )


def _weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Of layers that multiply by parameters as they are, by name."""
    for prefix, layer in module.named_modules():
        if not isinstance(layer, (Linear, *GROUPED)):
            continue
        for name, parameter in layer.named_parameters(prefix, recurse=False):
            if parameter.requires_grad and not name.endswith("bias"):
                yield name, parameter
