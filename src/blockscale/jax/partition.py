"""Operations that XLA cannot cut, cut by us: each device of a mesh computes its shards.

XLA cannot look into a compiled loop or a kernel, and would gather its operands on every device. A
primitive of our own tells it how they are cut, as late as it must be, when a function is lowered:

- For several devices, by ``custom_partitioning``: XLA says how arrays lie, and asks for the code of
  a shard. The choice of a platform, ``vmap`` and derivatives are inside of it, as it is opaque to
  all of these.
- For one device, in ``shard_map``, where arrays are shards already, and for ``jax.export``, whose
  module cannot ask anybody, it is the operation itself.
- In a mesh with explicit axes, how arrays lie is known when a function is traced: there it is a
  ``shard_map``, and the primitive is not needed.
- ``vmap`` adds a dimension that may be cut, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ..dtypes import UINT8
from .cut import WHOLE, Axes, Cut, Dims, Factor, Work, plan

__all__ = ["lying", "partitioned"]


def partitioned(work: Work, lies: NamedSharding | None = None) -> Callable[..., Any]:
    """The operation on whole arrays, which each device has shards of.

    ``lies``: how its result lies in a mesh with explicit axes; None where operands decide.
    """

    def run(*given: Any) -> Any:
        leaves, tree = jax.tree.flatten(given)
        dtypes = [x.dtype for x in leaves]
        made: list[Any] = []

        def flat(cut: Cut) -> Callable[..., list[jax.Array]]:
            function = work.run(cut)

            def of_bytes(*leaves: jax.Array) -> list[jax.Array]:
                own = jax.tree.unflatten(tree, map(_in, leaves, dtypes))
                found, out = jax.tree.flatten(function(*own))
                made[:] = out, [x.dtype for x in found]
                return [_in_bytes(x) for x in found]

            return of_bytes

        found = _bound(work._replace(run=flat), [_in_bytes(x) for x in leaves], lies)
        out, own = made
        return jax.tree.unflatten(out, map(_in, found, own))

    return run


def _in_bytes(x: jax.Array) -> jax.Array:
    """What has one byte as bytes: XLA sends FP8 as floats of more bits where it has to, which
    changes codes of NaN and flushes the smallest scales."""
    return _in(x, UINT8) if x.dtype.itemsize == 1 else x


def _in(x: jax.Array, dtype: Any) -> jax.Array:
    """The same bits. Those that are floats already have a derivative."""
    return x if x.dtype == dtype else x.view(dtype)


def lying(x: jax.Array) -> NamedSharding | None:
    """How an array lies, if it is in a mesh with explicit axes."""
    sharding = jax.typeof(x).sharding
    return sharding if _explicit(sharding.mesh) else None


def _explicit(mesh: Any) -> set[str]:
    """Axes of a mesh, of which it is known when a function is traced what they cut."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Explicit}


def _bound(
    work: Work, leaves: Sequence[jax.Array], lies: NamedSharding | None = None
) -> list[jax.Array]:
    for mesh in (jax.typeof(x).sharding.mesh for x in leaves):
        if _explicit(mesh):
            return _in_shard_map(work, leaves, mesh, lies)
    whole = jax.make_jaxpr(work.run(WHOLE))(*leaves)
    return _primitive.bind(*leaves, work=work, whole=whole, cut=_customized(work, whole, leaves))


def _in_shard_map(
    work: Work, leaves: Sequence[jax.Array], mesh: Any, lies: NamedSharding | None
) -> list[jax.Array]:
    lie = [_axes_of(jax.typeof(x).sharding.spec, x.ndim) for x in leaves]
    wanted = [() if lies is None else _axes_of(lies.spec, 0)] * len(work.results)
    chosen = plan(work, [x.shape for x in leaves], lie, wanted, mesh.shape)
    read, written = (
        tuple(PartitionSpec(*axes) for axes in each) for each in (chosen.operands, chosen.results)
    )
    explicit = _explicit(mesh)
    run = jax.shard_map(
        work.run(chosen.cut),
        mesh=mesh,
        in_specs=read,
        out_specs=list(written),
        # none are all but those that vmap has taken
        axis_names=explicit if len(explicit) < len(mesh.axis_names) else set(),
        check_vma=False,
    )
    placed = [
        jax.sharding.reshard(x, NamedSharding(mesh, spec))
        for x, spec in zip(leaves, read, strict=True)
    ]
    found = run(*placed)
    return found if lies is None else [jax.sharding.reshard(x, lies) for x in found]


def _customized(work: Work, whole: ClosedJaxpr, leaves: Sequence[jax.Array]) -> ClosedJaxpr:
    """The call that XLA asks us about. It takes constants first, as it may close over none."""
    constants, shapes = whole.consts, [x.shape for x in leaves]
    count, out = len(constants), [x.shape for x in whole.out_avals]

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        lie, wanted = (
            [_axes_of(x.sharding.spec, len(x.shape)) for x in each]
            for each in (operands[count:], results)
        )
        chosen = plan(work, shapes, lie, wanted, dict(mesh.shape))
        run = work.run(chosen.cut)
        read, written = (
            tuple(NamedSharding(mesh, PartitionSpec(*axes)) for axes in each)
            for each in (chosen.operands, chosen.results)
        )
        kept = (NamedSharding(mesh, PartitionSpec()),) * count
        return mesh, lambda *shards: run(*shards[count:]), list(written), kept + read

    @custom_partitioning
    def call(*given: jax.Array) -> list[jax.Array]:
        return jaxpr_as_fun(ClosedJaxpr(whole.jaxpr, given[:count]))(*given[count:])

    told = work._replace(operands=(*[()] * count, *work.operands))
    rule = _rule(told, [jnp.shape(x) for x in constants] + shapes, out)
    call.def_partition(partition, sharding_rule=rule)
    return jax.make_jaxpr(lambda *given: call(*constants, *given))(*leaves)


