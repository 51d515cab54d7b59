"""How long a product should take, and which wall it hits: computed from a launch's own counts.

``estimate(launch(arch, format, shape))`` needs no GPU. For Hopper it is held to measured times
(benchmarks/model_error.py); for Blackwell nothing has been measured.
"""

from .cache import Traffic, walk
from .counts import Launch
from .estimate import Estimate, estimate
from .kernels import FORMATS, launch
from .machine import B200, H200, MACHINES, Machine

__all__ = [
    "B200",
    "FORMATS",
    "H200",
    "MACHINES",
    "Estimate",
    "Launch",
    "Machine",
    "Traffic",
    "estimate",
    "launch",
    "walk",
]
