"""Weights that FSDP2 gathers quantized: rows for the forward, columns for the backward, as the
product that comes reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ..nn.forms import Forms
from ..nn.gathered_ops import number
from ..nn.linear import Linear
from ..nn.operand import Operand
from ..nn.recipe import Recipe
from ..watching import is_dtensor
from .collectives import as_rows
from .dtensor_parameters import dtensor_like
from .quantizer import Quantizer, warn_of_cut_blocks
from .ranks import check_alike
from .shard_ops import received_shards
from .tensor_parallel import ParallelLinear
from .weight_state import Gathered, WeightState

__all__ = ["GatheredWeight", "gather_quantized"]

aten = torch.ops.aten
_ops: Any = torch.ops.blockscale  # of nn.layer_ops and nn.gathered_ops
#: What gives a weight of a weight: FSDP2 cuts it so, and modules are moved, copied and cast so.
_WEIGHTS = {
    aten._pin_memory.default, aten._to_copy.default, aten.as_strided.default, aten.alias.default,
    aten.clone.default, aten.detach.default, aten.empty_like.default, aten.new_zeros.default,
    aten.slice.Tensor, aten.split.Tensor, aten.view.default, aten.zeros_like.default,
}  # fmt: skip
#: Of these, what a weight whose values are elsewhere has, too.
_SAME = {aten.alias.default, aten.as_strided.default, aten.detach.default, aten.view.default}
#: What has the memory of the weight.
_VIEWS = _SAME | {aten.slice.Tensor, aten.split.Tensor}


class Like(NamedTuple):
    """Torch knows this of a weight that has no values."""

    shape: torch.Size
    others: dict[str, Any]

    @staticmethod
    def of(x: Tensor) -> Like:
        others = {"strides": x.stride(), "dtype": x.dtype, "device": x.device}
        return Like(x.shape, {**others, "storage_offset": x.storage_offset()})


class Context(NamedTuple):
    """A graph keeps this of a weight; ``dtype`` and ``device`` only if the weight has no values."""

    quantizer: Quantizer
    dtype: torch.dtype | None = None
    device: torch.device | None = None


class GatheredWeight(Tensor):
    """A parameter (N, K) in high precision, which FSDP2 gathers quantized; whole it has no values
    but those of one product.

    Attributes:
        state: values, or what was gathered. In a graph that is being recorded, a handle alone.
    """

    state: WeightState

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, state: WeightState, like: Like) -> GatheredWeight:
        self: Any = Tensor._make_wrapper_subclass(cls, like.shape, **like.others)
        self.state = state
        found: GatheredWeight = self
        return found

    @staticmethod
    def of(state: WeightState) -> GatheredWeight:
        """A weight that has its values."""
        return GatheredWeight(state, Like.of(state.values))

    @property
    def quantizer(self) -> Quantizer:
        return self.state.quantizer

    @property
    def master(self) -> Tensor | None:
        return self.state.master

    @property
    def handle(self) -> Tensor | None:
        return self.state.handle

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = f"{self.quantizer.format}, gathered" if self.master is None else "high precision"
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype}, {state})"

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        """Tells torch.nn.Module that a cast or a move makes another weight, master and all, and
        compilers what their graphs hold in place of it."""
        if self.master is not None:
            return ["master"], Context(self.quantizer)
        return ["handle"], Context(self.quantizer, self.dtype, self.device)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Context, shape: torch.Size, stride: tuple[int, ...]
    ) -> GatheredWeight:
        quantizer, dtype, device = context
        if dtype is None:
            return GatheredWeight.of(WeightState(quantizer, "", inner["master"]))
        like = Like(shape, {"strides": stride, "dtype": dtype, "device": device})
        return GatheredWeight(WeightState(quantizer, "", handle=inner["handle"]), like)

    def _stable_hash_for_caching(self) -> str:
        """All that a graph depends on: torch runs the one that it has cached for a weight for each
        other one that has the same here, in later processes, too."""
        seen = self.shape, self.stride(), self.dtype, self.device, self.requires_grad
        return repr((self.__tensor_flatten__(), *seen))

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
        self.state.master = given
        self.state.writes.add()

    def in_place_of(self, given: Tensor) -> Tensor:
        """``given``, a parameter that was loaded in the place of this one, gathered as this is."""
        local = given._local_tensor if isinstance(given, DTensor) else given
        if type(local) not in (Tensor, nn.Parameter):
            return given
        state = WeightState(self.quantizer, self.state.name, local.detach())
        made: Tensor = GatheredWeight.of(state)
        if isinstance(given, DTensor):
            made = dtensor_like(made, given)
        return nn.Parameter(made, requires_grad=given.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A checkpoint has its values, and needs no class of ours. Compilers pickle what stands in
        for a weight, to know a graph that they have cached."""
        (inner,), _ = self.__tensor_flatten__()
        if isinstance(getattr(self, inner), FakeTensor):
            return str, (self._stable_hash_for_caching(),)
        return self.state.values.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if func in _PASSES:
            return _PASSES[func](*args)
        if isinstance(first, GatheredWeight) and first.master is None and func in _SAME:
            shape = args[1] if len(args) > 1 else first.shape
            if tuple(shape) == tuple(first.shape):
                return GatheredWeight(first.state, Like.of(first))
        plain_args, plain_kwargs = tree_map_only(
            GatheredWeight, lambda x: x.state.values, (args, kwargs or {})
        )
        out = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            tree_map_only(GatheredWeight, lambda x: x.state.writes.add(), (args, kwargs or {}))
        if not isinstance(first, GatheredWeight):
            return out
        if out is first.master:
            return first  # in place
        state, view = first.state, func in _VIEWS
        if func in _WEIGHTS:
            return tree_map_only(Tensor, lambda x: GatheredWeight.of(state.made(x, view=view)), out)
        if func.is_view:
            state.writes.hide()
        return out

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
        ranks = mesh.size()
        if ranks == 1:  # nothing travels, and FSDP2 hands on one tensor
            return (self.state.values.to(dtype),), (None, None, outer_size)
        if self.shape[1:] != outer_size[1:]:
            raise ValueError(
                f"shard_placement_fn: gave {self.state.name} {tuple(outer_size)} another dimension "
                "than the first; give it Shard(0), or leave the layer out of gather_quantized "
                "(filter_fn)"
            )
        if not self.state.checked:  # before ranks wait for each other's other bytes
            mine = tuple(outer_size), self.quantizer.operand
            check_alike("recipe of a weight", mine, mesh.get_group())
            self.state.checked = True
        alignment = self.quantizer.alignment
        if outer_size[0] % (ranks * alignment) or outer_size[1] % alignment:
            warn_of_cut_blocks(self.state.name, outer_size, ranks, self.quantizer)
            shard, rows = self.state.values.to(dtype), -(-outer_size[0] // ranks)
            padded = shard.new_zeros(rows, *outer_size[1:])
            padded[: len(shard)] = shard
            return (padded,), (None, None, outer_size)
        axis = -2 if torch._C._current_graph_task_id() >= 0 else -1
        group = mesh.get_group()
        q = self.state.quantize(axis, dtype, self.state.global_scale(dtype, group))
        return (as_rows(q.qdata).view(torch.uint8), q.qscale), (q, group, outer_size)

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
            state = WeightState(self.quantizer, self.state.name, values[: size[0]])
        else:
            data, scale = all_gather_outputs
            written = self.state.writes.count
            like = next(received_shards(q, data, scale))  # q itself would stay in memory
            gathered = Gathered(like, data, scale, size, self.state, param_dtype, group, written)
            state = WeightState(self.quantizer, self.state.name, gathered=gathered)
        if out is None:
            if state.master is not None:
                return GatheredWeight(state, Like.of(state.master)), all_gather_outputs
            state.handle = number(state)
            others = {"dtype": param_dtype, "device": data.device}
            return GatheredWeight(state, Like(size, others)), all_gather_outputs
        out = out._local_tensor if isinstance(out, DTensor) else out
        assert isinstance(out, GatheredWeight)
        out.state.master, out.state.gathered = state.master, state.gathered
        return None

    # --- layers -----------------------------------------------------------------------------------

    def quantized_forms(self, operand: Operand, *, rows: bool, columns: bool) -> Forms | None:
        """As products read it; None where it has values, which anybody may quantize."""
        return self.state.quantized_forms(operand, rows=rows, columns=columns)


def _fprop(*args: Any) -> list[Tensor]:
    """``linear_fprop``, as compilers record it, of a weight that may have been gathered."""
    x, (weight, bias, recipe, out_dtype, *more) = args[:6], args[6:]
    if weight.master is not None:
        found: list[Tensor] = _ops.linear_fprop(*x, weight.master, bias, recipe, out_dtype, *more)
        return found
    shape = list(weight.shape)
    return [_ops.gathered_fprop(*x, weight.handle, shape, bias, recipe, out_dtype)]


def _backward(*args: Any) -> list[Tensor]:
    """``linear_backward`` likewise."""
    x, (weight, w_global, w_dtype, recipe, dgrad, *more) = args[:7], args[7:]
    if weight.master is not None:
        found = _ops.linear_backward(*x, weight.master, w_global, w_dtype, recipe, dgrad, *more)
    else:
        found = _ops.gathered_backward(*x, weight.handle, w_dtype, recipe, *more)
    made: list[Tensor] = found
    return made


_PASSES = {_ops.linear_fprop.default: _fprop, _ops.linear_backward.default: _backward}


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
    rows ranks cut inside of a block is gathered as it is, with a warning. So are, without one,
    those of layers with a product in high precision, weights that other modules have, too, as
    embeddings, and those that are transformed or rounded stochastically. Of NVFP4 ranks agree on
    the global scale first.

    Layers of :class:`ColwiseParallel` and :class:`RowwiseParallel` gather over the other ranks of
    the mesh: call it after ``parallelize_module``.

    Args:
        module: changed in place, and returned.
        filter_fn: of a layer and its name; those for which it is false stay as they are.

    Raises ValueError where there is no layer of ``convert`` that ``filter_fn`` accepts, TypeError
    for parameters that are sharded already. Forward and backward raise ValueError for shards that
    are not of rows, RuntimeError where a weight was written to while it is gathered.
    """
    accepted = {
        weight: layers
        for weight, layers in _layers_of(module).items()
        if not filter_fn or all(filter_fn(each, name) for name, each in layers)
    }
    if not accepted:
        raise ValueError(
            "module: has no layer made by blockscale.convert that filter_fn accepts, no weight "
            "would be gathered quantized; call blockscale.convert before"
        )
    for weight, layers in accepted.items():
        name, first = layers[0]
        if not all(isinstance(each, Linear) for _, each in layers):
            continue  # tied to an embedding, say, which reads its values
        if is_dtensor(weight) and not isinstance(first, ParallelLinear):
            raise TypeError(
                f"{name}.weight: is a DTensor; call gather_quantized before fully_shard"
            )
        recipe = first.recipe
        if {"fprop", "dgrad"} & set(recipe.high_precision) or isinstance(weight, GatheredWeight):
            continue
        if any(each.recipe != recipe for _, each in layers):
            continue
        operand = recipe.operand("weights")
        if operand.is_random or not operand.has_one_global_scale:
            continue  # ranks would round, and transform, shards by themselves
        made = _made_of(weight, recipe, f"{name}.weight")
        parameter = nn.Parameter(made, requires_grad=weight.requires_grad)
        for _, each in layers:
            each.weight = parameter
    return module


def _made_of(weight: Tensor, recipe: Recipe, name: str) -> Tensor:
    quantizer = Quantizer(recipe.operand("weights"))
    if not isinstance(weight, DTensor):
        return GatheredWeight.of(WeightState(quantizer, name, weight.detach()))
    quantizer = quantizer._replace(mesh=weight.device_mesh)
    state = WeightState(quantizer, name, weight._local_tensor.detach())
    return dtensor_like(GatheredWeight.of(state), weight)


def _layers_of(module: nn.Module) -> dict[nn.Parameter, list[tuple[str, Any]]]:
    """Weights of converted layers, and every module that has one, with its name."""
    found: dict[nn.Parameter, list[tuple[str, Any]]] = {}
    for name, each in module.named_modules():
        for parameter in each._parameters.values():
            if parameter is not None:
                found.setdefault(parameter, []).append((name, each))
    weights = {each.weight for _, each in module.named_modules() if isinstance(each, Linear)}
    return {weight: layers for weight, layers in found.items() if weight in weights}
