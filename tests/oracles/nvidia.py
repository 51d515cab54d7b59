"""NVIDIA's casts: the host code of cuda_fp8.hpp, cuda_fp6.hpp and cuda_fp4.hpp, built with g++.

The headers come with the PyPI package nvidia-cuda-runtime. Two of the files they include belong to
the compiler and to CCCL; a host build needs a few empty macros of those, written here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

_STUBS = {
    "crt/host_defines.h": """
#define __host__
#define __device__
#define __global__
#define __constant__
#define __shared__
#define __managed__
#define __forceinline__ inline
#define CUDARTAPI
#define __device_builtin__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
""",
    "nv/target": """
#define NV_IF_TARGET(condition, yes)
#define NV_IF_ELSE_TARGET(condition, yes, no) no
""",
}

_SOURCE = """
#include <cuda_fp8.h>
#include <cuda_fp6.h>
#include <cuda_fp4.h>
#define FUNCTION(name, type, call) \\
    extern "C" void name(const type* x, unsigned char* y, long n) \\
    { for (long i = 0; i < n; ++i) y[i] = call; }
FUNCTION(E4M3, float, __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E4M3))
FUNCTION(E5M2, float, __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E5M2))
FUNCTION(E3M2, float, __nv_cvt_float_to_fp6(x[i], __NV_E3M2, cudaRoundNearest))
FUNCTION(E2M3, float, __nv_cvt_float_to_fp6(x[i], __NV_E2M3, cudaRoundNearest))
FUNCTION(E2M1, float, __nv_cvt_float_to_fp4(x[i], __NV_E2M1, cudaRoundNearest))
FUNCTION(e8m0_up, double, __nv_cvt_double_to_e8m0(x[i], __NV_SATFINITE, cudaRoundPosInf))
FUNCTION(e8m0_down, double, __nv_cvt_double_to_e8m0(x[i], __NV_SATFINITE, cudaRoundZero))
"""


def missing() -> str | None:
    """Why this oracle cannot be asked here, or None."""
    if shutil.which("g++") is None:
        return "no g++ to build NVIDIA's headers"
    return None if _include() else "no cuda_fp8.hpp: pip install nvidia-cuda-runtime"


def _include() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for header in sorted(Path(root).glob("*/include/cuda_fp4.hpp"), reverse=True):
            return header.parent
    return None


@lru_cache
def _library() -> ctypes.CDLL:
    with TemporaryDirectory() as folder:
        for name, text in _STUBS.items():
            path = Path(folder, name)
            path.parent.mkdir()
            path.write_text(text)
        source, library = Path(folder, "casts.cpp"), Path(folder, "casts.so")
        source.write_text(_SOURCE)
        command = ["g++", "-O2", "-shared", "-fPIC", "-I", folder, "-isystem", str(_include())]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


def _call(name: str, x: NDArray) -> NDArray:
    x, out = np.ascontiguousarray(x), np.empty(x.shape, np.uint8)
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (x, out))
    getattr(_library(), name)(*pointers, ctypes.c_long(x.size))
    return out


def cast(x: NDArray, element: str) -> NDArray:
    """Codes of fp32 values, __NV_SATFINITE."""
    return _call(element, x.astype(np.float32, copy=False))


def e8m0(x: NDArray, up: bool) -> NDArray:
    """E8M0 bytes of finite positive float64 values, rounded up or down to a power of two."""
    return _call("e8m0_up" if up else "e8m0_down", x.astype(np.float64, copy=False))
