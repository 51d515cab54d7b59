"""Kernels with everything that makes a Hopper or Blackwell kernel one: rings of asynchronous
copies, warps with roles, tensor cores, clusters. What each is launched with, and what comes out.

Beside each ``.cu`` lies its ``.ptx``; ``python -m pipelines`` in the folder above makes them anew.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from blockscale import emulator as em

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """Arguments of one launch, the arrays that it writes, and what they must hold then."""

    args: list[Any]
    outputs: list[np.ndarray]
    expected: list[np.ndarray]
    inputs: list[np.ndarray] = field(default_factory=list)  # kept alive


@dataclass(frozen=True)
class Pipeline:
    file: str
    target: str
    entry: str
    grid: tuple[int, ...]
    block: int
    shared: int
    make: Callable[[], Case]

    @property
    def source(self) -> Path:
        return HERE / f"{self.file}.cu"

    @property
    def ptx(self) -> str:
        return self.source.with_suffix(".ptx").read_text()

    @property
    def case(self) -> Case:
        return _case(self.make)

    def run(self, completion: str, seed: int = 0, ptx: str | None = None) -> bool:
        """Launch; whether the outputs are bitwise what they must be."""
        case = self.case
        for output in case.outputs:
            output.view(np.uint8).fill(0xA5)
        em.Device(
            self.target, completion=completion, seed=seed,
            check="all,exit_stores,tcgen05_order,mbarrier_proxy,cp_async_proxy,proxy_reads,global",
        ).launch(
            self.ptx if ptx is None else ptx, self.entry, self.grid, self.block, case.args,
            shared=self.shared,
        )  # fmt: skip
        pairs = zip(case.outputs, case.expected, strict=True)
        return all(output.tobytes() == expected.tobytes() for output, expected in pairs)


@cache
def _case(make: Callable[[], Case]) -> Case:
    return make()


def compile(pipeline: Pipeline) -> str:
    """What nvcc makes of the source, without what depends on where it lies."""
    arch = f"compute_{pipeline.target[3:]}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.ptx"
        command = ["nvcc", "-ptx", "-lineinfo", f"-gencode=arch={arch},code={arch}"]
        command += [str(pipeline.source), "-o", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        text = out.read_text()
    text = text.partition("\t.section\t.debug_str")[0]
    text = re.sub(r", function_name .*", "", text)  # names there hold a hash of the path
    return re.sub(r'(\.file\s+\d+ )"(?:[^"]*/)?([^"/]+)"', r'\1"\2"', text)


# --- operands whose products and sums are exact in fp32, so that float64 is the oracle ---


def _rng() -> np.random.Generator:
    return np.random.default_rng(20)


def _exact(product: np.ndarray, terms: np.ndarray, step: float) -> np.ndarray:
    """``product`` as bf16; ``terms``: sums of magnitudes; all are multiples of ``step``."""
    assert terms.max() / step < 2**24
    return product.astype(ml_dtypes.bfloat16).view(np.uint16)


def scale_tiles(scales: np.ndarray) -> np.ndarray:
    """(rows, blocks) -> (rows / 128, blocks / 4, 512): row r of a tile at (r % 32, r // 32)."""
    rows, blocks = scales.shape
    tiles = scales.reshape(rows // 128, 4, 32, blocks // 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles).reshape(rows // 128, blocks // 4, 512)


def _output(rows: int, columns: int) -> np.ndarray:
    return np.zeros((rows, columns), np.uint16)


def _map(array: np.ndarray, box: tuple[int, ...], element: str | None = None) -> em.TensorMap:
    return em.TensorMap.of(array, box, element=element, swizzle="128B")


def mxfp8(tiles: int = 3, steps: int = 3) -> Case:
    """One CTA: 128 rows, so many tiles of 64 columns, K of so many steps of 128."""
    rng, (m, n, k) = _rng(), (128, tiles * 64, steps * 128)
    values = [rng.integers(-8, 9, shape).astype(np.float64) for shape in ((m, k), (n, k))]
    a, b = (v.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for v in values)
    sfa, sfb = (rng.integers(125, 129, (rows, k // 32), dtype=np.uint8) for rows in (m, n))
    wide = [
        v * np.exp2(s.astype(np.float64) - 127).repeat(32, 1)
        for v, s in zip(values, (sfa, sfb), strict=True)
    ]
    # a tile of B is 64 rows, and has a tile of scales of its own
    filled = np.zeros((n // 64, 128, k // 32), np.uint8)
    filled[:, :64] = sfb.reshape(n // 64, 64, -1)
    d, scales = _output(m, n), [scale_tiles(sfa), scale_tiles(filled.reshape(-1, k // 32))]
    maps = [_map(a, (128, 128)), _map(b, (128, 64))]
    args = [*maps, *scales, _map(d, (64, 128), "bf16"), tiles, steps]
    expected = _exact(wide[0] @ wide[1].T, np.abs(wide[0]) @ np.abs(wide[1]).T, 2.0**-4)
    return Case(args, [d], [expected])


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def _nvfp4() -> Case:
    rng, (m, n, k) = _rng(), (256, 3 * 128, 2 * 256)
    codes = [rng.integers(0, 16, shape, dtype=np.uint8) for shape in ((m, k), (n, k))]
    a, b = (c[:, ::2] | c[:, 1::2] << 4 for c in codes)
    choices = np.array([0.5, 0.75, 1, 1.5], np.float64)
    scales = [rng.choice(choices, (rows, k // 16)) for rows in (m, n)]
    wide = [_E2M1[c] * s.repeat(16, 1) for c, s in zip(codes, scales, strict=True)]
    codes = [s.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for s in scales]
    tiles = [scale_tiles(c).view(np.uint16).reshape(-1, 256) for c in codes]
    d = _output(m, n)
    args = [
        _map(a, (256, 128), "b4x16_align8"), _map(b, (256, 64), "b4x16_align8"),
        em.TensorMap.of(tiles[0], (256, 4)), em.TensorMap.of(tiles[1], (256, 2)),
        _map(d, (64, 128), "bf16"), 3, 2,
    ]  # fmt: skip
    expected = _exact(wide[0] @ wide[1].T, np.abs(wide[0]) @ np.abs(wide[1]).T, 2.0**-6)
    return Case(args, [d], [expected])


def _wgmma() -> Case:
    rng, (m, n, k) = _rng(), (2 * 128, 128, 6 * 64)
    values = [rng.integers(-16, 17, shape).astype(np.float64) for shape in ((m, k), (k, n))]
    a, b = (v.astype(ml_dtypes.bfloat16).view(np.uint16) for v in values)
    d = _output(m, n)
    args = [_map(a, (64, 128), "bf16"), _map(b, (64, 64), "bf16"), _map(d, (64, 64), "bf16"), 6]
    expected = _exact(values[0] @ values[1], np.abs(values[0]) @ np.abs(values[1]), 1.0)
    return Case(args, [d], [expected])


def quantize(rows: int = 2, columns: int = 4) -> Case:
    """So many CTAs of 128 rows, each with so many tiles of 128 columns."""
    rng, (m, k) = _rng(), (rows * 128, columns * 128)
    sizes = np.exp2(rng.integers(-30, 30, (m, k // 32))).repeat(32, 1)
    x = (rng.standard_normal((m, k)) * sizes).astype(ml_dtypes.bfloat16)
    x[3, :32] = 0
    x[4, 32:64] *= ml_dtypes.bfloat16(2.0**-110)  # subnormal, the scale cannot follow
    x[5, 64], x[6, 96], x[7, 5] = np.nan, np.inf, 448  # the last: exactly on the boundary
    wide = x.astype(np.float64).reshape(m, k // 32, 32)
    largest = np.abs(wide).max(axis=2)
    finite = np.isfinite(largest)
    with np.errstate(divide="ignore"):
        exponents = np.ceil(np.log2(np.where(finite, largest, 1) / 448))
    exponents = np.maximum(exponents, -127)
    scales = np.where(finite, exponents + 127, 255).astype(np.uint8)
    divided = np.where(finite[..., None], wide * np.exp2(-exponents)[..., None], np.nan)
    q = divided.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(m, k)
    q = np.where(q == 0xFF, 0x7F, q).astype(np.uint8)  # NaN has no sign here
    data, words = np.zeros((m, k), np.uint8), np.zeros((m * k // 32 // 4,), np.uint32)
    bits = x.view(np.uint16)
    args = [_map(bits, (64, 128), "bf16"), _map(data, (128, 128)), words, k // 128]
    return Case(args, [data, words], [q, scale_tiles(scales)])


PIPELINES = {
    p.entry: p
    for p in (
        Pipeline("gemm_mxfp8_sm100", "sm_100a", "gemm_mxfp8", (1,), 192, 94208, mxfp8),
        Pipeline("gemm_nvfp4_2cta_sm100", "sm_100a", "gemm_nvfp4", (2,), 192, 91136, _nvfp4),
        Pipeline("gemm_wgmma_sm90", "sm_90a", "gemm_wgmma", (2,), 384, 164864, _wgmma),
        Pipeline("quantize_sm90", "sm_90a", "quantize", (1, 2), 128, 99328, quantize),
    )
}
