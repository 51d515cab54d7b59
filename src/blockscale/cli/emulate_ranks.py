"""Ranks of a mega MoE in the emulator, which run at once; and the same steps one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import emulator as em
from ..distributed import MegaMoE
from ..kernels.common import compile_cache
from ..kernels.common.calls import Alpha, Operand
from ..kernels.common.gpu import GPUS
from ..kernels.common.runtime import standing_in
from ..kernels.mega.buffers import Buffers, Sizes, needs_bf16_rings
from ..kernels.mega.memory import Experts, Launch, Memory
from ..kernels.sm90 import mega_calls as sm90
from ..kernels.sm100 import mega_calls as sm100
from ..quantize import quantize
from ..tensor import ScaledTensor

__all__ = ["CHECKS", "Case", "Ranks", "exact", "steps"]

CHECKS = {
    "sm_90a": "all,global,exit_stores",
    "sm_100a": "all,global,exit_stores,tcgen05_order,proxy_reads,mbarrier_proxy",
    "sm_103a": "all,global,exit_stores,tcgen05_order,proxy_reads,mbarrier_proxy",
}
CALLS: dict[str, Any] = {"sm_90a": sm90, "sm_100a": sm100, "sm_103a": sm100}
A1, A2 = 0.01, 0.1  # global scales of NVFP4 activations


@cache
def weights(experts: int, hidden: int, intermediate: int, format: str) -> list[ScaledTensor]:
    found = list[Any]()
    for seed, shape in enumerate(((2 * intermediate, hidden), (hidden, intermediate))):
        generator = torch.Generator().manual_seed(seed)
        w = (torch.randn(experts, *shape, generator=generator) / 8).bfloat16()
        each: list[Any] = [quantize(m, format) for m in w]  # of NVFP4 each with a scale of its own
        found.append(torch.stack(each))
    return found


@dataclass
class Case:
    """Tokens of each rank, and what they are given to."""

    tokens: Sequence[int] = (20,)
    topk: int = 2
    hidden: int = 256
    intermediate: int = 128
    experts: int = 4  # of each rank
    format: str = "nvfp4"
    activations: str = "nvfp4"
    ring: int = 32
    seed: int = 0
    skewed: bool = False  # all tokens have the same experts
    room: int = 0  # tokens that buffers have room for; 0: the most that a rank has

    sizes: Sizes = field(init=False)
    x: list[Tensor] = field(init=False)
    ids: list[Tensor] = field(init=False)
    weights: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        ranks = len(self.tokens)
        room = self.room or max(1, *self.tokens)
        widths = self.hidden, self.intermediate, self.experts, self.activations
        bf16_rings = needs_bf16_rings(self.activations, self.format)
        self.sizes = Sizes(ranks, room, self.topk, *widths, self.ring, bf16_rings)
        generator = torch.Generator().manual_seed(self.seed)
        every = ranks * self.experts
        self.x, self.ids, self.weights = [], [], []
        for count in self.tokens:
            self.x.append(torch.randn(count, self.hidden, generator=generator).bfloat16())
            ids = torch.rand(count, every, generator=generator).argsort(1)[:, : self.topk]
            if self.skewed:
                ids = torch.full_like(ids, -1)
                ids[:, 0] = every - 1
            else:
                ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
            self.ids.append(ids.contiguous())
            self.weights.append(torch.rand(count, self.topk, generator=generator))

    @property
    def scales(self) -> dict[str, Any]:
        return {"a1_scale": A1, "a2_scale": A2} if self.activations == "nvfp4" else {}

    def matrices(self) -> list[ScaledTensor]:
        count = self.sizes.every
        return weights(count, self.hidden, self.intermediate, self.format)


@dataclass
class Ranks:
    """The memory of all ranks, for launches one after another."""

    case: Case
    arch: str = "sm_100a"
    ctas: int = 1
    clusters: int = 2
    completion: str = "eager"
    check: str = ""  # those of CHECKS
    limit: float = 1.0
    profile: bool = False
    build: Callable[[Any], Any] = compile_cache.build
    kept: list[Any] = field(default_factory=list)  # tensors of launches that have not run

    def __post_init__(self) -> None:
        self.buffers, self.reports = Buffers(self.case.sizes), list[em.Report]()
        count = self.case.sizes.ranks
        self.memory = [torch.zeros(self.buffers.nbytes, dtype=torch.uint8) for _ in range(count)]
        addresses = torch.tensor([each.data_ptr() for each in self.memory])
        self.ranks = [
            Memory(self.buffers, self.memory[rank], addresses, rank) for rank in range(count)
        ]

    def launch(self, case: Case | None = None, absent: Sequence[int] = ()) -> list[Tensor]:
        """What tokens get; ranks that are ``absent`` do not launch."""
        case = case or self.case
        out = [torch.full_like(x, float("nan")) for x in case.x]
        how: dict[str, Any] = {
            "completion": self.completion,
            "check": self.check or CHECKS[self.arch],
        }
        if self.completion == "random":
            how["seed"] = case.seed
        with em.capture() as calls:
            for memory in self.ranks:
                if memory.rank not in absent:
                    self.rank(case, memory, out[memory.rank], em.Device(self.arch, **how))
        self.reports = em.launch_together(calls)
        self.kept.clear()
        return out

    def rank(self, case: Case, memory: Memory, out: Tensor, device: em.Device) -> None:
        rank = memory.rank
        scalar = torch.tensor(A1) if case.scales else None
        q = quantize(case.x[rank], case.activations, global_scale=scalar) if len(out) else None
        if q is not None:
            memory.put_tokens(q.qdata, q.qscale)
        (up, up_alpha), (down, down_alpha) = (self.matrices(case, rank, i) for i in range(2))
        scalar = torch.tensor(A2) if case.scales else None
        experts = Experts(up, down, up_alpha, down_alpha, scalar)
        named = {f"memory of rank {i}": each for i, each in enumerate(self.memory)}
        with em.cutedsl(device, buffers=named, profile=self.profile):
            CALLS[self.arch].mega_moe(
                memory,
                experts,
                case.ids[rank],
                case.weights[rank],
                out,
                Launch(self.limit, self.ctas, self.clusters),
                gpu=replace(GPUS[self.arch], load=self.load),
            )

    def matrices(self, case: Case, rank: int, which: int) -> tuple[Operand, Alpha]:
        """A rank's own, for the first product or the second one."""
        own = case.experts
        w: Any = case.matrices()[which][rank * own : (rank + 1) * own]
        operand: Operand = CALLS[self.arch].operand_of(w)
        operand = operand._replace(data=operand.data.clone())  # a buffer of its own
        if w.global_scale is None:
            return operand, None
        scales = w.global_scale.clone()
        return operand, (torch.tensor((A1, A2)[which]), scales) if case.scales else scales

    def load(self, config: Any) -> Any:
        kernel = self.build(config)

        def run(*args: Any) -> None:
            self.kept.append(args)
            kernel(*args)

        return run


