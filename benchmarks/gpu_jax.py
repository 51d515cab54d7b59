"""Device time of what JAX calls, beside torch's side, in one process on one GPU.

    python benchmarks/gpu_jax.py OUT.json

Both get the same arrays, and their results are compared byte for byte first. Then they run in
turns, each with a cold L2 cache, under torch's profiler, which sees what XLA launches, too:
microseconds are those of all kernels and copies of a call, the median of ``REPEATS``. XLA's
formulas are the same functions without kernels.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import torch
import typer
from torch.autograd import DeviceType

import blockscale as bs
import blockscale.jax as bsj

REPEATS = 15
FLUSH_BYTES = 256 << 20
MARK = "spin_kernel"  # what ``torch.cuda._sleep`` launches


class Case(NamedTuple):
    """A call of both, each with what it takes."""

    name: str
    torch: Callable[[], Any]
    jax: Callable[[], Any]


def main(out: Path, only: str = "") -> None:
    rows = []
    for case in [*quantizers(), *products(), *groups(), *columns()]:
        if only not in case.name:
            continue
        try:
            row = measured(case)
        except Exception as error:  # the others count, too
            row = {"name": case.name, "failed": f"{type(error).__name__}: {error}"[:2000]}
        rows.append(row)
        print({k: v for k, v in row.items() if k != "kernels"}, flush=True)
        versions = {"torch": torch.__version__, "jax": jax.__version__}
        about = {"gpu": torch.cuda.get_device_name(), **versions, "rows": rows}
        out.write_text(json.dumps(about, indent=1) + "\n")
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    print(
        f"{len(ratios)} cases: {geometric_mean(ratios):.3f} of torch's time, {max(ratios)} at most"
    )


def measured(case: Case) -> dict[str, Any]:
    same = octets(case.torch()) == octets(case.jax())
    calls = {"torch": case.torch, "jax": case.jax}
    buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for call in calls.values():
        ready(call())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for i in range(REPEATS):
            for call in calls.values():
                buffer.fill_(i)
                torch.cuda._sleep(1000)
                torch.cuda.synchronize()
                ready(call())
                torch.cuda._sleep(1000)
                torch.cuda.synchronize()
    took = {name: list[float]() for name in calls}
    names = {name: list[str]() for name in calls}
    events = [each for each in seen.events() if each.device_type == DeviceType.CUDA]
    events.sort(key=lambda each: each.time_range.start)
    marks = [i for i, each in enumerate(events) if MARK in each.name]
    for n, (first, last) in enumerate(zip(marks[::2], marks[1::2], strict=True)):
        name = list(calls)[n % 2]
        inside = events[first + 1 : last]
        took[name].append(sum(each.time_range.elapsed_us() for each in inside))
        names[name] = [each.name[:80] for each in inside]
    us = {name: round(median(each), 2) for name, each in took.items()}
    ratio = round(us["jax"] / us["torch"], 3)
    return {"name": case.name, "same": same, "us": us, "ratio": ratio, "kernels": names}


def ready(result: Any) -> None:
    jax.block_until_ready(result)
    torch.cuda.synchronize()


def octets(result: Any) -> list[bytes]:
    """Of all arrays of a result."""
    if isinstance(result, bs.ScaledTensor):
        parts = result.qdata, result.qscale, result.global_scale
        return [each for part in parts if part is not None for each in octets(part)]
    if isinstance(result, bsj.ScaledArray):
        return octets(bsj.to_torch(result))
    if isinstance(result, torch.Tensor):
        return [result.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()]
    if isinstance(result, tuple | list):
        return [each for part in result for each in octets(part)]
    return octets(torch.from_dlpack(result))


def normal(*shape: int, seed: int = 0) -> tuple[torch.Tensor, jax.Array]:
    """The same bf16 numbers for both."""
    made = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=made, device="cuda").bfloat16()
    return x, jnp.array(jnp.from_dlpack(x))


def quantizers() -> list[Case]:
    found = []
    for shape in ((4096, 4096), (16384, 7168), (16, 4096)):
        x, y = normal(*shape)
        ways: list[dict[str, Any]] = [
            {"format": "mxfp8"}, {"format": "mxfp8", "axis": -2}, {"format": "mxfp4"},
            {"format": "nvfp4"}, {"format": "mxfp8", "layout": "tcgen05"},
            {"format": "fp8_1x128", "layout": "sm90"}, {"format": "fp8_128x128", "pad": True},
        ]  # fmt: skip
        for how in ways:
            if how.get("axis") == -2 and shape[0] % 32:
                continue
            ours = jax.jit(partial(bsj.quantize, **how))
            name = " ".join(map(str, how.values()))
            found.append(
                Case(f"quantize {shape} {name}", partial(bs.quantize, x, **how), partial(ours, y))
            )
        if shape[0] % 32 == 0:
            both = jax.jit(partial(bsj.quantize_both, format="mxfp8"))
            found.append(
                Case(
                    f"quantize_both {shape} mxfp8",
                    partial(bs.quantize_both, x, "mxfp8"),
                    partial(both, y),
                )
            )
    return found


def products() -> list[Case]:
    found = []
    layouts = {"fp8_1x128": "sm90"}
    for m, n, k in ((4096, 4096, 4096), (8192, 2112, 7168), (64, 7168, 16384), (1, 4096, 14336)):
        x, w = normal(m, k, seed=1), normal(n, k, seed=2)
        for left, right in (
            ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("fp8_1x128", "fp8_128x128"),
            (None, "mxfp8"), (None, "nvfp4"),
        ):  # fmt: skip
            pair = []
            for given, format in zip((x, w), (left, right), strict=True):
                layout = layouts.get(format or "", "compact")
                one, other = given
                if format is not None:
                    one = bs.quantize(one, format, layout=layout, pad=True)
                    other = bsj.quantize(other, format, layout=layout, pad=True)
                pair.append((one, other))
            (a, c), (b, d) = pair
            ours = jax.jit(lambda c, d: bsj.gemm(c, d.mT))
            found.append(
                Case(
                    f"gemm {m} x {n} x {k} {left or 'bf16'} {right}",
                    partial(bs.gemm, a, b.mT),
                    partial(ours, c, d),
                )
            )
    return found


def groups() -> list[Case]:
    found = []
    for count, m, n, k in ((8, 8192, 4096, 2048), (32, 4096, 2048, 4096)):
        x, w = normal(m, k, seed=1), normal(count, n, k, seed=2)
        ends = torch.arange(1, count + 1, device="cuda", dtype=torch.int32) * (m // count)
        for left, right in (("fp8_1x128", "fp8_128x128"), ("mxfp8", "mxfp8"), (None, "nvfp4")):
            layout = "sm90" if left == "fp8_1x128" else "compact"
            a, c = x
            if left is not None:
                a, c = bs.quantize(a, left, layout=layout), bsj.quantize(c, left, layout=layout)
            b, d = bs.quantize(w[0], right), bsj.quantize(w[1], right)
            ours = jax.jit(lambda c, d, e: bsj.grouped_gemm(c, d.mT, e))
            theirs = partial(bs.grouped_gemm, a, b.mT, ends)
            name = f"grouped_gemm {count} groups, {m} x {n} x {k} {left or 'bf16'} {right}"
            found.append(Case(name, theirs, partial(ours, c, d, jnp.array(jnp.from_dlpack(ends)))))
    return found


def columns() -> list[Case]:
    """Of groups along K: quantizing both axes, as a backward does, and the product (wgrad)."""
    found = []
    for count, m, n, k in ((8, 4096, 2048, 8192), (32, 2048, 4096, 4096)):
        g, x = normal(k, m, seed=1), normal(k, n, seed=2)
        ends = torch.arange(1, count + 1, device="cuda", dtype=torch.int32) * (k // count)
        given = jnp.array(jnp.from_dlpack(ends))
        for name, layout in (("fp8_1x128", "sm90"), ("mxfp8", "compact"), ("nvfp4", "compact")):
            how: dict[str, Any] = {"format": name, "k_major": True}
            both = jax.jit(lambda y, e, how=how: bsj.quantize_both(y, offsets=e, **how))
            theirs = partial(bs.quantize_both, g[0], offsets=ends, **how)
            title = f"{count} groups, {k} x {m} {name}"
            found.append(Case(f"quantize_both {title}", theirs, partial(both, g[1], given)))
            how |= {"axis": -2, "layout": layout}
            a, b = (bs.quantize(each[0], offsets=ends, **how) for each in (g, x))
            c, d = (bsj.quantize(each[1], offsets=given, **how) for each in (g, x))
            ours = jax.jit(lambda c, d, e: bsj.grouped_gemm(c.mT, d, e))
            product = partial(bs.grouped_gemm, a.mT, b, ends)
            title = f"{count} groups along K, {m} x {n} x {k} {name}"
            found.append(Case(f"grouped_gemm {title}", product, partial(ours, c, d, given)))
    return found


if __name__ == "__main__":
    typer.run(main)
