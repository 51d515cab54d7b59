"""Bulk copies without a tensor map: cp.async.bulk, cp.reduce.async.bulk. PTX ISA 9.7.9.25.4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..clocks.scopes import GPU, Strength, width_of
from ..machine.engine import Work
from ..machine.mbarriers import MBarrier
from ..machine.ports import read_global, read_shared, write_global, write_shared
from ..machine.state import CTA, Fragment, Step
from ..machine.undefined import Undefined, fetched, used
from ..memory.buffers import RANK_SHIFT, MemoryFault
from .access import combiner
from .copies import groups
from .mbarrier import find, visible
from .registry import TYPES, Form, first, instruction

__all__ = ["REDUCTIONS", "Landing", "deliver", "landings", "reduced", "send", "strength_of"]

_PIECE = 16
#: Destination and source.
_WAYS = (
    ("shared::cluster", "global"), ("shared::cta", "global"), ("shared::cluster", "shared::cta"),
    ("global", "shared::cta"),
)  # fmt: skip
_SPACES = ("global", "shared::cluster", "shared::cta")
#: Operations of reductions and the types that each takes in global memory.
REDUCTIONS = {
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "add": ("u32", "s32", "u64", "s64", "f32", "f64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
}
#: Those that shared memory has, too.
_IN_SHARED = {
    *((operation, "b32") for operation in ("and", "or", "xor")),
    *((operation, type) for operation in ("add", "min", "max") for type in ("u32", "s32")),
    ("add", "u64"), ("inc", "u32"), ("dec", "u32"),
}  # fmt: skip


def strength_of(operation: str | None, type: str) -> Strength | None:
    """How a reduction accesses global memory: 9.7.9.25.4.2."""
    return Strength(GPU, width_of(type), updates=True, returns=False) if operation else None


def pieces(start: int, size: int) -> np.ndarray:
    return np.uint64(start) + np.arange(0, size, _PIECE, dtype=np.uint64)


Landing = tuple[CTA, int, MBarrier]


def landings(w: Fragment, to: int, bar: int, mask: int | None, pair: bool = False) -> list[Landing]:
    """Where a copy into shared memory lands: (CTA, address, the mbarrier that is told).

    Args:
        to, bar: addresses of the destination and of the mbarrier.
        mask: CTAs of a multicast, which lands at the same offset in each; None: at ``to`` only.
        pair: .cta_group::2: the mbarrier may be that of the other CTA of each pair.
    """
    ctas, offset = w.cta.cluster.ctas, (1 << RANK_SHIFT) - 1
    if mask is None:
        cta, _ = w.cta.cluster.shared(to, 1)
        barrier = find(w.cta, bar)
        if barrier.cta is not cta and not (pair and barrier.cta.rank ^ 1 == cta.rank):
            raise MemoryFault(
                f"the mbarrier at {bar:#x} is not in the CTA of the destination {to:#x}"
            )
        return [(cta, to, barrier)]
    if not mask or mask >> len(ctas):
        raise MemoryFault(f"multicast to CTAs {mask:#x} of a cluster of {len(ctas)}")
    found = []
    for rank in range(len(ctas)):
        if mask >> rank & 1:
            told = rank & ~1 | bar >> RANK_SHIFT & 1 if pair else rank
            barrier = find(w.cta, told << RANK_SHIFT | bar & offset)
            found.append((ctas[rank], rank << RANK_SHIFT | to & offset, barrier))
    return found


def deliver(
    w: Fragment, size: int, read: Callable[[Work], Callable[[Work, int], None]],
    lands: list[Landing], needs: tuple[CTA, ...] = (),
) -> None:  # fmt: skip
    """Submit a copy into shared memory that tells mbarriers of its bytes.

    Args:
        size: the bytes that each mbarrier is told of.
        read: fetches the source; what it returns writes it to an address of shared::cluster.
    """
    cluster = w.cta.cluster
    for _, _, barrier in lands:
        visible(w, barrier, by_proxy=True)

    writes: list[Callable[[Work, int], None]] = []  # what is read once lands in all places

    def copy(work: Work, address: int, barrier: MBarrier) -> None:
        if not writes:
            writes.append(read(work))
        writes[0](work, address)
        barrier.complete(size, work.message())

    for cta, address, barrier in lands:  # each mbarrier tells of the bytes of its own CTA
        actor = cluster.begin(w, told=(barrier.cta.rank, barrier.offset))
        run = partial(copy, address=address, barrier=barrier)
        ctas = tuple(dict.fromkeys((*needs, cta)))
        cluster.engine.submit(Work(w, run, needs=ctas, actor=actor))


def send(w: Fragment, read: Callable[[Work], Callable[[Work], None]]) -> None:
    """Submit a copy out of shared memory, as part of the open bulk group of the thread.

    Args:
        read: fetches the source; what it returns writes the destination, later.
    """
    cluster = w.cta.cluster

    writes: list[Callable[[Work], None]] = []

    def fetch(work: Work) -> None:
        writes.append(read(work))
        work.rest = rest
        cluster.engine.submit(rest)

    def store(work: Work) -> None:
        writes[0](work)

    actor = cluster.begin(w)
    work = Work(w, fetch, needs=(w.cta,), actor=actor, exit="exit_stores")
    rest = Work(w, store, actor=actor)
    groups(w.cta, "bulk").add(w.threads, work)
    cluster.engine.submit(work)


def reduced(operation: str | None, type: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """(old bytes, new bytes) -> bytes after a reduction of elements of ``type``; rows stay rows."""
    if operation is None:
        return lambda old, new: new
    kept = {"f16": "b16", "bf16": "b16"}.get(type, type)
    dtype, function = np.dtype(TYPES[kept]), combiner(type, operation)

    def run(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        a, b = (np.ascontiguousarray(x).view(dtype).reshape(-1) for x in (old, new))
        out = function(np.zeros(len(a), bool), a, b)
        return np.ascontiguousarray(out, dtype).view(np.uint8).reshape(old.shape)

    return run


def one_by_one(run: Callable[[Fragment], None]) -> Step:
    """Each thread issues an operation of its own, in order."""

    def step(w: Fragment) -> None:
        for thread in range(w.n):
            run(w.alone(thread))

    return step


def _checked(form: Form, size: int, **addresses: int) -> None:
    if size % _PIECE:
        raise form.error(f"size {size} is not a multiple of 16")
    for name, address in addresses.items():
        if address % _PIECE:
            raise MemoryFault(f"{name} {address:#x} of {form.ins.opcode} is not a multiple of 16")


@dataclass(frozen=True, slots=True)
class _Way:
    """From where to where, and what a reduction does there."""

    target: str
    source: str
    operation: str | None  # None: it copies
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray]  # what was there, with what comes
    how: Strength | None  # it reaches global memory, if it reduces


def _way(form: Form) -> _Way:
    spaces = form.several(*_SPACES)
    if tuple(spaces) not in _WAYS:
        raise form.error("expected the state spaces of destination and source")
    target, source = spaces
    if form.parts[1] != "reduce":
        return _Way(target, source, None, reduced(None, "b32"), None)
    operation = form.one(*REDUCTIONS)
    if operation is None:
        raise form.error(f"expected one of {', '.join(REDUCTIONS)}")
    noftz = form.has("noftz")
    type = form.type(*REDUCTIONS[operation])
    if noftz != (operation == "add" and type in ("f16", "bf16")):
        raise form.error("expected .noftz with .add of .f16 and .bf16 only")
    if source == "global" or (type == "s64" and operation == "add"):
        raise form.error(f"there is no .{operation} of .{type} from .{source} to .{target}")
    if target != "global" and (operation, type) not in _IN_SHARED:
        raise form.error(f"there is no .{operation} of .{type} in shared memory")
    return _Way(target, source, operation, reduced(operation, type), strength_of(operation, type))


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy or reduction with everything it was given."""

    way: _Way
    start: int
    to: int
    size: int
    keep: np.ndarray  # which bytes of each 16 are written

    def read(self, work: Work) -> Any:
        """Fetch the source; what is returned writes the destination."""
        where, found = pieces(self.start, self.size), None
        if self.way.source == "global":
            values = read_global(work, work.issuer[0].launch, where, _PIECE)
        else:
            values, found = fetched(work, lambda: read_shared(work, where, _PIECE))
        write = self._into_global if self.way.target == "global" else self._into_shared
        return partial(write, values, found)

    def _into_shared(
        self, values: np.ndarray, found: Undefined | None, work: Work, address: int
    ) -> None:
        where = pieces(address, self.size)
        if self.way.operation is not None:
            old = read_shared(work, where, _PIECE)
            if found is not None:
                used(work.issuer[0].launch.alarms, work.site(), "reduces {}", found.origin)
            values = self.way.combine(old, values)
        write_shared(work, where, values, found=found)

    def _into_global(self, values: np.ndarray, found: Undefined | None, work: Work) -> None:
        launch, where, keep = work.issuer[0].launch, pieces(self.to, self.size), self.keep
        with launch.lock:
            if self.way.operation is not None or not keep.all():
                old = launch.memory.load(where, _PIECE)
                values = np.where(keep, self.way.combine(old, values), old)
            kept = found and found.through(lambda bits: bits * keep)
            write_global(work, launch, where, values, kept, self.way.how)


