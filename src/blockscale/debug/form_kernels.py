"""Forms looked at by kernels: on a CPU by a compiled loop, on a GPU by one launch each."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.common.gpu import Unsupported
from ..kernels.common.matrix import Matrix
from ..kernels.common.runtime import describe, gpu_of
from ..kernels.cpu.watch_plan import CpuWatchPlan
from ..kernels.cpu.watch_plan import plan_watch as plan_on_cpu
from ..kernels.watch.plan import plan_watch
from ..memory import as_bytes
from ..nn.observing import Form, Made
from ..nn.quantize_launches import Parts
from ..tensor import ScaledTensor
from .form_numbers import Measured
from .form_rows import FormRows, RowWay
from .form_samples import SAMPLE, About, Grid, spread

__all__ = ["FormKernels"]


_UNKNOWN: Any = object()
_LIMIT = 4096  # ways that are remembered, and with them launches of shapes that may come no more
_CPU = torch.device("cpu")


class _VectorWay(NamedTuple):
    """The compiled loop that looks at forms alike, and what they are."""

    plan: CpuWatchPlan
    about: About


class FormKernels:
    """Looks at forms by kernels. Which one does it is found for the first of forms alike."""

    def __init__(self) -> None:
        self._ways: dict[Any, RowWay | _VectorWay | None] = {}
        self._rows, self._measured = FormRows(), dict[int, Measured]()

    def add(self, number: int, x: Tensor | None, form: Form) -> bool:
        """Look at a form, which was made of ``x``, and keep what is seen by its ``number``; False
        where no kernel does it."""
        if isinstance(form, Made):
            how = None if x is None else (x.stride(), x.data_ptr() % 16)
            key: Any = form.launch, form.axis, how  # parts of a launch lie alike
            parts = form.parts
        else:
            parts = Parts(as_bytes(form.qdata), form.qscale, form.global_scale)
            key = (
                *(form.format_name, form.shape, form.axis, form.layout_name, form.offsets is None),
                *(*map(describe, (x, *parts)), form.device),
            )
        way = self._ways.get(key, _UNKNOWN)
        if way is _UNKNOWN:
            if len(self._ways) >= _LIMIT:
                self._ways.clear()
            way = self._ways[key] = _find_way(x, form, parts)
        if way is None:
            return False
        if isinstance(way, RowWay):
            self._rows.add(number, way, x, parts)
        else:
            self._measured[number] = Measured(way.about, way.plan(x, parts))
        return True

    def evaluate(self) -> dict[int, Measured]:
        """The numbers of all forms of a step by theirs; nothing is kept any more."""
        found = self._measured | self._rows.evaluate()
        self._measured = {}
        return found


def _find_way(x: Tensor | None, form: Form, parts: Parts) -> RowWay | _VectorWay | None:
    """None where there is none."""
    like, turned = form, False
    if isinstance(form, Made):
        like = form.launch.form(form.launch.unwritten(form.axis), form.axis)
        turned = form.launch.is_turned(form.axis)
    assert isinstance(like, ScaledTensor)
    scalar, shape = like.global_scale, like.shape
    if like.dim() != 2 or like.offsets is not None or (scalar is not None and scalar.dim()):
        return None
    format, axis, device = like.format, like.axis, parts.data.device
    lines, k = shape if axis == -1 else shape[::-1]
    blocks, down = -(-k // format.block_size), -(-lines // format.block[0])
    grid = Grid(1, lines, blocks, SAMPLE // format.block_size, device)
    places, gpu = _places(grid, x is not None), gpu_of(device)
    counted = (down, blocks) if axis == -1 else (blocks, down)
    about = About(format, (shape[0], shape[1]), axis, counted)
    matrix = Matrix(format, (shape[0], shape[1]), axis, like.layout_name, *parts, turned)
    try:
        if device.type == "cpu" and gpu is None:
            return _VectorWay(plan_on_cpu(x, matrix, places.numpy()), about)
        return RowWay(plan_watch(x, matrix, places, device, gpu), about)
    except Unsupported:
        return None


@lru_cache(1024)
def _places(grid: Grid, known: bool) -> Tensor:
    """Picked blocks, counted along lines; none where nobody knows what they were made of. Found on
    the host: what a device's stream computes, kernels on another one may read too early."""
    if not known:
        return torch.empty(0, dtype=torch.int32, device=grid.device)
    _, line, block = spread(grid._replace(device=_CPU))
    return (line * grid.across + block).int().to(grid.device)
