"""What each rank does in the tests of experts that ranks share for training: a layer by itself on
the tokens of all ranks, and shared. On GPUs: ``torchrun --nproc-per-node 2 THIS_FILE nccl``.
"""

from __future__ import annotations

import copy
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import sequence_ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from observed import WRITES, error_of, whole
from processes import begin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.distributed import ExpertParallel

HIDDEN, INNER, EXPERTS, TOPK = 128, 64, 8, 3
#: Tokens of each of four ranks; of fewer ranks the sums.
SHARES = (40, 0, 23, 1)
BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """``experts``: where tokens go, of a router's choice, or to few; ``frozen``: parameters."""

    recipe: bs.Recipe | None
    dtype: torch.dtype = BF16
    experts: str = "routed"
    frozen: tuple[str, ...] = ()
    layer: dict[str, Any] = {}  # noqa: RUF012 - never changed
    again: bool = False
    autocast: bool = False


CASES = {
    **{
        f"{name} {dtype}": Case(bs.Recipe(name), dtype)
        for name in ("mxfp8", "fp8_block", "nvfp4")
        for dtype in (BF16, FP32)
    },
    "none bf16": Case(None),
    "none fp32": Case(None, FP32),
    "none fp64": Case(None, torch.float64),
    "bias": Case(bs.Recipe("nvfp4"), layer={"bias": True}),
    "saved": Case(bs.Recipe("nvfp4"), layer={"saved_format": "nvfp4"}),
    "gpt-oss": Case(
        bs.Recipe("mxfp8"), layer={"activation": bs.nn.GatedActivation(1.702, 7.0, 1.0, True)}
    ),
    "high precision": Case(bs.Recipe("nvfp4", high_precision=("fprop", "dgrad"))),
    "high precision gradients": Case(bs.Recipe("mxfp8", high_precision=("wgrad",))),
    "frozen": Case(bs.Recipe("nvfp4"), frozen=("gate_up_proj", "down_proj")),
    "frozen up": Case(bs.Recipe("mxfp8"), frozen=("gate_up_proj",)),
    "one expert": Case(bs.Recipe("nvfp4"), experts="one"),
    "one rank's": Case(bs.Recipe("mxfp8"), experts="low"),
    "of none": Case(bs.Recipe("nvfp4"), experts="none"),
    "some of none": Case(bs.Recipe("mxfp8"), experts="some"),
    "again": Case(bs.Recipe("nvfp4"), again=True),
    "autocast": Case(bs.Recipe("mxfp8"), FP32, autocast=True),
}


def share(rank: int, ranks: int) -> slice:
    per = len(SHARES) // ranks
    ends = [sum(SHARES[: (r + 1) * per]) for r in range(ranks)]
    return slice(ends[rank - 1] if rank else 0, ends[rank])


def make_experts(case: Case, device: torch.device) -> bs.nn.GatedExperts:
    torch.manual_seed(0)
    made = bs.nn.GatedExperts(HIDDEN, INNER, EXPERTS, recipe=case.recipe, **case.layer)
    with torch.no_grad():
        made.gate_up_proj[5] *= 3  # the largest of one rank
        made.down_proj[1] *= 3
    for name in case.frozen:
        getattr(made, name).requires_grad_(False)
    return made.to(device, case.dtype)


def tokens_of(case: Case, device: torch.device) -> list[Tensor]:
    """x, weights, the experts of each token, and the gradient of the output."""
    count, generator = sum(SHARES), torch.Generator().manual_seed(1)
    x, grad = (torch.randn(count, HIDDEN, generator=generator) for _ in range(2))
    x[3] *= 30  # of one rank
    grad[45] *= 30
    weights = torch.rand(count, TOPK, generator=generator)
    experts = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :TOPK]
    if case.experts == "one":
        experts = torch.tensor([6, -1, EXPERTS]).expand(count, -1)
    elif case.experts == "low":
        experts = experts % 2
    elif case.experts == "none":
        experts = torch.full_like(experts, -1)
    elif case.experts == "some":
        experts[::3, 1] = -1
    x, grad = x.to(device, case.dtype), grad.to(device, case.dtype)
    return [x, weights.to(device), experts.to(device), grad]


