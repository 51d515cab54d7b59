"""The emulator against what an H200 gave: recorded/h200.npz, written by compare.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
import test_instructions_convert
import test_instructions_floating
import test_instructions_integer
from cases import Case, cases, wgmma_formats
from compare import Launch, compiled, of_case, of_form

from gpu import content

_FILE = np.load(Path(__file__).parent / "recorded" / "h200.npz")
RECORD = dict(zip(_FILE["names"].tolist(), _FILE["digests"].tolist(), strict=True))


def digest(launch: Launch) -> int:
    assert launch.emulated is not None, launch.failure
    return int(content(launch.emulated), 16)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "module",
    [test_instructions_integer, test_instructions_floating, test_instructions_convert],
    ids=lambda module: module.__name__,
)
def test_forms(module: ModuleType) -> None:
    """Every form for sm_90a on its operands; a form that is newer than the record is left out."""
    forms = [form for form in module.forms() if form.target == "sm_90a"]
    wrong, compared = [], 0
    for form in forms:
        launch = of_form(form)
        wanted = RECORD.get(launch.request.key())
        compared += wanted is not None
        if wanted not in (None, digest(launch)):
            wrong.append(str(form))
    assert not wrong
    assert compared > 0.8 * len(forms)


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    return compiled(sorted({case.source for case in cases()}))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_kernels(case: Case, ptx: dict[str, str]) -> None:
    assert digest(of_case(case, ptx[case.source])) == RECORD[case.name]


# --- the wgmma kernels do multiply matrices -------------------------------------------------------

_NEGATED = {
    ("bf16_f32_negated", "shared"),
    ("bf16_f32_negated", "registers"),
    ("bf16_f32_columns", "registers"),
    ("f16_f32", "shared"),
}
_DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


def product(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """A B of a case in fp64, and the same of magnitudes."""
    kind, source = case.entry.rsplit("_", 1)
    a_bits, b_bits, _, pitch, _ = case.arguments()
    a_name, b_name, _ = wgmma_formats(kind)
    a, b = (
        bits.view(_DTYPES[name]).astype(np.float64)
        for bits, name in ((a_bits, a_name), (b_bits, b_name))
    )
    a = a.reshape(-1, pitch // a_bits.itemsize)
    b = b.reshape(-1, 128) if "columns" in kind else b.reshape(128, -1).T
    return a @ b * (-1 if (kind, source) in _NEGATED else 1), np.abs(a) @ np.abs(b)


def unpacked(d: np.ndarray) -> np.ndarray:
    """The tile of D from each thread's values: figure of D in PTX ISA 9.7.15.5."""
    thread, value = np.indices(d.shape)
    lane, warp = thread % 32, thread // 32
    out = np.empty((d.shape[0] // 2, 128))
    row = warp * 16 + lane // 4 + value // 2 % 2 * 8
    out[row, value // 4 * 8 + lane % 4 * 2 + value % 2] = d
    return out


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "case", [c for c in cases() if "near" in c.name], ids=lambda case: case.name
)
def test_wgmma_is_a_product(case: Case, ptx: dict[str, str]) -> None:
    launch = of_case(case, ptx[case.source])
    assert launch.emulated is not None, launch.failure
    half = "_f16_" in case.entry
    d = np.frombuffer(launch.emulated[2], np.float16 if half else np.float32)
    wanted, magnitude = product(case)
    got = unpacked(d.reshape(case.block, 64))
    assert (np.abs(got - wanted) <= magnitude * 2e-3).all()
