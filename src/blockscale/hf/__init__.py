"""transformers loads and saves quantized models with our layers, once this is imported.

>>> import blockscale.hf
>>> model = AutoModelForCausalLM.from_pretrained("Llama-3-8B-NVFP4")  # of `blockscale quantize`
>>> model.save_pretrained("copy")

What each file does::

    config        quantization_config, and which convention a model is saved in
    registration  which quant_method is read by what
    quantizer     transformers' quantizer, step by step
    plan          which parameters the tensors of a folder become
    recipes       how layers with these multiply
    operations    what transformers' loader does with parts and with weights on the way
    layers        layers before their weights are read, while they are, and after
    saving        what save_pretrained writes

Source: transformers 5.24, ``HfQuantizer``.
"""

from .config import BlockscaleConfig
from .quantizer import BlockscaleQuantizer
from .registration import register

__all__ = ["BlockscaleConfig", "BlockscaleQuantizer"]

register()
