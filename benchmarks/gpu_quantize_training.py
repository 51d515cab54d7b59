"""What training asks of the quantizers on a GPU: bytes beside a CPU's, and time beside plain ones.

    PYTHONPATH=src python3 benchmarks/gpu_quantize_training.py FILE.json

Stochastic rounding, Hadamard transforms, scales of squares and scales chosen by more than the
largest element. A small matrix is compared as a
whole, large ones in bands of rows. Then each kernel is timed with a cold L2 cache, in turn with the
plain one of its format and axes. Takes less than a minute, most of it to compile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import blockscale as bs
from blockscale.bench.cases import Case
from blockscale.bench.contest import turns
from blockscale.bench.timing import Timer

ROWS, COLUMNS, BOTH = (-1,), (-2,), (-1, -2)
SEED, HADAMARD = bs.Seed(7, step=3), bs.Hadamard.random(1)
WHOLE = (1152, 2944)
SHAPES = ((8192, 8192), (4096, 14336))
BAND = 128  # rows that are compared at once
LARGE = 1 << 24  # elements that are not compared as a whole
SCALAR = 2.0**-9
REPEATS = 20


@dataclass(frozen=True)
class Asked:
    """A format along axes, and what is asked for beside that."""

    format: str
    axes: tuple[int, ...]
    name: str = "plain"
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return Case(self.format, self.axes, "tcgen05")

    def run(self, x: Tensor, **other: Any) -> tuple[bs.ScaledTensor, ...]:
        given = {"layout": "tcgen05", "backend": "kernel", **self.given, **other}
        if self.format == "nvfp4":
            given.setdefault("global_scale", SCALAR)
        if self.axes == BOTH:
            return bs.quantize_both(x, self.format, **given)
        return (bs.quantize(x, self.format, self.axes[0], **given),)


STOCHASTIC, SQUARE = {"seed": SEED}, {"square": True}
FOUR, LONG = {"scaling": "four_over_six"}, {"hadamard": bs.Hadamard.random(1, 128)}
EDEN = {**STOCHASTIC, **LONG, "scaling": "ms_eden"}
CASES = (
    Asked("nvfp4", ROWS),
    Asked("nvfp4", ROWS, "stochastic", STOCHASTIC),
    Asked("nvfp4", ROWS, "Hadamard 16", {"hadamard": HADAMARD}),
    Asked("nvfp4", ROWS, "four over six", FOUR),
    Asked("nvfp4", ROWS, "MS-EDEN 128", EDEN),
    Asked("nvfp4", COLUMNS),
    Asked("nvfp4", COLUMNS, "stochastic", STOCHASTIC),
    Asked("nvfp4", COLUMNS, "Hadamard 16", {"hadamard": HADAMARD}),
    Asked("nvfp4", COLUMNS, "stochastic, Hadamard 16", {**STOCHASTIC, "hadamard": HADAMARD}),
    Asked("nvfp4", COLUMNS, "Hadamard 128", LONG),
    Asked("nvfp4", COLUMNS, "four over six", FOUR),
    Asked("nvfp4", COLUMNS, "four over six, Hadamard 16", {**FOUR, "hadamard": HADAMARD}),
    Asked("nvfp4", COLUMNS, "MS-EDEN 128", EDEN),
    Asked("nvfp4", BOTH),
    Asked("nvfp4", BOTH, "square", SQUARE),
    Asked("nvfp4", BOTH, "four over six", FOUR),
    Asked("nvfp4", BOTH, "four over six, square", {**FOUR, **SQUARE}),
    Asked("nvfp4", BOTH, "stochastic", STOCHASTIC),
    Asked("mxfp8", ROWS),
    Asked("mxfp8", ROWS, "stochastic", STOCHASTIC),
    Asked("mxfp8", COLUMNS),
    Asked("mxfp8", COLUMNS, "stochastic", STOCHASTIC),
    Asked("mxfp8", BOTH),
    Asked("mxfp8", BOTH, "square", SQUARE),
)


def matrix(shape: tuple[int, int]) -> Tensor:
    """Normal numbers with outliers, zeros and, in one block, no number."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, generator=generator, device="cuda")
    x[:, ::97] *= 50
    x[::64, :16] = 0
    x[3, 5] = float("nan")
    return x.to(torch.bfloat16)


# --- bytes ----------------------------------------------------------------------------------------


