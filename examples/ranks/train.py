"""Train a Llama over ranks:

    torchrun --nproc-per-node 2 -m examples.ranks.train --fsdp 2
    torchrun --nproc-per-node 4 -m examples.ranks.train --fsdp 2 --tp 2 --recipe fp8_block
    torchrun --nproc-per-node 4 -m examples.ranks.train --fsdp 2 --ep 2 --size tiny-moe
    torchrun --nproc-per-node 8 -m examples.ranks.train --fsdp 2 --ep 2 --tp 2 --size tiny-moe

On GPUs by NCCL, else by gloo. ``--size 8b --layers 8`` is a part of Llama 3 8B.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import replace
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import blockscale as bs

from .model import SIZES, Llama, LlamaConfig
from .shard import shard

__all__ = ["main", "make_model", "train"]


def make_model(config: LlamaConfig, transformers: bool) -> Any:
    """Of the same numbers on all ranks."""
    torch.manual_seed(0)
    if not transformers:
        return Llama(config)
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = "mixtral" if config.num_local_experts else "llama"
    made = AutoConfig.for_model(kind, **vars(config), use_cache=False)
    return AutoModelForCausalLM.from_config(made)


def train(model: Any, mesh: DeviceMesh, steps: int, batch: int, length: int) -> list[float]:
    """Losses of all ranks: of sequences that go on as they began."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = mesh["dp", "ep"]._flatten("batches")
    generator = torch.Generator().manual_seed(batches.get_local_rank())
    losses = []
    for _ in range(steps):
        tokens = sequences(batch, length + 1, model.config.vocab_size, generator).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1])
        logits = getattr(logits, "logits", logits)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        clip_gradients(list(model.parameters()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss.detach(), batches))
    return losses


def clip_gradients(parameters: list[Any], largest: float) -> None:
    """As torch's clip_grad_norm_, of parameters that are on several meshes: experts are."""
    groups = defaultdict(list)
    for each in parameters:
        if each.grad is not None:
            groups[each.device_mesh].append(each)
    norms = [get_total_norm([p.grad for p in group]).full_tensor() for group in groups.values()]
    total = torch.stack(norms).norm()
    for group in groups.values():
        clip_grads_with_norm_(group, largest, total)


def sequences(batch: int, length: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    start = torch.randint(vocabulary, (batch, 1), generator=generator)
    step = torch.randint(1, 4, (batch, 1), generator=generator)
    return (start + step * torch.arange(length)) % vocabulary


def mean(loss: Tensor, mesh: DeviceMesh) -> float:
    dist.all_reduce(loss, group=mesh.get_group())
    return loss.item() / mesh.size()


def main(
    fsdp: Annotated[int, typer.Option(help="Ranks that share parameters and batches.")] = 1,
    tp: Annotated[int, typer.Option(help="Ranks that share layers and sequences.")] = 1,
    ep: Annotated[
        int, typer.Option(help="Ranks that share experts, as tp does; batches are their own.")
    ] = 1,
    recipe: Annotated[str, typer.Option(help="bf16, mxfp8, fp8_block, nvfp4.")] = "mxfp8",
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "tiny",
    layers: Annotated[int | None, typer.Option(help="As many of its layers.")] = None,
    steps: int = 20,
    batch: Annotated[int, typer.Option(help="Sequences of a data-parallel rank.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    transformers: Annotated[bool, typer.Option("--transformers")] = False,
) -> None:
    if "RANK" not in os.environ:
        count = fsdp * tp * ep
        raise typer.BadParameter(f"start {count} ranks: torchrun --nproc-per-node {count}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (fsdp, ep, tp), mesh_dim_names=("dp", "ep", "tp"))
    config = SIZES[size]
    config = replace(config, num_hidden_layers=layers or config.num_hidden_layers)
    model = make_model(config, transformers).to(device)
    model = shard(model, None if recipe == "bf16" else bs.Recipe(recipe), mesh)
    began = time.perf_counter()
    losses = train(model, mesh, steps, batch, length)
    seconds = time.perf_counter() - began
    if dist.get_rank() == 0:
        print("losses", *(f"{loss:.4f}" for loss in losses))
        print(f"{steps * batch * length * fsdp * ep / seconds:,.0f} tokens/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