@instruction("cp.async.bulk", "cp.reduce.async.bulk")
def bulk(form: Form) -> Step:
    """[dst], [src], size, then [mbar] and a CTA mask, or nothing, or a byte mask; cache policy."""
    way = _way(form)
    target, source = way.target, way.source
    told = form.has("mbarrier::complete_tx::bytes")
    grouped = form.has("bulk_group")
    if told == grouped or grouped != (target == "global"):
        raise form.error(
            "expected .mbarrier::complete_tx::bytes into shared, .bulk_group into global memory"
        )
    multicast = (target, source) == _WAYS[0] and form.has("multicast::cluster")
    masked = target == "global" and way.operation is None and form.has("cp_mask")
    if masked:
        form.needs("sm_100")
    at = 3
    to, start = form.address(0, target), form.address(1, source)
    size_of = form.get(2, "u32")
    bar = form.address(at, "shared::cta") if told else None
    at += told
    ctas = form.get(at, "u16") if multicast else None
    at += multicast
    if "global" in (target, source) and form.has("L2::cache_hint"):
        form.get(at, "b64")
        at += 1
    bytes_of = form.get(at, "b16") if masked else None

    def run(w: Fragment) -> None:
        size, begin, last = first(size_of(w)), first(start(w)), first(to(w))
        _checked(form, size, destination=last, source=begin)
        if size == 0:
            return
        keep = np.ones(_PIECE, bool)
        if bytes_of is not None:
            keep = (first(bytes_of(w)) >> np.arange(_PIECE) & 1).astype(bool)
        copy = _Copy(way, begin, last, size, keep)
        if bar is None:
            send(w, copy.read)
            return
        mask = None if ctas is None else first(ctas(w))
        needs = () if source == "global" else (w.cta,)
        deliver(w, size, copy.read, landings(w, last, first(bar(w)), mask), needs)

    return one_by_one(run)


@instruction("cp.async.bulk.prefetch")
def prefetch(form: Form) -> Step:
    """cp.async.bulk.prefetch.L2.global [src], size."""
    form.has("L2")
    form.has("global")
    form.address(0)
    form.get(1, "u32")
    if form.has("L2::cache_hint"):
        form.get(2, "b64")
    return lambda w: None
