"""Weights that servers fuse into one, and the global scale that these must share.

A server stacks q, k and v (gate and up) to one matrix with one global scale: vLLM takes the largest
``weight_scale_2`` of the three for all of them. So theirs are made equal here. They may lie in
several files of a checkpoint, which its index names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from threading import Lock

import torch
from torch import Tensor

from ..formats import Format
from ..measure import amax
from ..rounding import ROOM, float32_bits, from_float32_bits, global_scale_from_amax
from .files import Files
from .header import Stored, show

__all__ = ["FUSED", "GlobalScales", "fused_with", "groups_of", "stored_amax"]

#: Modules whose weights become one in vLLM, SGLang or TensorRT-LLM (their
#: ``packed_modules_mapping``), by that part of their names which differs.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("gate_proj", "up_proj"),
    ("gate", "up"),
    ("w1", "w3"),  # of experts too
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq_a", "wkv"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
_GROUP = {member: group for group in FUSED for member in group}
_CHUNK = 1 << 21  # elements read at a time
_SHARD = re.compile(r"-\d+-of-\d+\.")

#: Why a tensor is not quantized; None if it is.
Reason = Callable[[str, Stored], str | None]


def fused_with(name: str) -> tuple[str, ...]:
    """Names of all tensors that a server makes one with ``name``, itself among them.

    >>> fused_with("layers.0.mlp.up_proj.weight")
    ('layers.0.mlp.gate_proj.weight', 'layers.0.mlp.up_proj.weight')
    """
    parts = name.split(".")
    for i in reversed(range(len(parts))):
        if group := _GROUP.get(parts[i]):
            return tuple(".".join((*parts[:i], member, *parts[i + 1 :])) for member in group)
    return (name,)


def groups_of(
    files: Files, reasons: Mapping[str, str | None], reason: Reason
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """For each tensor that is quantized those that share its global scale, itself among them; and
    sentences about groups that are quantized in part.

    Args:
        files: the source.
        reasons: of the tensors of ``files``.
        reason: of those of the other files of the checkpoint.

    Raises ValueError where ``files`` has a part of a group, and no index says where the rest is;
    OSError where the file with the rest cannot be read.
    """
    groups: dict[str, tuple[str, ...]] = {}
    warnings: list[str] = []
    for name, why in reasons.items():
        if why is not None or name in groups:
            continue
        why_not = {each: _look_up(files, name, each, reasons, reason) for each in fused_with(name)}
        group = tuple(each for each, why in why_not.items() if why is None)
        groups |= dict.fromkeys(group, group)
        warnings += [
            f"{show(name)} is quantized, but not {show(each)} ({why}), with which servers fuse it"
            for each, why in why_not.items()
            if why
        ]
    return groups, warnings


def _look_up(
    files: Files, name: str, other: str, reasons: Mapping[str, str | None], reason: Reason
) -> str | None:
    """Why ``other`` is not quantized; None if it is, "" if there is no such tensor."""
    if other in reasons:
        return reasons[other]
    file = files.find(other)
    if file is not None:
        return reason(other, file.header.tensors[other])
    if not files.knows_all and _SHARD.search(files.names[0]):
        raise ValueError(
            f"source: servers fuse {show(name)} with {show(other)}, so both need one global "
            f"scale, but the latter is not in {files.folder / files.names[0]}; put the "
            "checkpoint's *.safetensors.index.json and its other files beside it"
        )
    return ""


class GlobalScales:
    """The global scale of each tensor: that of the largest amax in its group.

    Args:
        groups: of each tensor.
        amax: reads that of a tensor; it is asked once, by whichever thread comes first.
        format: with global scales.
        power_of_two: round scales up to one.
        room: leave some above the largest scale, as other scalings than by amax need it.
    """

    def __init__(
        self,
        groups: Mapping[str, tuple[str, ...]],
        amax: Callable[[str], Tensor],
        format: Format,
        power_of_two: bool,
        room: bool = False,
    ) -> None:
        self._groups, self._amax = groups, amax
        self._format, self._power_of_two, self._room = format, power_of_two, room
        self._scales: dict[tuple[str, ...], Tensor] = {}
        self._locks = {group: Lock() for group in groups.values()}

    def __getitem__(self, name: str) -> Tensor:
        group = self._groups[name]
        with self._locks[group]:
            if group not in self._scales:
                largest = float32_bits(torch.stack([self._amax(each) for each in group]).amax())
                scale = from_float32_bits(global_scale_from_amax(largest, self._format))
                scale = scale * ROOM if self._room else scale
                self._scales[group] = _rounded_up(scale) if self._power_of_two else scale
            return self._scales[group]


def _rounded_up(scale: Tensor) -> Tensor:
    """The smallest power of two that is not below."""
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, from 0.5 up below 1
    return torch.ldexp(torch.ones(()), exponent - (mantissa == 0.5).int())


def stored_amax(files: Files, name: str) -> Tensor:
    """The largest magnitude of a tensor in high precision."""
    file, largest = files.holder(name), torch.zeros(())
    tensor, memory = file.header.tensors[name], torch.empty(4 * _CHUNK, dtype=torch.uint8)
    for start in range(0, tensor.numel, _CHUNK):
        piece = file.elements(name, start, min(_CHUNK, tensor.numel - start), memory)
        largest = torch.maximum(largest, amax(piece))
    return largest
