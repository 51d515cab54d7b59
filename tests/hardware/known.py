"""Where an H200 and the emulator may differ, and why: anything else is a failure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Regions = tuple[bytes, ...]
Same = Callable[[Any, Regions], bool]

#: dtype to compute with, bits of the mantissa
_FLOATS = {"f32": (np.float32, 23), "f16": (np.float16, 10), "bf16": (np.float32, 7)}

#: Of results: relative error (of f32 if not said), absolute error. PTX ISA 9.7.3 and 9.7.4.
_ERRORS: dict[str, tuple[float, float]] = {
    "ex2": (2**-22, 0),
    "ex2 f16": (2**-9.9, 0),
    "ex2 bf16": (2**-7, 0),
    "lg2": (2**-22, 2**-22),
    "sin": (0, 2**-20.5),
    "cos": (0, 2**-20.5),
    "tanh": (2**-11, 0),
    "tanh f16": (0, 2**-10.987),
    "tanh bf16": (0, 2**-8),
    "rsqrt": (2**-22.9, 0),
    "rcp": (2**-23, 0),
    "sqrt": (2**-23, 0),
    "div": (2**-22, 0),
}


@dataclass(frozen=True)
class Known:
    """Launches whose name and some executed opcode match, and what must hold of them still."""

    name: str
    opcodes: str
    reason: str
    same: Same

    def covers(self, name: str, opcodes: tuple[str, ...]) -> bool:
        return bool(re.search(self.name, name)) and any(
            re.search(self.opcodes, opcode) for opcode in opcodes
        )


def _pairs(launch: Any, gpu: Regions, dtype: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """The regions that differ, as numbers; none if some are no whole number of them."""
    different = [(a, b) for a, b in zip(gpu, launch.emulated, strict=True) if a != b]
    if any(len(a) % np.dtype(dtype).itemsize for a, _ in different):
        return []
    return [(np.frombuffer(a, dtype), np.frombuffer(b, dtype)) for a, b in different]


def _nan64(launch: Any, gpu: Regions) -> bool:
    pairs = _pairs(launch, gpu, np.float64)
    return bool(pairs) and all(
        ((x.view(np.uint64) == y.view(np.uint64)) | np.isnan(x) & np.isnan(y)).all()
        for x, y in pairs
    )


def _near(launch: Any, gpu: Regions) -> bool:
    """Sums and functions of many roundings."""
    for dtype, bound in ((np.float32, 2e-6), (np.float64, 1e-14)):
        pairs = _pairs(launch, gpu, dtype)
        with np.errstate(all="ignore"):
            if pairs and all(np.allclose(x, y, bound, bound, equal_nan=True) for x, y in pairs):
                return True
    return False


def _numbers(data: bytes, type: str) -> np.ndarray:
    if type == "bf16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, _FLOATS[type][0])


def _approximate(launch: Any, gpu: Regions) -> bool:
    """Errors of one approximation, in the domain for which the manual gives a bound."""
    opcode = next(o for o in launch.opcodes if re.search(_APPROXIMATE, o))
    family, type = opcode.split(".")[0], opcode.split(".")[-1].removesuffix("x2")
    relative, absolute = _ERRORS.get(f"{family} {type}") or _ERRORS[family]
    if launch.request.name != "form" or gpu[:-1] != launch.emulated[:-1]:
        return False
    x, y = (_numbers(regions[-1], type).astype(np.float64) for regions in (gpu, launch.emulated))
    operands = [_numbers(r, type).astype(np.float64) for r in launch.request.regions[:-1]]
    _, mantissa = _FLOATS[type]
    tiny = 2.0**-24 if type == "f16" else 2.0**-149 if type == "f32" else 2.0**-133
    with np.errstate(all="ignore"):  # the emulator's result is rounded itself: half a unit
        bound = np.abs(y) * (relative + 2.0 ** -(mantissa + 1)) + absolute + tiny
        good = (np.abs(x - y) <= bound) | (np.isnan(x) & np.isnan(y)) | (x == y)
        largest = np.finfo(np.float32).max  # the next number is infinite
        good |= (type == "f32") & np.isinf(x) & (np.abs(y) >= largest * (1 - relative))
        if family in ("sin", "cos"):  # 2 pi
            good |= np.isfinite(operands[0]) & (np.abs(operands[0]) > 6.2831855)
        if opcode.startswith("div.approx"):
            good |= (np.abs(operands[1]) > 2.0**126) | (np.abs(operands[1]) < 2.0**-126)
    return bool(good.all())


def _any(launch: Any, gpu: Regions) -> bool:
    """Addresses."""
    return True


def _but_warpid(launch: Any, gpu: Regions) -> bool:
    ((x, y),) = _pairs(launch, gpu, np.uint32)
    columns = [i for i in range(16) if i != 12]
    return bool((x.reshape(-1, 16)[:, columns] == y.reshape(-1, 16)[:, columns]).all())


def _last_equal(launch: Any, gpu: Regions) -> bool:
    """Old values depend on whose turn it is, the final ones do not."""
    return bool(gpu[1:] == launch.emulated[1:])


def _turns(launch: Any, gpu: Regions) -> bool:
    """exch: what was put in, what came out and what is left are the same values."""
    everything = [np.frombuffer(b"".join((r[0], r[2])), np.uint32) for r in (gpu, launch.emulated)]
    return bool((np.sort(everything[0]) == np.sort(everything[1])).all())


_APPROXIMATE = r"^(ex2|lg2|sin|cos|tanh|rsqrt|rcp|sqrt|div)\.(approx|full)"

KNOWN: tuple[Known, ...] = (
    Known("", r"\.f64", "an fp64 NaN may have any payload", _nan64),
    Known(
        "", _APPROXIMATE, "approximations: within the error that the PTX ISA allows", _approximate
    ),
    Known(
        "test_math|test_approximations", _APPROXIMATE,
        "functions of CUDA's library made of approximations: within 2e-6", _near,
    ),
    Known("test_reduction", "red|atom", "floats are added in another order: within 2e-6", _near),
    Known(
        "atomics_take_turns.*exch", "atom",
        "lanes take turns in any order, seen in the old values", _turns,
    ),
    Known(
        "atomics_take_turns", "atom",
        "lanes take turns in any order, seen in the old values", _last_equal,
    ),
    Known(
        "static_shared_variables_lie", "mov",
        "ptxas lays out shared variables in an order of its own", _any,
    ),
    Known(
        "test_special_registers", "mov",
        "%warpid is where a warp runs, not its number", _but_warpid,
    ),
)  # fmt: skip
