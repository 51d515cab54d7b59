"""A product's call as one value, checks that no architecture changes, and what needs no kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dtypes import from_torch
from ...formats import GROUP_TILE
from .epilogue import Epilogue
from .gpu import Gpu, Unsupported
from .runtime import FLOATS, Described, describe, gpu_of, missing

__all__ = [
    "Alpha",
    "CompiledGemm",
    "GemmCall",
    "Groups",
    "Operand",
    "OperandSpec",
    "below_each_other",
    "check_apart",
    "check_loadable",
    "check_matrix",
    "describe_call",
    "multiply",
]

#: What accumulators are multiplied by: an fp32 scalar, or a vector that has one for each group; or
#: two of these, whose product it is.
Alpha = Tensor | tuple[Tensor, Tensor] | None


class Operand(NamedTuple):
    """A matrix as kernels take it: (M, K), or (N, K); scales and format are None of bf16."""

    data: Tensor
    scale: Tensor | None = None
    format: str | None = None


class OperandSpec(NamedTuple):
    """What of an operand decides which kernel takes it."""

    data: Described
    scale: Described | None = None
    format: str | None = None

    @classmethod
    def of(cls, operand: Operand) -> OperandSpec:
        return cls(describe(operand.data), describe(operand.scale), operand.format)


class Groups(NamedTuple):
    """What is grouped of a product, by ``offsets`` (groups,) int32.

    Attributes:
        grouping: "m": rows of A, each of which B has a matrix for; offsets are the end of each
            group, and rows after the last one's end are set to zero. "masked": the same, but each
            group has an equal share of the rows, and offsets tell how many of these there are;
            others are not written. "k": columns of A and of B, which are moved apart as
            ``formats.padded_groups`` says; offsets are the ends in the contraction that was
            quantized, and each group has a product.
    """

    offsets: Tensor
    grouping: str = "m"


class GemmCall(NamedTuple):
    """All that decides which kernel computes ``alpha * A @ B.mT + bias``, and how it is launched.

    Attributes:
        a, b: (M, K) and (N, K).
        out: (M, N), where it is given.
        alpha: of each scalar or vector.
        gpu: None where kernels do not run.
        offsets, grouping: of ``Groups``, if there are any. Where rows of A are grouped, B is
            (groups, N, K); where columns are, ``out`` has the products of all groups one below the
            other.
    """

    a: OperandSpec
    b: OperandSpec
    out: Described | None
    bias: Described | None
    alpha: tuple[Described, ...]
    out_dtype: torch.dtype
    accumulate: bool
    device: torch.device
    gpu: Gpu | None
    offsets: Described | None = None
    grouping: str = ""

    def grouped(self, groups: Groups | None) -> GemmCall:
        """The same call of ``groups``, if there are any."""
        if groups is None:
            return self
        return self._replace(offsets=describe(groups.offsets), grouping=groups.grouping)

    def supported(self, why_not: Callable[[str], str]) -> Gpu:
        """The GPU that multiplies; Unsupported where there is none, or ``why_not`` has a reason
        against its architecture."""
        reason = missing()
        if not reason and self.gpu is None:
            reason = f"the operands are on {self.device}: the kernels run on CUDA devices"
        reason = reason or why_not(self.gpu.arch)
        if reason or self.gpu is None:
            raise Unsupported(reason)
        return self.gpu

    def epilogue(self, n: int) -> Epilogue:
        """What is done with an accumulator of ``n`` columns."""
        out, bias = from_torch(self.out_dtype), self.bias and from_torch(self.bias[2])
        alpha = tuple(len(x[0]) for x in self.alpha)
        return Epilogue(out, self.accumulate, bias, alpha, self._aligned_rows(n))

    def _aligned_rows(self, n: int) -> bool:
        """Whether TMA can store the output: it writes whole groups of 16 bytes of a row."""
        size = self.out_dtype.itemsize
        apart, address = (n, 0) if self.out is None else (self.out[1][0], self.out[3])
        return not (address % 16 or apart * size % 16 or n * size % 16)

    def check_rest(self, shape: tuple[int, int]) -> None:
        """Raise unless the arguments beside the operands fit a product of ``shape``."""
        _check_vector("bias", self.bias, shape[1:], FLOATS)
        for each in self.alpha:
            groups = self.offsets[0] if self.offsets and each[0] else ()
            _check_vector("alpha", each, tuple(groups), (torch.float32,))
        if self.accumulate and self.out is None:
            raise ValueError("accumulate: needs out, the tensor to add to")
        if self.out is not None:
            check_matrix("out", self.out, (self.out_dtype,))
            if tuple(self.out[0]) != shape:
                raise ValueError(f"out: has shape {tuple(self.out[0])}; the product is {shape}")


def describe_call(
    a: Operand,
    b: Operand,
    *,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: Alpha = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: bool = False,
    gpu: Gpu | None = None,
) -> GemmCall:
    """The call of ``alpha * A @ B.mT + bias``.

    Args:
        a, b: (M, K) and (N, K).
        out: written to and returned, (M, N); may have rows that lie apart, and shares no memory
            with the other tensors (not looked at here).
        bias: (N,) in bfloat16, float16 or float32.
        alpha: () fp32, or (groups,) of a product of groups; or two of these, whose product it is:
            NVFP4's global scales.
        out_dtype: bfloat16, float16 or float32.
        accumulate: add to ``out`` instead of overwriting it.
        gpu: to choose the kernel for where the tensors are on a CPU, for the emulator.
    """
    scalars = alpha if isinstance(alpha, tuple) else () if alpha is None else (alpha,)
    return GemmCall(
        OperandSpec.of(a),
        OperandSpec.of(b),
        describe(out),
        describe(bias),
        tuple(map(describe, scalars)),
        out_dtype,
        accumulate,
        a.data.device,
        gpu or gpu_of(a.data.device),
    )


@dataclass(frozen=True, slots=True)
class CompiledGemm:
    """What computes the products of calls alike.

    Attributes:
        config: of its kernel.
        run: takes data and scales of A and B as ``views`` makes them of those that were described,
            the output, bias, alpha, offsets of groups, and the ``rest``; None where
            nothing is to be multiplied.
        out: the output's template.
    """

    config: Any
    run: Callable[..., Any] | None
    out: Tensor
    views: Callable[..., Sequence[Tensor | None]]
    rest: tuple[Any, ...] = ()

    def __call__(
        self,
        operands: Sequence[Tensor | None],
        out: Tensor | None,
        bias: Tensor | None,
        alpha: Alpha,
        accumulate: bool,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """The product of data and scales of A and B, in ``out`` or in new memory."""
        written = torch.empty_like(self.out) if out is None else out
        if self.run is not None:
            groups = () if offsets is None else (offsets,)
            self.run(*self.views(*operands), written, bias, alpha, *groups, *self.rest)
            return written
        if not accumulate:
            written.zero_()
        return written if bias is None else written.add_(bias)


def multiply(
    plan: Callable[[GemmCall], CompiledGemm],
    a: Operand,
    b: Operand,
    *,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: Alpha = None,
    groups: Groups | None = None,
    **options: Any,
) -> Tensor:
    """``alpha * A @ B.mT + bias``: (M, N), by what ``plan`` finds; arguments of ``describe_call``.
    With ``groups``, of rows of A, B is (groups, N, K); of columns, the product (groups * M, N).

    The accumulator is multiplied and added to in fp32, and rounded once: the same bits in every
    run. Raises Unsupported, a ValueError, where there is no kernel; ValueError or TypeError where
    shapes, strides or dtypes do not belong together.
    """
    call = describe_call(a, b, out=out, bias=bias, alpha=alpha, **options).grouped(groups)
    offsets = None if groups is None else groups.offsets
    operands = a.data, a.scale, b.data, b.scale
    return plan(call)(operands, out, bias, alpha, call.accumulate, offsets)


def below_each_other(name: str, x: Described) -> Described:
    """A batch of matrices as one; Unsupported where they do not lie together."""
    (groups, rows, columns), stride, *rest = x
    if groups > 1 and stride[0] != rows * stride[1]:
        raise Unsupported(f"{name}: has strides {stride}; its matrices must lie together")
    return (torch.Size((groups * rows, columns)), tuple(stride[1:]), *rest)


def check_apart(k: int, groups: int) -> None:
    """Unsupported where columns of groups cannot be moved apart as ``formats.padded_groups`` has
    it."""
    if k % GROUP_TILE or k < groups * GROUP_TILE:
        raise Unsupported(
            f"a_data, b_data: got K = {k} with {groups} groups; expected groups moved apart to "
            f"multiples of {GROUP_TILE}: quantize with axis=-2, offsets=offsets, k_major=True"
        )


def check_loadable(**operands: Described) -> None:
    """Unsupported where TMA cannot load one."""
    for name, (_, stride, dtype, address) in operands.items():
        if address % 16 or stride[0] * dtype.itemsize % 16:
            raise Unsupported(f"{name}: TMA wants rows that start at a multiple of 16 bytes")


def check_matrix(name: str, x: Described, dtypes: tuple[torch.dtype, ...]) -> None:
    shape, stride, dtype, _ = x
    if dtype not in dtypes:
        raise TypeError(f"{name}: got {dtype}; expected {' or '.join(map(str, dtypes))}")
    if len(shape) != 2:
        raise ValueError(f"{name}: has shape {tuple(shape)}; expected a matrix")
    if stride[1] != 1 and shape[1] > 1:
        raise ValueError(
            f"{name}: has strides {stride}; its last dimension must lie together: call contiguous()"
        )


def _check_vector(
    name: str, x: Described | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if x is None:
        return
    if x[2] not in dtypes:
        raise TypeError(f"{name}: got {x[2]}; expected {' or '.join(map(str, dtypes))}")
    if tuple(x[0]) != shape or (shape > (1,) and x[1] != (1,)):
        raise ValueError(
            f"{name}: has shape {tuple(x[0])} and strides {x[1]}; expected {shape}, contiguous"
        )
