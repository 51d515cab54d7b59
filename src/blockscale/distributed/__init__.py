"""Ranks that share weights, sequences and experts: what travels between them is quantized.

Which file does what, from the bottom up:

- ``ranks``: which rank this is; what ranks tell each other; :class:`PeerError`.
- ``functional_collectives``: of plain tensors, as ops that compilers call.
- ``collectives``: :func:`all_gather` and :func:`all_to_all` of ScaledTensors, a message each.
  ``shard_ops``: the gather as an op that compilers call, for products. ``scaled_dtensor``: torch's
  collectives of DTensors whose shards are ScaledTensors.
- ``quantizer``: quantizes shards so that they have the bytes of the whole; global scales of all
  ranks. ``version``: whether somebody wrote to what is kept. ``dtensor_parameters``: parameters
  that styles of parallelize_module share.

Tensor and sequence parallelism: ``tensor_parallel`` has the styles and their layer, ``compiled``
its steps, at once or as ops of a graph, ``parallel_product`` the product and its gradients,
``gathered_input`` what goes in and comes out (Megatron's mappings), ``shards`` what is gathered of
an input for a product and kept for the backward.

FSDP2: ``gathered_weight`` has :func:`gather_quantized` and the parameter that FSDP2 calls,
``weight_state`` what it and its views have, shard or whole. What layers and graphs ask of it is in
``nn.gathered_ops``.

Experts, for training: ``expert_parallel`` has the style, ``parallel_experts`` its layer and
gradients, ``expert_peers`` what ranks send of a call, ``gate_parallel`` the router's style.
``token_dispatch`` sends tokens to the ranks of their experts, here and for inference.

Kernels that reach other ranks' memory, which ``symmetric_memory`` makes: ``gather_gemm`` has
:func:`all_gather_gemm`. ``mega_moe`` is experts for inference, by one kernel (``mega_launch``) or
its steps; ``mega_config`` is what ranks must have alike. ``mega_weights``: a checkpoint's weights
for DeepGEMM's kernel.
"""

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
