"""How threads and asynchronous work reach memory: bounds, checks and observers on the way.

Whoever accesses is either a fragment (each of its threads one item) or a :class:`Work` (pieces of
equal size). Addresses of shared memory are those of shared::cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..clocks.lane_copies import Copies
from ..clocks.scopes import WEAK, Strength
from ..memory.buffers import MemoryFault, gather, scatter
from .engine import Work
from .predecessor import follows
from .shadow import Shadow
from .undefined import Blank, Origin, Undefined, View, used

if TYPE_CHECKING:
    from ..launches.cluster import Cluster
    from ..launches.launch import Launch
    from .state import CTA, Fragment

__all__ = [
    "STORED",
    "blank",
    "cells",
    "mask_local",
    "mask_shared",
    "masks_of_local",
    "masks_of_shared",
    "read_global",
    "read_local",
    "read_map",
    "read_own",
    "read_shared",
    "write_global",
    "write_local",
    "write_own",
    "write_shared",
]

_MAP = 128  # bytes of a tensor map
STORED = "stores {} to global memory"
_POISON = 0xFF  # what is read where there is no memory, if that may go on: NaN


def cells(offsets: np.ndarray, size: int, cell: int) -> np.ndarray:
    """Cells (n, k) of pieces of ``size`` bytes at ``offsets``."""
    first = offsets // cell
    if size <= cell:
        return np.asarray(first[:, None])
    return np.asarray(first[:, None] + np.arange(-(-size // cell)))


# --- shared memory --------------------------------------------------------------------------------


def read_shared(
    by: Any, where: np.ndarray, size: int, how: Strength | None = None
) -> np.ndarray:  # fmt: skip
    """(n, size) bytes that a fragment or a work reads at addresses of shared::cluster. ``how``:
    None for a weak access."""
    if isinstance(by, Work) and by.view is View.MASKS:
        undefined = masks_of_shared(by, where, size)
        if undefined.bits.any():
            by.origin = undefined.origin
        return undefined.bits
    owners = _owners(by, where, size)
    for cta, chosen, offsets in owners:
        _observe(by, "read", (cta, chosen, offsets), where, size, how)
    found = [gather(cta.shared, offsets, size) for cta, _, offsets in owners]
    if len(found) == 1 and len(found[0]) == len(where):
        return found[0]
    out = np.full((len(where), size), _POISON, np.uint8)
    for (_, chosen, _), values in zip(owners, found, strict=True):
        out[chosen] = values
    return out


def write_shared(
    by: Any, where: np.ndarray, values: np.ndarray, how: Strength | None = None,
    found: Undefined | None = None,
) -> None:  # fmt: skip
    """``found``: what of the values, (n, size) bytes, is undefined."""
    size = values.shape[1]
    for cta, chosen, offsets in _owners(by, where, size):
        new = values[chosen]
        cta.cluster.engine.stores += 1
        same: np.ndarray | None = None
        if cta.shadow is None or (isinstance(by, Work) and not isinstance(by.actor, Copies)):
            scatter(cta.shared, offsets, new)
        else:  # several warps may write one value, as `if (found) flag = 1` does
            before = gather(cta.shared, offsets, size) == new
            scatter(cta.shared, offsets, new)
            kept = np.stack([before, gather(cta.shared, offsets, size) == new])
            same = np.all(kept.reshape(2, len(new), -1, min(size, cta.shadow.size)), axis=-1)
        _observe(by, "write", (cta, chosen, offsets), where, size, how, same)
        part = None if found is None else Undefined(found.bits[chosen], found.origin)
        mark_shared(cta, offsets, size, part)


def mark_shared(cta: CTA, offsets: np.ndarray, size: int, found: Undefined | None) -> None:
    """What of the bytes that were written there is undefined."""
    if cta.shadow is not None and cta.shadow.blanks is not None:
        cta.shadow.blanks.write(lambda: _bytes(offsets, size), found)


def mask_shared(by: Any, where: np.ndarray, found: Undefined) -> None:
    """Of bytes that were written already."""
    size = found.bits.shape[1]
    for cta, chosen, offsets in _owners(by, where, size):
        mark_shared(cta, offsets, size, Undefined(found.bits[chosen], found.origin))


def masks_of_shared(by: Any, where: np.ndarray, size: int) -> Undefined:
    """Masks (n, size) of the bytes there, some of which may be undefined."""
    out, origin = np.zeros((len(where), size), np.uint8), Origin(by.site(), "")
    for cta, chosen, offsets in _owners(by, where, size):
        assert cta.shadow is not None
        assert cta.shadow.blanks is not None
        found = cta.shadow.blanks.masks(_bytes(offsets, size), by.site())
        out[chosen] = found.bits
        if found.bits.any():
            origin = found.origin
    return Undefined(out, origin)


def _bytes(offsets: np.ndarray, size: int) -> np.ndarray:
    return offsets[:, None] + np.arange(size)


def blank(by: Any, find: Callable[[], Undefined]) -> None:
    """A fragment or work reads undefined bits: Blank where masks are kept of them, else a use."""
    if isinstance(by, Work):
        if by.view is View.TRIED:
            raise Blank
        uses = by.view is View.USED
    else:
        uses = not by.frame.knowing
        if uses and by.frame.code.reads(by.pc):
            raise Blank
    if uses:
        used(by.issuer[0].launch.alarms if isinstance(by, Work) else by.cta.launch.alarms,
             by.site(), "uses {}", find().origin)  # fmt: skip


def _owners(by: Any, where: np.ndarray, size: int) -> list[tuple[CTA, Any, np.ndarray]]:
    """CTAs whose memory it is, which of the pieces lie there, and their offsets.

    Pieces out of bounds are left out, if that may go on.
    """
    cluster = (by.issuer[0] if isinstance(by, Work) else by.cta).cluster
    try:
        found = _parted(cluster, where, size)
    except MemoryFault as fault:
        cluster.launch.alarms.tell("bounds", fault, by.site())
        there = np.nonzero([cluster.holds(address, size) for address in where.tolist()])[0]
        parts = _parted(cluster, where[there], size) if len(there) else []
        found = [(cta, there[chosen], offsets) for cta, chosen, offsets in parts]
    if not isinstance(by, Work):
        for cta, chosen, _ in found:
            if not cta.alive:
                cluster.gone(cta, int(where[chosen][0]), by.site())
    return found


def _parted(cluster: Cluster, where: np.ndarray, size: int) -> list[tuple[CTA, Any, np.ndarray]]:
    low = high = int(where[0])
    if len(where) > 1:
        low, high = int(where.min()), int(where.max())
    cta, _ = cluster.shared(low, size)
    if low >> 24 == high >> 24:
        if high != low:
            cluster.shared(high, size)
        return [(cta, slice(None), (where & np.uint64(0xFFFFFF)).astype(np.int64))]
    found = []
    for rank in np.unique(where >> np.uint64(24)):
        chosen = np.nonzero(where >> np.uint64(24) == rank)[0]
        for address in (where[chosen].min(), where[chosen].max()):
            cta, _ = cluster.shared(int(address), size)
        found.append((cta, chosen, (where[chosen] & np.uint64(0xFFFFFF)).astype(np.int64)))
    return found


def _observe(
    by: Any, kind: str, owner: tuple[CTA, Any, np.ndarray], where: np.ndarray, size: int,
    how: Strength | None, same: np.ndarray | None = None,
) -> None:  # fmt: skip
    """The checks and who watches see an access to what a CTA owns of the addresses."""
    cta, chosen, offsets = owner
    shadow: Shadow | None = cta.shadow
    if shadow is not None:
        touched = cells(offsets, size, shadow.size)
        blanks = shadow.blanks
        if (
            kind == "read"
            and blanks is not None
            and blanks.has(touched, lambda: _bytes(offsets, size))
        ):
            blank(by, lambda: blanks.masks(_bytes(offsets, size), by.site()))
        if isinstance(by, Work):
            assert by.actor is not None
            if isinstance(by.actor, Copies):
                shadow.write_copies(touched, by.actor, by.site(), same)
            else:
                check = shadow.read_by if kind == "read" else shadow.write_by
                check(touched, by.actor, by.site())
        else:
            agents, site, flags = by.agents(), by.site(), shadow.order.flags
            if not isinstance(chosen, slice):
                agents = agents[chosen]
            code = how.code if how is not None else WEAK
            last = None if how is None else shadow.last(touched, agents, code)
            if kind == "read":
                if how is not None and last is not None:
                    flags.reads(where[chosen], agents, how, size, *last)
                shadow.read(touched, agents, site, code)
            else:
                began = shadow.order.now
                shadow.write(touched, agents, site, code, same)
                if how is not None and last is not None:
                    now = shadow.order.now
                    flags.writes(where[chosen], agents, how, size, last[0], now, last[1], began)
            if cta is not by.cta:
                cta.visit(agents, site)
    _tell(by, "shared", kind, offsets, size, cta, chosen, cta.launch)


def _tell(
    by: Any, space: str, kind: str, where: np.ndarray, size: int, cta: CTA | None, chosen: Any,
    launch: Launch,
) -> None:  # fmt: skip
    if launch.watch is None:
        return
    if isinstance(by, Work):
        launch.watch.transfer(by, space, kind, where, size, cta)
    else:
        launch.watch.access(by, space, kind, where, size, cta, by.threads[chosen])


# --- global memory --------------------------------------------------------------------------------


def read_global(
    by: Any, launch: Launch, where: np.ndarray, size: int, how: Strength | None = None
) -> np.ndarray:  # fmt: skip
    """(n, size) bytes that a fragment or a work reads at global addresses. ``how``: None for a weak
    access."""
    try:
        values = launch.memory.load(where, size)
    except MemoryFault as fault:
        launch.alarms.tell("bounds", fault, by.site())
        values = np.full((len(where), size), _POISON, np.uint8)
        held = launch.memory.holds(where, size)
        if held.any():
            values[held] = launch.memory.load(where[held], size)
        return values
    if launch.programmatic:
        follows(by, launch, "reads", where)
    if launch.races is not None:
        launch.races.read(by, where, size, how)
    elif how is not None and not isinstance(by, Work) and by.cta.cluster.order is not None:
        flags = by.cta.cluster.order.flags
        flags.reads(where, by.agents(), how, size)
    _tell(by, "global", "read", where, size, None, slice(None), launch)
    return values


def read_map(w: Fragment, where: np.ndarray) -> bytes:
    """The tensor map at the address of a fragment of one thread, in parameters or global memory."""
    if w.cta.launch.programmatic:
        follows(w, w.cta.launch, "reads", where)
    return w.cta.launch.memory.load(where, _MAP)[0].tobytes()


def write_global(
    by: Any, launch: Launch, where: np.ndarray, values: np.ndarray,
    found: Undefined | None = None, how: Strength | None = None,
) -> None:  # fmt: skip
    """``found``: what of the values is undefined; somebody will read it."""
    size = values.shape[1]
    if found is not None and found.bits.any():
        used(launch.alarms, by.site(), STORED, found.origin)
    try:
        before: Any = None
        if launch.races is not None:
            before = launch.memory.load(where, size) == values
        launch.memory.store(where, values)
    except MemoryFault as fault:
        launch.alarms.tell("bounds", fault, by.site())
        held = launch.memory.holds(where, size, to_write=True)
        if held.any():
            launch.memory.store(where[held], values[held])
        return
    if launch.programmatic:
        follows(by, launch, "writes", where)
    if launch.races is not None:
        same = np.stack([before, launch.memory.load(where, size) == values])
        launch.races.write(by, where, size, how, same)
    elif how is not None and not isinstance(by, Work) and by.cta.cluster.order is not None:
        flags = by.cta.cluster.order.flags
        flags.writes(where, by.agents(), how, size)
    _tell(by, "global", "write", where, size, None, slice(None), launch)


# --- a thread's own -------------------------------------------------------------------------------


def _own(variable: np.ndarray, w: Any, where: np.ndarray, size: int) -> Any:
    """Where each thread's bytes lie in its own row of (threads, bytes)."""
    if int(where.max()) + size > variable.shape[1]:
        raise MemoryFault(
            f"address {int(where.max()):#x} (+{size}) of a thread's own memory is out of bounds: "
            f"it has {variable.shape[1]} bytes"
        )
    return w.threads[:, None], where.astype(np.int64)[:, None] + np.arange(size)


