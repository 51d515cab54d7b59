"""What ranks of a mega MoE have alike: sizes and formats, which they tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import choose
from ..formats import get_format
from ..kernels.common.runtime import gpu_of
from ..kernels.mega.buffers import Sizes, needs_bf16_rings
from ..stored import is_per_group
from ..tensor import ScaledTensor
from .mega_launch import why_no_kernel
from .ranks import PeerError

__all__ = [
    "MegaConfig",
    "Message",
    "activation_scale",
    "config_of",
    "multiprocessors_of",
    "same_config",
]

#: Of weights, the formats of activations that they are multiplied with; the first is the default.
ACTIVATIONS = {
    "nvfp4": ("nvfp4", "fp8_1x128"),
    "mxfp4": ("mxfp8", "fp8_1x128"),
    "mxfp8": ("mxfp8",),
    "fp8_128x128": ("fp8_1x128",),
}
#: NVFP4's global scale of activations where none is given, as of checkpoints that were not
#: calibrated: with it blocks up to 2688 are held.
ACTIVATION_SCALE = 1.0
BACKENDS = ("auto", "kernel", "steps")


class MegaConfig(NamedTuple):
    """Sizes and formats of a layer, which all ranks must have alike."""

    weights: str
    activations: str
    experts: int  # of each rank
    hidden: int
    intermediate: int
    tokens: int  # of each rank, at most
    topk: int
    ranks: int
    multiprocessors: int  # that run one kernel which does it all; 0: there is none

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            self.ranks,
            self.tokens,
            self.topk,
            self.hidden,
            self.intermediate,
            self.experts,
            self.activations,
            bf16_rings=needs_bf16_rings(self.activations, self.weights),
        )


Message = tuple[MegaConfig | None, float | None, str]  # what is wrong, if there is no config


def config_of(
    up: Any, down: Any, tokens: int, topk: int, activations: str | None, ranks: int
) -> MegaConfig:
    for name, each in (("up", up), ("down", down)):
        if not isinstance(each, ScaledTensor) or each.format_name not in ACTIVATIONS:
            given = each.format_name if isinstance(each, ScaledTensor) else type(each).__name__
            raise TypeError(
                f"{name}: got {given}; expected a ScaledTensor in {', '.join(ACTIVATIONS)}: call "
                "blockscale.quantize"
            )
        if each.dim() != 3 or each.axis != -1 or each.layout_name != "compact":
            raise ValueError(
                f"{name}: got {each}; expected (experts, rows, columns), blocked along -1, compact"
            )
    experts, wide, hidden = up.shape
    if wide % 2 or tuple(down.shape) != (experts, hidden, wide // 2):
        raise ValueError(
            f"up, down: got {tuple(up.shape)} and {tuple(down.shape)}; expected (experts, 2 * I, "
            "H) and (experts, H, I)"
        )
    if down.format_name != up.format_name or down.device != up.device:
        raise ValueError(f"up, down: got {up} and {down}; expected one format and device")
    for name, number in (("tokens", tokens), ("topk", topk)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name}: got {number!r}; expected a positive integer")
    if topk > experts * ranks:
        raise ValueError(f"topk: got {topk}; all ranks together have {experts * ranks} experts")
    known = {name: name for name in ACTIVATIONS[up.format_name]}
    what = f"activations (of {up.format_name} weights)"
    chosen = choose(what, next(iter(known)) if activations is None else activations, known)
    columns = hidden, wide // 2
    return MegaConfig(
        up.format_name, chosen, experts, *columns, tokens, topk, ranks, multiprocessors=0
    )


def multiprocessors_of(
    config: MegaConfig, a2_scale: Tensor | None, device: torch.device, backend: str
) -> int:
    """Those that run the kernel; 0 where steps run one after another. ValueError where a kernel
    shall run, and there is none."""
    gpu = gpu_of(device)
    if choose("backend", backend, {name: name for name in BACKENDS}) == "steps":
        return 0
    reason = why_no_kernel(config.sizes, config.weights, device)
    if not reason and is_per_group(a2_scale):
        reason = "a2_scale: has one for each expert, the kernel one for all"
    if reason and backend == "kernel":
        raise ValueError(f"backend: there is no kernel: {reason}")
    return 0 if reason or gpu is None else gpu.multiprocessors


def activation_scale(
    name: str, given: Any, config: MegaConfig, device: torch.device
) -> Tensor | None:
    """() or (experts,) fp32, of formats that have global scales."""
    if not get_format(config.activations).has_global_scale:
        if given is not None:
            raise ValueError(f"{name}: {config.activations} activations have none; leave it out")
        return None
    value = ACTIVATION_SCALE if given is None else given
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = torch.tensor(value, dtype=torch.float32)
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        what = value.dtype if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"{name}: got {what}; expected a number, or a float32 tensor")
    if value.numel() != 1 and tuple(value.shape) != (config.experts,):
        raise ValueError(f"{name}: got {tuple(value.shape)}; expected () or ({config.experts},)")
    if not bool((value.isfinite() & (value > 0)).all()):
        raise ValueError(
            f"{name}: got {value.tolist()}; expected positive finite numbers, the multipliers that "
            "dequantize"
        )
    scale = value.detach().to(device, copy=True)
    return scale if is_per_group(scale) else scale.reshape(())


def same_config(messages: Sequence[Message]) -> tuple[MegaConfig, float | None]:
    """What all ranks have, and the largest of their scales; raises on every rank where they
    differ."""
    configs = []
    for rank, (config, _, wrong) in enumerate(messages):
        if config is None:
            raise PeerError(f"rank {rank} cannot go on: {wrong}")
        configs.append(config)
    first = configs[0]
    for rank, config in enumerate(configs):
        for name, expected, given in zip(MegaConfig._fields, first, config, strict=True):
            if given != expected:
                raise ValueError(
                    f"{name}: rank 0 has {expected!r}, rank {rank} {given!r}; all ranks make it "
                    "alike"
                )
    return first, max((scale for _, scale, _ in messages if scale is not None), default=None)
