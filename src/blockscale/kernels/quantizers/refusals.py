"""What the kernels cannot do, of what can be asked of a quantizer."""

from __future__ import annotations

from ...layouts import get_layout
from ..common.gpu import GPUS, no_kernels
from .config import Request

__all__ = ["why_not"]


def why_not(request: Request, arch: str) -> str:
    """Why there is no kernel for such a call; empty where there is one."""
    format = request.fmt
    if arch not in GPUS:
        return f"architecture {arch}: {no_kernels(arch, GPUS)}"
    if reason := _why_not_together(request):
        return reason
    if format.element.bits == 6:
        return f"format {format.name}: no kernel packs 6-bit elements"
    for layout in request.layouts:
        if format.scale.nbytes not in get_layout(layout).itemsize:
            return f"layout {layout}: does not hold scales of {format.name}"
        if format.block[0] > 1 and layout != "compact":
            return f"format {format.name}: its kernels write compact scales"
    if request.square and format.block[0] > 1:
        return f"square: blocks of {format.name} are squares; leave it out"
    return _why_not_transform(request) or _why_not_scaling(request)


def _why_not_together(request: Request) -> str:
    """Some arguments only kernels of one plain matrix or batch take."""
    asked = {
        "seed": request.stochastic,
        "hadamard": request.hadamard > 0,
        "square": request.square,
        "scaling": request.scaling != "amax",
    }
    given = {
        "offsets": request.grouped,
        "gather": request.gather,
        f"producer {request.producer}": request.producer != "load",
    }
    found = [(one, other) for one in asked if asked[one] for other in given if given[other]]
    found += [("square", "hadamard")] * (request.square and request.hadamard > 0)
    for argument, other in found:
        return f"{argument}: no kernel takes it with {other}; leave out one of them"
    return ""


def _why_not_transform(request: Request) -> str:
    """Lanes of a warp must have what is transformed: of a row, or rows of 4-bit columns."""
    format = request.fmt
    if not request.hadamard:
        return ""
    if format.block[0] > 1:
        return f"hadamard: no kernel transforms before it has blocks of {format.name}"
    if -2 in request.axes and format.element.bits == 8:
        return "hadamard with axis=-2: no kernel transforms columns of 8-bit elements"
    return ""


def _why_not_scaling(request: Request) -> str:
    scaling = f"scaling={request.scaling!r}"
    if request.scaling == "amax":
        return ""
    if not request.fmt.has_global_scale:
        return f"{scaling}: is for nvfp4, not {request.format}"
    if request.scaling == "search":
        return f"{scaling}: is for weights that are kept, no GPU kernel tries so many scales"
    if request.scaling == "ms_eden":
        given = request.stochastic and request.hadamard >= 16
        return "" if given else f"{scaling}: needs a seed, and a hadamard of 16 to 128"
    seed = f"{scaling} with seed: elements are rounded to nearest; leave it out"
    return seed if request.stochastic else ""
