"""A weight as the product of a layer reads it: quantized in each pass, or kept by
``reuse_weights``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.common.runtime import Described
from .method_launches import operand_launch
from .quantize_launches import Asked, Parts
from .recipe import Recipe
from .reuse import is_reusing, quantized_weight
from .seeds import OperandSeed

__all__ = ["WeightLaunch"]


class WeightLaunch:
    """Quantizes weights that lie as ``weight`` along ``axis``, or finds them quantized; the latter
    only if it ``reuses`` any.

    Raises Unsupported where no kernel quantizes them.
    """

    def __init__(
        self,
        weight: Described,
        device: torch.device,
        recipe: Recipe,
        axis: int,
        *,
        reuses: bool = True,
    ) -> None:
        self._axis, self._reuses = axis, reuses
        self._which: Any = {"rows": axis == -1, "columns": axis == -2}
        asked = Asked.of(recipe, "weights", device, **self._which)
        self._operand = recipe.operand("weights")
        self.launch = operand_launch(weight, asked)

    def __call__(
        self,
        weight: Tensor,
        global_scale: Tensor | None = None,
        *,
        dgrad: bool = False,
        seed: OperandSeed | None = None,
    ) -> Parts:
        """Its parts; ``dgrad`` as of :func:`quantized_weight`."""
        if not (self._reuses and is_reusing()):
            rows, columns = self.launch(weight.detach(), global_scale, seed)
            parts = rows or columns
            assert parts is not None
            return parts
        forms = quantized_weight(
            weight,
            self._operand,
            **self._which,
            global_scale=global_scale,
            dgrad=dgrad,
            seed=seed,
        )
        form = forms.rows if self._axis == -1 else forms.columns
        assert form is not None
        return self.launch.parts_of(form.qdata, form.qscale, form.global_scale, self._axis)
