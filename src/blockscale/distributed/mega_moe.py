"""Experts over ranks: from tokens to tokens."""

from __future__ import annotations

import warnings
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..formats import get_format
from ..fused import swiglu_quantize
from ..gemm import grouped_gemm
from ..gemm_quantize import grouped_gemm_quantize
from ..nn.holds import own_global_scale
from ..ops import FallbackWarning
from ..ops.operand_layout import operand_layout
from ..quantize import quantize
from ..routing import INTEGERS, Routing, combine, route
from ..stored import is_per_group
from ..tensor import ScaledTensor
from ..tensor_checks import DTYPES, check_is_tensor
from ..watching import is_dtensor
from .mega_config import (
    Message,
    activation_scale,
    config_of,
    multiprocessors_of,
    same_config,
)
from .mega_launch import MegaLaunch, memory_of
from .ranks import gather_messages, make_on_all, rank_and_ranks
from .token_dispatch import dispatch

__all__ = ["MegaMoE"]


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
    where products have them. On Hopper, of fp8_1x128, and on Blackwell (there it has run in the
    emulator alone) one kernel does all of it; elsewhere its steps run one after another, with the
    same bits (but of FP8 by mxfp4 on Hopper, which steps multiply in E4M3 from 160 rows an expert
    on): quantize, dispatch, product, SwiGLU and quantize, product, return, combine. Compilers call
    it as it is. Set as ``experts`` of a :class:`blockscale.nn.MoE`, it spreads that layer's routed
    experts over ranks.

    Args:
        up: (experts, 2 * I, H) of this rank, gate's rows first, blocked along -1: nvfp4, mxfp4,
            mxfp8 or fp8_128x128. Rank ``r`` has experts from ``r * experts`` on. Each expert may
            have a global scale of its own.
        down: (experts, H, I), likewise.
        tokens: the most that a rank has in one call: what buffers of the kernel are made for.
        topk: experts of a token.
        activations: format of what is sent and of what the second product reads: "nvfp4" or
            "fp8_1x128" of nvfp4 weights, "mxfp8" or "fp8_1x128" of mxfp4 ones; the default is the
            first. (On Hopper the kernel multiplies by "fp8_1x128", by others the steps do.)
        a1_scale, a2_scale: global scales of NVFP4 activations, of tokens and in front of the second
            product: fp32, one for all or one for each expert of this rank. Of ``a1_scale`` the
            largest of all ranks is taken, as a token is quantized once; with an ``a2_scale`` for
            each expert these are quantized one after another, in steps. The largest magnitude that
            calibration finds, / 2688, is right. Default: 1, with which blocks are held up to 2688,
            and those whose largest value is below some 0.006 become zeros. Loaded ones are taken
            as they are: load the same ``a1_scale`` on all ranks.
        group: of torch.distributed; None: the default one, or this process alone where it was not
            initialized. All ranks make the module together.
        backend: "kernel": one kernel, ValueError where there is none; "steps": one after another;
            "auto": the kernel where there is one.

    Raises ValueError or TypeError where this rank's arguments do not fit, and :class:`PeerError` on
    the others then; ValueError on every rank where ranks differ.

    Source: DeepGEMM's mega MoE, and DeepEP for what travels.
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
        backend: str = "auto",
    ) -> None:
        super().__init__()
        message: Message = None, None, ""
        error = None
        try:
            config = config_of(up, down, tokens, topk, activations, rank_and_ranks(group)[1])
            scales = [
                activation_scale(*each, config, up.device)
                for each in (("a1_scale", a1_scale), ("a2_scale", a2_scale))
            ]
            count = multiprocessors_of(config, scales[1], up.device, backend)
            config = config._replace(multiprocessors=count)
            message = config, None if scales[0] is None else float(scales[0].max()), ""
        except Exception as wrong:  # whatever it is, other ranks wait for this one
            error, message = wrong, (None, None, str(wrong))
        messages = gather_messages(message, group)
        if error is not None:
            raise error
        self.group = group
        self._config, largest = same_config(messages)
        for name, each in (("up", up), ("down", down)):
            own_global_scale(each)
            self.register_parameter(name, nn.Parameter(each, requires_grad=False))
        one = None
        if largest is not None:
            one = torch.tensor(largest, dtype=torch.float32, device=up.device)
        self.register_buffer("a1_scale", one)
        self.register_buffer("a2_scale", scales[1])
        self._launch: MegaLaunch | None = None
        if self._config.multiprocessors:
            self._launch = self._launch_of(backend)

    @torch.compiler.disable
    def forward(self, x: Tensor, weights: Tensor, experts: Tensor | Routing) -> Tensor:
        """What this rank's tokens get: (t, H), in the dtype of ``x``.

        Args:
            x: (t, H), of ``tokens`` at most, float32, bfloat16 or float16. Other ranks may have
                more or fewer, or none.
            weights: floating (t, topk): what an expert's result is multiplied by, in fp32.
            experts: int64 or int32 (t, topk), the numbers of a token's experts among all of all
                ranks; others are those of none. Or their routing, made for all these experts.

        Every rank calls it. Raises ValueError or TypeError where these are something else, and
        :class:`PeerError` on all other ranks then. What goes wrong after that, in products, is
        raised on its rank alone; others wait for the time-out of torch.distributed.

        With the kernel a rank that another one waits for longer than 100 s is named by
        :class:`PeerError` at the next call, on a GPU, and results are NaN. Calls of modules alike
        share memory: make them on one stream, and let no other kernel that waits for ranks, as
        NCCL's, run beside them. Weights that are changed by way of ``.data`` are not seen, and a
        CUDA graph has those of its capture.
        """
        config, error = self._config, None
        ranks = rank_and_ranks(self.group)[1]
        if ranks != config.ranks:
            raise ValueError(
                f"MegaMoE: was made by {config.ranks} ranks, and there are {ranks} now, which have "
                "other experts; make it anew on all of them"
            )
        parts: tuple[Tensor, ...] = ()
        try:
            numbers = self._numbers(experts)
            self._check(x, weights, numbers)
            parts = self._quantized(x)
        except Exception as wrong:  # whatever it is, other ranks wait for this one
            error = wrong
            numbers = torch.empty(0, config.topk, dtype=torch.int64, device=self.up.device)
        if self._launch is not None:
            if error is not None:
                raise error
            given = weights.float().contiguous(), numbers.contiguous(), x.new_empty(x.shape)
            scales = self.a1_scale, self.a2_scale
            return self._launch(parts, (self.up, self.down), scales, *given)
        tokens = dispatch(parts, numbers, config.experts, self.group, error=error)
        routing = route(tokens.experts, config.experts)
        count = sum(tokens.results_sent)
        rows = routing.tokens[:count]
        y = x.new_empty(0, config.hidden, dtype=torch.bfloat16)
        if count:
            y = self._products([part[rows] for part in tokens.parts], routing.offsets)
        # in the order of received rows and their experts, which those of other ranks interrupt
        slots = routing.slots.flatten()
        results = tokens.return_results(y[slots[slots < count]])
        return combine(results, tokens.pairs.slots, weights, x.dtype)

    def _launch_of(self, backend: str) -> MegaLaunch | None:
        """The kernel's, with the memory that ranks share. Where they cannot share any, and it was
        not asked for by name, none."""
        make = partial(memory_of, self._config.sizes, self.up.device, self.group)
        memory, wrong = make_on_all(make, self.group)
        if memory is not None:
            return MegaLaunch(memory)
        if backend == "kernel":
            raise RuntimeError(wrong)
        warnings.warn(f"MegaMoE: steps run one after another: {wrong}", FallbackWarning, 4)
        self._config = self._config._replace(multiprocessors=0)
        return None

    def _numbers(self, experts: Any) -> Any:
        """The numbers of each token's experts, of which those of none lie outside."""
        if not isinstance(experts, Routing):
            return experts
        every = self._config.experts * self._config.ranks
        if len(experts.offsets) != every:
            raise ValueError(
                f"experts: got a routing of {len(experts.offsets)} experts, all ranks have {every}:"
                f" call blockscale.route(numbers, {every})"
            )
        return torch.searchsorted(experts.offsets, experts.slots.int(), right=True)

    def _quantized(self, x: Tensor) -> tuple[Tensor, ...]:
        """Data and scales of tokens, of which there may be none."""
        given = (
            x.contiguous() if len(x) else torch.zeros(1, x.shape[1], dtype=x.dtype, device=x.device)
        )
        q = quantize(given.detach(), self._config.activations, pad=True, global_scale=self.a1_scale)
        return q.qdata[: len(x)], q.qscale[: len(x)]

    def _products(self, parts: list[Tensor], offsets: Tensor) -> Tensor:
        """Multiply rows of experts, which end at ``offsets``, by both of their matrices."""
        config, down = self._config, self.down
        data, scale = parts
        shape = len(data), config.hidden
        a: Any = ScaledTensor(
            data, scale, format=config.activations, shape=shape, global_scale=self.a1_scale
        )
        scales = self.a2_scale
        if is_per_group(scales):
            # a product has one alpha of ``a`` for all groups, but one for each of ``down``
            assert down.global_scale is not None
            a = self._activate_each(grouped_gemm(a, self.up.mT, offsets), offsets)
            down = down._with(global_scale=down.global_scale * scales)
        elif config.intermediate % get_format(config.activations).block_size:
            h = grouped_gemm(a, self.up.mT, offsets)
            (a,) = swiglu_quantize(h, config.activations, axes=(-1,), pad=True, global_scale=scales)
        else:
            a = grouped_gemm_quantize(
                a,
                self.up.mT,
                offsets,
                config.activations,
                swiglu=True,
                out_dtype=torch.bfloat16,
                layout=operand_layout(config.activations, data.device).layout,
                global_scale=scales,
            )
        return grouped_gemm(a, down.mT, offsets)

    def _activate_each(self, h: Tensor, offsets: Tensor) -> Tensor:
        """Quantized with the scale of each expert, and not yet multiplied by it."""
        assert self.a2_scale is not None
        one, groups = torch.ones_like(self.a2_scale[0]), list[Any]()
        bounds = pairwise([0, *offsets.tolist()])
        for scale, (start, end) in zip(self.a2_scale, bounds, strict=True):
            if start < end:
                (group,) = swiglu_quantize(
                    h[start:end],
                    self._config.activations,
                    axes=(-1,),
                    pad=True,
                    global_scale=scale,
                )
                groups.append(group._with(global_scale=one))
        return torch.cat(groups)

    def _apply(self, fn: Any, recurse: bool = True) -> MegaMoE:
        """Moved with the module, scales of activations stay fp32."""
        scales = {name: self._buffers.pop(name) for name in ("a1_scale", "a2_scale")}
        super()._apply(fn, recurse)
        for name, scale in scales.items():
            if scale is not None and scale.is_meta:
                scale = torch.empty_like(scale, device=self.up.device)
            self._buffers[name] = None if scale is None else scale.to(self.up.device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> MegaMoE:
        """A copy of the same ranks."""
        memo[id(self.group)] = self.group
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: deepcopy(x, memo) for name, x in self.__dict__.items()})
        return made

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._config._asdict().items())

    def _check(self, x: Tensor, weights: Tensor, experts: Tensor) -> None:
        config, device = self._config, self.up.device
        for name, each in (("x", x), ("weights", weights), ("experts", experts)):
            check_is_tensor(name, each)
            if isinstance(each, ScaledTensor) or each.layout != torch.strided or is_dtensor(each):
                raise TypeError(f"{name}: got a {type(each).__name__}; expected a dense tensor")
            if each.device != device:
                raise ValueError(f"{name}: is on {each.device}, weights on {device}; move it")
        if x.dtype not in DTYPES:
            raise TypeError(f"x: got {x.dtype}; expected one of {', '.join(map(str, DTYPES))}")
        if x.dim() != 2 or x.shape[1] != config.hidden:
            raise ValueError(f"x: got {tuple(x.shape)}; expected (tokens, {config.hidden})")
        if len(x) > config.tokens:
            raise ValueError(
                f"x: has {len(x)} tokens, more than tokens={config.tokens} of each rank; call it "
                f"with fewer, or make it with tokens={len(x)} on all ranks"
            )
        if experts.dtype not in INTEGERS or not weights.dtype.is_floating_point:
            raise TypeError(
                f"experts, weights: got {experts.dtype} and {weights.dtype}; expected int64 or "
                "int32, and a floating type"
            )
        if any(tuple(each.shape) != (len(x), config.topk) for each in (experts, weights)):
            raise ValueError(
                f"experts, weights: got {tuple(experts.shape)} and {tuple(weights.shape)}; "
                f"expected ({len(x)}, {config.topk})"
            )
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            raise TypeError(
                "x, weights: a gradient is asked for, and there is none; call it under "
                "torch.no_grad(), or train by blockscale.nn.MoE"
            )
