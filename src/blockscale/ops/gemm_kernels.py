"""Which kernels multiply on a device, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import cast

import torch
from torch import Tensor

from ..kernels.common import calls
from ..kernels.common.gpu import Gpu, Unsupported, no_kernels
from ..kernels.common.runtime import gpu_of, missing
from ..stored import is_per_group
from ..tensor_checks import DTYPES
from .gemm_operands import GroupedProducts, Products, Quantization, Side, detached, global_scales

__all__ = [
    "ARCHITECTURES",
    "as_rows",
    "lay",
    "multiply",
    "multiply_groups",
    "multiply_quantized",
    "products_of",
    "products_on",
]

_Plan = Callable[[calls.GemmCall], calls.CompiledGemm]
_Operands = tuple[calls.Operand, calls.Operand]

#: The module that has an architecture's products. It is imported when a GPU asks for it: the plans
#: and configurations of all of them take a third of the time of ``import blockscale``.
ARCHITECTURES = {"sm_90a": "gemm_sm90", "sm_100a": "gemm_sm100", "sm_103a": "gemm_sm100"}


def products_on(device: torch.device) -> Products | str:
    """What multiplies on a device; or why nothing does."""
    gpu = gpu_of(device)
    if gpu is None:
        return f"the operands are on {device}: the kernels run on CUDA devices"
    return products_of(gpu)


@lru_cache
def products_of(gpu: Gpu) -> Products | str:
    """What multiplies on a GPU; or why nothing does."""
    if reason := missing():
        return reason
    if gpu.arch not in ARCHITECTURES:
        return f"architecture {gpu.arch}: {no_kernels(gpu.arch, ARCHITECTURES)}"
    module = import_module(f".{ARCHITECTURES[gpu.arch]}", __package__)
    return cast("Products", module.PRODUCTS)


def lay(
    a: Side, b: Side, groups: calls.Groups | None, device: torch.device
) -> tuple[_Plan, _Operands] | None:
    """What plans the product of these on a device, and they as it takes them; None where no kernel
    there multiplies such formats. Raises ValueError or TypeError where they cannot be laid so."""
    found = products_on(device)
    if isinstance(found, str):
        return None
    products: Products | GroupedProducts = found
    if groups is not None:
        products = found.of_groups(groups.grouping)
    if (a.format, b.format) not in products.pairs:
        return None
    laid: Callable[..., _Operands] = products.lay
    return products.plan, laid(a, b) if groups is None else laid(a, b, groups)


def multiply(
    a: Side,
    b: Side,
    bias: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """``a @ b + bias`` by a kernel, in ``out`` if that is given; Unsupported if there is none."""
    products = _products_of(a, b)
    a, b, bias = _taken(a, b, bias)
    out = detached(out)
    rows = _written(out, accumulate)
    product = calls.multiply(
        products.plan,
        *products.lay(a, b),
        out=rows,
        bias=bias,
        alpha=global_scales(a.global_scale, b.global_scale),
        out_dtype=out_dtype,
        accumulate=accumulate,
    )
    return product if out is None or rows is out else out.copy_(product)


def multiply_groups(
    a: Side,
    b: Side,
    groups: calls.Groups,
    out: Tensor | None,
    accumulate: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """The product of each group by one kernel, in ``out`` if that is given; Unsupported if there is
    none."""
    found = products_on(a.data.device)
    if isinstance(found, str):
        raise Unsupported(found)
    grouped = found.of_groups(groups.grouping)
    if (a.format, b.format) not in grouped.pairs:
        along = " along K" if groups.grouping == "k" else ""
        raise Unsupported(
            f"no kernel multiplies groups{along} of {a.format or 'bf16'} by {b.format} on "
            f"{found.gpu}; there are kernels for {grouped.formats}"
        )
    a, b, _ = _taken(a, b, None)
    out = detached(out)
    rows = _written(out, accumulate)
    groups = groups._replace(offsets=detached(groups.offsets))
    product = calls.multiply(
        grouped.plan,
        *grouped.lay(a, b, groups),
        out=rows,
        alpha=global_scales(a.global_scale, b.global_scale),
        out_dtype=out_dtype,
        accumulate=accumulate,
        groups=groups,
    )
    if groups.grouping == "k":
        product = product.unflatten(0, (len(groups.offsets), -1))
    if out is None:
        return product
    return out if rows is not None and rows.data_ptr() == out.data_ptr() else out.copy_(product)


def multiply_quantized(
    a: Side,
    b: Side,
    bias: Tensor | None,
    how: Quantization,
    groups: calls.Groups | None = None,
) -> tuple[Tensor, Tensor]:
    """Data, and scales in layout "tcgen05", of ``a @ b + bias``, or of the product of each group of
    rows, by one kernel; Unsupported if there is none."""
    found = _products_of(a, b)
    if found.quantize is None:
        raise Unsupported(f"no kernel quantizes its product on {found.gpu}")
    how = how._replace(global_scale=_scalar(how.global_scale))
    if groups is not None:
        groups = groups._replace(offsets=detached(groups.offsets))
    return found.quantize(*_taken(a, b, bias), how, groups)


def _products_of(a: Side, b: Side) -> Products:
    """What multiplies these; Unsupported if nothing does."""
    found = products_on(a.data.device)
    if isinstance(found, str):
        raise Unsupported(found)
    if (a.format, b.format) not in found.pairs:
        raise Unsupported(
            f"no kernel multiplies {a.format or 'bf16'} by {b.format} on {found.gpu}; there are "
            f"kernels for {found.formats}"
        )
    return found


def _taken(a: Side, b: Side, bias: Tensor | None) -> tuple[Side, Side, Tensor | None]:
    """Operands and bias as kernels take them."""
    a, b = (
        side._replace(data=detached(side.data), global_scale=_scalar(side.global_scale))
        for side in (a, b)
    )
    bias = detached(bias)
    if bias is not None and (bias.dtype not in DTYPES or bias.stride() != (1,)):
        bias = bias.float().contiguous()
    return a, b, bias


def as_rows(out: Tensor) -> Tensor | None:
    """Matrices one below the other as one, a view; None where they do not lie so."""
    if out.stride(-1) != 1:
        return None
    if out.dim() == 2:
        return out
    apart = out.stride(0) == out.shape[1] * out.stride(1) or out.shape[0] == 1
    return out.flatten(0, 1) if apart else None


def _written(out: Tensor | None, accumulate: bool) -> Tensor | None:
    """What a kernel writes of ``out``: its rows. Where these do not lie together, a copy that it
    adds to, or new memory, which are copied to ``out`` then."""
    if out is None:
        return None
    rows = as_rows(out)
    return out.contiguous().flatten(0, -2) if rows is None and accumulate else rows


def _scalar(x: Tensor | None) -> Tensor | None:
    """One for each group, which lie together; or of one element, without dimensions."""
    if is_per_group(x):
        return x.contiguous()
    return None if x is None else x.reshape(())
