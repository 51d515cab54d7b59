"""Layers: Recipe, Linear, convert and autocast."""

from .cache import clear_weight_cache
from .convert import autocast, convert
from .linear import Linear, linear
from .recipe import Recipe

__all__ = ["Linear", "Recipe", "autocast", "clear_weight_cache", "convert", "linear"]
