"""transformers with blockscale registered, and without it again."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def registered(transformers_restored: None) -> Iterator[Any]:
    """``blockscale.hf``; transformers says nothing of what it loads."""
    warnings.filterwarnings("ignore", module="transformers|torchao")
    logging.disable(logging.WARNING)
    import blockscale.hf

    yield blockscale.hf
    logging.disable(logging.NOTSET)
