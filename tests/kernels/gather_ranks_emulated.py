"""Ranks in the emulator that bring rows together and multiply them, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import blockscale as bs
from blockscale import emulator as em
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.calls import Operand
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import GPUS
from blockscale.kernels.ranks.gather_memory import GatherMemory
from blockscale.kernels.ranks.gather_sizes import GatherSizes
from blockscale.kernels.sm90 import calls, gather_calls, plan
from blockscale.kernels.sm90.config import Config, candidates

__all__ = ["Ranks", "operand"]


def operand(q: bs.ScaledTensor) -> Operand:
    return Operand(q.qdata.clone(), q.qscale.clone(), q.format_name)


@dataclass
class Ranks:
    """The memory of all of them, for launches one after another."""

    ranks: int
    most: GatherSizes
    completion: str = "eager"
    multiprocessors: int = 2
    limit: float = 1.0
    build: Callable[[Any], Any] = compile_cache.build
    check: str = "all,global,exit_stores"
    kept: list[Any] = field(default_factory=list)  # tensors of launches that have not run

    def __post_init__(self) -> None:
        self.memory = [torch.zeros(self.most.nbytes, dtype=torch.uint8) for _ in range(self.ranks)]
        addresses = torch.tensor([each.data_ptr() for each in self.memory])
        self.places = [GatherMemory(each, addresses, i) for i, each in enumerate(self.memory)]
        for place in self.places:
            place.prepare()

    @property
    def gpu(self) -> Any:
        return replace(GPUS["sm_90a"], load=self.load, multiprocessors=self.multiprocessors)

    def load(self, config: Any) -> Any:
        kernel = self.build(config)

        def run(*args: Any) -> None:
            self.kept.append(args)
            kernel(*args)

        return run

    def __call__(
        self, x: Tensor, w: Tensor, absent: Sequence[int] = (), **how: Any
    ) -> tuple[list[Tensor], Tensor]:
        """What each rank that is not ``absent`` gets; and what one has of all rows at once. The
        shards of ``x`` (M, K) by ``w`` (N, K)."""
        q, found = bs.quantize(w, "fp8_128x128", pad=True), []
        device: dict[str, Any] = {"completion": self.completion, "check": self.check}
        if self.completion == "random":
            device["seed"] = len(x)
        named = {f"memory of rank {i}": each for i, each in enumerate(self.memory)}
        with em.capture() as launches:
            for rank, shard in enumerate(x.chunk(self.ranks)):
                if rank in absent:
                    continue
                a = operand(bs.quantize(shard.contiguous(), "fp8_1x128", layout="sm90", pad=True))
                with em.cutedsl(em.Device("sm_90a", **device), buffers=named):
                    given = self.places[rank], a, operand(q)
                    how |= {"limit": self.limit, "gpu": self.gpu}
                    found.append(gather_calls.gather_gemm(*given, **how))
        em.launch_together(launches)
        self.kept.clear()
        whole = operand(bs.quantize(x, "fp8_1x128", layout="sm90"))
        alone = {name: value for name, value in how.items() if name != "limit"}
        alone["gpu"] = replace(GPUS["sm_90a"], load=partial(compile_cache.build))  # planned anew
        with em.cutedsl(em.Device("sm_90a")), patch.object(plan, "choose_config", in_order):
            want = calls.gemm(whole, operand(q), **alone)
        return found, want


def in_order(shape: tuple[int, int, int], epilogue: Epilogue, **how: Any) -> Config:
    """The kernel that is chosen first of those that add up K blocks one after another."""
    return next(each for each in candidates(shape, epilogue, **how) if not each.warpgroup_split_k)
