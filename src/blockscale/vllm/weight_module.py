"""A quantized weight as plain parameters of a module: what vLLM moves, counts and frees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..formats import get_format
from ..memory import as_bytes
from ..ops.operand_layout import operand_layout
from ..tensor import ScaledTensor

__all__ = ["WeightModule", "frozen", "of_parts", "take"]


class WeightModule(torch.nn.Module):
    """The parts of a :class:`~blockscale.ScaledTensor`, scales as its device's kernels read them.

    >>> module = WeightModule(bs.quantize(torch.randn(256, 512), "mxfp8"))
    >>> module.weight
    ScaledTensor(mxfp8, shape=(256, 512), axis=-1, layout=compact, dtype=torch.bfloat16, device=cpu)
    """

    def __init__(self, q: ScaledTensor) -> None:
        super().__init__()
        if q.dim() == 2:  # scales of a stack have no other layout
            q = q.to_layout(operand_layout(q.format_name, q.device).layout)
        self.format_name, self.layout_name, self.shape = q.format_name, q.layout_name, list(q.shape)
        self.codes = torch.nn.Parameter(as_bytes(q.qdata), requires_grad=False)
        self.scales = torch.nn.Parameter(q.qscale, requires_grad=False)
        self.global_scale = frozen(q.global_scale)

    @property
    def weight(self) -> ScaledTensor:
        """The tensor, of the same memory."""
        stored = self.codes, self.scales, self.global_scale
        return of_parts(*stored, self.format_name, self.layout_name, self.shape)

    def extra_repr(self) -> str:
        return f"{self.format_name}, shape={tuple(self.shape)}"


def frozen(x: Tensor | None) -> torch.nn.Parameter | None:
    """A parameter without gradient; None, if there is none."""
    return None if x is None else torch.nn.Parameter(x.detach(), requires_grad=False)


def take(layer: Any, name: str) -> Tensor:
    """The values of a parameter, which the layer has no more."""
    parameter = getattr(layer, name)
    delattr(layer, name)
    data: Tensor = parameter.data
    return data


def of_parts(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    format: str,
    layout: str,
    shape: list[int],
) -> ScaledTensor:
    """The tensor of these parts, blocked along its last dimension."""
    return ScaledTensor(
        codes.view(get_format(format).element.dtype),
        scales,
        format=format,
        shape=shape,
        layout=layout,
        global_scale=global_scale,
    )
