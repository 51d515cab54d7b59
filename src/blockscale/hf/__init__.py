"""transformers loads and saves quantized models with our layers, once this is imported.

>>> import blockscale.hf
>>> model = AutoModelForCausalLM.from_pretrained("Llama-3-8B-NVFP4")  # of `blockscale quantize`
>>> model.save_pretrained("copy")

Source: transformers 5.24, ``HfQuantizer``.
"""

from .config import BlockscaleConfig
from .quantizer import BlockscaleQuantizer
from .registration import register

__all__ = ["BlockscaleConfig", "BlockscaleQuantizer"]

register()