def bands(rows: int) -> list[int]:
    """First rows of those that are compared."""
    return [0, rows // 2 // BAND * BAND, rows - BAND]


def wrong(asked: Asked, x: Tensor) -> Iterator[str]:
    """What differs from a CPU's bytes; the elements and scales of bands of rows."""
    found = [q.to_layout("compact") for q in asked.run(x)]
    large = x.numel() > LARGE
    for first in bands(x.shape[0]) if large else [0]:
        part = x[first : first + BAND] if large else x
        given: dict[str, Any] = {"layout": "compact", "backend": "auto"}
        if "seed" in asked.given:
            given["seed"] = bs.Seed(SEED.value, SEED.step, (first, 0), tuple(x.shape))
        wanted = asked.run(part.cpu(), **given)
        for got, want, axis in zip(found, wanted, asked.axes, strict=True):
            for name in ("qdata", "qscale"):
                whole, here = getattr(got, name), getattr(want, name)
                start = first * here.shape[0] // part.shape[0]
                there = whole[start : start + here.shape[0]].cpu()
                if not torch.equal(*(t.contiguous().view(torch.uint8) for t in (there, here))):
                    yield f"{asked.case.name}, {asked.name}: {name} along {axis} from {first} on"


def wrong_scalars(x: Tensor) -> Iterator[str]:
    """Global scales that differ from a CPU's."""
    for axis in (-1, -2):
        for hadamard in (None, HADAMARD):
            given = {"hadamard": hadamard, "axis": axis}
            got = bs.quantize(x, "nvfp4", backend="kernel", **given).global_scale
            want = bs.quantize(x.cpu(), "nvfp4", **given).global_scale
            if not torch.equal(got.cpu(), want):
                yield f"global scale along {axis}, hadamard={hadamard}"


# --- times ----------------------------------------------------------------------------------------


def measure(shape: tuple[int, int], timer: Timer) -> Iterator[dict[str, Any]]:
    x = matrix(shape)
    # in tensors, so that no other kernel makes some of them
    scalar, step = torch.full((), SCALAR, device="cuda"), torch.tensor(SEED.step, device="cuda")
    held = bs.Seed(SEED.value, step)
    for _, each in groupby(CASES, key=lambda asked: (asked.format, asked.axes)):
        asked = list(each)
        calls = {}
        for one in asked:
            given = {"global_scale": scalar} if one.format == "nvfp4" else {}
            given |= {"seed": held} if "seed" in one.given else {}
            calls[one.name] = lambda one=one, given=given: one.run(x, **given)
        yield from _rows(asked[0].case, shape, turns(calls, timer, REPEATS))
    words, _ = HADAMARD.for_op()
    calls = {
        name: (lambda given=given: torch.ops.blockscale.global_scale(x, "nvfp4", "kernel", *given))
        for name, given in (("plain", ()), ("rows", (-1, words)), ("columns", (-2, words)))
    }
    times = turns(calls, timer, REPEATS)
    for name, took in times.items():
        yield {"case": f"global scale, {name}", **_row(shape, 2.0, took, times["plain"])}


def _rows(case: Case, shape: tuple[int, int], times: dict[str, Any]) -> Iterator[dict[str, Any]]:
    each = case.nbytes(*shape) / shape[0] / shape[1]
    for name, took in times.items():
        yield {"case": f"{case.name}, {name}", **_row(shape, each, took, times["plain"])}


def _row(
    shape: tuple[int, int], each: float, took: float | str, plain: float | str
) -> dict[str, Any]:
    where: dict[str, Any] = {"rows": shape[0], "columns": shape[1]}
    for time in (took, plain):
        if isinstance(time, str):
            return where | {"why": time}
    speed = shape[0] * shape[1] * each / took / 1e3
    return where | {"microseconds": took, "gigabytes_per_second": speed, "of_plain": plain / took}


def main() -> None:
    x = matrix(WHOLE)
    found = [*wrong_scalars(x), *(text for asked in CASES for text in wrong(asked, x))]
    for shape in SHAPES:
        found += [text for asked in CASES for text in wrong(asked, matrix(shape))]
    print("\n".join(found) or "all bytes are a CPU's")
    timer, rows = Timer(), []
    for shape in SHAPES:
        for row in measure(shape, timer):
            rows.append(row)
            print(row, flush=True)
    device = torch.cuda.get_device_name()
    result = {"device": device, "torch": torch.__version__, "wrong": found, "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
