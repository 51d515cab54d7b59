"""Shared by all tests: both CPU backends, and hypothesis without a clock."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from blockscale.ops import backends

settings.register_profile("blockscale", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("blockscale")
torch.set_num_threads(1)  # the suite runs a worker on each core


@pytest.fixture(scope="module", params=["reference", "numba"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with the plain-torch reference and with the compiled CPU kernels."""
    if request.param == "numba" and not importlib.util.find_spec("numba"):
        pytest.skip("numba is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "cpu_backend", lambda: request.param)
        yield request.param
