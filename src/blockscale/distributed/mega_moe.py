"""Experts over ranks: from tokens to tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checks import choose
from ..formats import get_format
from ..fused import swiglu_quantize
from ..gemm import grouped_gemm
from ..quantize import quantize
from ..routing import INTEGERS, Routing, combine, route
from ..tensor import ScaledTensor
from ..tensor_checks import DTYPES, check_is_tensor
from ..watching import is_dtensor
from .tokens import Stopped, exchange_tokens, rank_and_ranks

__all__ = ["MegaMoE"]

#: Of weights, the formats of activations that they are multiplied with; the first is the default.
ACTIVATIONS = {
    "nvfp4": ("nvfp4", "fp8_1x128"),
    "mxfp4": ("mxfp8", "fp8_1x128"),
    "mxfp8": ("mxfp8",),
    "fp8_128x128": ("fp8_1x128",),
}
#: NVFP4's global scale of activations where none is given, as of checkpoints that were not
#: calibrated: with it blocks up to 2688 are held.
ACTIVATION_SCALE = 1.0


class _Kind(NamedTuple):
    """What all ranks have to have alike."""

    weights: str
    activations: str
    experts: int  # of each rank
    hidden: int
    intermediate: int
    tokens: int  # of each rank, at most
    topk: int
    ranks: int


class MegaMoE(nn.Module):
    """``sum_j weights[:, j] * (swiglu(x @ up[e].T) @ down[e].T)`` of each token's experts ``e``,
    which ranks share; for inference.

    >>> up, down = torch.randn(8, 2 * 64, 128), torch.randn(8, 128, 64)
    >>> quantized = [bs.quantize(w, "mxfp8") for w in (up, down)]
    >>> moe = bs.distributed.MegaMoE(*quantized, tokens=32, topk=2)
    >>> x, weights = torch.randn(5, 128).bfloat16(), torch.full((5, 2), 0.5)
    >>> moe(x, weights, torch.randint(8, (5, 2))).shape
    torch.Size([5, 128])

    A token travels once, quantized, to each rank that has one of its experts; each expert's result
    comes back in bfloat16, and its token's rank adds them up: the same bits on any number of ranks
    where products have them. One kernel is to do all of it; here are its steps, one after another:
    quantize, send, product, SwiGLU and quantize, product, send back, combine. Where it takes the
    place of ``experts`` of a :class:`blockscale.nn.MoE`, that one is shared by ranks.

    Args:
        up: (experts, 2 * I, H) of this rank, gate's rows first, blocked along -1: nvfp4, mxfp4,
            mxfp8 or fp8_128x128. Rank ``r`` has experts from ``r * experts`` on. Each expert may
            have a global scale of its own.
        down: (experts, H, I), likewise.
        tokens: that a rank has in one call, at most.
        topk: experts of a token.
        activations: format of what is sent and of what the second product reads: "nvfp4" or
            "fp8_1x128" of nvfp4 weights, "mxfp8" or "fp8_1x128" of mxfp4 ones; the default is the
            first.
        a1_scale, a2_scale: global scales of NVFP4 activations, of tokens and in front of the second
            product: fp32, one for all or one for each expert of this rank. Of ``a1_scale`` the
            largest of all ranks is taken, as a token is quantized once. Default: 1.
        group: of torch.distributed; None: the default one, or this process alone where it was not
            initialized. All ranks make the module together.

    Raises ValueError or TypeError where these do not fit, on every rank where they differ.
    """

    up: ScaledTensor
    down: ScaledTensor
    a1_scale: Tensor | None
    a2_scale: Tensor | None

    def __init__(
        self,
        up: ScaledTensor,
        down: ScaledTensor,
        *,
        tokens: int,
        topk: int,
        activations: str | None = None,
        a1_scale: Tensor | float | None = None,
        a2_scale: Tensor | float | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        mine: _Told = None, None, ""
        problem = None
        try:
            kind = _kind_of(up, down, tokens, topk, activations, rank_and_ranks(group)[1])
            scales = [
                _activation_scale(*each, kind, up.device)
                for each in (("a1_scale", a1_scale), ("a2_scale", a2_scale))
            ]
            mine = kind, None if scales[0] is None else float(scales[0].max()), ""
        except Exception as error:
            problem, mine = error, (None, None, str(error))
        told = _tell(mine, group)
        if problem is not None:
            raise problem
        self.group = group
        self.kind, largest = _agreed(told)
        for name, each in (("up", up), ("down", down)):
            self.register_parameter(name, nn.Parameter(each, requires_grad=False))
        one = None
        if largest is not None:
            one = torch.tensor(largest, dtype=torch.float32, device=up.device)
        self.register_buffer("a1_scale", one)
        self.register_buffer("a2_scale", scales[1])

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor | Routing) -> Tensor:
        """What this rank's tokens get: (t, H), in the dtype of ``x``.

        Args:
            x: (t, H), of ``tokens`` at most, float32, bfloat16 or float16. Other ranks may have
                more or fewer, or none.
            weights: floating (t, topk): what an expert's result is multiplied by, in fp32.
            experts: int64 or int32 (t, topk), the numbers of a token's experts among all of all
                ranks; others are those of none. Or the routing of these.

        Every rank calls it. Raises ValueError or TypeError where these are something else, and
        :class:`Stopped` on all other ranks then. What goes wrong after that, in products, is raised
        on its rank alone; others wait for the time-out of torch.distributed.
        """
        kind, problem = self.kind, None
        parts: tuple[Tensor, ...] = ()
        try:
            if isinstance(experts, Routing):
                experts = torch.searchsorted(experts.offsets, experts.slots.int(), right=True)
            self._check(x, weights, experts)
            parts = self._quantized(x)
        except Exception as error:
            problem = error
            experts = torch.empty(0, kind.topk, dtype=torch.int64, device=self.up.device)
        way = exchange_tokens(parts, experts, kind.experts, self.group, problem=problem)
        routing = route(way.received.experts, kind.experts)
        due = sum(way.due)
        rows = routing.tokens[:due]
        y = x.new_empty(0, kind.hidden, dtype=torch.bfloat16)
        if due:
            y = self._products([part[rows] for part in way.received.parts], routing.offsets)
        # in the order of received rows and their experts, which those of no expert interrupt
        own = routing.slots.flatten()
        results = way.back(y[own[own < due]])
        return combine(results, way.pairs.slots, weights, x.dtype)

    def _quantized(self, x: Tensor) -> tuple[Tensor, ...]:
        """Data and scales of tokens, of which there may be none."""
        given = x if len(x) else torch.zeros(1, x.shape[1], dtype=x.dtype, device=x.device)
        q = quantize(given.detach(), self.kind.activations, pad=True, global_scale=self.a1_scale)
        return q.qdata[: len(x)], q.qscale[: len(x)]

    def _products(self, parts: list[Tensor], offsets: Tensor) -> Tensor:
        """Of rows of experts, which end at ``offsets``: both products."""
        kind, down = self.kind, self.down
        data, scale = parts
        shape = len(data), kind.hidden
        a: Any = ScaledTensor(
            data, scale, format=kind.activations, shape=shape, global_scale=self.a1_scale
        )
        h = grouped_gemm(a, self.up.mT, offsets)
        scales = self.a2_scale
        if scales is None or not scales.dim():
            (a,) = swiglu_quantize(h, kind.activations, axes=(-1,), pad=True, global_scale=scales)
            return grouped_gemm(a, down.mT, offsets)
        # kernels multiply both global scales by each other first: these are those of ``down``
        one, groups = torch.ones_like(scales[0]), list[Any]()
        for i, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
            if start < end:
                (group,) = swiglu_quantize(
                    h[start:end], kind.activations, axes=(-1,), pad=True, global_scale=scales[i]
                )
                groups.append(group._with(global_scale=one))
        a = torch.cat(groups)
        assert down.global_scale is not None
        return grouped_gemm(a, down._with(global_scale=down.global_scale * scales).mT, offsets)

    def _check(self, x: Tensor, weights: Tensor, experts: Tensor) -> None:
        kind, device = self.kind, self.up.device
        for name, each in (("x", x), ("weights", weights), ("experts", experts)):
            check_is_tensor(name, each)
            if isinstance(each, ScaledTensor) or each.layout != torch.strided or is_dtensor(each):
                raise TypeError(f"{name}: got a {type(each).__name__}; expected a dense tensor")
            if each.device != device:
                raise ValueError(f"{name}: is on {each.device}, weights on {device}; move it")
        if x.dtype not in DTYPES:
            raise TypeError(f"x: got {x.dtype}; expected one of {', '.join(map(str, DTYPES))}")
        if x.dim() != 2 or x.shape[1] != kind.hidden:
            raise ValueError(f"x: got {tuple(x.shape)}; expected (tokens, {kind.hidden})")
        if len(x) > kind.tokens:
            raise ValueError(
                f"x: has {len(x)} tokens, buffers are for {kind.tokens} a rank; call it with "
                f"fewer, or make it with tokens={len(x)} on all ranks"
            )
        if experts.dtype not in INTEGERS or not weights.dtype.is_floating_point:
            raise TypeError(
                f"experts, weights: got {experts.dtype} and {weights.dtype}; expected int64 or "
                "int32, and a floating type"
            )
        if any(tuple(each.shape) != (len(x), kind.topk) for each in (experts, weights)):
            raise ValueError(
                f"experts, weights: got {tuple(experts.shape)} and {tuple(weights.shape)}; "
                f"expected ({len(x)}, {kind.topk})"
            )
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            raise TypeError(
                "x, weights: a gradient is asked for, and there is none; call it under "
                "torch.no_grad(), or train by blockscale.nn.MoE"
            )


_Told = tuple[_Kind | None, float | None, str]  # what is wrong, if there is no kind


def _kind_of(
    up: Any, down: Any, tokens: int, topk: int, activations: str | None, ranks: int
) -> _Kind:
    for name, each in (("up", up), ("down", down)):
        if not isinstance(each, ScaledTensor) or each.format_name not in ACTIVATIONS:
            given = each.format_name if isinstance(each, ScaledTensor) else type(each).__name__
            raise TypeError(
                f"{name}: got {given}; expected a ScaledTensor in {', '.join(ACTIVATIONS)}: call "
                "blockscale.quantize"
            )
        if each.dim() != 3 or each.axis != -1 or each.layout_name != "compact":
            raise ValueError(
                f"{name}: got {each}; expected (experts, rows, columns), blocked along -1, compact"
            )
    experts, wide, hidden = up.shape
    if wide % 2 or tuple(down.shape) != (experts, hidden, wide // 2):
        raise ValueError(
            f"up, down: got {tuple(up.shape)} and {tuple(down.shape)}; expected (experts, 2 * I, "
            "H) and (experts, H, I)"
        )
    if down.format_name != up.format_name or down.device != up.device:
        raise ValueError(f"up, down: got {up} and {down}; expected one format and device")
    for name, number in (("tokens", tokens), ("topk", topk)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name}: got {number!r}; expected a positive integer")
    if topk > experts * ranks:
        raise ValueError(f"topk: got {topk}; all ranks together have {experts * ranks} experts")
    known = {name: name for name in ACTIVATIONS[up.format_name]}
    what = f"activations (of {up.format_name} weights)"
    chosen = choose(what, activations or next(iter(known)), known)
    return _Kind(up.format_name, chosen, experts, hidden, wide // 2, tokens, topk, ranks)


def _activation_scale(
    name: str, given: Tensor | float | None, kind: _Kind, device: torch.device
) -> Tensor | None:
    """() or (experts,) fp32, of formats that have global scales."""
    if not get_format(kind.activations).has_global_scale:
        if given is not None:
            raise ValueError(f"{name}: {kind.activations} activations have none; leave it out")
        return None
    value = ACTIVATION_SCALE if given is None else given
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=torch.float32)
    scale = value.detach().to(device, copy=True)
    if isinstance(given, Tensor) and given.dtype != torch.float32:
        raise TypeError(f"{name}: got {given.dtype}; expected float32")
    if scale.numel() == 1:
        scale = scale.reshape(())
    if tuple(scale.shape) not in ((), (kind.experts,)):
        raise ValueError(f"{name}: got {tuple(scale.shape)}; expected () or ({kind.experts},)")
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ValueError(f"{name}: expected positive finite numbers")
    return scale


def _tell(mine: _Told, group: dist.ProcessGroup | None) -> list[_Told]:
    """What each rank says."""
    ranks = rank_and_ranks(group)[1]
    if ranks == 1:
        return [mine]
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, mine, group)
    return told


def _agreed(told: list[_Told]) -> tuple[_Kind, float | None]:
    """What all ranks say, and the largest of their scales; raises on every rank where they
    differ."""
    for rank, (kind, _, wrong) in enumerate(told):
        if kind is None:
            raise Stopped(f"rank {rank} cannot go on: {wrong}")
    first = told[0][0]
    assert first is not None
    for rank, (kind, *_) in enumerate(told):
        assert kind is not None
        for name, mine, other in zip(_Kind._fields, first, kind, strict=True):
            if mine != other:
                raise ValueError(
                    f"{name}: rank 0 has {mine!r}, rank {rank} {other!r}; all ranks make it alike"
                )
    scales = [scale for _, scale, _ in told if scale is not None]
    return first, max(scales, default=None)
