"""What numerics do to a model: which layer, product and format costs how much, and what
quantization does to each tensor, step by step."""

from .bisect import Bisection, Cost, bisect
from .watch import NonfiniteWarning, WatchFiles, watch
from .watch_report import write_watch_report

__all__ = [
    "Bisection",
    "Cost",
    "NonfiniteWarning",
    "WatchFiles",
    "bisect",
    "watch",
    "write_watch_report",
]
