"""Checkpoints: quantize a safetensors file in constant memory, inspect it, save and load.

>>> from blockscale import checkpoint
>>> checkpoint.quantize_file("model.safetensors", "model.mxfp8.safetensors", "mxfp8")
>>> state = checkpoint.load_file("model.mxfp8.safetensors")  # name -> Tensor or ScaledTensor
>>> checkpoint.save_file(state, "copy.safetensors")
"""

from .conventions import CONVENTIONS
from .converting import convert_folder
from .jobs import Progress
from .quantizing import quantize_file, quantize_folder
from .report import FileReport, TensorReport, inspect_file, inspect_folder
from .selection import DEFAULT_EXCLUDE
from .states import load_file, load_folder, save_file
from .statistics import ErrorStatistics, ValueStatistics

__all__ = [
    "CONVENTIONS",
    "DEFAULT_EXCLUDE",
    "ErrorStatistics",
    "FileReport",
    "Progress",
    "TensorReport",
    "ValueStatistics",
    "convert_folder",
    "inspect_file",
    "inspect_folder",
    "load_file",
    "load_folder",
    "quantize_file",
    "quantize_folder",
    "save_file",
]
