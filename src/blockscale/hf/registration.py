"""Make our configuration and quantizer known to transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.quantizers import auto

from ..checkpoint.conventions import CONVENTIONS
from .config import METHOD, BlockscaleConfig, is_ours
from .quantizer import BlockscaleQuantizer

__all__ = ["register"]


def register() -> None:
    """For every ``quant_method`` of our conventions. Where transformers has one of that name, too,
    formats that we do not read stay its own."""
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = BlockscaleQuantizer
    for convention in CONVENTIONS.values():
        for method in convention.methods:
            theirs = auto.AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
            auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = _reader(theirs)
            auto.AUTO_QUANTIZER_MAPPING.setdefault(method, BlockscaleQuantizer)
    known: Any = auto.LOADING_ATTRIBUTES_CONFIG_TYPES
    if BlockscaleConfig not in known:
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*known, BlockscaleConfig)


def _reader(theirs: Any) -> Any:
    """The class that reads a ``quantization_config`` of a method that ``theirs`` reads, too."""
    if theirs is None or issubclass(theirs, BlockscaleConfig | _Either):
        return theirs or BlockscaleConfig
    return type(f"Either{theirs.__name__}", (_Either,), {"theirs": theirs})


class _Either:
    """Ours where we read the formats, else transformers' own."""

    theirs: Any

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        found = BlockscaleConfig if is_ours(config_dict) else cls.theirs
        return found.from_dict(config_dict, **kwargs)
