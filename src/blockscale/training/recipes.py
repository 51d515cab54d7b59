"""The recipes that ``blockscale train`` knows, by name; None quantizes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ..checks import choose
from ..nn import Recipe
from ..nn.nvfp4 import METHODS

__all__ = ["BASELINE", "DEFAULT_RECIPES", "RECIPES", "check_recipes", "default_recipes"]

#: What every other recipe is compared with.
BASELINE = "bf16"

RECIPES: Mapping[str, Recipe | None] = MappingProxyType(
    {
        BASELINE: None,
        "mxfp8": Recipe("mxfp8"),
        "mxfp8_e5m2_grad": Recipe("mxfp8", gradients="mxfp8_e5m2"),
        "mxfp8_floor": Recipe("mxfp8", scale_rounding="floor"),
        "mxfp8_even": Recipe("mxfp8", scale_rounding="even"),
        "mxfp6_e2m3": Recipe("mxfp6_e2m3"),
        "mxfp6_e3m2": Recipe("mxfp6_e3m2"),
        "mxfp4": Recipe("mxfp4"),
        "nvfp4": Recipe("nvfp4"),
        **{f"nvfp4_{name}": Recipe.nvfp4(name) for name in METHODS},
        "fp8_block": Recipe("fp8_block"),
    }
)

#: The claim (MXFP8 trains as BF16 does) and its two ablations.
DEFAULT_RECIPES = (BASELINE, "mxfp8", "mxfp8_e5m2_grad", "mxfp8_floor")

#: On a GPU: what it is fast with.
_GPU_RECIPES = (BASELINE, "fp8_block", "mxfp8")


def default_recipes(device: str, moe: bool = False) -> tuple[str, ...]:
    """Those of the docs, on a CPU and on a GPU, or of experts."""
    return DEFAULT_RECIPES if device == "cpu" and not moe else _GPU_RECIPES


def check_recipes(names: Iterable[str]) -> tuple[str, ...]:
    """``names`` without repetitions, the baseline first; ValueError for an unknown one."""
    unique = list(dict.fromkeys(names))
    for name in unique:
        choose("recipe", name, RECIPES)
    return tuple(sorted(unique, key=lambda name: name != BASELINE))
