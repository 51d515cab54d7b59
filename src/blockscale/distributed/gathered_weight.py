"""Weights that FSDP2 gathers quantized: rows for the forward, columns for the backward, as the
product that comes reads them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..formats import get_format
from ..nn.forms import Forms
from ..nn.linear import Linear
from ..ops.operand_layout import operand_layout
from ..ops.quantize import global_scale
from ..quantize import quantize
from ..tensor import ScaledTensor
from ..watching import is_dtensor
from .collectives import all_gather

__all__ = ["GatheredWeight", "gather_quantized"]

aten = torch.ops.aten
#: What gives a weight of a weight: FSDP2 cuts it so, and modules are moved, copied and cast so.
_WEIGHTS = {
    aten._pin_memory.default, aten._to_copy.default, aten.as_strided.default, aten.alias.default,
    aten.clone.default, aten.detach.default, aten.empty_like.default, aten.new_zeros.default,
    aten.slice.Tensor, aten.split.Tensor, aten.view.default, aten.zeros_like.default,
}  # fmt: skip
#: Of these, what a weight whose values are elsewhere has, too.
_SAME = {aten.alias.default, aten.as_strided.default, aten.detach.default, aten.view.default}


class How(NamedTuple):
    """The format, and the rounding of scales, in which a layer multiplies its weight."""

    format: str
    scale_rounding: str | None

    @property
    def rows(self) -> int:
        """How many rows a shard has, or a multiple: whole blocks along either axis."""
        return max(get_format(self.format).block)

    def quantize(self, x: Tensor, axis: int, global_scale: Tensor | None) -> ScaledTensor:
        rounding = self.scale_rounding
        return quantize(x, self.format, axis, scale_rounding=rounding, global_scale=global_scale)

    def global_scale(self, shard: Tensor, group: dist.ProcessGroup) -> Tensor | None:
        """Of the whole: the largest of those of shards that have one, as it rises with amax."""
        if not get_format(self.format).has_global_scale:
            return None
        found = global_scale(shard, self.format)
        found = torch.where((shard.isfinite() & (shard != 0)).any(), found, 0)
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        return torch.where(found == 0, 1, found)


class Gathered(NamedTuple):
    """What a rank has of a whole weight, by one axis, and where it can gather it from by the other
    one: its own ``shard``, in ``dtype``.

    Attributes:
        parts: the whole, or shards that do not lie below each other.
    """

    parts: tuple[ScaledTensor, ...]
    shape: torch.Size
    shard: GatheredWeight
    dtype: torch.dtype
    group: dist.ProcessGroup

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def along(self, axis: int, how: How) -> ScaledTensor:
        block, first = get_format(how.format).block, self.parts[0]
        if axis != first.axis and block[0] != block[1]:
            shard = _master_of(self.shard).to(self.dtype)
            return all_gather(how.quantize(shard, axis, first.global_scale), 0, self.group)
        whole: Any = torch.cat(list(self.parts)) if len(self.parts) > 1 else first
        found: ScaledTensor = whole  # the same elements and scales may serve both products
        return found if axis == first.axis else found._with(axis=axis)


class GatheredWeight(Tensor):
    """A parameter (N, K) in high precision, which FSDP2 gathers quantized; whole it has no values
    but those of one product.

    Attributes:
        master: values in high precision, of a shard or where it was gathered as it is.
        gathered: what a rank has of the whole one, otherwise.
        how: it is quantized.
    """

    master: Tensor | None
    gathered: Gathered | None
    how: How

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        how: How,
        master: Tensor | None = None,
        gathered: Gathered | None = None,
        dtype: torch.dtype | None = None,
    ) -> GatheredWeight:
        """One of ``master`` and ``gathered``; of the latter ``dtype`` is what it stands for."""
        like: Any = gathered if gathered is not None else master
        strides = (like.shape[1], 1) if master is None else master.stride()
        self: Any = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=strides,
            storage_offset=0 if master is None else master.storage_offset(),
            dtype=dtype or like.dtype,
            device=like.device,
            requires_grad=master is not None and master.requires_grad,
        )
        self.how, self.master, self.gathered = how, master, gathered
        found: GatheredWeight = self
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = "high precision" if self.gathered is None else f"{self.how.format}, gathered"
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype}, {state})"

    def __tensor_flatten__(self) -> tuple[list[str], How]:
        """Tells torch.nn.Module that a cast or a move makes another weight, master and all."""
        _master_of(self)
        return ["master"], self.how

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], how: How, shape: torch.Size, stride: tuple[int, ...]
    ) -> GatheredWeight:
        return GatheredWeight(how, inner["master"])

    def _stable_hash_for_caching(self) -> str:
        return repr(self.how)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        given = value.master if isinstance(value, GatheredWeight) else value
        alike = given is not None and (given.shape, given.dtype, given.device) == (
            self.shape,
            self.dtype,
            self.device,
        )
        if not alike or self.master is None:
            raise TypeError(
                f"data: got {value.dtype} {tuple(value.shape)} on {value.device}; {self} takes its "
                "like alone: give the layer another parameter, or call module.to()"
            )
        self.master = given

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A checkpoint has its values, and needs no class of ours."""
        return _master_of(self).__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, GatheredWeight) and first.gathered is not None and func in _SAME:
            shape = args[1] if len(args) > 1 else first.shape
            if tuple(shape) == tuple(first.shape):
                return GatheredWeight(first.how, gathered=first.gathered, dtype=first.dtype)
        plain_args, plain_kwargs = tree_map_only(GatheredWeight, _master_of, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if isinstance(first, GatheredWeight) and out is first.master:
            return first  # in place
        if func not in _WEIGHTS or not isinstance(first, GatheredWeight):
            return out
        return tree_map_only(Tensor, lambda x: GatheredWeight(first.how, x), out)

    # --- FSDP2 ------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What this rank sends: elements and scales of its shard, or where ranks cut a block or
        there is one alone, its values."""
        dtype = mp_policy.param_dtype or self.dtype
        shard, ranks = _master_of(self).to(dtype), mesh.size()
        if ranks == 1:  # nothing travels, and FSDP2 hands on one tensor
            return (shard,), (None, None, outer_size)
        if outer_size[0] % (ranks * self.how.rows) or outer_size[1] % self.how.rows:
            _warn(tuple(outer_size), ranks, self.how)
            rows = -(-outer_size[0] // ranks)
            padded = shard.new_zeros(rows, *outer_size[1:])
            padded[: len(shard)] = shard
            return (padded,), (None, None, outer_size)
        axis = -2 if torch._C._current_graph_task_id() >= 0 else -1
        group = mesh.get_group()
        q = self.how.quantize(shard, axis, self.how.global_scale(shard, group))
        # along columns elements of four bits lie column after column
        data = q.qdata if q.qdata.is_contiguous() else q.qdata.mT.contiguous()
        return (data.view(torch.uint8), q.qscale), (q, group, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """The whole weight, of what all ranks have sent; or ``out``, which is it already."""
        q, group, size = metadata
        if q is None:
            (values,) = all_gather_outputs
            made = GatheredWeight(self.how, values[: size[0]])
        else:
            data, scale = all_gather_outputs
            data = data.view(q.qdata.dtype)
            if q.qdata.is_contiguous():
                parts = (q._with(data=data, scale=scale, shape=tuple(size)),)
            else:
                each = data.view(-1, *q.qdata.mT.shape), scale.view(-1, *q.qscale.shape)
                parts = tuple(q._with(data=d.mT, scale=s) for d, s in zip(*each, strict=True))
            found = Gathered(parts, size, self, param_dtype, group)
            made = GatheredWeight(self.how, gathered=found, dtype=param_dtype)
        if out is None:
            return made, all_gather_outputs
        assert isinstance(out, GatheredWeight)
        out.master, out.gathered = made.master, made.gathered
        return None

    # --- layers -----------------------------------------------------------------------------------

    def quantized_forms(
        self, format: str, scale_rounding: str | None, *, rows: bool, columns: bool
    ) -> Forms | None:
        """As products read it; None where it has values, which anybody may quantize."""
        if self.gathered is None:
            return None
        how = How(format, scale_rounding)
        if how != self.how:
            raise ValueError(
                f"weight: was gathered as {self.how}, its layer multiplies {how}; call "
                "blockscale.distributed.gather_quantized after recipes are set"
            )
        made = [
            _operand(self.gathered.along(axis, how)) if wanted else None
            for axis, wanted in ((-1, rows), (-2, columns))
        ]
        return Forms(*made)


def gather_quantized(
    module: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> nn.Module:
    """Let FSDP2 gather the weights of converted layers quantized: about half of bfloat16's bytes,
    by rows for the forward and by columns for the backward. Call it between ``convert`` and
    ``fully_shard``; the losses are the same bit for bit.

    >>> model = bs.convert(torch.nn.Sequential(torch.nn.Linear(256, 256)), bs.Recipe("mxfp8"))
    >>> model = bs.distributed.gather_quantized(model)
    >>> # for layer in model: torch.distributed.fsdp.fully_shard(layer)

    Weights stay in high precision, and so do gradients and what checkpoints have. A weight whose
    rows ranks cut inside of a block is gathered as it is, with a warning. So are those of layers
    with a product in high precision, and weights that other modules have, too, as embeddings. Of
    NVFP4 ranks agree on the global scale first.

    Args:
        module: changed in place, and returned.
        filter_fn: of a layer and its name; those for which it is false stay as they are.

    Raises TypeError for parameters that are sharded already.
    """
    for weight, layers in _layers_of(module).items():
        name, first = layers[0]
        if not all(isinstance(each, Linear) for _, each in layers):
            continue  # tied to an embedding, say, which reads its values
        if filter_fn and not all(filter_fn(each, name) for name, each in layers):
            continue
        if is_dtensor(weight):
            raise TypeError(
                f"{name}.weight: is a DTensor; call gather_quantized before fully_shard"
            )
        recipe = first.recipe
        if {"fprop", "dgrad"} & set(recipe.high_precision) or isinstance(weight, GatheredWeight):
            continue
        if any(each.recipe != recipe for _, each in layers):
            continue
        how = How(recipe.format_of("weights").name, recipe.scale_rounding)
        made = GatheredWeight(how, weight.detach())
        parameter = nn.Parameter(made, requires_grad=weight.requires_grad)
        for _, each in layers:
            each.weight = parameter
    return module


def _layers_of(module: nn.Module) -> dict[nn.Parameter, list[tuple[str, Any]]]:
    """Weights of converted layers, and every module that has one, with its name."""
    found: dict[nn.Parameter, list[tuple[str, Any]]] = {}
    for name, each in module.named_modules():
        for parameter in each._parameters.values():
            if parameter is not None:
                found.setdefault(parameter, []).append((name, each))
    weights = {each.weight for _, each in module.named_modules() if isinstance(each, Linear)}
    return {weight: layers for weight, layers in found.items() if weight in weights}


def _master_of(weight: GatheredWeight) -> Tensor:
    if weight.master is None:
        raise ValueError(
            f"weight: {weight} has no values in high precision while it is gathered; read it when "
            "FSDP has sharded it again, or leave the layer out of gather_quantized (filter_fn)"
        )
    return weight.master


def _operand(whole: ScaledTensor) -> ScaledTensor:
    """In memory as products want it."""
    layout, k_major = operand_layout(whole.format_name, whole.device)
    if whole.axis == -2 and k_major:
        whole = whole._with(data=whole.qdata.mT.contiguous().mT)
    return whole.to_layout(layout)


_warned = False


def _warn(size: tuple[int, ...], ranks: int, how: How) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"a weight {size} over {ranks} ranks is gathered in high precision: {how.format} has "
            f"blocks of {how.rows}, and ranks would cut them. (Said once.)",
            UserWarning,
            stacklevel=3,
        )
