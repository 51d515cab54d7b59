"""What a rank has of a weight that ranks share, quantized: its shard, or what was gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..formats import get_format
from ..nn.forms import Forms
from ..nn.operand import Operand
from ..nn.reuse import kept_with
from ..tensor import ScaledTensor
from .collectives import all_gather_named
from .quantizer import Quantizer
from .shard_ops import as_operand, join_received

__all__ = ["Gathered", "WeightState"]


class Gathered(NamedTuple):
    """What a rank has of a whole weight, by one axis, and where it can gather it from by the other
    one: its own ``shard``, in ``dtype``.

    Attributes:
        like: a shard, as all were sent: the first one received; ``data`` and ``scale``: what all
            ranks have sent, one after the other.
        written: how often the shard was written to before, if anybody can tell.
    """

    like: ScaledTensor
    data: Tensor
    scale: Tensor
    shape: torch.Size
    shard: WeightState
    dtype: torch.dtype
    group: dist.ProcessGroup
    written: int | None

    def along(self, axis: int) -> ScaledTensor:
        block, sent = get_format(self.shard.quantizer.format).block, self.like
        if axis != sent.axis and block[0] != block[1]:
            if self.shard.writes.count not in (None, self.written):
                raise RuntimeError(
                    f"weight: {self.shard.name} was written to after FSDP gathered it, and what "
                    "is gathered now would be of other values; call reshard() of the module that "
                    "fully_shard wraps before writing, as by an optimizer's step"
                )
            shard = self.shard.quantize(axis, self.dtype, sent.global_scale)
            return all_gather_named(shard, self.group, self.shard.name)
        whole = join_received(sent, self.data, self.scale, self.shape)
        # the same elements and scales may serve both products
        return whole if axis == sent.axis else whole._with(axis=axis)


class Writes:
    """How often the values of a weight were written to, by it and its views; None where nobody can
    tell, as views are about that are no weights.

    Not torch's versions: views that are made, and writes that arrive, below autograd (as DTensors
    pass them on) count none.
    """

    def __init__(self) -> None:
        self.count: int | None = 0

    def add(self) -> None:
        if self.count is not None:
            self.count += 1

    def hide(self) -> None:
        self.count = None


@dataclass(eq=False)
class WeightState:
    """What a weight and its views have: FSDP2 gathers into all of them anew.

    Attributes:
        quantizer: of shards, as the product has it that reads the weight.
        name: of its layer, the same on all ranks.
        master: values in high precision, of a shard or where it was gathered as it is.
        gathered: what a rank has of the whole one, otherwise.
        handle: what compiled code knows the gathered one by.
        checked: that all ranks quantize it alike.
    """

    quantizer: Quantizer
    name: str
    master: Tensor | None = None
    gathered: Gathered | None = None
    handle: Tensor | None = None
    checked: bool = False
    writes: Writes = field(default_factory=Writes)

    @property
    def values(self) -> Tensor:
        if self.master is None:
            raise ValueError(
                f"weight: {self.name} has no values in high precision while it is gathered; read "
                "it when FSDP has sharded it again, leave the layer out of gather_quantized "
                "(filter_fn), or convert it back before that"
            )
        return self.master

    def made(self, master: Tensor, *, view: bool) -> WeightState:
        """Hold ``master``, which an operation has made of the values."""
        writes = self.writes if view else Writes()
        return WeightState(self.quantizer, self.name, master, writes=writes)

    def global_scale(self, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor | None:
        """Ranks find the global scale of the whole weight together, if its format has one."""
        if not get_format(self.quantizer.format).has_global_scale:
            return None
        found: Tensor | None = self._kept(
            (dtype,), lambda: self.quantizer.global_scale(self.values.to(dtype), group)
        )
        return found

    def quantize(self, axis: int, dtype: torch.dtype, scale: Tensor | None) -> ScaledTensor:
        """A shard, with this global scale, which is kept beside it as its id is in the key."""

        def make() -> tuple[ScaledTensor, Tensor | None]:
            values = self.values.to(dtype)
            layout = self.quantizer.travelling_layout(values)
            return self.quantizer.quantize(values, axis, scale, layout), scale

        found: ScaledTensor
        found, _ = self._kept((dtype, axis, id(scale)), make)
        return found

    def _kept(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """``make`` is called once for the values and ``key`` inside of ``reuse_weights``."""
        if self.writes.count is None:
            return make()
        return kept_with(self.values, (self.writes.count, self.quantizer, *key), make)

    def quantized_forms(self, operand: Operand, *, rows: bool, columns: bool) -> Forms | None:
        """As products read it; None where it has values, which anybody may quantize."""
        if self.gathered is None:
            return None
        if operand != self.quantizer.operand:
            raise ValueError(
                f"weight: was gathered as {self.quantizer.operand}, its layer multiplies {operand};"
                " call blockscale.distributed.gather_quantized after recipes are set"
            )
        made = [
            as_operand(self.gathered.along(axis)) if wanted else None
            for axis, wanted in ((-1, rows), (-2, columns))
        ]
        return Forms(*made)
