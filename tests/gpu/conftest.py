"""Tests that need an NVIDIA GPU; without one they are skipped and counted."""

import os

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
            elif item.get_closest_marker("alone") and _others():
                item.add_marker(
                    pytest.mark.skip(reason="times the host: pytest tests/gpu -m alone")
                )


def _others() -> bool:
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
