"""Products of every kind on Hopper, and experts, for compute-sanitizer: tails, few tiles, few rows,
decoding; gathers, activations, sums.

    PYTHONPATH=src python3 benchmarks/gpu_sanitize.py   # compiles the kernels; then with each tool
    compute-sanitizer --tool memcheck --error-exitcode 9 python3 benchmarks/gpu_sanitize.py

Names of kinds as arguments leave out the others. Says of each product that it has run, and fails if
it is not close to the fp32 product of what was quantized.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import blockscale as bs

SHAPES = (  # M, N, K
    (192, 320, 384),
    (64, 576, 2048),
    (128, 576, 3072),
    (33, 200, 1568),
    (100, 264, 2080),
    (128, 384, 4096),
    (20, 1100, 1536),
    (200, 1264, 6144),
)
DECODING = ((1, 264, 2048), (16, 6800, 512), (11, 8192, 1024))
WIDENED = ("mxfp8", "mxfp4", "nvfp4")
BOTH = {name: (name, name) for name in WIDENED}
WEIGHTS = {f"{name} weights": (None, name) for name in WIDENED}
FP8 = {"fp8": ("fp8_1x128", "fp8_128x128"), "added": ("fp8_1x128", "fp8_1x128")}

Formats = tuple[str | None, str]  # of x (M, K), None for bf16, and of w (N, K)


def product(name: str, formats: Formats, x: Tensor, w: Tensor) -> Tensor:
    quantized = partial(bs.quantize, backend="kernel")
    a_format, b_format = formats
    a = x if a_format is None else quantized(x, a_format)
    out = torch.zeros(len(x), len(w), device=x.device) if name == "added" else None
    b = quantized(w, b_format).mT
    return bs.gemm(a, b, out=out, accumulate=out is not None, backend="kernel")


def products() -> Iterator[tuple[str, Formats, tuple[int, int, int]]]:
    for shape in SHAPES:
        for name, formats in {**(FP8 if shape[2] % 128 == 0 else {}), **BOTH, **WEIGHTS}.items():
            yield name, formats, shape
    for shape in DECODING:
        for name, formats in WEIGHTS.items():
            yield name, formats, shape


def experts() -> None:
    """Forward and backward of each recipe, of experts with few rows and many, and none."""
    leaves = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in ((200, 384), (200, 3), (5, 512, 384), (5, 384, 256))
    ]
    ids = torch.rand(200, 5, device="cuda").argsort(1)[:, :3]
    ids[ids == 2] = 7  # of no expert
    routing = bs.route(ids, 5)
    for name in ("fp8_block", "mxfp8", "nvfp4"):
        for saved in (None, "mxfp8"):
            x, weights, up, down = leaves
            given = {"recipe": bs.Recipe(name), "saved_format": saved}
            y = bs.nn.experts(x, weights, routing, up, down, **given)
            y.backward(torch.randn_like(y))
            print(f"experts, {name}, saved as {saved}", flush=True)


@torch.no_grad()
def mega() -> None:
    """A mega MoE by each format of weights, with few tokens, many, and none: the bits of steps (of
    MXFP4 as an expert has 150 rows in the mean, less than steps multiply in E4M3)."""
    made = [torch.randn(s, device="cuda").bfloat16() / 16 for s in ((4, 512, 384), (4, 384, 256))]
    for name in ("fp8_128x128", "nvfp4", "mxfp4"):
        weights = [torch.stack([bs.quantize(w, name) for w in some]) for some in made]
        how = {"tokens": 300, "topk": 2, "activations": "fp8_1x128"}
        kernel, steps = (
            bs.distributed.MegaMoE(*weights, backend=backend, **how)
            for backend in ("kernel", "steps")
        )
        for count in (300, 3, 0, 300):
            x = torch.randn(count, 384, device="cuda", dtype=torch.bfloat16)
            ids = torch.rand(count, 4, device="cuda").argsort(1)[:, :2].contiguous()
            given = x, torch.rand(count, 2, device="cuda"), ids
            if not torch.equal(kernel(*given), steps(*given)):
                sys.exit(f"mega MoE, {name}: other bits than those of steps")
        print(f"mega MoE, {name}", flush=True)


def main(kinds: list[str]) -> None:
    torch.manual_seed(1)
    if not kinds or "experts" in kinds:
        experts()
    if not kinds or "mega" in kinds:
        mega()
    for name, formats, (m, n, k) in products():
        if kinds and not set(name.split()) & set(kinds):
            continue
        x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
        got, want = product(name, formats, x, w).float(), x.float() @ w.float().mT
        error = float((got - want).norm() / want.norm())
        print(f"{name}, {m} x {n} x {k}: error {error:.3f}", flush=True)
        if not error < 0.3:  # of quantization: FP4 on both sides has most
            sys.exit("that is too much")


if __name__ == "__main__":
    main(sys.argv[1:])
