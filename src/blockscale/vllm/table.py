"""Which layers of a checkpoint are quantized, and how, as its files say it.

Configurations name layers by globs, classes or what they leave out, and each library in its own
way. Names, dtypes and shapes of a weight's parts tell without a doubt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..checkpoint.header import TORCH_DTYPES, Stored, show
from ..checkpoint.storage import Description
from ..exclusions import why_left_alone
from .weights import Kind

__all__ = ["Table"]

_EXPERT = re.compile(r"\d+\.")
_BLOCK = re.compile(r".*?\.\d+\.")


@dataclass(frozen=True)
class Table:
    """Weights of a checkpoint, by the names that vLLM has for layers.

    Attributes:
        kinds: of the quantized ones.
        names: of all tensors.
        claimed: quantized ones that a layer was made for.
    """

    kinds: Mapping[str, Kind]
    names: frozenset[str]
    claimed: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, found: Mapping[str, Description], tensors: Mapping[str, Stored]) -> Table:
        """What ``found`` describes of ``tensors``. ValueError for what layers do not hold."""
        return cls(
            {name: _kind(name, each, tensors) for name, each in found.items()}, frozenset(tensors)
        )

    def renamed(self, rename: Callable[[str], str | None]) -> Table:
        """By other names; None drops one."""
        kinds = {new: kind for name, kind in self.kinds.items() if (new := rename(name))}
        names, claimed = (
            {new for name in each if (new := rename(name))} for each in (self.names, self.claimed)
        )
        return Table(kinds, frozenset(names), claimed)

    def has(self, layer: str) -> bool:
        """Whether it has a weight for a layer of this name."""
        return f"{layer}.weight" in self.names or f"{layer}.weight" in self.kinds

    def linear(self, prefix: str, packed: Mapping[str, Sequence[str]]) -> Kind | None:
        """How the weight of a linear layer is quantized; None if it is not.

        Args:
            prefix: the layer's name.
            packed: last part of a name -> those of the layers that vLLM makes one of.

        Raises ValueError where weights that become one are quantized in several ways, and where
        there are none of these names.
        """
        parent, dot, last = prefix.rpartition(".")
        members = [f"{parent}{dot}{each}.weight" for each in packed.get(last, [last])]
        return self._common(prefix, members)

    def experts(self, prefix: str) -> Kind | None:
        """The same of experts, each of which has a number in front of its names."""
        start = f"{prefix}."
        inside = [name for name in self.names if name.startswith(start)]
        stacks = [name for name in self.kinds if name.startswith((start, f"{prefix}_"))]
        members = sorted(
            name
            for name in {*inside, *stacks}
            if name.endswith(".weight") and _EXPERT.match(name, len(start))
        )
        if not members and stacks:
            raise ValueError(
                f"{prefix}: {show(stacks[0])} is a stack of experts, and blockscale serves those "
                "of gpt-oss only, beside experts that have names of their own. Serve it without "
                "quantization='blockscale'"
            )
        return None if inside and not members else self._common(prefix, members)

    def stacks(self, prefix: str) -> Kind | None:
        """The same of experts in stacks as gpt-oss has them; None if there are none."""
        members = [
            name
            for name, kind in self.kinds.items()
            if name.startswith(f"{prefix}.") and kind.places["data"].name.endswith("_blocks")
        ]
        return self._common(prefix, members) if members else None

    def check_claimed(self) -> None:
        """ValueError for a quantized weight beside others that have layers, itself without one.

        vLLM does not ask about all layers, routers for one, and its loaders may then take codes for
        weights. Blocks of which nothing is claimed are those of other ranks, or not loaded.
        """
        blocks = {_block(name) for name in self.claimed}
        for name in self.kinds.keys() - self.claimed:
            if (block := _block(name)) is None or block not in blocks:
                continue
            raise ValueError(
                f"{show(name)} is in {self.kinds[name].format_name}, and vLLM makes no layer of it "
                "that may be quantized; quantize without it (blockscale quantize --exclude), or "
                "serve it without quantization='blockscale'"
            )

    def _common(self, prefix: str, members: Sequence[str]) -> Kind | None:
        kinds = {name: kind for name in members if (kind := self.kinds.get(name)) is not None}
        plain = [name for name in members if name in self.names and name not in kinds]
        if not kinds:
            if plain:
                return None
            raise ValueError(
                f"{prefix}: the checkpoint has no tensor {show(members[0] if members else prefix)},"
                " so blockscale cannot tell whether this layer is quantized; vLLM knows it by "
                "another name. Serve it without quantization='blockscale'"
            )
        name, kind = next(iter(kinds.items()))
        others = [each for each, one in kinds.items() if one != kind]
        absent = [each for each in members if each not in kinds and each not in plain]
        if other := [*plain, *others, *absent]:
            what = "not quantized" if plain else "quantized otherwise" if others else "not there"
            raise ValueError(
                f"{prefix}: vLLM makes one layer of {show(name)} ({kind.format.name}) and "
                f"{show(other[0])}, which is {what}; quantize both alike, or none (blockscale "
                "quantize --exclude)"
            )
        self.claimed.update(kinds)
        return kind


def _block(name: str) -> str | None:
    """The block of a model that a weight is in: its name up to the first number."""
    found = _BLOCK.match(name)
    return found and found[0]


def _kind(name: str, description: Description, tensors: Mapping[str, Stored]) -> Kind:
    if why_left_alone(name).startswith("left alone by default: embedding"):
        raise ValueError(
            f"{show(name)} is a quantized embedding, and blockscale serves linear layers and "
            "experts; quantize without it (blockscale quantize --exclude '*embed*'), or serve it "
            "without quantization='blockscale'"
        )
    if description.axis != -1 or description.transposed or description.groups:
        raise ValueError(
            f"{show(name)}: its blocks do not run along its last dimension, as those of layers "
            "here do; serve it without quantization='blockscale'"
        )
    dtypes = {part: tensors[stored].dtype for part, stored in description.names(name).items()}
    return Kind(
        description.format.name,
        {part: description.storage.places[part] for part in description.parts},
        {part: TORCH_DTYPES[each] for part, each in dtypes.items()},
    )
