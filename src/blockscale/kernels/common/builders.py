"""Which module builds the kernel of a configuration: no configuration knows its kernel."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["BUILDERS", "build_kernel"]

#: A configuration's type, and the module whose ``compile_config`` takes it.
BUILDERS = {
    "quantizers.config.Config": "quantizers.kernel",
    "quantizers.config.AmaxConfig": "quantizers.amax",
    "quantizers.norm_config.NormConfig": "quantizers.rmsnorm_kernel",
    "quantizers.dequantize_config.DequantizeConfig": "quantizers.dequantize_kernel",
    "sm90.config.Config": "sm90.fp8_gemm",
    "sm90.bf16_config.Bf16Config": "sm90.bf16_gemm",
    "sm90.mixed_config.Config": "sm90.mixed",
    "sm90.skinny_config.Config": "sm90.skinny",
    "sm90.permute_config.PermuteConfig": "sm90.permute_activations",
    "sm90.ladder_config.LadderConfig": "sm90.ladder",
    "sm100.config.Config": "sm100.kernel",
}
_KERNELS = __name__.rpartition(".common.")[0]


def build_kernel(config: Any) -> Any:
    """The host function of a configuration's kernel; takes about a second and the CuTe DSL."""
    kind = type(config)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix(f"{_KERNELS}.")
    return import_module(f"{_KERNELS}.{BUILDERS[name]}").compile_config(config)