def step(experts: nn.Module, case: Case, given: list[Tensor]) -> list[Tensor]:
    """Output, and gradients of x, weights and parameters."""
    x, weights, numbers, grad = given
    x, weights = (each.clone().requires_grad_() for each in (x, weights))
    experts.zero_grad()

    def call(x: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = experts(x, weights, bs.route(numbers, EXPERTS))
        return y

    with torch.autocast(x.device.type, BF16, enabled=case.autocast):
        y = checkpoint(call, x, weights, use_reentrant=False) if case.again else call(x, weights)
    y.backward(grad.to(y.dtype))
    found = [y.detach(), x.grad, weights.grad]
    return found + [whole(p.grad) for p in experts.parameters() if p.requires_grad]


def gathered(x: Tensor, ranks: int) -> Tensor:
    """Rows of all ranks, of whom each has another number."""
    parts: list[Any] = [None] * ranks
    dist.all_gather_object(parts, x.cpu())
    return torch.cat(parts)


def compared(device: torch.device) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Outputs and gradients of each case: of one layer with all tokens, and over ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("ep",))
    found = {}
    for name, case in CASES.items():
        given = tokens_of(case, device)
        alone = step(make_experts(case, device), case, given)
        experts = parallelize_module(make_experts(case, device), mesh, ExpertParallel())
        mine = [each[share(rank, ranks)] for each in given]
        shared = step(experts, case, mine)
        with torch.no_grad(), torch.autocast(device.type, BF16, enabled=case.autocast):
            y = experts(*mine[:2], bs.route(mine[2], EXPERTS))
        assert torch.equal(y, shared[0]), name
        shared[:3] = (gathered(each, ranks) for each in shared[:3])
        found[name] = [(a.cpu(), b.cpu()) for a, b in zip(alone, shared, strict=True)]
    return found


def make_moe(device: torch.device, mesh: DeviceMesh | None) -> bs.nn.MoE:
    torch.manual_seed(0)
    router = bs.nn.Router(top_k=2)
    moe = bs.nn.MoE(HIDDEN, INNER, EXPERTS, router, recipe=bs.Recipe("mxfp8"))
    if mesh is not None:
        parallelize_module(moe.to(device), mesh, {"experts": ExpertParallel()})
    return moe.to(device)


def train(moe: nn.Module, device: torch.device, rank: int, ranks: int) -> list[Tensor]:
    """Parameters of experts after a few steps, and the loss of each step, of all ranks' tokens."""
    optimizer = torch.optim.AdamW(moe.experts.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(4):
        x = torch.randn(sum(SHARES), HIDDEN, generator=generator).to(device)
        x = x[share(rank, ranks)]
        loss = (moe(x) - 1).square().sum() / sum(SHARES)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    total = torch.stack(losses)
    if ranks > 1:
        dist.all_reduce(total)
    return [total.cpu(), *(whole(p.detach()).cpu() for p in moe.experts.parameters())]


def trained(device: torch.device, folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Losses and parameters, alone and shared; and the shared state, saved for other ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("ep",))
    alone = train(make_moe(device, None), device, 0, 1)
    moe = make_moe(device, mesh)
    shared = train(moe, device, rank, ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"moe": moe.state_dict()}, checkpoint_id=str(folder / "dcp"))
    return list(zip(alone, shared, strict=True))


def loaded(device: torch.device, folder: Path) -> list[bool]:
    """Whether what other ranks saved is what a layer over these ranks, and one alone, load."""
    saved = torch.load(folder / "0.pt")["trained"]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ep",))
    found = []
    for each in (mesh, None):
        moe = make_moe(device, each)
        with torch.no_grad():
            for parameter in moe.parameters():
                parameter.zero_()
        state = {"moe": moe.state_dict()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=str(folder / "dcp"))
        moe.load_state_dict(state["moe"])
        got = [whole(p.detach()).cpu() for p in moe.experts.parameters()]
        found.append(all(torch.equal(a, b) for a, (_, b) in zip(got, saved[1:], strict=True)))
    return found