def _rule(
    work: Work, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> SdyShardingRule:
    """What Shardy is told: dimensions of the same factor are cut alike, and units stay whole."""
    sizes: dict[str, int] = {}
    alone = 0

    def mapped(dims: Dims, shape: Sequence[int]) -> ArrayMapping:
        nonlocal alone
        found = list[Any]()
        for each, size in zip_longest(dims, shape):
            alone += 1
            if each is None or size == each.unit:  # compound ones of size 1 are refused
                found.append(f"alone{alone}")
            elif each.unit == 1:
                found.append(each.name)
            else:
                unit = f"unit{alone}"
                sizes[unit], sizes[each.name] = each.unit, size // each.unit
                found.append(CompoundFactor(each.name, unit))
        return ArrayMapping(*found)

    read, written = (
        tuple(mapped(*pair) for pair in zip(dims, shapes, strict=True))
        for dims, shapes in ((work.operands, operands), (work.results, results))
    )
    told = {each for mapping in (*read, *written) for each in mapping if isinstance(each, str)}
    rest: dict[str, Any] = {name: size for name, size in sizes.items() if name not in told}
    rest["reduction_factors"] = tuple(name for name in work.sums if name in {*told, *sizes})
    return SdyShardingRule(read, written, **rest)


def _axes_of(spec: Any, ndim: int) -> Axes:
    """The axes of each dimension, of a PartitionSpec."""
    found = [() if x is None else (x,) if isinstance(x, str) else tuple(x) for x in spec]
    return (*found, *[()] * (ndim - len(found)))


def _evaluated(*given: Any, whole: ClosedJaxpr, **_: Any) -> list[Any]:
    return jaxpr_as_fun(whole)(*given)


def _lowered(ctx: Any, *given: Any, whole: ClosedJaxpr, cut: ClosedJaxpr, **_: Any) -> Any:
    module = ctx.module_context
    config: Any = jax.config
    # of the context of several devices that compute whole arrays together, not of shard_map's
    mesh = getattr(module.axis_context, "abstract_mesh", None)
    by_shardy = config.jax_use_shardy_partitioner and not module.lowering_parameters.for_export
    if mesh is None or not by_shardy:
        run = whole
    else:
        run, places = cut, replace(module.axis_context, abstract_mesh=_refined(mesh))
        ctx = ctx.replace(module_context=module.replace(axis_context=places))
    return mlir.lower_fun(jaxpr_as_fun(run), multiple_results=True)(ctx, *given)


def _refined(mesh: Any) -> AbstractMesh:
    """The same devices, with an axis for each prime factor: two blocks on an axis of four devices
    are cut in two by XLA, and JAX could not tell how."""
    axes = {
        f"{name}/{i}": prime
        for name, size in mesh.shape.items()
        for i, prime in enumerate(_primes(size))
    }
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def _primes(n: int) -> list[int]:
    found, prime = list[int](), 2
    while n > 1:
        while n % prime == 0:
            found.append(prime)
            n //= prime
        prime += 1
    return found


def _batched(args: Any, dims: Any, *, work: Work, **_: Any) -> Any:
    """With a dimension in front of all that is mapped."""
    mapped = [each is not None for each in dims]
    moved = [jnp.moveaxis(x, d, 0) if m else x for x, d, m in zip(args, dims, mapped, strict=True)]
    known = [each.name for each in sum((*work.operands, *work.results), ()) if each is not None]
    front = Factor(f"map{sum(name.startswith('map') for name in {*known})}")
    axes = tuple(0 if each else None for each in mapped)
    more = work._replace(
        run=lambda cut: jax.vmap(work.run(cut), axes),
        operands=tuple(
            (front, *each) if m else each for each, m in zip(work.operands, mapped, strict=True)
        ),
        results=tuple((front, *each) for each in work.results),
    )
    found = _bound(more, moved)
    return found, [0] * len(found)


def _derived(primals: Any, tangents: Any, *, whole: ClosedJaxpr, **_: Any) -> Any:
    """The derivative of the operation itself, which XLA cuts as it can."""
    moving = [i for i, each in enumerate(tangents) if not isinstance(each, ad.Zero)]

    def run(*moved: Any) -> list[Any]:
        given = dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))
        return jaxpr_as_fun(whole)(*given.values())

    return jax.jvp(run, [primals[i] for i in moving], [tangents[i] for i in moving])


_primitive = Primitive("blockscale")
_primitive.multiple_results = True
_primitive.def_impl(_evaluated)
_primitive.def_abstract_eval(lambda *_, whole, **__: whole.out_avals)
mlir.register_lowering(_primitive, _lowered)
batching.primitive_batchers[_primitive] = _batched
ad.primitive_jvps[_primitive] = _derived
