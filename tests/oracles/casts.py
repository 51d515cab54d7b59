"""Element casts of other libraries, brought to one signature: fp32 array -> uint8 codes."""

from __future__ import annotations

import gfloat
import ml_dtypes
import numpy as np
import torch
from gfloat import formats as gf
from numpy.typing import NDArray

from . import exact, nvidia

_ML_DTYPES = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E2M1": ml_dtypes.float4_e2m1fn,
}
_GFLOAT = {
    "E4M3": gf.format_info_ocp_e4m3,
    "E5M2": gf.format_info_ocp_e5m2,
    "E3M2": gf.format_info_ocp_e3m2,
    "E2M3": gf.format_info_ocp_e2m3,
    "E2M1": gf.format_info_ocp_e2m1,
}
_TORCH = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def _one_nan(codes: NDArray, x: NDArray, element: str) -> NDArray:
    """The sign of a NaN says nothing, and FP6 and FP4 casts of others leave NaN undefined."""
    return np.where(np.isnan(x), exact.SPECS[element].nan, codes).astype(np.uint8)


def _clamped(x: NDArray, element: str) -> NDArray:
    limit = np.float32(exact.SPECS[element].max)
    return np.clip(np.where(np.isnan(x), np.float32(0), x), -limit, limit)


def by_ml_dtypes(x: NDArray, element: str) -> NDArray:
    """Clamped first: its E4M3 overflows to NaN and its E5M2 to infinity."""
    return _one_nan(_clamped(x, element).astype(_ML_DTYPES[element]).view(np.uint8), x, element)


def by_torch(x: NDArray, element: str) -> NDArray:
    """Clamped first: torch casts saturate since 2.13, and then only E4M3 on an infinity."""
    codes = torch.from_numpy(_clamped(x, element)).to(_TORCH[element]).view(torch.uint8)
    return _one_nan(codes.numpy(), x, element)


def by_gfloat(x: NDArray, element: str) -> NDArray:
    clean = np.where(np.isnan(x), 0, x).astype(np.float64)
    rounded = gfloat.round_ndarray(_GFLOAT[element], clean, sat=True)
    return _one_nan(gfloat.encode_ndarray(_GFLOAT[element], rounded), x, element)


def by_definition(x: NDArray, element: str) -> NDArray:
    return exact.cast(x, exact.SPECS[element])


def oracles(element: str, *, slow: bool = False) -> dict:
    """The oracles that know ``element``, by name; at least two, whatever is installed."""
    found = {"ml_dtypes": by_ml_dtypes}
    if element in _TORCH:
        found["torch"] = by_torch
    if nvidia.missing() is None:
        found["NVIDIA"] = nvidia.cast
    if slow or len(found) < 2:
        found |= {"gfloat": by_gfloat, "definition": by_definition}
    return found
