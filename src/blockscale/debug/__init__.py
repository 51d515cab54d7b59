"""What numerics do to a model: which layer, product and format costs how much."""

from .bisect import Bisection, Cost, bisect

__all__ = ["Bisection", "Cost", "bisect"]
