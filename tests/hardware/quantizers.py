"""The quantizers' kernels on a GPU beside the reference: every byte, and what CI cannot run.

    PYTHONPATH=src:tests:tests/kernels python3 tests/hardware/quantizers.py --json FILE

Compiles all kernels first, in several processes at once, into the cache on disk. With --launch it
only launches each kernel on small inputs, for compute-sanitizer.
"""

import argparse
import json
import os
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu_bench import expected, nasty
from torch import Tensor

from blockscale import reference
from blockscale.formats import formats
from blockscale.kernels.common.gpu import Gpu
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.quantizers import calls as quantizers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS, COLUMNS, BOTH = (-1,), (-2,), (-1, -2)
SHAPES = ((1, 32), (127, 96), (128, 128), (129, 160), (1000, 2880), (4096, 7168))
RANDOM = 200


@dataclass(frozen=True)
class Case:
    format: str
    axes: tuple[int, ...]
    layouts: tuple[str, ...]
    dtype: torch.dtype = BF16
    producer: str = "load"
    experts: int = 0
    given: dict[str, Any] = field(default_factory=dict, hash=False)

    def run(
        self,
        x: Tensor,
        grad: Tensor | None = None,
        offsets: Tensor | None = None,
        gpu: Gpu | None = None,
    ) -> Any:
        given = dict(self.given)
        fmt = formats[self.format]
        if fmt.has_global_scale:
            given["global_scale"] = torch.tensor(0.37, device=x.device)
        others, scalar = () if grad is None else (grad,), given.get("global_scale")
        names = {name: value for name, value in self.given.items() if name != "global_scale"}
        asked = quantizers.Request(
            self.format, self.axes, self.layouts, producer=self.producer, **names
        )
        results = quantizers.quantize(
            x,
            asked,
            global_scale=scalar,
            others=others,
            offsets=offsets,
            gpu=gpu,
        )
        return results, given

    def inputs(self, rows: int, columns: int, seed: int) -> tuple[Tensor, ...]:
        """x, the gradient and the experts' ends, or None for the last two."""
        if self.producer == "load":
            x, grad = nasty(rows, columns, self.dtype, seed), None
        else:
            columns = -(-columns // 256) * 256
            x = (torch.randn(rows, columns) * 3).to(self.dtype)
            grad = torch.randn(rows, columns // 2).to(self.dtype)
            grad = grad.cuda() if self.producer == "swiglu_backward" else None
        offsets = None
        if self.experts:
            ends = sorted(random.Random(seed).randint(0, rows) for _ in range(self.experts))
            offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        return x.cuda(), grad, offsets


def cases() -> list[Case]:
    found = []
    layouts = {"mxfp8": ("tcgen05", "compact", "packed"), "fp8_1x128": ("sm90", "compact")}
    for name in ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp8_1x128", "fp8_128x128"):
        square = formats[name].block[0] > 1
        for layout in layouts.get(name, ("compact",) if square else ("tcgen05",)):
            for axes in (ROWS, COLUMNS, BOTH):
                for nonfinite in ("propagate", "te"):
                    given = {"nonfinite": nonfinite}
                    found.append(Case(name, axes, (layout,) * len(axes), given=given))
    for dtype in (FP16, FP32):
        found += [Case("mxfp8", axes, ("tcgen05",) * len(axes), dtype) for axes in (ROWS, BOTH)]
        found += [Case(name, BOTH, ("tcgen05",) * 2, dtype) for name in ("mxfp4", "nvfp4")]
        found.append(Case("fp8_1x128", BOTH, ("sm90",) * 2, dtype))
    for rounding in ("floor", "even"):
        found.append(Case("mxfp8", ROWS, ("tcgen05",), given={"scale_rounding": rounding}))
    found.append(Case("fp8_1x128", BOTH, ("sm90",) * 2, given={"scale_rounding": "rceil"}))
    for producer in ("swiglu", "swiglu_backward"):
        found += [Case("mxfp8", axes, ("tcgen05",) * len(axes), producer=producer)
                  for axes in (ROWS, COLUMNS, BOTH)]  # fmt: skip
        found.append(Case("fp8_1x128", BOTH, ("sm90",) * 2, producer=producer))
        found.append(Case("nvfp4", BOTH, ("tcgen05",) * 2, producer=producer))
    for name, layout in (
        ("mxfp8", "packed"), ("fp8_1x128", "sm90"), ("fp8_128x128", "compact")
    ):  # fmt: skip
        found += [Case(name, axes, (layout,) * len(axes), given={"k_major": True})
                  for axes in (COLUMNS, BOTH)]  # fmt: skip
    for producer in ("swiglu", "swiglu_backward"):
        found.append(Case("mxfp8", BOTH, ("packed",) * 2, BF16, producer, given={"k_major": True}))
    for layout, name in (("tcgen05", "mxfp8"), ("sm90", "fp8_1x128")):
        found.append(Case(name, ROWS, (layout,), experts=8))
        found.append(Case(name, BOTH, (layout, "compact"), experts=40))
    return found


def equal(case: Case, rows: int, columns: int, seed: int) -> bool:
    x, grad, offsets = case.inputs(rows, columns, seed)
    results, given = case.run(x, grad, offsets)
    made = x
    if case.producer == "swiglu":
        made = reference.swiglu(x)
    elif case.producer == "swiglu_backward":
        made = reference.swiglu_backward(grad, x)
    same = True
    for axis, layout, pair in zip(case.axes, case.layouts, results, strict=True):
        wanted = expected(made, case.format, axis, layout, offsets=offsets, **given)
        for got, want in zip(pair, wanted, strict=True):
            a, b = (t.contiguous().view(torch.uint8) for t in (got, want))
            same = same and torch.equal(a, b)
    if not same:
        print("differs:", case, rows, columns, seed, flush=True)
    return same


def norms(shapes: Any) -> Counter:
    found: Counter = Counter()
    for rows, columns in shapes:
        for name in ("mxfp8", "nvfp4", "fp8_1x128"):
            x, weight = nasty(rows, columns, BF16).cuda(), torch.randn(columns, device="cuda")
            given: dict[str, Any] = {"scale_rounding": formats[name].default_scale_rounding}
            if name == "nvfp4":
                given["global_scale"] = torch.tensor(0.37, device="cuda")
            layout = "sm90" if name == "fp8_1x128" else "tcgen05"
            asked = quantizers.Request(name, (-1,), (layout,), given["scale_rounding"])
            scalar = given.get("global_scale")
            got = quantizers.rmsnorm(x, weight, asked, eps=1e-5, global_scale=scalar)
            y, rstd = reference.rmsnorm(x, weight, 1e-5)
            wanted = (*expected(y, name, -1, layout, **given), rstd)
            same = all(
                torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
                for a, b in zip(got, wanted, strict=True)
            )
            found["equal" if same else "different"] += 1
            if not same:
                print("differs: rmsnorm", name, rows, columns, flush=True)
    return found


def every_bf16() -> Counter:
    """Each of the 65,536 patterns in each position of a block, among zeros and among ones."""
    found: Counter = Counter()
    patterns = torch.arange(1 << 16, device="cuda").to(torch.int16).view(BF16)
    for position in range(32):
        for other in (0.0, 1.0):
            x = torch.full((1 << 16, 32), other, device="cuda", dtype=BF16)
            x[:, position] = patterns
            for case, each in (
                (Case("mxfp8", ROWS, ("tcgen05",)), x),
                (Case("mxfp8", COLUMNS, ("tcgen05",)), x.mT.contiguous()),
                (Case("nvfp4", ROWS, ("tcgen05",)), x),
            ):
                results, given = case.run(each)
                wanted = expected(each, case.format, case.axes[0], case.layouts[0], **given)
                same = all(
                    torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
                    for a, b in zip(results[0], wanted, strict=True)
                )
                found["equal" if same else "different"] += 1
    return found


def repeated(runs: int = 1000) -> Counter:
    """The same call again and again on four streams at once."""
    x = nasty(4096, 7168, BF16, 5).cuda()
    case = Case("mxfp8", BOTH, ("tcgen05",) * 2)
    first = [t.view(torch.uint8) for pair in case.run(x)[0] for t in pair]
    streams = [torch.cuda.Stream() for _ in range(4)]
    differing = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for i in range(runs):
        with torch.cuda.stream(streams[i % 4]):
            again = [t.view(torch.uint8) for pair in case.run(x)[0] for t in pair]
            for a, b in zip(again, first, strict=True):
                differing[i % 4] += (a != b).any()
    torch.cuda.synchronize()
    bad = int(sum(differing))
    return Counter({"equal": runs - bad, "different": bad})


def large() -> Counter:
    """More than 2^31 elements, of which parts are compared."""
    rows, columns = (1 << 21) + 130, 1056
    x = torch.randn(rows, columns, device="cuda", dtype=BF16)
    case = Case("mxfp8", BOTH, ("compact",) * 2)
    (row, row_scale), (column, column_scale) = case.run(x)[0]
    found: Counter = Counter()
    for start in (0, 1 << 20, (1 << 21) - 64, rows - 130):
        start = start // 32 * 32
        part = slice(start, min(start + 128, rows // 32 * 32))
        blocks = slice(part.start // 32, part.stop // 32)
        want = expected(x[part], "mxfp8", -1, "compact")
        turned = expected(x[part], "mxfp8", -2, "compact")
        pairs = ((row[part], want[0]), (row_scale[part], want[1]),
                 (column[part], turned[0]), (column_scale[blocks], turned[1]))  # fmt: skip
        for a, b in pairs:
            same = torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
            found["equal" if same else "different"] += 1
    return found


def warm(part: int, parts: int) -> None:
    """Compile the kernels of every parts-th call."""
    for i, (case, shape) in enumerate((c, s) for c in cases() for s in SHAPES[:5]):
        if i % parts == part:
            case.run(*case.inputs(*shape, 0))
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--launch", action="store_true")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.launch:
        own = gpu_of(torch.device("cuda", torch.cuda.current_device()))
        assert own is not None
        for gpu in (
            own,
            replace(own, multiprocessors=0),
        ):  # kernels of small tensors, of large ones
            for case in cases()[arguments.part :: arguments.parts]:
                case.run(*case.inputs(129, 288, 0), gpu)
        norms([(129, 288)])
        quantizers.global_scale(nasty(129, 288, BF16).cuda(), formats["nvfp4"])
        torch.cuda.synchronize()
        print("launched all kernels")
        return
    begun = time.time()
    workers = min(14, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(warm, i, workers) for i in range(workers)]:
            done.result()
    print(f"compiled after {time.time() - begun:.0f} s", flush=True)
    found: dict[str, Counter] = {"shapes": Counter(), "random shapes": Counter()}
    for case in cases():
        for shape in SHAPES:
            found["shapes"]["equal" if equal(case, *shape, 1) else "different"] += 1
    print(f"shapes after {time.time() - begun:.0f} s", found, flush=True)
    draw, some = random.Random(0), cases()
    for i in range(RANDOM):
        shape = draw.randint(1, 700), draw.choice((32, 96, 128, 160, 2880))
        same = equal(draw.choice(some), *shape, i)
        found["random shapes"]["equal" if same else "different"] += 1
    found["RMSNorm"] = norms(((1, 32), (129, 288), (1000, 2880), (4096, 7168)))
    found["every bf16 pattern in every position"] = every_bf16()
    found["1000 runs on four streams"] = repeated()
    found["more than 2^31 elements"] = large()
    print(f"all after {time.time() - begun:.0f} s", flush=True)
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cases": len(cases()),
        "compared": {name: dict(each) for name, each in found.items()},
    }
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
