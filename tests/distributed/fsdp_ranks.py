"""What each rank does in the tests of weights that FSDP2 gathers quantized: train a small model
with and without, compiled or not, and tell the losses.

On GPUs: ``torchrun --nproc-per-node 2 tests/distributed/fsdp_ranks.py nccl``.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import begin
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.distributed import gather_quantized, quantizer, shard_ops
from blockscale.distributed.gathered_weight import GatheredWeight
from blockscale.distributed.quantizer import Quantizer
from blockscale.nn.nvfp4 import METHODS
from blockscale.ops.operand_layout import OperandLayout

WIDE, STEPS = 512, 4
#: Recipe, or method of Recipe.nvfp4, dtype that weights are gathered in, whether they are sharded
#: after the forward, and what else.
CASES: dict[str, tuple[str, torch.dtype | None, bool, str]] = {
    "mxfp8": ("mxfp8", None, True, ""),
    "mxfp8 bf16": ("mxfp8", torch.bfloat16, True, ""),
    "mxfp8 kept": ("mxfp8", None, False, ""),
    "mxfp8 again": ("mxfp8", torch.bfloat16, True, "checkpoint"),
    "mxfp8 outside": ("mxfp8", torch.bfloat16, True, "outside"),
    "mxfp8 accumulated": ("mxfp8", torch.bfloat16, True, "accumulate"),
    "fp8_block": ("fp8_block", torch.bfloat16, True, ""),
    "nvfp4": ("nvfp4", torch.bfloat16, True, ""),
    "nvfp4 kept": ("nvfp4", None, False, ""),
    "nvidia": ("nvidia", torch.bfloat16, True, ""),
    "four_over_six": ("four_over_six", torch.bfloat16, True, ""),
    "ms_eden": ("ms_eden", torch.bfloat16, True, ""),
    "odd": ("mxfp8", torch.bfloat16, True, "odd"),
    "meta": ("mxfp8", torch.bfloat16, True, "meta"),
    "mxfp8 tiles": ("mxfp8", torch.bfloat16, True, "tiles"),
    "nvfp4 tiles": ("nvfp4", torch.bfloat16, True, "tiles"),
    "mxfp8 columns": ("mxfp8", torch.bfloat16, True, "columns"),
    "fp8_block columns": ("fp8_block", torch.bfloat16, True, "columns"),
    "fp8_block columns again": ("fp8_block", torch.bfloat16, True, "columns checkpoint"),
    "fp8_block columns kept": ("fp8_block", torch.bfloat16, False, "columns"),
}
#: Those that are run by four ranks, which take twice as long as two.
OF_FOUR = "mxfp8 bf16", "nvfp4 kept", "nvidia", "odd", "fp8_block columns"
#: As products read operands on Blackwell, and on Hopper.
LAYOUTS = {"tiles": OperandLayout("tcgen05"), "columns": OperandLayout(k_major=True)}
#: Cases whose blocks are compiled, and the backend.
COMPILED = {
    "mxfp8": "aot_eager",
    "mxfp8 bf16": "inductor",
    "mxfp8 kept": "aot_eager",
    "mxfp8 again": "aot_eager_decomp_partition",  # a checkpoint inside of the graph
    "mxfp8 outside": "aot_eager",  # and around it
    "mxfp8 accumulated": "aot_eager",
    "fp8_block": "aot_eager",
    "nvfp4": "aot_eager",
    "nvfp4 kept": "aot_eager_decomp_partition",
    "four_over_six": "aot_eager",
    "odd": "aot_eager",
}


class Block(nn.Module):
    def __init__(self, hidden: int, again: bool):
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, hidden), nn.Linear(hidden, WIDE)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return found
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Again(nn.Module):
    """A block that is run again in the backward."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return found