def read_own(variable: np.ndarray, w: Any, where: np.ndarray, size: int) -> np.ndarray:
    """From a .param variable of a call."""
    out: np.ndarray = variable[_own(variable, w, where, size)]
    return out


def write_own(variable: np.ndarray, w: Any, where: np.ndarray, values: np.ndarray) -> None:
    variable[_own(variable, w, where, values.shape[1])] = values


def read_local(w: Any, where: np.ndarray, size: int) -> np.ndarray:
    _tell(w, "local", "read", where, size, None, slice(None), w.cta.launch)
    if w.cta.local_blanks is not None and not w.frame.knowing:
        found = masks_of_local(w, where, size)
        if found.bits.any():
            blank(w, lambda: found)
    return read_own(w.cta.local, w, where, size)


def write_local(w: Any, where: np.ndarray, values: np.ndarray) -> None:
    _tell(w, "local", "write", where, values.shape[1], None, slice(None), w.cta.launch)
    write_own(w.cta.local, w, where, values)
    if w.cta.local_blanks is not None:
        mask_local(w, where, Undefined(np.zeros_like(values), w.cta.local_blanks[1]))


def _local_masks(cta: CTA, origin: Origin | None) -> np.ndarray:
    """As large as local memory is by now."""
    kept = cta.local_blanks
    bits = np.zeros_like(cta.local)
    if kept is not None:
        if kept[0].shape == bits.shape and (origin is None or origin == kept[1]):
            return kept[0]
        bits[:, : kept[0].shape[1]] = kept[0]
    assert origin is not None or kept is not None
    cta.local_blanks = bits, origin or kept[1]  # type: ignore[index]
    return bits


def masks_of_local(w: Any, where: np.ndarray, size: int) -> Undefined:
    bits = read_own(_local_masks(w.cta, None), w, where, size)
    return Undefined(bits, w.cta.local_blanks[1])


def mask_local(w: Any, where: np.ndarray, found: Undefined) -> None:
    """What of the bytes that were stored there is undefined; one origin is kept for all."""
    write_own(_local_masks(w.cta, found.origin), w, where, found.bits)
