"""Layers: Recipe, Linear, convert, autocast, reuse_weights and quantize_."""

from .attention import MultiheadAttention
from .autocast import autocast
from .convert import convert
from .exclude import DEFAULT_EXCLUDE
from .linear import Linear, linear
from .quantize import quantize_
from .quantized import QuantizedLinear, quantized_linear
from .recipe import Recipe
from .report import ConversionReport
from .reuse import clear_weight_cache, reuse_weights

__all__ = [
    "DEFAULT_EXCLUDE",
    "ConversionReport",
    "Linear",
    "MultiheadAttention",
    "QuantizedLinear",
    "Recipe",
    "autocast",
    "clear_weight_cache",
    "convert",
    "linear",
    "quantize_",
    "quantized_linear",
    "reuse_weights",
]