def make_model(
    name: str, device: torch.device, *, gathers: bool, backend: str | None = None
) -> nn.Module:
    """``backend``: what compiles the blocks, before anything else is done with them."""
    recipe, dtype, reshard, more = CASES[name]
    torch.manual_seed(0)
    hidden = WIDE + 18 if more == "odd" else WIDE  # whose rows ranks cut, and share unevenly
    blocks = nn.Sequential(*(Block(hidden, "checkpoint" in more) for _ in range(2)))
    if more == "meta":
        blocks = blocks.to("meta")
    how = bs.Recipe.nvfp4(recipe) if recipe in METHODS else bs.Recipe(recipe)
    model = bs.convert(blocks, how).to("meta" if more == "meta" else device)
    if backend:
        for block in model:
            block.compile(fullgraph=True, backend=backend)
    if more == "outside":
        model = nn.Sequential(*map(Again, model))
    if gathers:
        gather_quantized(model)
    policy: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
    for block in model:
        fully_shard(block, reshard_after_forward=reshard, **policy)
    fully_shard(model, **policy)
    if more == "meta":
        model.to_empty(device=device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(0.01 * (1 + len(name) % 3))
    return model


def train(name: str, model: nn.Module, rank: int, device: torch.device) -> list[float]:
    _, dtype, _, more = CASES[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(rank), []
    for _ in range(STEPS):
        for part in range(2 if more == "accumulate" else 1):
            if more == "accumulate":
                model.set_requires_gradient_sync(part == 1)
            x = torch.randn(64, WIDE, generator=generator).to(device, dtype)
            loss = (model(x).float() - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(model(torch.ones(64, WIDE, device=device, dtype=dtype)).float().sum().item())
    return losses


def results(
    rank: int, device: torch.device, names: Iterable[str] = CASES
) -> dict[str, tuple[list[float], list[float]]]:
    """Losses of each case, without and with."""
    found = {}
    for name in names:
        each = [make_model(name, device, gathers=gathers) for gathers in (False, True)]
        layout = LAYOUTS.get(CASES[name][3].partition(" ")[0])
        with ExitStack() as stack:
            for module in (quantizer, shard_ops) if layout else ():
                stack.enter_context(patch.object(module, "operand_layout", lambda *_: layout))  # noqa: B023
            plain, quantized = (train(name, model, rank, device) for model in each)
        found[name] = plain, quantized
    return found


def compiled(rank: int, ranks: int, folder: Path) -> dict[str, list[list[float]]]:
    """Losses of each case, on a CPU: blocks that are compiled with and without, and those that are
    not compiled and gather no weight quantized."""
    cpu, found = torch.device("cpu"), {}
    for name, backend in COMPILED.items():
        torch.compiler.reset()
        graphs = [make_model(name, cpu, gathers=on, backend=backend) for on in (True, False)]
        each = [*graphs, make_model(name, cpu, gathers=False)]
        found[name] = [train(name, model, rank, cpu) for model in each]
    return found


#: Cases whose blocks are run inside of ``reuse_weights``, and what compiles them.
REUSED = {"mxfp8 bf16": None, "mxfp8 kept": None, "fp8_block": "aot_eager", "nvfp4": None}
PARTS = 3


def reuse(name: str, rank: int, *, reuses: bool) -> tuple[list[float], list[Counter[str]]]:
    """Losses, and how often shards were quantized along each axis and scales agreed on, by steps
    of some micro-batches."""
    counts: list[Counter[str]] = []
    quantize, all_reduce = Quantizer.quantize, dist.all_reduce

    def count_quantize(how: Any, x: Tensor, axis: int, *args: Any) -> Any:
        counts[-1][str(axis)] += 1
        return quantize(how, x, axis, *args)

    def count_reduce(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        counts[-1]["agreed"] += x.dim() == 0
        return all_reduce(x, *args, **kwargs)

    model = make_model(name, torch.device("cpu"), gathers=True, backend=REUSED[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    generator, losses = torch.Generator().manual_seed(rank), []
    counted = patch.object(Quantizer, "quantize", count_quantize)
    with counted, patch.object(dist, "all_reduce", count_reduce):
        for _ in range(2):
            counts.append(Counter())
            with bs.reuse_weights() if reuses else nullcontext():
                for _ in range(PARTS):
                    x = torch.randn(64, WIDE, generator=generator).to(CASES[name][1])
                    loss = (model(x).float() - 1).square().mean()
                    loss.backward()
                    losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, counts


#: What changes a sharded parameter.
WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda w: w.mul_(2),
    "detached": lambda w: w.detach().mul_(2),
    "data": lambda w: w.data.mul_(2),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "the shard": lambda w: w.to_local().mul_(2),
    "a part of the shard": lambda w: w.to_local()[:16].mul_(2),
    "a row of the shard": lambda w: w.to_local()[0].mul_(2),
    "later a row of the shard": lambda w: w.row.mul_(2),
    "a step": lambda w: torch.optim.SGD([w], lr=1.0).step(),
}


def writes(name: str) -> dict[str, tuple[bool, bool]]:
    """Whether each changes what a model gives inside of a block, and to what it gives outside."""
    found = {}
    for write, change in WRITES.items():
        model, x = make_model(name, torch.device("cpu"), gathers=True), torch.ones(64, WIDE)
        weight = model[0].up.weight
        weight.grad = torch.ones_like(weight)
        weight.row = weight.to_local()[0]
        x = x.to(CASES[name][1])
        with torch.no_grad():
            with bs.reuse_weights():
                before = model(x)
                change(weight)
                after = model(x)
            found[write] = torch.equal(before, after), torch.equal(after, model(x))
    return found


def reused(rank: int, ranks: int, folder: Path) -> tuple[Any, ...]:
    """Losses and counts of each case, without and with ``reuse_weights``; what it sees; and whether
    a rank may have no rows."""
    cases = {n: [reuse(n, rank, reuses=on) for on in (False, True)] for n in REUSED}
    return cases, {name: writes(name) for name in ("mxfp8 bf16", "nvfp4")}, empty(rank)


def empty(rank: int) -> bool:
    """Whether gradients are those of weights gathered as they are, where one rank has no rows."""
    name, gradients = "mxfp8 bf16", []
    x = torch.ones(0 if rank else 64, WIDE, dtype=CASES[name][1])
    for gathers, backend in ((False, None), (True, None), (True, "aot_eager")):
        model = make_model(name, torch.device("cpu"), gathers=gathers, backend=backend)
        model(x).float().square().sum().backward()
        gradients.append([each.grad.full_tensor() for each in model.parameters()])
    want, *others = gradients
    return all(torch.equal(a, b) for got in others for a, b in zip(got, want, strict=True))


def bytes_sent(name: str, device: torch.device) -> tuple[list[int], int, int]:
    """Of each gather of a weight in a step; how many elements its shard has; and how many of the
    quantized shards are in memory after the step."""
    sent: list[int] = []
    shards: list[weakref.ref[Tensor]] = []
    plain = GatheredWeight.fsdp_pre_all_gather

    def count(weight: Any, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        parts, metadata = plain(weight, mesh, size, stride, module, policy)
        sent.append(sum(part.nbytes for part in parts))
        shards.append(weakref.ref(metadata[0].qdata))
        return parts, metadata

    with patch.object(GatheredWeight, "fsdp_pre_all_gather", count):
        model = make_model(name, device, gathers=True)
        x = torch.randn(64, WIDE, device=device, dtype=torch.bfloat16)
        model(x).float().sum().backward()
    gc.collect()
    kept = sum(shard() is not None for shard in shards)
    return sent, WIDE * WIDE // dist.get_world_size(), kept


def saved(rank: int, device: torch.device, folder: Path) -> bool:
    """Whether a checkpoint of ranks that gather quantized is one of plain weights."""
    model = make_model("mxfp8 bf16", device, gathers=True)
    train("mxfp8 bf16", model, rank, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/dcp")
        other = make_model("mxfp8 bf16", device, gathers=False)
        state = get_model_state_dict(other)
        dcp.load({"model": state}, checkpoint_id=f"{folder}/dcp")
        set_model_state_dict(other, state)
        again = make_model("mxfp8 bf16", device, gathers=True)
        state = get_model_state_dict(again)
        dcp.load({"model": state}, checkpoint_id=f"{folder}/dcp")
        set_model_state_dict(again, state)
    x = torch.ones(64, WIDE, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        want, *others = (each(x) for each in (model, other, again))
    return all(torch.equal(want, each) for each in others)


def refusals(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """What is said where an optimizer steps while weights are gathered, or sharded, and of shards
    of columns."""

    def attempt(model: nn.Module, *, reshards: bool) -> str:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        x = torch.ones(64, WIDE, requires_grad=True)
        try:
            for _ in range(2):
                model(x.bfloat16()).float().sum().backward()
                for module in model.modules():
                    if reshards and isinstance(module, FSDPModule):
                        module.reshard()
                optimizer.step()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "nothing"

    found, cpu = {}, torch.device("cpu")
    for name, reshards in (("gathered", False), ("sharded", True)):
        model: Any = make_model("mxfp8 bf16", cpu, gathers=True)
        model.set_reshard_after_backward(False)
        found[name] = attempt(model, reshards=reshards)
    layer = gather_quantized(bs.convert(nn.Sequential(nn.Linear(WIDE, WIDE)), bs.Recipe("mxfp8")))
    fully_shard(layer, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    found["columns"] = attempt(layer.bfloat16(), reshards=False)
    return found


def assigned(rank: int, ranks: int, folder: Path) -> list[tuple[list[float], str]]:
    """Losses after states are loaded by ``assign=True``, before and after a step, and the kind of
    a weight's shard."""
    found = []
    for name in ("mxfp8 bf16", "odd", "meta"):
        for gathers in (False, True):
            model = make_model(name, torch.device("cpu"), gathers=gathers)
            losses = []
            for _ in range(2):
                state = {key: value.clone() * 1.5 for key, value in model.state_dict().items()}
                model.load_state_dict(state, assign=True)
                losses += train(name, model, rank, torch.device("cpu"))
            weight: Any = model[0].up.weight
            found.append((losses, type(weight._local_tensor).__name__))
    return found


def run(rank: int, ranks: int, folder: Path) -> tuple[Any, ...]:
    """Losses, bytes of gathers, and whether checkpoints are plain, on a CPU."""
    cpu = torch.device("cpu")
    sent = {name: bytes_sent(name, cpu) for name in ("mxfp8 bf16", "fp8_block", "nvfp4")}
    names = OF_FOUR if ranks == 4 else CASES
    return results(rank, cpu, names), sent, saved(rank, cpu, folder)


if __name__ == "__main__":
    device = begin(sys.argv[1])
    for name, (plain, quantized) in results(dist.get_rank(), device).items():
        print(dist.get_rank(), name, plain == quantized, plain[-1], quantized[-1])
    dist.destroy_process_group()
