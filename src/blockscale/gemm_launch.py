"""Products like one before: a look-up finds their kernel, what is left to do is to launch it.

What ``gemm`` checks, and what its kernel needs, depends on the key of a ``Call``. One with the key
of another that a kernel ran needs neither again: most of the time that a small product takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .formats import get_format
from .kernels import sm90
from .kernels.gpu.plan import describe
from .kernels.sm90.plan import Plan, plan_gemm
from .kernels.sm90.widened_plan import plan_widened
from .layouts import as_bytes
from .ops.gemm import write_to
from .ops.gemm_kernels import FP8, KERNELS, WIDENED, detached, global_product
from .ops.operation import needs_gradient, unwatched
from .tensor import ScaledTensor

__all__ = ["Call", "find_call"]

_LIMIT = 4096  # calls that are remembered
_DTYPES = (torch.dtype, type(None))
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})

Launch = Callable[..., Tensor]
_launches: dict[Any, Launch] = {}


class _Operand(NamedTuple):
    """A matrix as kernels take it; kept with a quantized tensor, of whose parts it has views."""

    key: tuple[Any, ...]
    address: int
    data: Tensor  # (rows, K): bytes, or bf16
    scale: Any  # None of bf16
    global_scale: Tensor | None
    format: str | None
    parts: tuple[Tensor, Tensor] | None


def _operand(q: Any, axis: int) -> _Operand | None:
    """None of what a kernel cannot read as it is."""
    if type(q) is not ScaledTensor:
        return _plain(q) if axis == -1 else None
    data, scale = q.qdata, q.qscale
    kept: _Operand | None = q.__dict__.get("_operand")
    if kept is not None and kept.parts and kept.parts[0] is data and kept.parts[1] is scale:
        return kept
    name = q.format_name
    few = axis == -2 and name == "fp8_128x128"
    layout = "sm90" if name in FP8 and not few else "compact"
    if q.axis != axis or q.layout_name != layout or q.offsets is not None or q.dim() != 2:
        return None
    if type(data) is not Tensor or name not in FP8 + WIDENED:
        return None
    octets, rows = as_bytes(data), scale
    if axis == -2:
        octets, rows = octets.mT, scale if layout == "sm90" else scale.mT
    key = (q.shape, name, axis, data.stride(), scale.stride(), data.device)
    address = data.data_ptr() | (0 if few else scale.data_ptr())
    made = _Operand(key, address, octets, rows, q.global_scale, name, (data, scale))
    q.__dict__["_operand"] = made
    return made


def _plain(x: Any) -> _Operand | None:
    if x is None or type(x) not in _PLAIN or x.dtype != torch.bfloat16 or needs_gradient(x):
        return None
    key = (x.shape, None, -1, x.stride(), (), x.device)
    return _Operand(key, x.data_ptr(), x.detach(), None, None, None, None)


class Call(NamedTuple):
    """A call that a kernel may run; ``launch`` is None until it is known that one does."""

    key: Any
    a: _Operand
    b: _Operand
    launch: Launch | None

    def remember(
        self, out: Tensor | None, bias: Tensor | None, dtype: torch.dtype, accumulate: bool
    ) -> None:
        """Find the kernel for calls to come, after one that has passed all checks."""
        try:
            launch = _prepare(self.a, self.b, out, bias, dtype, accumulate)
        except (TypeError, ValueError):  # of what has to be rewritten first
            return
        if len(_launches) >= _LIMIT:
            _launches.clear()
        _launches[self.key] = launch


def find_call(
    a: Any,
    b: Any,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    accumulate: bool,
    bias: Tensor | None,
    backend: str,
) -> Call | None:
    """None where a call has to go through all checks, and torch's dispatcher maybe."""
    if not unwatched() or backend not in ("auto", "kernel") or type(out_dtype) not in _DTYPES:
        return None
    left, right = _operand(a, -1), _operand(b, -2)
    if left is None or right is None:
        return None
    address, extra = left.address | right.address, None
    if out is not None or bias is not None:
        if type(out) not in _PLAIN or type(bias) not in _PLAIN or needs_gradient(out, bias):
            return None
        extra = tuple(
            None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in (out, bias)
        )
        address |= 0 if out is None else out.data_ptr()
    if address % 16:
        return None
    key = (left.key, right.key, out_dtype, accumulate, extra)
    launch = _launches.get(key)
    if launch is None:
        known = (left.format, right.format) in KERNELS
        if not known or sm90.unsupported(left.data.device):
            return None
    return Call(key, left, right, launch)


def _prepare(
    a: _Operand,
    b: _Operand,
    out: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    accumulate: bool,
) -> Launch:
    """What launches the kernel of a call, given operands, output and bias."""
    plan, swap = (_plan_fp8 if b.format in FP8 else _plan_widened)(
        a, b, out, bias, dtype, accumulate
    )
    if plan.run is None:
        raise ValueError("out: is empty, or a sum of nothing")
    run, like, multiprocessors = plan.run, plan.out, plan.multiprocessors

    def launch(a: _Operand, b: _Operand, out: Tensor | None, bias: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty_like(like)
        else:
            write_to(out, (a.data, a.scale), (b.data, b.scale), bias)
        left, right = (b, a) if swap else (a, b)
        run(
            left.data,
            left.scale,
            right.data,
            right.scale,
            detached(out),
            detached(bias),
            global_product(a.global_scale, b.global_scale),
            multiprocessors,
        )
        return out

    return launch


def _plan_fp8(
    a: _Operand,
    b: _Operand,
    out: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    accumulate: bool,
) -> tuple[Plan, bool]:
    plan = plan_gemm(
        describe(a.data),
        describe(a.scale),
        describe(b.data),
        describe(b.scale),
        describe(out),
        describe(bias),
        None,
        dtype,
        get_format(b.format or "none").block,
        accumulate,
        a.data.device,
        None,
    )
    return plan, False


def _plan_widened(
    a: _Operand,
    b: _Operand,
    out: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    accumulate: bool,
) -> tuple[Plan, bool]:
    alpha = global_product(a.global_scale, b.global_scale)
    plan = plan_widened(
        describe(a.data),
        describe(a.scale),
        a.format,
        describe(b.data),
        describe(b.scale),
        b.format or "none",
        describe(out),
        describe(bias),
        describe(alpha),
        dtype,
        accumulate,
        a.data.device,
        None,
    )
    return plan, plan.config is not None and plan.config.swap
