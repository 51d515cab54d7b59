"""Checkpoints: quantize a safetensors file in constant memory, inspect it, save and load.

>>> from blockscale import checkpoint
>>> checkpoint.quantize_file("model.safetensors", "model.mxfp8.safetensors", "mxfp8")
>>> state = checkpoint.load_file("model.mxfp8.safetensors")  # name -> Tensor or ScaledTensor
>>> checkpoint.save_file(state, "copy.safetensors")
"""

from .report import FileReport, TensorReport, inspect_file
from .selection import DEFAULT_EXCLUDE
from .states import load_file, save_file
from .statistics import ErrorStatistics, ValueStatistics
from .stream import Progress, quantize_file

__all__ = [
    "DEFAULT_EXCLUDE",
    "ErrorStatistics",
    "FileReport",
    "Progress",
    "TensorReport",
    "ValueStatistics",
    "inspect_file",
    "load_file",
    "quantize_file",
    "save_file",
]
