"""Products for Blackwell in every combination that has code of its own, and the orders in which the
emulator runs them.

A line of TABLE is two kernels: of single blocks of threads, and of pairs whose tensor cores work
together. Each multiplies the smallest matrices that come to all of it: more tiles than clusters
that are there at once, more K blocks than stages, and tails in all dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import sm100_quantized
import torch
from sm100_inputs import Operand, emulated, operand, product, rounded
from torch import Tensor

from blockscale.dtypes import BFLOAT16, FLOAT16, FLOAT32, UINT8, to_torch
from blockscale.kernels.sm100.config import Config
from blockscale.kernels.sm100.quantizing_config import Quantizing

__all__ = ["CASES", "EPILOGUES", "LAYOUTS", "ONE_TILE", "ORDERS", "PAIRS", "Case"]

#: Eager and late take nothing from a seed: there is one run of each.
ORDERS = (("late", 0), ("eager", 0), *(("random", seed) for seed in range(20)))

LAYOUTS = {"TN": ("k", "k"), "TT": ("mn", "k"), "NN": ("k", "mn"), "NT": ("mn", "mn")}
_MX = ("mxfp8", "mxfp8_e5m2", "mxfp4")
PAIRS = (*((a, b) for a in _MX for b in _MX), ("nvfp4", "nvfp4"))

#: What becomes of the sums: fields of a configuration.
EPILOGUES: dict[str, dict[str, Any]] = {
    "bf16": {"out_dtype": BFLOAT16},
    "fp16": {"out_dtype": FLOAT16},
    "fp32": {"out_dtype": FLOAT32},
    "bf16 added": {"out_dtype": BFLOAT16, "accumulate": True, "alpha": (0,), "bias": BFLOAT16},
    "fp16 added": {"out_dtype": FLOAT16, "accumulate": True, "bias": FLOAT32},
    "fp32 added": {"out_dtype": FLOAT32, "accumulate": True, "alpha": (0,), "bias": FLOAT16},
    "bf16 one by one": {"out_dtype": BFLOAT16, "alpha": (0,), "tma_store": False},
    "fp32 one by one": {"out_dtype": FLOAT32, "accumulate": True, "tma_store": False},
    "swiglu-mxfp8": {"quantizing": Quantizing("mxfp8", swiglu=True), "bias": BFLOAT16},
    "swiglu-nvfp4": {"quantizing": Quantizing("nvfp4", swiglu=True)},
    "mxfp8": {"quantizing": Quantizing("mxfp8")},
    "mxfp8_e5m2": {"quantizing": Quantizing("mxfp8_e5m2")},
    "mxfp4": {"quantizing": Quantizing("mxfp4")},
    "nvfp4": {"quantizing": Quantizing("nvfp4")},
}

# Formats of A and B, layout, clusters of single blocks and of pairs, columns, epilogue.
TABLE = """
mxfp8       mxfp8       TN  1x1 2x1  128  bf16
mxfp8       mxfp8_e5m2  TT  2x1 2x1  128  bf16 added
mxfp8       mxfp4       TT  1x1 2x2  128  fp32
mxfp8_e5m2  mxfp8       NN  1x1 2x1  256  fp16
mxfp8_e5m2  mxfp8_e5m2  NT  1x1 2x1  256  fp32 added
mxfp8_e5m2  mxfp4       TN  4x1 4x1  128  fp16 added
mxfp4       mxfp8       NN  1x1 2x1  256  bf16 one by one
mxfp4       mxfp8_e5m2  TN  2x1 2x1  128  fp32 one by one
mxfp4       mxfp4       TN  1x1 2x1  256  swiglu-mxfp8
nvfp4       nvfp4       TN  2x1 2x1  256  swiglu-nvfp4
nvfp4       nvfp4       TN  2x2 2x2  128  bf16
mxfp8       mxfp8       TN  1x1 2x1  128  mxfp8
nvfp4       nvfp4       TN  1x1 2x1  128  nvfp4
mxfp4       mxfp4       TN  1x1 2x1  128  mxfp4
mxfp8_e5m2  mxfp8       TN  1x1 2x1  128  mxfp8_e5m2
"""


@dataclass(frozen=True)
class Case:
    """A kernel and a shape: M, rows of B, K."""

    config: Config
    shape: tuple[int, int, int]

    @cached_property
    def operands(self) -> tuple[Operand, Operand]:
        m, n, k = self.shape
        return operand(self.config.a_format, m, k, 1), operand(self.config.b_format, n, k, 2)

    @cached_property
    def sums(self) -> np.ndarray:
        return product(*self.operands)

    @cached_property
    def epilogue(self) -> dict[str, Tensor | None]:
        """Values of the size of the sums, where these are added to something or go through exp."""
        (m, n, _), config = self.shape, self.config
        generator = torch.Generator().manual_seed(5)
        size = float(np.median(np.abs(self.sums)))
        alpha = torch.tensor(4 / size) if config.alpha else None
        size = 4.0 if config.alpha else size
        bias = size * torch.randn(n, generator=generator)
        given = {"alpha": alpha, "bias": bias.to(to_torch(config.bias)) if config.bias else None}
        if config.quantizing is None:
            start = size * torch.randn(m, n, generator=generator)
            given["start"] = start.to(to_torch(config.out_dtype)) if config.accumulate else None
        elif config.quantizing.stored.has_global_scale:
            given["global_scale"] = torch.tensor(0.037)
        return given

    @cached_property
    def expected(self) -> tuple[Tensor, ...]:
        if self.config.quantizing is None:
            return (rounded(self.sums, to_torch(self.config.out_dtype), **self.epilogue),)
        return sm100_quantized.expected(self.config.quantizing, self.sums, **self.epilogue)

    def run(self, completion: str, seed: int) -> tuple[Tensor, ...]:
        """What the kernel gives in this order; 2 clusters take tiles, at random 1 to 3."""
        order: Any = {"completion": completion, "seed": seed, "resident": None}
        if self.config.quantizing is None:
            return (emulated(self.config, *self.operands, **self.epilogue, **order),)
        return sm100_quantized.emulated(self.config, *self.operands, **self.epilogue, **order)

    def right(self, completion: str, seed: int) -> bool:
        """Whether it is the reference, bit for bit."""
        got = self.run(completion, seed)
        return all(
            torch.equal(x.view(torch.uint8), y.view(torch.uint8))
            for x, y in zip(got, self.expected, strict=True)
        )


def _shape(config: Config) -> tuple[int, int, int]:
    """Four tiles of single blocks; three of clusters, one beside the other."""
    (rows, columns), across = config.tile, config.cluster[1]
    n = columns * across * (1 if config.cluster_size == 1 else 2) + 32
    n = config.b_halves * n + (not config.tma_store and config.majors[1] == "k")
    tail = 128 if any(config.unpacked) else 32 if config.kind.packed else 16
    return rows + 16, n, 2 * config.kind.block_k + tail


def _cases() -> Iterator[tuple[str, Case]]:
    for line in filter(None, TABLE.split("\n")):
        a, b, layout, single, pair, columns, epilogue = line.split(maxsplit=6)
        for ctas, cluster in ((1, single), (2, pair)):
            down, across = map(int, cluster.split("x"))
            fields: dict[str, Any] = {"out_dtype": UINT8, "alpha": ()}
            fields |= EPILOGUES[epilogue]
            if "quantizing" in fields:
                fields["alpha"] = (0,)
            config = Config(
                a,
                b,
                majors=LAYOUTS[layout],
                mma_n=int(columns),
                ctas=ctas,
                cluster=(down, across),
                stages=2,
                epilogue_stages=1,
                **fields,
            )
            yield (
                f"{a} x {b} {layout}, {ctas} of {cluster}, {epilogue}",
                Case(config, _shape(config)),
            )


CASES = dict(_cases())
#: Some once more, of each kind of instruction, for one tile that is not full.
ONE_TILE = {
    name: Case(case.config, (8, 32, case.config.kind.block_k))
    for name, case in CASES.items()
    if name.endswith((", bf16", ", mxfp4"))
}
