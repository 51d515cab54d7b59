"""As much of vLLM as ``blockscale.vllm.config`` imports: vLLM is too large for these tests.

What needs vLLM is run by ``benchmarks/vllm_plugin.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

QUANTIZATION = "vllm.model_executor.layers.quantization"


class QuantizationConfig:
    """vLLM's base class."""

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class Config:
    """What transformers makes of a config.json."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def to_dict(self) -> dict[str, Any]:
        return dict(self.content)


@contextmanager
def vllm(headers: Callable[..., dict[str, Any]] = lambda name, revision: {}) -> Iterator[Any]:
    """Its registry of quantization methods: ``known`` and ``registered``. ``headers`` are those of
    names on a hub."""
    registry, base, config = (
        ModuleType(name)
        for name in (QUANTIZATION, f"{QUANTIZATION}.base_config", "vllm.transformers_utils.config")
    )
    registry.QUANTIZATION_METHODS = known = ["fp8", "modelopt"]  # type: ignore[attr-defined]
    registry.registered = []  # type: ignore[attr-defined]

    def register(name: str) -> Callable[[type], type]:
        def keep(cls: type) -> type:
            known.append(name)
            registry.registered.append(cls)
            return cls

        return keep

    registry.register_quantization_config = register  # type: ignore[attr-defined]
    base.QuantizationConfig = QuantizationConfig  # type: ignore[attr-defined]
    base.QuantizeMethodBase = object  # type: ignore[attr-defined]
    config.get_safetensors_params_metadata = headers  # type: ignore[attr-defined]
    modules = {each.__name__: each for each in (registry, base, config)}
    parents = {name.rsplit(".", i)[0] for name in modules for i in (1, 2, 3)}
    stubs = {name: ModuleType(name) for name in parents - modules.keys()}
    # one by one: a copy of sys.modules put back would make anew what is imported meanwhile
    sys.modules.update({**stubs, **modules})
    try:
        yield registry
    finally:
        for name in (*stubs, *modules, "blockscale.vllm.config"):
            sys.modules.pop(name, None)
