"""Forms looked at by kernels: on a CPU by a compiled loop, on a GPU by one launch each."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import describe, gpu_of
from ..kernels.cpu.watch_plan import CpuWatchPlan
from ..kernels.cpu.watch_plan import plan_watch as plan_on_cpu
from ..kernels.watch.plan import Lines, Matrix, plan_watch
from ..nn.observing import Form, Made
from ..tensor import ScaledTensor
from .form_numbers import Measured
from .form_rows import FormRows, RowWay
from .form_samples import SAMPLE, About, Grid, spread

__all__ = ["FormKernels"]


class _VectorWay(NamedTuple):
    """How forms alike are looked at on a CPU."""

    plan: CpuWatchPlan
    about: About


class FormKernels:
    """What forms alike have in common is found for the first of them."""

    def __init__(self) -> None:
        self._ways: dict[Any, RowWay | _VectorWay | None] = {}
        self._rows, self._measured = FormRows(), dict[int, Measured]()

    def add(self, number: int, x: Tensor | None, form: Form) -> bool:
        """Look at a form, which was made of ``x``, and keep what is seen by its ``number``; False
        where no kernel does it."""
        key = _key(x, form)
        if key not in self._ways:
            self._ways[key] = _find_way(x, form)
        way = self._ways[key]
        if way is None:
            return False
        if isinstance(way, RowWay):
            self._rows.add(number, way, _lines(x, form))
        else:
            q = form.tensor() if isinstance(form, Made) else form
            vector = way.plan(x, _matrix(q))
            self._measured[number] = Measured(way.about, vector)
        return True

    def evaluate(self) -> dict[int, Measured]:
        """The numbers of all forms of a step by theirs; nothing is kept any more."""
        found = self._measured | self._rows.evaluate()
        self._measured = {}
        return found


def _key(x: Tensor | None, form: Form) -> Any:
    """Forms with the same key are looked at alike."""
    if isinstance(form, Made):
        return form.launch, form.axis, describe(x)
    return (
        *(form.format_name, form.shape, form.axis, form.layout_name, form.global_scale is None),
        *(form.qdata.stride(), form.qscale.stride(), form.offsets is None, form.device),
        describe(x),
    )


def _lines(x: Tensor | None, form: Form) -> Lines:
    if isinstance(form, ScaledTensor):
        return Lines.of(x, _matrix(form))
    data, scale, global_scale = form.parts
    if form.axis == -2:
        turned = form.launch.is_turned(-2)
        x, data = None if x is None else x.mT, data if turned else data.mT
    return Lines(x, data, scale, global_scale)


def _matrix(q: ScaledTensor) -> Matrix:
    shape: Any = tuple(q.shape)
    parts = q.qdata, q.qscale, q.global_scale
    return Matrix(q.format, shape, q.axis, q.layout_name, *parts)


def _find_way(x: Tensor | None, form: Form) -> RowWay | _VectorWay | None:
    """None where there is none."""
    device, like = _like(form)
    scalar = like.global_scale
    if like.dim() != 2 or like.offsets is not None or (scalar is not None and scalar.dim()):
        return None
    format, axis = like.format, like.axis
    lines, k = like.shape if axis == -1 else like.shape[::-1]
    blocks, down = -(-k // format.block_size), -(-lines // format.block[0])
    grid = Grid(1, lines, blocks, SAMPLE // format.block_size, device)
    places, gpu = _places(grid, x is not None), gpu_of(device)
    shape: Any = (down, blocks) if axis == -1 else (blocks, down)
    about = About(format, tuple(like.shape), axis, shape)
    try:
        if device.type == "cpu" and gpu is None:
            return _VectorWay(plan_on_cpu(x, _matrix(like), places.numpy()), about)
        plan = plan_watch(x, _matrix(like), places, device, gpu)
    except Unsupported:
        return None
    return RowWay(plan, about)


def _like(form: Form) -> tuple[torch.device, ScaledTensor]:
    """The device, and what the form is like: its parts may be on meta."""
    if isinstance(form, ScaledTensor):
        return form.device, form
    like = form.launch.form(form.launch.unwritten(form.axis), form.axis)
    return form.parts.data.device, like


@lru_cache(1024)
def _places(grid: Grid, known: bool) -> Tensor:
    """Picked blocks, counted along lines; none where nobody knows what they were made of."""
    if not known:
        return torch.empty(0, dtype=torch.int32, device=grid.device)
    _, line, block = spread(grid)
    return (line * grid.across + block).int()
