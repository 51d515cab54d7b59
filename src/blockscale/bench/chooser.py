"""The kernel that the chooser takes for FP8 with scales of 128, beside every one that it could."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch

from ..dtypes import BFLOAT16
from ..kernels.common.compile_all import compile_all
from ..kernels.common.epilogue import Epilogue
from ..kernels.common.runtime import gpu_of
from ..kernels.sm90.config import Config, candidates, choose_config
from ..quantize import quantize
from .contest import Call, ready, turns
from .llm_shapes import LlmShape
from .timing import Timer

__all__ = ["Choice", "compare", "describe", "described", "summary"]

_REPEATS = 12  # of each of many


@dataclass(frozen=True, slots=True)
class Choice:
    """``of_best``: the time of the best candidate over that of the chosen one."""

    model: str
    layer: str
    m: int
    n: int
    k: int
    chosen: str
    best: str
    microseconds: float  # of the chosen one
    tflops: float
    of_best: float
    candidates: dict[str, float]  # microseconds
    failed: dict[str, str]  # and why

    @property
    def shape(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


def compare(
    shapes: Sequence[LlmShape], timer: Timer, multiprocessors: int
) -> Iterator[Choice | str]:
    """Time all candidates at each shape; text where the chosen one could not run, and why."""
    compile_all(config for shape in shapes for config in _candidates(shape))
    for shape in shapes:
        calls: dict[str, Call] = {}
        failed: dict[str, str] = {}
        chosen = describe(_chosen(shape))
        for name, call in _calls(shape, timer.device, multiprocessors):
            if isinstance(call, str):
                failed[name] = call
            else:
                calls[name] = call
        took = {}
        for name, time in turns(calls, timer, _REPEATS).items():
            if isinstance(time, str):
                failed[name] = time
            else:
                took[name] = time
        if chosen not in took:
            yield f"{shape.model}, {shape.layer}, {shape.m} tokens: {failed[chosen]}"
            continue
        best = min(took, key=lambda name: took[name])
        mine, flops = took[chosen], 2 * shape.m * shape.n * shape.k
        where = shape.model, shape.layer, shape.m, shape.n, shape.k
        rate = flops / mine / 1e6
        yield Choice(*where, chosen, best, mine, rate, took[best] / mine, took, failed)


def _calls(shape: LlmShape, device: str, multiprocessors: int) -> Iterator[tuple[str, Call | str]]:
    x, w = (
        torch.randn(n, shape.k, device=device, dtype=torch.bfloat16) for n in (shape.m, shape.n)
    )
    a, b = quantize(x, "fp8_1x128", layout="sm90"), quantize(w, "fp8_128x128")
    given = a.qdata.view(torch.uint8), a.scale, b.qdata.view(torch.uint8), b.scale
    d = torch.empty(shape.m, shape.n, device=device, dtype=torch.bfloat16)
    for config in _candidates(shape):

        def prepare(config: Config = config) -> Call:
            gpu = gpu_of(x.device)
            assert gpu is not None
            return partial(gpu.load(config), *given, d, None, None, None, None, multiprocessors)

        yield describe(config), ready(prepare)


def _chosen(shape: LlmShape) -> Config:
    return choose_config((shape.m, shape.n, shape.k), Epilogue())


def _candidates(shape: LlmShape) -> list[Config]:
    """The chosen one, then the others."""
    return candidates((shape.m, shape.n, shape.k), Epilogue())


#: Fields that files of results call otherwise.
_RESULTS = {
    "warpgroup_split_k": "alternate",
    "split_k": "split",
    "mma_n": "batch",
    "epilogue_stages": "c_buffers",
}


def describe(config: Config) -> str:
    """Names the fields of a configuration that are not the default's, as ``name=value``."""
    plain = Config(config.out_dtype)
    changed = [f.name for f in fields(config) if getattr(config, f.name) != getattr(plain, f.name)]
    pairs = [f"{_RESULTS.get(name, name)}={getattr(config, name)}" for name in changed]
    return " ".join(pair.replace(" ", "") for pair in pairs)


def described(name: str) -> Config:
    """The configuration that :func:`describe` said, to bf16: that of a file of results, which the
    chooser may not take any more."""
    known = {_RESULTS.get(f.name, f.name): f.name for f in fields(Config)}
    pairs = (pair.split("=") for pair in name.split())
    return Config(BFLOAT16, **{known[key]: ast.literal_eval(value) for key, value in pairs})


def summary(found: Iterable[Choice]) -> tuple[float, float]:
    """Geometric mean and least of ``of_best``."""
    shares = [choice.of_best for choice in found]
    return math.exp(sum(map(math.log, shares)) / len(shares)), min(shares)