def steps(case: Case, arch: str = "sm_100a") -> list[Tensor]:
    """The same by kernels one after another, with all experts on one rank."""
    gpu = replace(GPUS[arch], load=compile_cache.build)
    with standing_in({torch.device("cpu"): gpu}.get), em.cutedsl(em.Device(arch)):
        moe = MegaMoE(
            *case.matrices(),
            tokens=case.sizes.tokens,
            topk=case.topk,
            activations=case.activations,
            backend="steps",
            **case.scales,
        )
        given = zip(case.x, case.weights, case.ids, strict=True)
        return [moe(*each) if len(each[0]) else each[0] for each in given]


def exact(case: Case) -> list[Tensor]:
    """In float64, of dequantized weights and tokens as they are."""
    up, down = (w.dequantize(torch.float64) for w in case.matrices())
    found = []
    for x, weights, ids in zip(case.x, case.weights, case.ids, strict=True):
        out = torch.zeros(x.shape, dtype=torch.float64)
        for k in range(case.topk):
            for token in (ids[:, k] >= 0).nonzero().flatten().tolist():
                expert = int(ids[token, k])
                gate, rise = (up[expert] @ x[token].double()).chunk(2)
                hidden = torch.nn.functional.silu(gate) * rise
                out[token] += weights[token, k].double() * (down[expert] @ hidden)
        found.append(out)
    return found
