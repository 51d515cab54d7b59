"""Mutation of the products for Blackwell, as of the pipelines: what is wrong in them is noticed.

The PTX is what CuTe DSL makes of the kernels, respelled so that the rules for nvcc's PTX fit: one
register where there is a sum or a number, names of inline assembly as of registers. Mutants are of
what runs: K has few blocks, so that one copy of a loop which the compiler unrolled is left.
``python mutation_sm100.py`` runs all of them and writes RESULTS.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

from mutation import FOLDER, POLICIES, Mutant, Outcome, Reasons, mutants, summary, trial
from mutation import REASONS as PIPELINE_REASONS
from mutation_rules import PRODUCT_RULES, RULES, Rule
from mutation_spelling import lines_that_run, respelled
from sm100_inputs import emulated, operand, product, rounded

from blockscale import emulator as em
from blockscale.dtypes import BFLOAT16, FLOAT32, to_torch
from blockscale.kernels.common import compile_cache
from blockscale.kernels.sm100.config import Config

RESULTS = FOLDER / "emulator_mutants_sm100.json"
ORDERS = POLICIES[:3]  # late, eager, random: a run takes a second or more
_SECONDS = 90


@dataclass(frozen=True)
class Product:
    """A kernel, and the smallest call that comes to all of it: several tiles for a cluster."""

    config: Config
    shape: tuple[int, int, int]
    rules: Sequence[Rule] = (*RULES, *PRODUCT_RULES)

    @cached_property
    def operands(self) -> tuple[Any, Any]:
        m, n, k = self.shape
        return operand(self.config.a_format, m, k, 1), operand(self.config.b_format, n, k, 2)

    @cached_property
    def epilogue(self) -> dict[str, Tensor | None]:
        (m, n, _), config = self.shape, self.config
        generator = torch.Generator().manual_seed(5)
        start = 100 * torch.randn(m, n, generator=generator)
        bias = 100 * torch.randn(n, generator=generator)
        return {
            "alpha": torch.tensor(3e-3) if config.alpha else None,
            "bias": bias.to(to_torch(config.bias)) if config.bias else None,
            "start": start.to(to_torch(config.out_dtype)) if config.accumulate else None,
        }

    @cached_property
    def expected(self) -> Tensor:
        return rounded(product(*self.operands), to_torch(self.config.out_dtype), **self.epilogue)

    @cached_property
    def built(self) -> Any:
        with em.cutedsl(em.Device(self.config.arch, check="all,exit_stores")):
            return compile_cache.build(self.config)

    @cached_property
    def ptx(self) -> str:
        return respelled(self.built.__ptx__)

    def run(self, completion: str, seed: int = 0, ptx: str | None = None) -> bool:
        """One cluster takes all tiles; in random order up to three share them."""
        resident = None if completion == "random" else 1
        launch = em.Device.launch

        def replaced(it: em.Device, _: str, *args: Any, **kwargs: Any) -> em.Report:
            return launch(it, self.ptx if ptx is None else ptx, *args, **kwargs)

        assert self.built
        how: Any = {"completion": completion, "seed": seed, "resident": resident}
        with patch.object(em.Device, "launch", replaced):
            got = emulated(self.config, *self.operands, **self.epilogue, **how)
        return torch.equal(got, self.expected)

    @cached_property
    def lines(self) -> frozenset[int]:
        """Of the text, those that run."""
        return lines_that_run(lambda: self.run("late"))


KERNELS = {
    "mxfp8": Product(
        Config("mxfp8", "mxfp8_e5m2", BFLOAT16, stages=2, alpha=(0,)), (130, 264, 144)
    ),
    "nvfp4, pairs": Product(
        Config(
            "nvfp4",
            "nvfp4",
            BFLOAT16,
            ctas=2,
            cluster=(2, 1),
            stages=2,
            mma_n=256,
            epilogue_stages=1,
        ),
        (264, 776, 288),
    ),
    "mxfp8 x mxfp4, 2x2": Product(
        Config("mxfp8", "mxfp4", FLOAT32, ("mn", "k"), accumulate=True, cluster=(2, 2), stages=2),
        (272, 1032, 256),
    ),
    "mxfp4, added to": Product(
        Config("mxfp4", "mxfp4", BFLOAT16, accumulate=True, bias=BFLOAT16, stages=2),
        (130, 8, 64),
        PRODUCT_RULES,
    ),
}

#: Instructions of which there are many alike: the first place is mutated.
_ALIKE = re.compile(r"tcgen05\.(mma|cp)|cvt|mul|add|st\.shared|setp\.ne")


def every() -> Iterator[Mutant]:
    """All mutants, in order."""
    for name, kernel in KERNELS.items():
        places: dict[str, list[Mutant]] = {}
        for mutant in mutants({name: kernel}, kernel.rules):
            if mutant.line in kernel.lines:
                places.setdefault(mutant.rule, []).append(mutant)
        for found in places.values():
            if not _ALIKE.match(found[0].was):
                yield from found
            else:
                yield found[0]
                if "accumulates" in found[0].rule:  # the first instruction of a tile never does
                    yield found[-1]


_FENCE = (
    "equivalent",
    "of one of those who read an answer: others read it, or a later one, after that, and their "
    "fence before they let it be overwritten is for both reads (8.9.5)",
)
_LAST = (
    "equivalent",
    "of the loader, after its last tile, whose sums are stored only when all that it loaded was "
    "read; or it waits for a stage that is freed later than the one it fills",
)
_BEHIND = (
    "missed",
    "of waits after the last tile: only a loader that falls far behind waits for ever, as it does "
    "with turns of 256 instructions; those of the policy eager are fair",
)
_WHETHER = (
    "equivalent",
    "of those who multiply or ask, who need to know only whether there is another tile",
)
#: As in ``mutation``.
REASONS: Reasons = {
    ("", "delete tcgen05.fence"): PIPELINE_REASONS["", "delete tcgen05.fence"],
    ("", "delete fence.proxy.async"): _FENCE,
    ("", "arrive relaxed"): PIPELINE_REASONS["", "arrive relaxed"],
    ("", "source of tcgen05.cp: base offset"): PIPELINE_REASONS[
        "", "source of tcgen05.cp: base offset"
    ],
    ("", "delete bar.warp.sync"): PIPELINE_REASONS["gemm_nvfp4", "delete bar.warp.sync"],
    ("", "delete mbarrier.try_wait"): _LAST,
    ("", "parity flipped"): _BEHIND,
    ("", "waits at the next mbarrier"): _LAST,
    ("nvfp4, pairs", "waits at the next mbarrier at 2000"): _BEHIND,
    ("", "y of the answer"): _WHETHER,
    ("", "CTA for cluster"): _WHETHER,
    ("", "tcgen05.mma always accumulates"): ("equivalent", "all but the first of a tile do"),
    ("", "tcgen05.mma never accumulates"): ("equivalent", "the first of a tile does not"),
}

WHAT = (
    "tests/emulator/mutation_sm100.py: products for Blackwell (src/blockscale/kernels/sm100) with "
    "one thing wrong in their PTX, run under completion policies until one of them notices"
)


def attempt(mutant: Mutant) -> Outcome:
    return trial(mutant, ORDERS, KERNELS, _SECONDS)


def write(outcomes: list[Outcome]) -> None:
    RESULTS.write_text(
        json.dumps(summary(outcomes, WHAT, KERNELS, REASONS, ORDERS), indent=1) + "\n"
    )


if __name__ == "__main__":
    with ProcessPoolExecutor(
        mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        write(list(pool.map(attempt, every(), chunksize=8)))
