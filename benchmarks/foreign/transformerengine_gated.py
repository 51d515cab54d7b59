"""TransformerEngine's SwiGLU, and its gradient, fused with the cast to MXFP8.

The output is silu(a) * g of an input whose rows hold a, then g, rounded to bf16 and then cast.
Codes and scales must be those that numpy computes, byte for byte: elements whose exact values in
double precision are so near to the middle of two numbers of bf16 that fp32 may decide are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from blockscale import emulator as em

from .kernel import Foreign, Launch, allocated
from .transformerengine import BFLOAT16, BOTH, MADE, NO_MAP, VERSION, Output

CHUNK = 64  # rows and columns of a CTA
SURE = 2.0**-16  # of a number: more than what fp32 loses here


def doubtful(exact: np.ndarray) -> np.ndarray:
    """Where a value and one that is off by ``SURE`` round to other numbers of bf16."""
    near = [(exact * (1 + off)).astype(np.float32).astype(BFLOAT16) for off in (-SURE, SURE)]
    return near[0] != near[1]


@dataclass(frozen=True)
class Gated:
    """One instance.

    Attributes:
        ways: "row", "column" or both.
        gradient: of a and g, side by side as they were, for a gradient of the output.
        swizzle: scales lie in tiles of 128 x 4.
    """

    ways: tuple[str, ...]
    gradient: bool = False
    swizzle: bool = False

    @property
    def threads(self) -> int:
        return 128 if self.ways == ("column",) else 64

    @property
    def entry(self) -> str:
        """The part of the mangled name that holds the arguments of the template."""
        silu = "XadL_ZNS_4siluIffEET_T0_RKS4_EE"
        backward = "XadL_ZNS_5dsiluIffEES6_S7_S9_EE" if self.gradient else "LPFffS9_E0E"
        flags = ("row" in self.ways, "column" in self.ways, self.swizzle)
        ends = "".join(f"Lb{flag:d}E" for flag in flags) + f"Lm{self.threads}E"
        start = f"quantize_gated_mxfp8_kernelILb{self.gradient:d}ENS_5EmptyE{silu}{backward}"
        return f"{start}13__nv_bfloat1613__nv_fp8_e4m3{ends}"

    def values(self, a: np.ndarray, g: np.ndarray, d: np.ndarray) -> np.ndarray:
        """The output in double precision."""
        s = 1 / (1 + np.exp(-a))
        if not self.gradient:
            return a * s * g
        return np.hstack([d * g * (s + a * s * (1 - s)), d * a * s])


def maps(array: np.ndarray, columns: int) -> list[em.TensorMap | bytes]:
    """Of the two halves of an array of twice as many columns, or of the only one."""
    starts = range(0, array.shape[1], columns)
    both = [em.TensorMap.of(array[:, at : at + columns], (CHUNK, 32)) for at in starts]
    return [*both, NO_MAP][:2]


def run(kernel: Gated, launch: Launch) -> bool:
    right = True
    last = 32 if kernel.gradient else 48  # the gradient of g begins with a block of its own
    for rows, columns in ((3 * CHUNK, 2 * CHUNK), (2 * CHUNK + 40, CHUNK + last)):
        rng = np.random.default_rng(rows)
        draw = rng.normal(size=(3, rows, columns)).astype(BFLOAT16).astype(np.float64)
        draw[0] = abs(draw[0])  # near silu's minimum its slope is a small difference
        bad = doubtful(kernel.values(*draw)).reshape(rows, -1, columns).any(1)
        draw[:, bad] = 0
        x = allocated(np.hstack([draw[0], draw[1]]).astype(BFLOAT16))
        grad = allocated(draw[2].astype(BFLOAT16))
        exact = kernel.values(*draw).astype(np.float32).astype(BFLOAT16)
        outs = [
            way in kernel.ways and Output(exact, way == "column", kernel.swizzle)
            for way in ("row", "column")
        ]
        there = [out for out in outs if out]
        parts = 1 + kernel.gradient

        launch(
            (-(-columns // CHUNK), -(-rows // CHUNK)), kernel.threads,
            [em.TensorMap.of(grad, (CHUNK, 32)) if kernel.gradient else NO_MAP, *maps(x, columns),
             *(map for out in outs for map in (maps(out.codes, columns) if out else [NO_MAP] * 2)),
             *(out.scales if out else 0 for out in outs),
             rows, columns, *(out.scales.shape[1] if out else 1 for out in outs), 0],
            shared=2 * 32 * CHUNK * (2 * (2 + kernel.gradient) + parts * len(there)) + 128,
            buffers=[("x", x), ("grad", grad), *(("codes", out.codes) for out in there)],
        )  # fmt: skip
        right &= all(out.right() for out in there)
    return right


GATED = {
    "te_mxfp8_swiglu_row": Gated(("row",)),
    "te_mxfp8_swiglu_column": Gated(("column",)),
    "te_mxfp8_swiglu_both": Gated(BOTH, swizzle=True),
    "te_mxfp8_dswiglu_both": Gated(BOTH, gradient=True),
}
KERNELS = [
    Foreign(
        name, "TransformerEngine", VERSION, "sm_100a", gated.entry,
        MADE.format("activation/swiglu.cu"), partial(run, gated),
    )
    for name, gated in GATED.items()
]  # fmt: skip
