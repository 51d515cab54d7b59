"""How others write quantized checkpoints, as data: a module each."""

from collections.abc import Mapping
from types import MappingProxyType

from .compressed_tensors import COMPRESSED_TENSORS
from .convention import Convention, Scheme
from .deepseek import DEEPSEEK, DEEPSEEK_V4, FINE_GRAINED
from .gpt_oss import GPT_OSS
from .modelopt import MODELOPT
from .own import BLOCKSCALE

__all__ = ["CONVENTIONS", "Convention", "Scheme"]

#: By name.
CONVENTIONS: Mapping[str, Convention] = MappingProxyType(
    {
        each.name: each
        for each in (
            *(BLOCKSCALE, MODELOPT, COMPRESSED_TENSORS),
            *(DEEPSEEK_V4, DEEPSEEK, FINE_GRAINED, GPT_OSS),
        )
    }
)
