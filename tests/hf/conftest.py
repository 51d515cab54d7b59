"""transformers with blockscale registered, and without it again; its tiny models in folders."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[Any]:
    """Other tests of this process find transformers as it was."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    warnings.filterwarnings("ignore", module="transformers|torchao")
    logging.disable(logging.WARNING)
    from transformers.quantizers import auto

    kept = {
        name: dict(getattr(auto, name))
        for name in ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING")
    }
    attributes = auto.LOADING_ATTRIBUTES_CONFIG_TYPES
    import blockscale.hf
    from blockscale.hf.registration import register

    register()
    yield blockscale.hf
    logging.disable(logging.NOTSET)
    for name, mapping in kept.items():
        getattr(auto, name).clear()
        getattr(auto, name).update(mapping)
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES = attributes
