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
from ..fused_names import fused_with
from ..measure import amax
from ..rounding import global_scale_from_amax
from .files import Files
from .header import Stored, show

__all__ = ["GlobalScales", "groups_of", "stored_amax"]

_CHUNK = 1 << 21  # elements read at a time
_SHARD = re.compile(r"-\d+-of-\d+\.")

#: Why a tensor is not quantized; None if it is.
Reason = Callable[[str, Stored], str | None]


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
        scaling: of blocks; others than by amax need room above the largest scale.
    """

    def __init__(
        self,
        groups: Mapping[str, tuple[str, ...]],
        amax: Callable[[str], Tensor],
        format: Format,
        power_of_two: bool,
        scaling: str = "amax",
    ) -> None:
        self._groups, self._amax = groups, amax
        self._format, self._power_of_two, self._scaling = format, power_of_two, scaling
        self._scales: dict[tuple[str, ...], Tensor] = {}
        self._locks = {group: Lock() for group in groups.values()}

    def __getitem__(self, name: str) -> Tensor:
        group = self._groups[name]
        with self._locks[group]:
            if group not in self._scales:
                largest = torch.stack([self._amax(each) for each in group]).amax()
                self._scales[group] = global_scale_from_amax(
                    largest, self._format, self._scaling, power_of_two=self._power_of_two
                )
            return self._scales[group]


def stored_amax(files: Files, name: str) -> Tensor:
    """The largest magnitude of a tensor in high precision."""
    file, largest = files.holder(name), torch.zeros(())
    tensor, memory = file.header.tensors[name], torch.empty(4 * _CHUNK, dtype=torch.uint8)
    for start in range(0, tensor.numel, _CHUNK):
        piece = file.elements(name, start, min(_CHUNK, tensor.numel - start), memory)
        largest = torch.maximum(largest, amax(piece))
    return largest
