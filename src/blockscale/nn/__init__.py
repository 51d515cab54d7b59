"""Layers: Recipe, Linear, GroupedLinear, experts, convert, autocast, reuse_weights, quantize_."""

from .attention import MultiheadAttention
from .autocast import autocast
from .blocks import block_names
from .convert import convert
from .exclude import DEFAULT_EXCLUDE
from .experts import experts
from .gated import SWIGLU, GatedActivation
from .grouped import GroupedLinear, grouped_linear
from .held_experts import QuantizedExperts
from .hf_experts import register_experts
from .linear import Linear, linear
from .main_gradients import MainGradients
from .mlp import MLP
from .moe import GatedExperts, MoE
from .norm import LayerNorm, RMSNorm
from .norm_linear import LayerNormLinear, RMSNormLinear
from .quantize import quantize_
from .quantized import QuantizedLinear, quantized_linear
from .quantized_experts import quantized_experts
from .recipe import Recipe
from .report import ConversionReport
from .reuse import clear_weight_cache, reuse_weights
from .rounding_state import (
    load_rounding_state,
    rounding_state,
    rounding_step,
    set_rounding_step,
)
from .router import Router, choose_experts, load_balancing_loss
from .seeds import LayerSeed

__all__ = [
    "DEFAULT_EXCLUDE",
    "MLP",
    "SWIGLU",
    "ConversionReport",
    "GatedActivation",
    "GatedExperts",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerSeed",
    "Linear",
    "MainGradients",
    "MoE",
    "MultiheadAttention",
    "QuantizedExperts",
    "QuantizedLinear",
    "RMSNorm",
    "RMSNormLinear",
    "Recipe",
    "Router",
    "autocast",
    "block_names",
    "choose_experts",
    "clear_weight_cache",
    "convert",
    "experts",
    "grouped_linear",
    "linear",
    "load_balancing_loss",
    "load_rounding_state",
    "quantize_",
    "quantized_experts",
    "quantized_linear",
    "register_experts",
    "reuse_weights",
    "rounding_state",
    "rounding_step",
    "set_rounding_step",
]
