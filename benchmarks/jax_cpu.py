"""Quantizing and multiplying on a CPU: torch's side, JAX's, and what users write with jnp.

    python benchmarks/jax_cpu.py benchmarks/results/jax_cpu.json

Milliseconds, medians of nine calls, the ways taking turns. JAX's calls are compiled. "jnp" is the
quantization that users write: the largest magnitude of a block, a power of two by log2, a product,
a cast; its bytes are near those of "ceil", not equal.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import torch
import typer

import blockscale as bs
import blockscale.jax as bsj

SIZE, CALLS = 4096, 9


def with_jnp(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    blocks = x.reshape(x.shape[0], -1, 32).astype(jnp.float32)
    amax = jnp.maximum(jnp.abs(blocks).max(-1, keepdims=True), 2.0**-118)
    exponent = jnp.ceil(jnp.log2(amax / 448))
    data = (blocks * jnp.exp2(-exponent)).astype(jnp.float8_e4m3fn)
    return data.reshape(x.shape), (exponent[..., 0] + 127).astype(jnp.uint8)


def turns(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(CALLS + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if i:  # the first one compiles
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(median(found), 2) for name, found in times.items()}


def main(out: Path) -> None:
    rows, ready = [], jax.block_until_ready
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(SIZE, SIZE).to(dtype)
        given, users = jnp.from_dlpack(x), jax.jit(with_jnp)
        for format in ("mxfp8", "nvfp4"):
            for axis in (-1, -2):

                def ours(x: Any, format: str = format, axis: int = axis) -> Any:
                    return bsj.quantize(x, format, axis)

                compiled = jax.jit(ours)
                ways: dict[str, Callable[[], Any]] = {
                    "torch": lambda x=x, f=format, a=axis: bs.quantize(x, f, a),
                    "jax": lambda f=compiled, x=given: ready(f(x)),
                }
                if (format, axis) == ("mxfp8", -1):
                    ways["jnp"] = lambda f=users, x=given: ready(f(x))
                what = f"quantize {str(dtype).removeprefix('torch.')}"
                rows.append({"what": what, "format": format, "axis": axis, "ms": turns(ways)})
                print(rows[-1], flush=True)
    for format, m in (("nvfp4", 1), ("mxfp8", 512)):
        a, w = torch.randn(m, SIZE).bfloat16(), bs.quantize(torch.randn(SIZE, SIZE), format)
        x = a if m == 1 else bs.quantize(a, format)
        left = jnp.from_dlpack(a) if m == 1 else bsj.from_torch(x)
        right, multiply = bsj.from_torch(w), jax.jit(lambda a, b: bsj.gemm(a, b.mT))
        ways = {
            "torch": lambda x=x, w=w: bs.gemm(x, w.mT),
            "jax": lambda f=multiply, a=left, b=right: ready(f(a, b)),
        }
        rows.append({"what": f"gemm of {m} rows", "format": format, "ms": turns(ways)})
        print(rows[-1], flush=True)
    about = {"machine": platform.machine(), "jax": jax.__version__, "torch": torch.__version__}
    out.write_text(json.dumps({**about, "size": SIZE, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
