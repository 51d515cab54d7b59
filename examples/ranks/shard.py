"""A model that is converted, on a mesh: this is all that ranks need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import parallelize_module

import blockscale as bs

__all__ = ["shard"]


def shard(model: Any, recipe: bs.Recipe | None, mesh: DeviceMesh) -> nn.Module:
    """Convert a Llama and share it over the mesh's dimensions: "dp" and "ep" have batches of their
    own and share all parameters (FSDP2); "tp" shares layers, and sequences between them; experts
    are shared by number over "ep" and "tp"."""
    if recipe is not None:
        bs.convert(model, recipe)  # not lm_head, whose logits stay as they are
    if mesh["tp"].size() > 1:
        share_layers(model, mesh["tp"], recipe is not None)
    if recipe is not None:
        bs.distributed.gather_quantized(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh._flatten("all")  # so that norms of gradients are one sum, the same on all ranks
    batches, sharers = mesh["dp", "ep"]._flatten("batches"), mesh["ep", "tp"]._flatten("experts")
    for layer in model.model.layers:
        experts = getattr(layer.mlp, "experts", None)
        if experts is not None and sharers.size() > 1:
            parallelize_module(experts, sharers, bs.distributed.ExpertParallel())
            # not cast: the weights of tokens' experts are fp32, as without "ep"
            uncast = replace(policy, cast_forward_inputs=False)
            fully_shard(experts, mesh=mesh["dp"], mp_policy=uncast)
            # an expert has the gradients of all tokens, as others have after FSDP's sum
            experts.set_gradient_divide_factor(batches.size())
            # gloo has no sum of multiples; torch 2.13 divides twice where one rank has no sum
            experts.set_force_sum_reduction_for_comms(mesh["dp"].size() > 1)
        fully_shard(layer, mesh=batches, mp_policy=policy)
    return fully_shard(model, mesh=batches, mp_policy=policy)


def share_layers(model: Any, mesh: DeviceMesh, converted: bool) -> None:
    """torch's plan of a Llama, with the styles of this package where layers were converted."""
    styles: Any = bs.distributed if converted else torch_parallel
    column, row = styles.ColwiseParallel, styles.RowwiseParallel
    gathers: dict[str, Any] = {
        "input_kwarg_layouts": {"hidden_states": Shard(1)},
        "desired_input_kwarg_layouts": {"hidden_states": Replicate()},
    }
    layer = {
        "input_layernorm": torch_parallel.SequenceParallel(use_local_output=True),
        "self_attn": styles.PrepareModuleInput(use_local_output=True, **gathers),
        **{f"self_attn.{name}_proj": column() for name in "qkv"},
        "self_attn.o_proj": row(output_layouts=Shard(1)),
        "post_attention_layernorm": torch_parallel.SequenceParallel(use_local_output=True),
    }
    if getattr(model.config, "num_local_experts", 0):
        layer["mlp.gate"] = bs.distributed.GateParallel()  # each rank routes its tokens
    else:
        layer |= {
            "mlp": styles.PrepareModuleInput(
                input_layouts=(Shard(1),),
                desired_input_layouts=(Replicate(),),
                use_local_output=True,
            ),
            "mlp.gate_proj": column(),
            "mlp.up_proj": column(),
            "mlp.down_proj": row(output_layouts=Shard(1)),
        }
    plan = {
        "model.embed_tokens": torch_parallel.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)
        ),
        "model.norm": torch_parallel.SequenceParallel(use_local_output=True),
        "lm_head": torch_parallel.ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Replicate()
        ),
        **{f"model.layers.*.{name}": style for name, style in layer.items()},
    }
    parallelize_module(model, mesh, plan)
    # torch 2.13: a compiled layer drops the gradient of what a collective has not given yet
    model.model.embed_tokens.register_forward_hook(lambda module, given, out: out.clone())
