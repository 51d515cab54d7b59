"""Ordinary CUDA C++ through nvcc, run in the emulator, compared with numpy."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from blockscale import emulator as em

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module", params=["-lineinfo", "-G"])
def ptx(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The kernels, optimized, and for debugging: every variable in local memory."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on PATH")
    out = tmp_path_factory.mktemp("nvcc") / "kernels.ptx"
    source = Path(__file__).with_name("kernels.cu")
    command = [nvcc, "-arch=sm_90a", "-ptx", request.param, str(source), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return out.read_text()


DEVICE = em.Device("sm_90a")


@pytest.mark.sampled(1)
def test_reduction(ptx: str) -> None:
    data, out = RNG.standard_normal(5000).astype(np.float32), np.zeros(1, np.float32)
    DEVICE.launch(ptx, "reduce", 3, 256, [data, out, len(data)])
    assert abs(out[0] - data.astype(np.float64).sum()) < 1e-3


@pytest.mark.sampled(1)
def test_tiled_matmul(ptx: str) -> None:
    n = 48
    a, b = (RNG.standard_normal((n, n)).astype(np.float32) for _ in range(2))
    c = np.zeros((n, n), np.float32)
    DEVICE.launch(ptx, "matmul", (3, 3), (16, 16), [a, b, c, n])
    assert np.allclose(c, a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)


def test_histogram(ptx: str) -> None:
    data, bins = RNG.integers(0, 256, 3000, dtype=np.uint8) // 3, np.zeros(256, np.uint32)
    DEVICE.launch(ptx, "histogram", 2, 96, [data, bins, len(data)], shared=1024)
    assert (bins == np.bincount(data, minlength=256)).all()


def test_local_array(ptx: str) -> None:
    data = RNG.integers(-100, 100, (64, 16), dtype=np.int32)
    wanted = np.sort(data, axis=1)
    DEVICE.launch(ptx, "local_sort", 2, 32, [data])
    assert (data == wanted).all()


def test_calls_and_switch(ptx: str) -> None:
    data, out = RNG.integers(0, 1 << 31, 70, dtype=np.int32), np.zeros(70, np.int64)
    DEVICE.launch(ptx, "calls", 1, 70, [data, out])
    for t, x in enumerate(data.tolist()):
        product, mask = x * 1000003, 0xFFFFFFFF
        steps, n = 0, t + 1
        while n != 1:
            n, steps = (3 * n + 1 if n & 1 else n // 2), steps + 1
        octets = (t << 32 | x).to_bytes(8, "little")
        permuted = int.from_bytes(bytes(octets[i] for i in (0, 4, 1, 5)), "little")
        funnel = ((t << 32 | x) << t % 32 >> 32) & mask
        wanted = [
            steps,
            int(np.array(product // (t + 3)).astype(np.int32)),
            product % (t + 3),
            x.bit_count() * 100 + 32 - x.bit_length(),
            int(f"{x:032b}"[::-1], 2) ^ permuted,
            (x * 0x9E3779B9 >> 32) + funnel & mask,
            x % (t + 1) + x // 7,
        ][t % 7]
        assert out[t] == wanted, (t, x)


def test_math(ptx: str) -> None:
    x = np.abs(RNG.standard_normal(200)).astype(np.float32) * 3 + np.float32(0.01)
    out, wide = np.zeros((200, 8), np.float32), np.zeros(200)
    DEVICE.launch(ptx, "math", 2, 128, [x, out, wide, 200])
    y = x.astype(np.float64)
    wanted = [
        np.sqrt(y), 1 / y, y / 3, np.exp(y), np.log(y), np.sin(y),
        np.floor(y) + np.rint(2 * y) + np.minimum(y, 2) + np.abs(y - 5), np.tanh(y) + y**1.5,
    ]  # fmt: skip
    for i, column in enumerate(wanted):
        assert np.allclose(out[:, i], column, rtol=1e-6, atol=1e-6), i
    assert (
        out[:, :3] == np.stack([np.sqrt(x), 1 / x, x / np.float32(3)], 1)
    ).all()  # rounded correctly
    assert np.allclose(wide, np.sqrt(y) / 3 + np.exp(-y) * y, rtol=1e-14)


def test_vector_loads_and_stores(ptx: str) -> None:
    data = RNG.standard_normal((50, 4)).astype(np.float32)
    octets, out = RNG.integers(0, 256, (50, 4), dtype=np.uint8), np.zeros((50, 4), np.float32)
    DEVICE.launch(ptx, "copy4", 1, 64, [data, out, octets, 50])
    assert (out == data[:, ::-1] + octets.astype(np.float32)).all()


def test_halves(ptx: str) -> None:
    a, b = (RNG.standard_normal((32, 2)).astype(np.float16) for _ in range(2))
    d = RNG.standard_normal((32, 2)).astype(ml_dtypes.bfloat16)
    c, e = np.zeros_like(a), np.zeros_like(d)
    DEVICE.launch(ptx, "halves", 1, 32, [a, b, c, d, e, 32])
    exact = a.astype(np.float64) * b.astype(np.float64) + np.maximum(a, b).astype(np.float64)
    assert (c == exact.astype(np.float16)).all()
    x, y = d[:, 0].astype(np.float32), d[:, 1].astype(np.float32)
    assert (e[:, 0] == (x * y).astype(ml_dtypes.bfloat16)).all()
    both = (x + y).astype(ml_dtypes.bfloat16).astype(np.float32) + x
    assert (e[:, 1] == both.astype(ml_dtypes.bfloat16)).all()


def test_scan(ptx: str) -> None:
    data = RNG.integers(0, 10, 64, dtype=np.int32)
    sums = np.cumsum(data.reshape(2, 32), axis=1)
    many = int((sums > 100).sum())
    wanted = sums * 1000 + ((sums & 1).sum(1) + sums.max(1))[:, None] + many
    DEVICE.launch(ptx, "scan", 1, 64, [data])
    assert (data == wanted.reshape(-1)).all()