def fully_sharded(device: torch.device, name: str) -> list[tuple[Tensor, Tensor]]:
    """Experts that FSDP2 shards once more, over the other half of ranks, and one layer's: gradients
    of tokens, and parameters after two steps with the mean of what halves have."""
    rank, case = dist.get_rank(), CASES[name]
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "ep"))
    given = [each[:64] for each in tokens_of(case, device)]
    alone = make_experts(case, device)
    shared = parallelize_module(make_experts(case, device), mesh["ep"], ExpertParallel())
    fully_shard(shared, mesh=mesh["dp"], reshard_after_forward=True)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (alone, shared)]
    for _ in range(2):
        halves = [step(alone, case, [x.chunk(2)[i] for x in given]) for i in range(2)]
        for p, a, b in zip(alone.parameters(), halves[0][3:], halves[1][3:], strict=True):
            p.grad = (a + b) / 2
        found = step(shared, case, [x.chunk(4)[rank] for x in given])
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(alone.parameters(), shared.parameters(), strict=True)
    return [
        (halves[rank // 2][1].chunk(2)[rank % 2].cpu(), found[1].cpu()),
        *((a.detach().cpu(), whole(b.detach()).cpu()) for a, b in pairs),
    ]


def means(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Gradients of a loss that is a mean over all ranks, of one layer and of one that FSDP2 shards:
    its experts over half of the mesh, and the router over all ranks."""
    rank = dist.get_rank()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "ep"))
    x = torch.randn(4, 32, HIDDEN, generator=torch.Generator().manual_seed(3)).to(device)
    alone, shared = make_moe(device, None), make_moe(device, mesh["ep"])
    for half in x.chunk(2):
        (alone(half).square().mean() / 2).backward()
    fully_shard(shared.experts, mesh=mesh["dp"])
    shared.experts.set_gradient_divide_factor(4)
    shared.experts.set_force_sum_reduction_for_comms(True)  # gloo has no sum that is scaled
    fully_shard(shared, mesh=init_device_mesh(device.type, (4,)))
    shared(x[rank]).square().mean().backward()
    pairs = zip(alone.parameters(), shared.parameters(), strict=True)
    return [(a.grad.cpu(), whole(b.grad).cpu()) for a, b in pairs]


def used(rank: int, ranks: int, device: torch.device) -> dict[str, bool]:
    """Whether shared experts have the same bits when they are used in other ways."""
    case = CASES["nvfp4 torch.float32"]
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("ep",))
    experts = parallelize_module(make_experts(case, device), mesh, ExpertParallel())
    given = [each[share(rank, ranks)] for each in tokens_of(case, device)]
    want = step(experts, case, given)

    def same(found: list[Tensor]) -> bool:
        return all(torch.equal(*pair) for pair in zip(want, found, strict=True))

    found = {"copied": same(step(copy.deepcopy(experts), case, given))}
    with bs.reuse_weights():
        found["reused"] = all(same(step(experts, case, given)) for _ in range(2))
    found |= {f"written {name}": written(case, given, mesh, name) for name in WRITES}
    found["compiled"] = same(step(torch.compile(experts, backend="eager"), case, given))
    turned = [given[0].mT.contiguous().mT, *given[1:]]
    found["strided"] = same(step(experts, case, turned))
    x, weights, numbers, grad = given
    x = x.clone().requires_grad_()
    y = experts(x, weights, bs.route(numbers, EXPERTS))
    for times in (1, 2):
        y.backward(grad, retain_graph=True)
        found[f"backward {times}"] = torch.equal(x.grad, times * want[1])
    with torch.inference_mode():
        found["inference"] = torch.equal(experts(x, weights, bs.route(numbers, EXPERTS)), want[0])
    return found


def written(case: Case, given: list[Tensor], mesh: DeviceMesh, name: str) -> bool:
    """Whether a write to the experts' parameters inside of ``reuse_weights`` is seen."""
    found = []
    for reuses in (True, False):
        experts = parallelize_module(make_experts(case, given[0].device), mesh, ExpertParallel())
        with bs.reuse_weights() if reuses else nullcontext():
            step(experts, case, given)
            with torch.no_grad():
                for parameter in experts.parameters():
                    WRITES[name](parameter)
            found.append(step(experts, case, given))
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


def bytes_sent(rank: int, ranks: int, device: torch.device) -> dict[str, list[float]]:
    """Of the messages of a forward, and of a backward, that have tokens' elements: how many bytes
    for each."""
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("ep",))
    found = {}
    plain = dist.all_to_all_single
    for name in ("mxfp8 torch.bfloat16", "frozen"):
        case, seen = CASES[name], list[Any]()

        def count(to: Any, of: Any, *args: Any, seen: Any = seen, **how: Any) -> Any:
            seen.append(of.numel() * of.element_size())
            return plain(to, of, *args, **how)

        experts = parallelize_module(make_experts(case, device), mesh, ExpertParallel())
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(200, HIDDEN, generator=generator).to(device, BF16).requires_grad_()
        numbers = torch.arange(EXPERTS)[:: EXPERTS // ranks].expand(200, -1)  # one of each rank
        weights = torch.ones(numbers.shape)
        with patch.object(dist, "all_to_all_single", count):
            y = experts(x, weights, bs.route(numbers, EXPERTS))
            seen.append(0)
            y.backward(torch.ones_like(y))
        found[name] = [m for n in seen if (m := n / (x.numel() * ranks)) == 0 or m > 0.5]
    return found


def wrong(rank: int, ranks: int, device: torch.device) -> dict[str, str]:
    """What a rank is told where one of them, the last one, does something else."""
    last, told = rank == ranks - 1, dict[str, str]()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("ep",))
    case = CASES["mxfp8 torch.bfloat16"]
    experts = parallelize_module(make_experts(case, device), mesh, ExpertParallel())
    tokens, weights, numbers, _ = (each[:5] for each in tokens_of(case, device))
    routing = bs.route(numbers, EXPERTS)
    told["operands"] = error_of(
        lambda: experts(tokens[:, :64] if last else tokens, weights, routing)
    )
    told["dtype"] = error_of(lambda: experts(tokens.float() if last else tokens, weights, routing))
    grad = tokens.clone().requires_grad_(last)
    told["gradients"] = error_of(lambda: experts(grad, weights, routing))
    told["after that"] = error_of(lambda: experts(tokens, weights, routing))
    few = bs.route(numbers % 4, 4)
    told["routing"] = error_of(lambda: experts(tokens, weights, few))
    odd = bs.nn.GatedExperts(64, 64, ranks + 1)
    told["uneven"] = error_of(lambda: parallelize_module(odd, mesh, ExpertParallel()))
    told["twice"] = error_of(lambda: parallelize_module(experts, mesh, ExpertParallel()))
    told["moe"] = error_of(
        lambda: parallelize_module(make_moe(device, None), mesh, ExpertParallel())
    )
    told["linear"] = error_of(lambda: parallelize_module(nn.Linear(8, 8), mesh, ExpertParallel()))
    flat = init_device_mesh(device.type, (1, ranks), mesh_dim_names=("dp", "ep"))
    told["mesh"] = error_of(lambda: ExpertParallel()._apply(make_experts(case, device), flat))
    plain = parallelize_module(make_experts(case, device), mesh, ExpertParallel())
    plain.gate_up_proj.main_grad = torch.zeros(1)
    told["main_grad"] = error_of(lambda: plain(tokens, weights, routing))
    return told


def run(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """What a rank finds, on a CPU. Four ranks leave a checkpoint for two."""
    cpu, four = torch.device("cpu"), folder.parent / "four"
    found: dict[str, Any] = {"compared": compared(cpu)}
    found |= {"used": used(rank, ranks, cpu), "bytes": bytes_sent(rank, ranks, cpu)}
    found["in sequence"] = sequence_ranks.compared(rank, ranks, cpu)
    found["wrong"] = wrong(rank, ranks, cpu) | sequence_ranks.wrong(ranks, cpu)
    if ranks == 4:
        found |= {"trained": trained(cpu, folder), "means": means(cpu)}
        found["fsdp"] = {r: fully_sharded(cpu, f"{r} torch.float32") for r in ("mxfp8", "nvfp4")}
    else:
        found["loaded"] = loaded(cpu, four)
    return found


if __name__ == "__main__":
    device = begin(sys.argv[1])
    for name, pairs in compared(device).items():
        errors = [(a.float() - b.float()).norm() / a.float().norm().clamp(1e-9) for a, b in pairs]
        if dist.get_rank() == 0:
            print(name, [f"{float(e):.2e}" for e in errors])
    print(dist.get_rank(), wrong(dist.get_rank(), dist.get_world_size(), device))
    dist.destroy_process_group()
