"""What tests/hardware/tensormap_dump.py found on an H200, with names for its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

H200 = json.loads((Path(__file__).parent / "data" / "tensormaps_h200.json").read_text())

# In the order of the enumerations in cuda.h.
NAMES = {
    "element": (
        *("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16"),
        *("f32_ftz", "tf32", "tf32_ftz", "b4x16_align8", "b4x16_align16", "b6x16_align16"),
    ),
    "interleave": ("none", "16B", "32B"),
    "swizzle": (
        *("none", "32B", "64B", "128B"),
        *("128B_atom_32B", "128B_atom_32B_flip_8B", "128B_atom_64B"),
    ),
    "l2_promotion": ("none", "64B", "128B", "256B"),
    "oob_fill": ("zeros", "nan"),
}
BITS = dict(
    zip(NAMES["element"], (8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6), strict=True)
)


def named(case: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call with names for its numbers; None where one has none."""
    case = H200["base"] | case
    out = {}
    for key in ("address", "shape", "strides", "box", "element_strides"):
        out[key] = case[key] if key == "address" else tuple(case[key])
    for key, names in NAMES.items():
        if case[key] >= len(names):
            return None
        out[key] = names[case[key]]
    return out


def short(case: dict[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in case.items() if k not in ("hex", "memory", "error"))[:90]
