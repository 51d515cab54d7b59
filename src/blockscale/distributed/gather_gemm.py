"""A product of rows that ranks have shards of, which travel while those that are here are
multiplied."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import choose
from ..gemm import gemm, side
from ..gemm_checks import check_product
from ..kernels.common.runtime import gpu_of
from ..kernels.ranks.gather_memory import GatherMemory
from ..kernels.ranks.gather_sizes import GatherSizes, why_not_gather
from ..kernels.sm90.gather_calls import gather_gemm
from ..ops import FallbackWarning
from ..ops.gemm_kernels import lay
from ..ops.gemm_operands import Side
from ..tensor import ScaledTensor
from .collectives import all_gather
from .ranks import PeerError, check_alike, make_on_all, rank_and_ranks
from .shard_ops import as_operand
from .symmetric_memory import symmetric_memory

__all__ = ["all_gather_gemm"]

_BACKENDS = ("auto", "kernel", "steps")
_LIMIT = 100.0  # seconds to wait for another rank


@torch.compiler.disable
def all_gather_gemm(
    a: ScaledTensor,
    b: ScaledTensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """``all_gather(a) @ b + bias``: the rows of all ranks, in their order, by a matrix.

    >>> x, w = torch.randn(64, 256), torch.randn(128, 256)  # of x each rank has its own
    >>> a, b = bs.quantize(x, "fp8_1x128", layout="sm90"), bs.quantize(w, "fp8_128x128").mT
    >>> bs.distributed.all_gather_gemm(a, b).shape  # alone; of 2 ranks (128, 128)
    torch.Size([64, 128])

    On Hopper one kernel multiplies fp8_1x128 by fp8_128x128: its tensor cores begin with this
    rank's rows, two of its warps write these to the other ranks, and a tile of their rows waits for
    no more than its own. It has the bits of the product of all rows by a kernel that adds up K in
    order. It has run in the emulator alone, with up to four ranks at once; speed on GPUs was not
    measured yet. Elsewhere rows are gathered, quantized, then multiplied. Compilers call it as it
    is.

    Args:
        a: this rank's rows (M / ranks, K), blocked along -1, of the same shape on all. For the
            kernel as many as are a multiple of 64, and K of 128; scales are read in layout "sm90",
            others are rewritten.
        b: (K, N), blocked along -2: ``w.mT`` for a weight (N, K) quantized along -1. Each rank has
            its own.
        group: of torch.distributed; None: the default one, or this process alone where it was not
            initialized. All ranks of it call this, on one stream each.
        bias: (N,), added before rounding.
        out_dtype: bfloat16 (default), float16 or float32.
        backend: "kernel": the kernel, ValueError where there is none; "steps": gather, then
            multiply; "auto": the kernel where there is one.

    Returns: (M, N).

    Raises ValueError or TypeError, with the remedy, where operands do not belong together, and on
    every rank where ranks differ when a product is the first of its kind. A rank that the kernel
    waits for longer than 100 s is named by :class:`PeerError` at the next call, on a GPU, and its
    rows are NaN. Products share memory, one after another; the first of a kind cannot be captured
    in a CUDA graph.

    Source: Flux (arXiv:2406.06858) and TransformerEngine's userbuffers, for products that overlap
    with gathers.
    """
    choose("backend", backend, dict.fromkeys(_BACKENDS))
    check_product(a, b, out_dtype, None, False, bias, "auto")
    if not isinstance(a, ScaledTensor):
        raise TypeError(f"a: got {a.dtype}; expected a ScaledTensor: call blockscale.quantize")
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            "bias: a gradient is asked for, and there is none; call it under torch.no_grad(), or "
            "train by blockscale.distributed.ColwiseParallel"
        )
    if rank_and_ranks(group)[1] == 1:
        return gemm(a, b, out_dtype, bias=bias)
    if group is None:
        group = dist.group.WORLD  # itself, as another one may be initialized later
    launcher = _launcher_of(
        _Kind(a.shape[0], a.qdata.shape[1], a.format_name, b.format_name), a.device, group, backend
    )
    if launcher is not None:
        return launcher(a, b, bias, out_dtype or torch.bfloat16)
    whole = as_operand(all_gather(a.to_layout("compact"), 0, group))
    return gemm(whole, b, out_dtype, bias=bias)


class _Kind(NamedTuple):
    """The part of a product that all ranks have alike."""

    rows: int
    columns: int  # of the data of ``a``, which may be padded
    a_format: str
    b_format: str

    def sizes(self, ranks: int) -> GatherSizes:
        return GatherSizes(ranks, self.rows, self.columns)

    def why_no_kernel(self, ranks: int, device: torch.device) -> str:
        """Empty where there is one."""
        gpu = gpu_of(device)
        if gpu is None:
            return f"a is on {device}: the kernel runs on CUDA devices"
        if gpu.arch != "sm_90a":
            return f"architecture {gpu.arch}: the kernel is for sm_90a"
        if (self.a_format, self.b_format) != ("fp8_1x128", "fp8_128x128"):
            return (
                f"formats {self.a_format} by {self.b_format}: the kernel takes fp8_1x128 by "
                "fp8_128x128"
            )
        return why_not_gather(self.sizes(ranks))


class _Launcher:
    """Launches on a device's memory that a group shares."""

    def __init__(self, memory: GatherMemory) -> None:
        self.memory = memory
        # read when the next launch is made: to wait for this one's would take the host's time
        cuda = memory.buffer.is_cuda
        self.missing = torch.zeros(1, dtype=torch.int32, pin_memory=cuda)

    def __call__(
        self, a: ScaledTensor, b: ScaledTensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        self._check()
        found = lay(Side(*side(a)), Side(*side(b)), None, a.device)
        assert found is not None  # else there is no kernel
        _, (left, right) = found
        out = gather_gemm(self.memory, left, right, bias=bias, out_dtype=out_dtype, limit=_LIMIT)
        if not (out.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.missing.copy_(self.memory.missing, non_blocking=True)
        return out

    def _check(self) -> None:
        if missing := int(self.missing):
            for known in (_found, _largest):  # who begins anew has other memory
                for key in [key for key, each in known.items() if each is self]:
                    del known[key]
            raise PeerError(
                f"rank {missing - 1} did not come within {_LIMIT:g} s of a product; what it left "
                "in shared memory cannot be used: begin anew on all ranks"
            )


#: Of what ranks have told each other: what launches it, or None where steps do. Memory is not
#: given back, as CUDA graphs may have it: each is at least twice as large as the last.
_found: dict[Any, _Launcher | None] = {}  # by kind, device, group and backend
_largest: dict[Any, _Launcher | None] = {}  # by device and group


def _launcher_of(kind: _Kind, device: torch.device, group: Any, backend: str) -> _Launcher | None:
    """What launches the kernel, or None where steps do; all ranks ask for the same one after
    another."""
    key = kind, device, group, backend
    if key not in _found:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "all_gather_gemm: ranks have not told each other yet that their products are "
                "alike; call it once before it is captured in a CUDA graph"
            )
        _found[key] = _find(kind, device, group, backend)
    return _found[key]


def _find(kind: _Kind, device: torch.device, group: Any, backend: str) -> _Launcher | None:
    ranks = rank_and_ranks(group)[1]
    reason = kind.why_no_kernel(ranks, device)
    check_alike("a, b", (*kind, backend, reason), group)
    if reason and backend == "kernel":
        raise ValueError(f"backend: there is no kernel: {reason}")
    if reason or backend == "steps":
        return None
    nbytes = kind.sizes(ranks).nbytes
    known = _largest.get((device, group))
    if known is not None and len(known.memory.buffer) >= nbytes:
        return known
    make = partial(symmetric_memory, 1 << (nbytes - 1).bit_length(), device, group)
    made, wrong = make_on_all(make, group)
    if made is None:
        if backend == "kernel":
            raise RuntimeError(wrong)
        warnings.warn(f"all_gather_gemm: gathers, then multiplies: {wrong}", FallbackWarning, 5)
        return None
    memory = GatherMemory(*made, rank_and_ranks(group)[0])
    memory.prepare()
    found = _largest[device, group] = _Launcher(memory)
    return found
