"""Experts of which each rank has an equal part: tokens travel to them, results back, and in the
backward their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..nn import experts_backward, observing, passes
from ..nn.double_backward import refuse_double_backward
from ..nn.experts_call import ExpertsConfig
from ..nn.gated import exact
from ..nn.group_checks import ExpertParameters, check_experts, check_saved_format
from ..nn.group_operands import Activated, Source
from ..nn.main_grad import adds_to_main_grad
from ..nn.moe import GatedExperts
from ..nn.output_dtype import output_dtype
from ..quantize import quantize
from ..routing import Routing
from ..tensor import ScaledTensor
from ..watching import is_transformed
from .dtensor_parameters import dtensor_like
from .expert_peers import ExpertPeers, global_scale
from .ranks import rank_and_ranks
from .token_dispatch import dispatch

__all__ = ["ParallelExperts"]


class ParallelExperts(GatedExperts):
    """Experts of which this rank has a part, as :class:`ExpertParallel` made them."""

    @torch.compiler.disable
    def forward(self, x: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        """Return the sums for this rank's tokens; ``routing`` names experts of all ranks."""
        stacks: Any = ExpertParameters(
            self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias
        )
        group = _group_of(stacks.up)
        local = _local(stacks)
        ranks, error, kind = rank_and_ranks(group)[1], None, ""
        experts = torch.empty(0, 1, dtype=torch.int64, device=local.up.device)
        parts: tuple[Tensor, ...] = ()
        try:
            how = self._how(x, weights, routing, local, ranks)
            needs = [each is not None and each.requires_grad for each in (x, weights, *stacks)]
            kind = f"{how}, x {x.dtype} (tokens, {x.shape[1]}), {routing.slots.shape[1]} experts "
            kind += f"a token, gradients of {needs}"
            experts = torch.searchsorted(routing.offsets, routing.slots.int(), right=True)
            parts = (weights.detach().to(torch.promote_types(how.dtype, torch.float32)),)
        except Exception as wrong:  # whatever it is, other ranks wait for this one
            error = wrong
        tokens = dispatch(parts, experts, len(local.up), group, error=error, kind=kind)
        peers = ExpertPeers(tokens, how, local)
        y: Tensor = _ParallelExperts.apply(peers, x, weights, *stacks[:4])
        return y

    def _how(
        self, x: Tensor, weights: Tensor, routing: Routing, local: ExpertParameters, ranks: int
    ) -> ExpertsConfig:
        """Return what all ranks have to have alike; raises where this rank's operands do not
        fit."""
        if is_transformed():
            raise NotImplementedError(
                "torch.func has no rule for experts that ranks share; call backward"
            )
        if not isinstance(routing, Routing):
            raise TypeError(
                f"routing: got {type(routing).__name__}; expected blockscale.route(...)"
            )
        recipe, activation = self.recipe, self.activation
        check_experts(x, weights, routing, local, recipe, False, activation.interleaved, ranks)
        for name in ("gate_up_proj", "down_proj"):
            if adds_to_main_grad(getattr(self, name)):
                raise ValueError(
                    f"{name}.main_grad: gradients of experts that ranks share go to .grad alone; "
                    "delete main_grad"
                )
        dtype = output_dtype(x)
        check_saved_format(self.saved_format, dtype)
        activation = activation if recipe is None else exact(activation)
        return ExpertsConfig(
            recipe, activation, dtype, False, self.saved_format, torch.is_grad_enabled()
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ExpertParallel"


class _ParallelExperts(torch.autograd.Function):
    """Keeps what experts keep: this rank's tokens, and the first product of its experts. Tokens
    that came in high precision are kept, too; others travel again in the backward, as the gradient
    of the first matrix has blocks along the rows of an expert, which their rank alone knows."""

    @staticmethod
    def forward(ctx: Any, peers: ExpertPeers, x: Tensor, weights: Tensor, *stacks: Any) -> Tensor:
        ctx.site = observing.site()
        how, needs = peers.how, (False,) * 7
        if how.grad_enabled:
            needs = *ctx.needs_input_grad[1:], False
        came, rows = None, _sent(peers, x, "fprop", "activations")
        if rows is None:
            came = peers.send(x)
            rows = peers.rows(came)
        call = peers.call(x, _local(ExpertParameters(*stacks)))
        h = call.multiply(rows, "up", dgrad=False)
        del rows
        y = call.multiply(Activated(how.activation, h), "down", dgrad=False)
        if how.saved_format is not None and any(needs):
            scale = global_scale(h, how.saved_format, peers.group)
            h = quantize(h, how.saved_format, pad=True, global_scale=scale)
        y = peers.combine(y, weights, how.dtype)
        ctx.peers = peers
        ctx.save_for_backward(x, weights, h, came if needs[2] else None, *stacks)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, h, came, *stacks = ctx.saved_tensors
        needs, peers, how = (*ctx.needs_input_grad[1:], False), ctx.peers, ctx.peers.how
        of_up, of_down = needs[2:4]
        held = _local(ExpertParameters(*stacks))
        with torch.no_grad(), observing.at(ctx.site):
            h = h.dequantize(how.dtype) if isinstance(h, ScaledTensor) else h
            grad, rows = grad.to(how.dtype), None
            if not of_down and held.down_bias is None:
                rows = _sent(peers, grad, "dgrad", "gradients")
            rows = peers.rows(peers.send(grad)) if rows is None else rows
            if of_up and came is None:
                came = peers.send(x)
            call = peers.call(x if came is None else came, held)
            found = experts_backward.gradients(needs, call, h, rows)
        dx, dweights, *others = found
        dweights = None if dweights is None else dweights.to(weights.dtype)
        shared = [
            None if gradient is None else dtensor_like(gradient, stack)
            for gradient, stack in zip(others[:4], stacks, strict=True)
        ]
        return None, *refuse_double_backward((dx, dweights, *shared))


def _sent(peers: ExpertPeers, x: Tensor, product: str, role: str) -> Source | None:
    """Rows that travel quantized, where the product that reads them is."""
    recipe = peers.how.recipe
    if recipe is None or not passes.quantized_products(recipe)[product]:
        return None
    return peers.send_quantized(x, recipe, role)


def _group_of(stack: Any) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError(
            "ExpertParallel: torch.distributed has no process group any more, which experts are "
            "shared over; call torch.distributed.init_process_group, and make the model anew"
        )
    if not isinstance(stack, DTensor) or stack.device_mesh.ndim != 1:
        raise RuntimeError(
            "ExpertParallel: the experts' parameters are not shared over one dimension of a mesh; "
            "call them by the module that fully_shard wraps, which gathers the others"
        )
    return stack.device_mesh.get_group()


def _local(stacks: ExpertParameters) -> ExpertParameters:
    """This rank's parts, as tensors of this pass alone: torch does not count all writes to a
    DTensor, so that nothing could be kept of them in ``reuse_weights``."""
    parts: list[Any] = [None if each is None else each._local_tensor.detach() for each in stacks]  # type: ignore[attr-defined]
    return ExpertParameters(*parts)
