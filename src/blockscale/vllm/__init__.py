"""The plugin for vLLM: linear layers and experts of quantized checkpoints run by our kernels.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and calls it in each of its
processes; blockscale itself never imports this package. What knows nothing of vLLM is in modules of
its own, and tested without it::

    schemes        what becomes of activations, as config.json says it
    table          which layers of a checkpoint are quantized, as its files say it
    weights        the parameters of a layer, and the ScaledTensor that is made of them
    weight_module  a ScaledTensor as plain parameters of a module
    served         linear layers and experts, which multiply by such modules' weights
    device         whether a device has the kernels
    limits         what layers do not do

What is vLLM's::

    config         its configuration of a checkpoint
    methods        which layer is run by what
    linear         its method of linear layers
    experts        its method of experts
"""

__all__ = ["METHOD", "register"]

#: What users pass as ``--quantization``, and folders of our own have as ``quant_method``.
METHOD = "blockscale"


def register() -> None:
    """Make vLLM know ``quantization="blockscale"``. Called by vLLM, in each process, once or more.

    >>> llm = vllm.LLM("Llama-3-8B-NVFP4", quantization="blockscale")

    Nothing else of vLLM changes: a model is served by our kernels where it is asked for, and where
    a folder's ``quant_method`` is ours.
    """
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )

    if METHOD not in QUANTIZATION_METHODS:
        from .config import BlockscaleConfig

        register_quantization_config(METHOD)(BlockscaleConfig)
