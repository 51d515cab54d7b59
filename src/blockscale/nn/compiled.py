"""A layer as compilers record it: one op.

What it is made of is traced when they differentiate, and is kept by their caches on disk, which
know nothing of this package's version. So the op is given a fingerprint of all that decides what is
traced. An autograd.Function in what they record would keep them from caching it.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.common.runtime import gpu_of
from ..ops.operand_layout import operand_layout
from ..ops.operation import composite
from ..watching import has_transform
from .functions import CompiledLinear, TransformedLinear
from .layer_ops import recipe_of
from .recipe import Recipe
from .seeds import LayerSeed, numbers_of, seed_of_numbers

__all__ = ["compiled_linear", "fingerprint"]

_PACKAGE = Path(__file__).parents[1]
_TRACED = "distributed", "layouts", "nn", "ops"


def compiled_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
    seed: LayerSeed | None,
) -> Tensor:
    """``linear`` of checked operands; no product is in high precision."""
    text = recipe.text
    numbers = numbers_of(seed)
    return linear(x, weight, bias, text, out_dtype, fingerprint(x.device, text), *numbers)


@composite
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: str,
    out_dtype: torch.dtype,
    fingerprint: str,
    seed: list[int] | None = None,
    step: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias``; ``fingerprint``: of what this call was recorded for."""
    trains = torch.is_grad_enabled()
    dgrad, wgrad = trains and x.requires_grad, trains and weight.requires_grad
    function: Any = TransformedLinear if has_transform() else CompiledLinear
    given = recipe_of(recipe), out_dtype, dgrad, wgrad, seed_of_numbers(seed, step)
    return function.apply(x, weight, bias, *given)


def fingerprint(device: torch.device, recipe: str = "") -> str:
    """Of what is traced on a device, of layers with the text of a recipe."""
    roles = ("activations", "weights", "gradients") if recipe else ()
    formats = [recipe_of(recipe).format_of(role).name for role in roles]
    layouts = [operand_layout(format, device) for format in formats]
    gpu = gpu_of(device)
    known = _sources(), gpu and gpu.arch, layouts
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]


# As torch.compiler.assume_constant_result does, which imports torch._dynamo: that takes a second.
fingerprint._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _sources() -> str:
    """A hash of the code that may be traced."""
    folders = _PACKAGE, *(_PACKAGE / name for name in _TRACED)
    files = (path for folder in folders for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
