"""Triton's fused attention, forward, for Hopper and Blackwell.

Its exponentials are approximations on a GPU, and correctly rounded here: the output is compared
with numpy's in double precision, within a few units of fp16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from blockscale import emulator as em

from .kernel import Foreign, Launch, allocated
from .triton import VERSION

HEADS, TOKENS, SCALE = 2, 384, 0.125
BLOCK_M, BLOCK_N = 128, 64


@dataclass(frozen=True)
class Attention:
    """_attn_fwd of tutorial 06, one specialization.

    Attributes:
        sm: 90 or 100.
        width: of a head.
        shared: bytes of dynamic shared memory, in the compiler's metadata.
        causal: each token sees those before it.
        specialized: warps have roles.
    """

    sm: int
    width: int
    shared: int
    causal: bool = True
    specialized: bool = False

    @property
    def name(self) -> str:
        parts = ["_causal" * self.causal, "_ws" * self.specialized]
        return f"attention{''.join(parts)}_{self.width}_sm{self.sm}"

    @property
    def made(self) -> str:
        registers = f", maxnreg {168 if self.width == 128 else 80}" if self.specialized else ""
        return (
            "_attn_fwd of python/tutorials/06-fused-attention.py, through its JIT "
            f"(JITFunction.warmup with GPUTarget('cuda', {self.sm}, 32)): Z 1, host tensor "
            f"descriptors, HEAD_DIM {self.width}, BLOCK_M {BLOCK_M}, BLOCK_N {BLOCK_N}, FP8_OUTPUT "
            f"False, STAGE {3 if self.causal else 1}, warp_specialize {self.specialized}, "
            f"IS_HOPPER {self.sm == 90}, num_stages 2, num_warps 4{registers}"
        )


def run(kernel: Attention, launch: Launch) -> bool:
    rng = np.random.default_rng(0)
    shape = (HEADS * TOKENS, kernel.width)
    q, k, v = (allocated(rng.normal(0, 1, shape).astype(np.float16)) for _ in range(3))
    out = allocated(np.zeros(shape, np.float16))
    logs = allocated(np.zeros((HEADS, TOKENS), np.float32))
    args: list[object] = [SCALE, logs, HEADS]
    for array, rows in ((q, BLOCK_M), (k, BLOCK_N), (v, BLOCK_N), (out, BLOCK_M)):
        box = em.TensorMap.of(array, (64, rows), swizzle="128B", l2_promotion="128B")
        args += [box, *shape, kernel.width, 1]
    launch(
        (TOKENS // BLOCK_M, HEADS), 384 if kernel.specialized else 128, [*args, TOKENS, 0, 0],
        shared=kernel.shared,
    )  # fmt: skip
    left, right, values = (
        x.astype(np.float64).reshape(HEADS, TOKENS, kernel.width) for x in (q, k, v)
    )
    scores = left @ right.transpose(0, 2, 1) * SCALE
    if kernel.causal:
        scores[:, np.triu(np.ones((TOKENS, TOKENS), bool), 1)] = -np.inf
    weights = np.exp(scores)
    sums = weights.sum(-1, keepdims=True)
    wanted = (weights / sums @ values).reshape(shape)
    close = np.allclose(out.astype(np.float64), wanted, rtol=2e-3, atol=2e-3)
    return bool(close and np.allclose(logs, np.log2(sums[..., 0]), rtol=0, atol=1e-5))


ATTENTIONS = [
    Attention(90, 64, 49184),
    Attention(90, 128, 98336),
    Attention(100, 64, 49216),
    Attention(100, 64, 50768, specialized=True),
    Attention(100, 128, 99920, causal=False, specialized=True),
]
KERNELS = [
    Foreign(
        kernel.name, "triton", VERSION, f"sm_{kernel.sm}a", "_attn_fwd", kernel.made,
        partial(run, kernel),
    )
    for kernel in ATTENTIONS
]  # fmt: skip
