"""Copies of boxes of tensors: cp.async.bulk.tensor and relatives. PTX ISA 9.7.9.27."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ..machine.engine import Work
from ..machine.ports import STORED, read_global, read_map, read_shared, write_global, write_shared
from ..machine.state import Fragment, Step
from ..machine.undefined import fetched, used
from ..memory.buffers import MemoryFault
from ..memory.tensormap import TensorMap
from ..memory.tensormap_tile import Tile
from ..ptx.program import Address, Vector
from .bulk import REDUCTIONS, deliver, landings, one_by_one, reduced, send, strength_of
from .registry import Form, first, instruction

_DIMENSIONS = tuple(f"{n}d" for n in range(1, 6))
_LOADS = ("tile", "tile::gather4")
_STORES = ("tile", "tile::scatter4")
_decode = lru_cache(maxsize=256)(TensorMap.decode)


Place = tuple[bytes, tuple[int, ...]]  # a tensor map as stored, and coordinates


def _tensor(form: Form, index: int) -> Callable[[Fragment], Place]:
    """The operand [map, {coordinates}] of a fragment of one thread."""
    op = form.operand(index)
    if not isinstance(op, Address) or len(op.more) != 1 or not isinstance(op.more[0], Vector):
        raise form.error("expected [tensor map, {coordinates}]")
    at = form.address(Address(op.base, op.offset))
    gets = [form.get(item, "s32") for item in op.more[0].items]

    def find(w: Fragment) -> Place:
        where = np.array(at(w))
        if int(where[0]) % 64:
            raise MemoryFault(f"address {int(where[0]):#x} of a tensor map: a multiple of 64")
        return read_map(w, where[:1]), tuple(first(get(w)) for get in gets)

    return find


def _box(form: Form, place: Place, rank: int, rows: bool, store: bool) -> Tile:
    dimensions = len(_decode(place[0]).shape)
    if dimensions != rank:
        raise form.error(f"the tensor map is of rank {dimensions}, not {rank}")
    return _tile(*place, rows, store)


@lru_cache(maxsize=512)
def _tile(raw: bytes, coordinates: tuple[int, ...], rows: bool, store: bool) -> Tile:
    """Kept, as the lanes of a warp often say the same, and other CTAs later."""
    tensor = _decode(raw)
    return (tensor.tile4 if rows else tensor.tile)(coordinates, store=store)


@instruction("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def tensor(form: Form) -> Step:
    """Loads: [dst], [map, {..}], [mbar], CTA mask, policy. Stores: [map, {..}], [src], policy."""
    dimensions = form.one(*_DIMENSIONS)
    spaces = form.several("global", "shared::cluster", "shared::cta")
    if dimensions is None or len(spaces) != 2 or spaces.count("global") != 1:
        raise form.error("expected .1d to .5d, and the state spaces of destination and source")
    rank = int(dimensions[0])
    operation = form.one(*REDUCTIONS) if form.parts[1] == "reduce" else None
    if (operation is not None) != (form.parts[1] == "reduce"):
        raise form.error(f"expected one of {', '.join(REDUCTIONS)}")
    if spaces == ["global", "shared::cta"]:
        return _store(form, rank, operation)
    if operation is not None or spaces[0] == "global":
        raise form.error("stores and reduces from .shared::cta to .global only")
    return _load(form, rank, spaces[0])


def _rows(form: Form, rank: int, modes: tuple[str, ...]) -> bool:
    """Whether the mode is that of four rows."""
    rows = (form.one(*modes) or "tile") == modes[1]
    if rows:
        form.needs("sm_100f")
        if rank != 2:
            raise form.error(f".{modes[1]} is for .2d only")
    return rows


def _load(form: Form, rank: int, target: str) -> Step:
    rows = _rows(form, rank, _LOADS)
    if not form.has("mbarrier::complete_tx::bytes"):
        raise form.error("expected .mbarrier::complete_tx::bytes")
    multicast = target == "shared::cluster" and form.has("multicast::cluster")
    group = form.one("cta_group::1", "cta_group::2")
    if group:
        form.needs("sm_100f")
    to, source, bar = form.address(0, target), _tensor(form, 1), form.address(2, target)
    at = 3
    ctas = form.get(at, "u16") if multicast else None
    at += multicast
    if form.has("L2::cache_hint"):
        form.get(at, "b64")

    def run(w: Fragment) -> None:
        box = _box(form, source(w), rank, rows, store=False)
        launch = w.cta.launch
        mask = None if ctas is None else first(ctas(w))
        lands = landings(w, int(to(w)[0]), int(bar(w)[0]), mask, pair=group == "cta_group::2")

        def read(work: Work) -> Callable[[Work, int], None]:
            values = box.load(lambda where, size: read_global(work, launch, where, size))
            return lambda work, base: write_shared(work, box.places(base).astype(np.uint64), values)

        deliver(w, box.nbytes, read, lands)

    return one_by_one(run)


def _store(form: Form, rank: int, operation: str | None) -> Step:
    rows = _rows(form, rank, _STORES)
    if not form.has("bulk_group"):
        raise form.error("expected .bulk_group")
    target, source = _tensor(form, 0), form.address(1, "shared::cta")
    if form.has("L2::cache_hint"):
        form.get(2, "b64")

    def run(w: Fragment) -> None:
        given = target(w)
        box = _box(form, given, rank, rows, store=True)
        where = box.places(int(source(w)[0])).astype(np.uint64)
        launch = w.cta.launch
        element = _decode(given[0]).element.removesuffix("_ftz")
        bits = element.replace("u", "b")  # of unsigned types: an H200 faults with s64
        if operation is not None and not {element, bits} & {*REDUCTIONS[operation]}:
            raise form.error(f".{operation} of {element} is not supported")
        combine, how = reduced(operation, element), strength_of(operation, element)

        def fetch(work: Work) -> Callable[[Work], None]:
            values, found = fetched(work, lambda: read_shared(work, where, box.taken))

            def look(places: np.ndarray, bits: np.ndarray) -> None:
                if found is not None and bits.any():
                    used(launch.alarms, work.site(), STORED, found.origin)

            def put(places: np.ndarray, values: np.ndarray, work: Work) -> None:
                with launch.lock:
                    if operation is not None:
                        values = combine(launch.memory.load(places, values.shape[1]), values)
                    write_global(work, launch, places, values, None, how)

            def store(work: Work) -> None:
                if found is not None:
                    box.store(found.bits, look)
                box.store(values, lambda at, new: put(at, new, work))

            return store

        send(w, fetch)

    return one_by_one(run)


@instruction("cp.async.bulk.prefetch.tensor")
def prefetch(form: Form) -> Step:
    """Into L2: no effect on values."""
    dimensions = form.one(*_DIMENSIONS)
    if dimensions is None or not form.has("L2") or not form.has("global"):
        raise form.error("expected .1d to .5d, .L2 and .global")
    rank = int(dimensions[0])
    rows, source = _rows(form, rank, _LOADS), _tensor(form, 0)
    if form.has("L2::cache_hint"):
        form.get(1, "b64")

    def run(w: Fragment) -> None:
        _box(form, source(w), rank, rows, store=False)

    return one_by_one(run)


def _prefetch_map(form: Form) -> Step:
    """Of a tensor map itself: no effect on values."""
    address: Any = form.address(0)

    def run(w: Fragment) -> None:
        where, threads = np.unique(address(w), return_index=True)
        for i, thread in enumerate(threads.tolist()):
            read_map(w.alone(thread), where[i : i + 1])

    return run


for _space in ("", "const.", "param."):
    instruction(f"prefetch.{_space}tensormap")(_prefetch_map)
