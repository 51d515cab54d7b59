"""Layers: Recipe, Linear, convert and autocast."""

from .convert import autocast, convert
from .linear import Linear, linear
from .recipe import Recipe
from .reuse import clear_weight_cache, reuse_weights

__all__ = [
    "Linear",
    "Recipe",
    "autocast",
    "clear_weight_cache",
    "convert",
    "linear",
    "reuse_weights",
]
