"""Weights that servers fuse into one, and the global scale that these must share.

A server stacks q, k and v (gate and up) to one matrix with one global scale: vLLM takes the largest
``weight_scale_2`` of the three for all of them. So theirs are made equal here. They may lie in
several files of a checkpoint, which its index names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..formats import Format
from ..measure import amax
from ..rounding import float32_bits, from_float32_bits, global_scale_from_amax
from .header import Stored, show
from .index import read_index
from .reader import Reader

__all__ = ["FUSED", "GlobalScales", "fused_with"]

#: Modules whose weights become one in vLLM, SGLang or TensorRT-LLM (their
#: ``packed_modules_mapping``), by that part of their names which differs.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),  # of experts too
    ("q_a_proj", "kv_a_proj_with_mqa"),
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


class GlobalScales:
    """The global scales of the tensors of ``file`` that are quantized, one for each fused group.

    Args:
        file: the source.
        format: with global scales.
        reasons: of the tensors of ``file``.
        reason: of those of the other files of the checkpoint.

    Attributes:
        elsewhere: amax of tensors in other files, which decide about bytes of this one.
        warnings: sentences about groups that are quantized in part.

    Raises ValueError where ``file`` has a part of a group, and no index says where the rest is;
    OSError where the file with the rest cannot be read.
    """

    def __init__(
        self, file: Reader, format: Format, reasons: Mapping[str, str | None], reason: Reason
    ) -> None:
        self._file, self._format, self._reasons = file, format, reasons
        self._scales: dict[tuple[str, ...], Tensor] = {}
        self.elsewhere: dict[str, float] = {}
        self.warnings: list[str] = []
        places, seen = read_index(file.path), set[str]()
        for name in (name for name, why in reasons.items() if why is None):
            for other in fused_with(name):
                if other in seen:
                    continue
                seen.add(other)
                if other in reasons:
                    self._warn(name, other, reasons[other])
                elif places is None and _SHARD.search(file.path.name):
                    raise ValueError(
                        f"source: servers fuse {show(name)} with {show(other)}, so both need one "
                        f"global scale, but the latter is not in {file.path}; put the "
                        "checkpoint's *.safetensors.index.json and its other files beside it"
                    )
                elif places and other in places:
                    with Reader(file.path.parent / places[other], "source") as neighbour:
                        self._look_at(neighbour, name, other, reason)

    def _look_at(self, neighbour: Reader, name: str, other: str, reason: Reason) -> None:
        tensor = neighbour.header.tensors.get(other)
        if tensor is None:
            raise ValueError(
                f"source: the index of {self._file.path} says that {show(other)} is in "
                f"{neighbour.path}, but it is not; fetch the checkpoint again"
            )
        why = reason(other, tensor)
        self._warn(name, other, why)
        if why is None:
            self.elsewhere[other] = float(_amax(neighbour, other))

    def _warn(self, name: str, other: str, why: str | None) -> None:
        if why is not None:
            self.warnings.append(
                f"{show(name)} is quantized, but not {show(other)} ({why}), with which servers "
                "fuse it"
            )

    def __getitem__(self, name: str) -> Tensor:
        """That of a tensor and of its group: it takes a reading of all of them, once."""
        group = fused_with(name)
        if group not in self._scales:
            here = [_amax(self._file, n) for n in group if self._reasons.get(n, "") is None]
            there = [torch.tensor(self.elsewhere[n]) for n in group if n in self.elsewhere]
            largest = float32_bits(torch.stack([*here, *there]).amax())
            self._scales[group] = from_float32_bits(global_scale_from_amax(largest, self._format))
        return self._scales[group]


def _amax(file: Reader, name: str) -> Tensor:
    count, largest = file.header.tensors[name].numel, torch.zeros(())
    for start in range(0, count, _CHUNK):
        largest = torch.maximum(
            largest, amax(file.elements(name, start, min(_CHUNK, count - start)))
        )
    return largest
