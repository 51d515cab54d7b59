"""What each rank does in the tests of compiled tensor parallelism: modules as they are, and in
graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from observed import counted_gathers, whole
from tensor_ranks import BATCH, WIDE, make_block, parallel
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import blockscale as bs
from blockscale.distributed import (
    ColwiseParallel,
    RowwiseParallel,
    gather_quantized,
)

CPU, LENGTH, STEPS = torch.device("cpu"), 128, 2
#: Of a block that is one graph: its recipe, and what else.
CASES = {
    f"{recipe} {case}": (recipe, case)
    for recipe in ("mxfp8", "fp8_block", "nvfp4")
    for case in ("sequence", "shared")
}
CASES |= {
    f"mxfp8 {case}": ("mxfp8", case)
    for case in ("cut", "recomputed", "routed", "precise", "scattered")
}
#: Of two layers with nothing between them that a backend sums in another order.
BACKENDS = {"mxfp8": "aot_eager_decomp_partition", "nvfp4": "inductor"}
#: Of weights that FSDP2 shards, too: whether they are sharded after the forward.
SHARDED = {
    "mxfp8 shared": True,
    "nvfp4 shared": False,
    "mxfp8 recomputed": True,
}
#: What a module does with an input that its layers share, before they read it.
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda x: x.mul_(2),
    "a row": lambda x: x[0].zero_(),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "data": lambda x: x.data.mul_(2),
}


def inputs(rank: int, length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, WIDE, generator=torch.Generator().manual_seed(rank))


def step(model: Any, x: Tensor) -> list[Tensor]:
    """The output, and gradients."""
    x = x.clone().requires_grad_()
    y = model(x)
    ((y * x.detach()).sum() + getattr(getattr(model, "mlp", None), "loss", 0)).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    return [y.detach(), x.grad, *(whole(p.grad).clone() for p in trained)]


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The same of steps between which weights change."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        found += step(model, x)
        optimizer.step()
    return found


def blocks(rank: int, mesh: Any) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Of each case without a compiler, and as one graph."""
    found = {}
    for name, (recipe, case) in CASES.items():
        torch.compiler.reset()
        block, graph = (parallel(make_block(recipe, case, CPU), case, mesh) for _ in "ab")
        graph.compile(fullgraph=True, backend="aot_eager")
        x = inputs(rank, 34 if case == "cut" else LENGTH)
        found[name] = list(zip(train(block, x), train(graph, x), strict=True))
    return found


def make_layers(recipe: str, mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDE, 512, False), nn.Linear(512, WIDE, False))
    plan: dict[str, Any] = {
        "0": ColwiseParallel(input_layouts=Shard(1)),
        "1": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(bs.convert(layers, bs.Recipe(recipe)), mesh, plan)


def layers(rank: int, mesh: Any) -> dict[str, Any]:
    """Of each backend: pairs as above, and the bytes of each gather and of what is kept."""
    found = {}
    for recipe, backend in BACKENDS.items():
        torch.compiler.reset()
        model, graph = make_layers(recipe, mesh), make_layers(recipe, mesh)
        graph.compile(fullgraph=True, backend=backend)
        x = inputs(rank)
        each = list(zip(train(model, x), train(graph, x), strict=True))
        found[recipe] = each, *watched(graph, x)
    return found


def watched(model: nn.Module, x: Tensor) -> tuple[tuple[list[int], list[int]], list[Any]]:
    """Bytes of each gather, in the forward and in the backward; and what is kept between."""
    kept: list[tuple[torch.dtype, int]] = []

    def keep(x: Tensor) -> Tensor:
        kept.append((x.dtype, x.numel()))
        return x

    with counted_gathers() as sent:
        with saved_tensors_hooks(keep, lambda x: x):
            y = model(x.requires_grad_())
        before = len(sent)
        y.sum().backward()
    return (sent[:before], sent[before:]), kept


def alone(rank: int, mesh: Any) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """What of a module with a shared input is compiled by itself."""
    found, x = {}, inputs(rank)
    for name in ("module", "layers", "broken"):
        torch.compiler.reset()
        block, other = (parallel(make_block("mxfp8", "shared", CPU), "shared", mesh) for _ in "ab")
        if name == "module":
            other.mlp.compile(backend="aot_eager")
        elif name == "layers":
            for layer in (other.mlp.gate_proj, other.mlp.up_proj, other.mlp.down_proj):
                layer.compile(backend="aot_eager")
        else:
            other.mlp.before = breaks
            other.compile(backend="aot_eager")
        found[name] = list(zip(step(block, x), step(other, x), strict=True))
    return found


def breaks(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def writes(rank: int, mesh: Any) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Of each write to a copy without a compiler, and to what is shared in one graph."""
    found, x = {}, inputs(rank)
    for name, write in WRITES.items():
        torch.compiler.reset()
        block, graph = (parallel(make_block("mxfp8", "shared", CPU), "shared", mesh) for _ in "ab")

        def on_a_copy(x: Tensor, write: Any = write) -> Tensor:
            x = x.clone()
            write(x)
            return x

        def as_it_is(x: Tensor, write: Any = write) -> Tensor:
            write(x)
            return x

        block.mlp.before, graph.mlp.before = on_a_copy, as_it_is
        graph.compile(fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            found[name] = [(block(x), graph(x))]
    return found


def write_later(block: Any, write: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    y = block.norm(x) * 1
    z = block.mlp(y)
    write(y)
    found: Tensor = y + z
    return found


def kept_plain(rank: int, mesh: Any) -> list[str]:
    """What is said where an input that the backward reads as it is was written to meanwhile."""
    said = []
    for name in ("in place", "foreach"):
        torch.compiler.reset()
        block = parallel(make_block("mxfp8", "precise", CPU), "precise", mesh)

        block.inner = partial(write_later, block, WRITES[name])
        block.compile(fullgraph=True, backend="aot_eager")
        try:
            block(inputs(rank).requires_grad_())
        except Exception as error:
            said.append(str(error))
    return said


def sharded(rank: int, ranks: int) -> dict[str, list[list[float]]]:
    """Losses with FSDP2 on another dimension: as they are, and of graphs with and without weights
    that are gathered quantized."""
    wide = max(1, ranks // 2)  # two ranks shard weights, and one has the whole layers
    mesh, found = init_device_mesh("cpu", (2, wide), mesh_dim_names=("dp", "tp")), {}
    for name, reshard in SHARDED.items():
        recipe, case = name.split()
        found[name] = []
        for compiles, gathers in ((False, False), (True, False), (True, True)):
            torch.compiler.reset()
            block = parallel(make_block(recipe, case, CPU), case, mesh["tp"])
            if gathers:
                gather_quantized(block)
            if compiles:
                block.compile(fullgraph=True, backend="aot_eager")
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=reshard)
            optimizer, losses = torch.optim.AdamW(block.parameters(), lr=1e-2), []
            for number in range(3):
                x = inputs(2 * number + rank).bfloat16()
                loss = (block(x).float() - 1).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            found[name].append(losses)
    return found


def task(rank: int, ranks: int, folder: Path) -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    parts = blocks(rank, mesh), layers(rank, mesh), alone(rank, mesh), writes(rank, mesh)
    return *parts, kept_plain(rank, mesh), sharded(rank, ranks)
