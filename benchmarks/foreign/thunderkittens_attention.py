"""ThunderKittens' attention for the B300: pairs of CTAs, 192 elements of q and k, 128 of v.

The forward pass in bf16 for one pair of CTAs, 512 rows of q, and as many of k, which is twice
around the ring; without a mask, and with the causal one. The weights round to bf16: the output
must be near a reference in fp64, and the logarithms of the sums nearer.
"""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np

from blockscale import emulator as em

from .kernel import Foreign, Launch, allocated
from .thunderkittens import VERSION, layout

BFLOAT16 = ml_dtypes.bfloat16
FLAGS = (
    "GPU := B300, CONFIG := pytorch, the flags of kernels/common.mk, nvcc 13.0.88, --ptx; headers "
    "of torch 2.13, and for the host's code alone empty headers with the types of cuSPARSE, "
    "cuBLAS and cuSOLVER that torch's headers name"
)


def tile(array: np.ndarray, rows: int, columns: int) -> bytes:
    """Tiles along the second of four dimensions (batch, sequence, head, element), swizzled."""
    batch, sequence, heads, width = array.shape
    row = width * 2
    map = em.TensorMap(
        array.ctypes.data, "bf16",
        (64, sequence, width // 64, heads, batch), (heads * row, 128, row, sequence * heads * row),
        (64, rows, columns // 64, 1, 1), swizzle="128B",
    )  # fmt: skip
    return layout(array, (None,) * 4, map)


def run(causal: bool, launch: Launch) -> bool:
    rng = np.random.default_rng(0)
    length, grid = 512, 2 if causal else 148
    q, k, v, o = (
        allocated((rng.uniform(-1, 1, (1, length, 1, width)) * most).astype(BFLOAT16))
        for width, most in ((192, 16), (192, 1), (128, 1), (128, 1))  # 16: the maxima move
    )
    sums = allocated(np.zeros((1, 1, 1, length), np.float32))
    structure = tile(q, 128, 192) + tile(k, 64, 192) + tile(v, 128, 64) + tile(o, 128, 128)
    launch(
        grid, 512, [structure + layout(sums, (None,) * 4, None)],
        cluster=2, shared=226 * 1024,
        buffers=[("q", q), ("k", k), ("v", v), ("o", o), ("sums", sums)],
    )  # fmt: skip
    wide = [x[0, :, 0].astype(np.float64) for x in (q, k, v)]
    scores = wide[0] @ wide[1].T / np.sqrt(192)
    if causal:
        scores[np.triu_indices(length, 1)] = -np.inf
    powers = np.exp(scores)
    total = powers.sum(1)
    output = powers @ wide[2] / total[:, None]
    near = np.allclose(o[0, :, 0].astype(np.float64), output, rtol=0.01, atol=0.01)
    return near and np.allclose(sums[0, 0, 0], np.log(total), rtol=0, atol=1e-4)


KERNELS = [
    Foreign(
        f"tk_mha_{name}", "ThunderKittens", VERSION, "sm_103a", entry,
        f"kernels/attention/bf16_b300_mha_{name}/bf16_b300_mha_{name}.cu as it is, the entry of "
        f"{config}; {FLAGS}", partial(run, name == "causal"),
    )
    for name, config, entry in (
        ("noncausal", "config<128, 128, 192, 128>", "ELi128EEEv"),
        ("causal", "config<128, 128, 192, 128, false>", "ELi128ELb0E"),
    )
]  # fmt: skip
