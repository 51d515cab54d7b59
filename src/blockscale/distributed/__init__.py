"""Collectives of quantized tensors; experts over ranks, and their weights as one kernel from tokens
to tokens reads them."""

from . import scaled_dtensor  # noqa: F401 (fills the table of operations)
from .collectives import all_gather, all_to_all
from .expert_parallel import ExpertParallel
from .gate_parallel import GateParallel
from .gather_gemm import all_gather_gemm
from .gathered_weight import gather_quantized
from .mega_moe import MegaMoE
from .mega_weights import FoldError, MegaWeights, check_mega_weights, transform_weights
from .ranks import PeerError
from .tensor_parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "FoldError",
    "GateParallel",
    "MegaMoE",
    "MegaWeights",
    "PeerError",
    "PrepareModuleInput",
    "RowwiseParallel",
    "all_gather",
    "all_gather_gemm",
    "all_to_all",
    "check_mega_weights",
    "gather_quantized",
    "transform_weights",
]
