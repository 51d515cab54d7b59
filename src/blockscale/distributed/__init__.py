"""Experts over ranks: their weights as one kernel from tokens to tokens reads them."""

from .mega_weights import FoldError, MegaWeights, check_mega_weights, transform_weights

__all__ = ["FoldError", "MegaWeights", "check_mega_weights", "transform_weights"]
