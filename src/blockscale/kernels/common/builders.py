"""Which module builds the kernel of a configuration: no configuration knows its kernel."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["BUILDERS", "build_kernel", "describe_kernel", "made_of", "register_builder"]

#: A configuration's type, and the module whose ``host_function`` takes it.
BUILDERS = {
    "quantizers.config.Config": "quantizers.kernel",
    "quantizers.config.AmaxConfig": "quantizers.amax",
    "quantizers.norm_config.NormConfig": "quantizers.rmsnorm_kernel",
    "quantizers.statistics_config.StatisticsConfig": "quantizers.statistics_kernel",
    "quantizers.dequantize_config.DequantizeConfig": "quantizers.dequantize_kernel",
    "watch.config.WatchConfig": "watch.kernel",
    "experts.combine_config.CombineConfig": "experts.combine_kernel",
    "experts.route_config.RouteConfig": "experts.route_kernel",
    "sm90.config.Config": "sm90.fp8_gemm",
    "sm90.bf16_config.Bf16Config": "sm90.bf16_gemm",
    "sm90.mixed_config.Config": "sm90.mixed",
    "sm90.skinny_config.Config": "sm90.skinny",
    "sm90.upcast_config.UpcastConfig": "sm90.upcast_gemm",
    "sm90.upcast_config.KBlocksConfig": "sm90.k_blocks_kernel",
    "sm90.permute_config.PermuteConfig": "sm90.permute_activations",
    "sm90.mega_config.MegaConfig": "sm90.mega_kernel",
    "sm90.mega_config.MixedMegaConfig": "sm90.mega_mixed",
    "sm90.gather_config.GatherConfig": "sm90.gather_gemm",
    "sm100.config.Config": "sm100.kernel",
    "sm100.mega_config.MegaConfig": "sm100.mega_kernel",
}
#: Configurations whose kernels are made of code in other folders, too.
_MADE_OF = {
    "watch.config.WatchConfig": ("quantizers", "ranks"),
    "sm90.mega_config.MegaConfig": ("mega", "ranks"),
    "sm90.mega_config.MixedMegaConfig": ("mega", "ranks"),
    "sm90.gather_config.GatherConfig": ("ranks",),
    "sm100.mega_config.MegaConfig": ("mega", "ranks"),
}
_KERNELS = __name__.rpartition(".common.")[0]


class _Builder(NamedTuple):
    module: str
    made_of: tuple[str, ...]


_registered: dict[type, _Builder] = {}


def register_builder(kind: type, module: str, *, made_of: tuple[str, ...] = ()) -> None:
    """Let configurations of another package have kernels, which are then cached like all others.

    Call it in the module that defines the type: a process that gets a configuration from another
    one imports that module alone.

    Args:
        kind: the configuration's type: hashable, with a ``repr`` that tells all of it.
        module: the module whose ``host_function`` takes the configuration; imported when needed.
        made_of: modules in whose folders there is code that the kernel is made of, beside the
            configuration's own folder: a change there is a new kernel, too.

    Example:
        >>> register_builder(LadderConfig, "examples.ladder.kernel",
        ...                  made_of=("blockscale.kernels.sm90",))
    """
    _registered[kind] = _Builder(module, made_of)


def made_of(kind: type) -> tuple[str, ...]:
    """Modules in whose folders there is code that the kernels of a type of configuration are made
    of: the type's own one first."""
    if kind in _registered:
        return kind.__module__, *_registered[kind].made_of
    folders = _MADE_OF.get(_short_name(kind), ())
    return kind.__module__, *(f"{_KERNELS}.{folder}" for folder in folders)


def describe_kernel(config: Any) -> Any:
    """The ``tensor_specs.HostFunction`` of a configuration's kernel; takes the CuTe DSL."""
    kind = type(config)
    if kind in _registered:
        module = _registered[kind].module
    else:
        module = f"{_KERNELS}.{BUILDERS[_short_name(kind)]}"
    return import_module(module).host_function(config)


def build_kernel(config: Any) -> Any:
    """The compiled host function of a configuration's kernel; takes about a second."""
    return describe_kernel(config).compile()


def _short_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix(f"{_KERNELS}.")
