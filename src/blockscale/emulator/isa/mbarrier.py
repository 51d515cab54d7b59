"""Instructions on mbarrier objects, see ``mbarriers``: PTX ISA 9.7.13.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..clocks.access import Access, Conflict
from ..clocks.scopes import SYS, WEAK, Strength
from ..machine.mbarriers import COUNT_BITS, MOST, OPAQUE, MBarrier, Phase
from ..machine.state import CTA, Fragment, Split, Step, Wait
from ..memory.buffers import SHARED_WINDOW, MemoryFault
from ..ptx.program import PtxError
from .registry import Form, instruction

__all__ = ["addresses", "find", "visible"]

_OBJECT = Strength(SYS, 8)  # how an mbarrier is made: see visible for who knows of it


def find(cta: CTA, address: int) -> MBarrier:
    """The object at an address of shared::cluster, seen from ``cta``."""
    owner, offset = cta.cluster.shared(address, 8)
    if offset % 8:
        raise MemoryFault(f"mbarrier address {address:#x} is not a multiple of 8")
    barrier = owner.mbarriers.get(offset)
    if barrier is None:
        raise PtxError(f"no mbarrier was initialized at {address:#x} of {owner}")
    if not barrier.intact:
        raise PtxError(
            f"{barrier} was overwritten: mbarrier.inval must come before its memory is used for "
            "anything else"
        )
    return barrier


def addresses(
    form: Form, index: int, space: str | None, *, bare: bool = False
) -> Callable[[Fragment], np.ndarray]:
    """Per-thread addresses of shared::cluster.

    Args:
        bare: a generic address may be one of shared::cluster itself, without the window. By the
            ISA it must fall in the window of shared::cluster (9.7.16.11); the hardware uses the
            low 32 bits, and Triton's tl.dot passes no more to tcgen05.commit.
    """
    get = form.address(index, space)
    if space is not None:
        return get

    def generic(w: Fragment) -> np.ndarray:
        where = get(w)
        within = where >> np.uint64(56) == np.uint64(SHARED_WINDOW >> 56)
        if bare:
            within |= where >> np.uint64(32) == 0
        if not within.all():
            raise MemoryFault(f"{form.ins.opcode}: the address is not in shared memory")
        return where & ~np.uint64(SHARED_WINDOW)

    return generic


def _space(form: Form, *more: str) -> str | None:
    return form.one("shared", "shared::cta", *more)


def _order(form: Form, *orders: str) -> str | None:
    """The order, which goes with a scope and never without."""
    order, scope = form.one(*orders), form.one("cta", "cluster")
    if (order is None) != (scope is None):
        raise form.error(f".{' or .'.join(orders)} and .cta or .cluster go together")
    return order


def visible(
    w: Fragment, barrier: MBarrier, users: Any = slice(None), by_proxy: bool = False
) -> None:  # fmt: skip
    """The initialization must happen before every use.

    Args:
        users: which threads use it.
        by_proxy: the asynchronous proxy does it for them.
    """
    w.cta.cluster.gone(barrier.cta, barrier.cta.shared_base | barrier.offset, w.site())
    shadow, order = barrier.cta.shadow, w.cta.cluster.order
    if shadow is None or order is None or not shadow.races:
        return
    cell, agents = barrier.offset // shadow.size, w.agents()[users]
    unaware = agents[~shadow.seen(cell, agents)]
    writer, written = int(shadow.writer[cell]), int(shadow.written[cell])
    if len(unaware):
        unaware = unaware[~order.initialized(unaware, writer, written, False)]
    if len(unaware):
        shadow.read(np.array([[cell]]), unaware[:1], w.site())
    barrier.uses.update(dict.fromkeys(agents.tolist(), order.event(w.site())))
    alarms = w.cta.launch.alarms
    if not by_proxy or "mbarrier_proxy" not in alarms.checks:
        return
    if not order.initialized(agents[:1], writer, written, True).all():
        earlier = order.site(written)
        message = (
            f"{w.site()} makes the asynchronous proxy use {barrier}, initialized by {earlier}: "
            "fence.mbarrier_init or fence.proxy.async must come between"
        )
        alarms.tell("mbarrier_proxy", message, w.site(), earlier)


@instruction("mbarrier.init")
def init(form: Form) -> Step:
    space = _space(form)
    form.type("b64")
    where, count = addresses(form, 0, space), form.get(1, "u32")

    def run(w: Fragment) -> None:
        counts = np.broadcast_to(count(w), w.n)
        for i, (address, n) in enumerate(zip(where(w), counts, strict=True)):
            owner, offset = w.cta.cluster.shared(int(address), 8)
            if owner is not w.cta:
                raise form.error("the mbarrier lies in the shared memory of another CTA")
            if offset % 8:
                raise MemoryFault(f"mbarrier address {int(address):#x} is not a multiple of 8")
            if not 1 <= n <= MOST:
                raise form.error(f"count {n}; allowed are 1 to {MOST}")
            before = owner.mbarriers.get(offset)
            if before is not None and before.intact:
                raise form.error(f"{before} is there already: mbarrier.inval must come between")
            owner.mbarriers[offset] = MBarrier(owner, offset, int(n))
            _mark(w, i, owner, offset)

    return run


def _mark(w: Fragment, i: int, cta: CTA, offset: int, again: bool = False) -> None:
    """Its 8 bytes are written; what they hold is opaque. ``again``: the mbarrier was there."""
    cta.cluster.engine.stores += 1
    cta.shared[offset : offset + 8] = np.frombuffer(OPAQUE, np.uint8)
    if cta.shadow is not None:
        cells = np.arange(offset // cta.shadow.size, (offset + 8) // cta.shadow.size)[None]
        same = np.ones((2, *cells.shape), bool) if again else None
        code = WEAK if again else _OBJECT.code
        cta.shadow.write(cells, w.agents()[i : i + 1], w.site(), code, same)


def _all_uses_are_over(w: Fragment, i: int, barrier: MBarrier) -> None:
    """A race, unless a thread knows of all that was done with the mbarrier. Of what its own warp
    did it is enough that it is over: libcu++'s pipelines only match.sync before."""
    shadow, agent = barrier.cta.shadow, w.agents()[i : i + 1]
    if shadow is None or not shadow.races:
        return
    cell, over = barrier.offset // shadow.size, shadow.order.over_for(int(agent[0]))
    view = shadow.order.view(agent)
    access = Access(np.array([[cell]]), agent[:, None], view, w.site(), "ends")
    for user, event in barrier.uses.items():
        if event > over[user]:
            shadow.race(access, Conflict(cell, int(agent[0]), user, event), "use")


@instruction("mbarrier.inval")
def inval(form: Form) -> Step:
    space = _space(form)
    form.type("b64")
    where = addresses(form, 0, space)

    def run(w: Fragment) -> None:
        for i, address in enumerate(where(w)):
            barrier = find(w.cta, int(address))
            visible(w, barrier, [i])
            _all_uses_are_over(w, i, barrier)
            del barrier.cta.mbarriers[barrier.offset]
            _mark(w, i, barrier.cta, barrier.offset, again=True)

    return run


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def transactions(form: Form) -> Step:
    """Change the bytes awaited without arriving."""
    expects = form.parts[1] == "expect_tx"
    _order(form, "relaxed")
    space = _space(form, "shared::cluster")
    form.type("b64")
    where, count = addresses(form, 0, space), form.get(1, "u32")

    def run(w: Fragment) -> None:
        counts = np.broadcast_to(count(w), w.n)
        for i, (address, n) in enumerate(zip(where(w), counts, strict=True)):
            barrier = find(w.cta, int(address))
            visible(w, barrier, [i])
            if expects:
                barrier.expect(int(n))
            else:
                barrier.complete(int(n))

    return run


@instruction("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(form: Form) -> Step:
    """With .expect_tx, announces bytes and arrives once; .noComplete must leave some pending."""
    drops = form.parts[1] == "arrive_drop"
    expects = form.has("expect_tx")
    partial = form.has("noComplete")
    if partial and {"relaxed", "cluster"} & set(form.left):
        raise form.error(".noComplete goes with .release.cta only")
    relaxed = _order(form, "release", "relaxed") == "relaxed"
    space = _space(form, *(() if partial else ("shared::cluster",)))
    if space == "shared::cluster" and form.operand(0) is not None:
        raise form.error("gives no state in .shared::cluster: expected _")
    form.type("b64")
    put, where = form.set(0, "b64"), addresses(form, 1, space)
    count = form.get(2, "u32") if len(form.ins.operands) > 2 else None
    if (expects or partial) and count is None:
        raise form.error(f"needs the number of {'bytes' if expects else 'arrivals'}")

    def run(w: Fragment) -> None:
        counts = np.broadcast_to(1 if count is None else count(w), w.n)
        tokens = np.zeros(w.n, np.uint64)
        order, agents, places = w.cta.cluster.order, w.agents(), where(w)
        for address in np.unique(places):
            barrier, here = find(w.cta, int(address)), places == address
            visible(w, barrier, here)
            if barrier.cta is not w.cta and not relaxed:
                barrier.cta.visit(agents[here], w.site())
        for i, address in enumerate(places):
            barrier, n = find(w.cta, int(address)), int(counts[i])
            if order is not None:
                barrier.learn(order.release(agents[i : i + 1], relaxed))
            if expects:
                barrier.expect(n)
            if drops:
                barrier.count -= 1 if expects else n
            before = barrier.phase
            tokens[i] = barrier.arrive(1 if expects else n)
            if partial and barrier.phase != before:
                raise form.error(f"completes phase {before} of {barrier}")
        put(w, tokens)

    return run


@instruction("mbarrier.pending_count")
def pending_count(form: Form) -> Step:
    form.type("b64")
    put, get = form.set(0, "u32"), form.get(1, "b64")
    mask = np.uint64((1 << COUNT_BITS) - 1)
    return lambda w: put(w, (get(w) & mask).astype(np.uint32))


def _phase(form: Form, barrier: MBarrier, what: int, parity: bool) -> Phase:
    """The phase that an operand means, a parity or a state: this one or the one before."""
    if parity and what > 1:
        raise form.error(f"phase parity {what}; allowed are 0 and 1")
    number = what if parity else what >> COUNT_BITS
    if not parity and barrier.phase - number not in (0, 1):
        raise form.error(
            f"the state is of phase {number} of {barrier}, which is in phase "
            f"{barrier.phase}: only that and the one before can be waited for"
        )
    return barrier.last if (barrier.phase - number) & 1 else barrier.current


def _why(form: Form, phases: list[Phase], thread: int, parity: bool) -> str:
    """Names the phase that a thread waits for: the first of these that is not over."""
    phase = next(phase for phase in phases if not phase.over)
    text = f"the phase of parity {phase.number & 1} of " if parity else ""
    return text + phase.barrier.describe() + phase.barrier.missed(thread, form.ins.line)


def _distinct(places: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of operands, each once, and which is that of each thread."""
    pairs = np.stack([places, tokens.astype(np.uint64)], 1)
    if (pairs == pairs[0]).all():
        return pairs[:1], np.zeros(len(pairs), np.int64)
    pairs, whose = np.unique(pairs, axis=0, return_inverse=True)
    return pairs, whose.reshape(-1)


@instruction("mbarrier.test_wait", "mbarrier.try_wait", control=True)
def wait(form: Form) -> Step:
    """True once the phase has ended. try_wait suspends its threads until the phase ends that they
    began to wait for, whatever phases end after it; it may in the end say false: here, when nothing
    else can move."""
    suspends = form.parts[1] == "try_wait"
    parity = form.has("parity")
    relaxed = _order(form, "acquire", "relaxed") == "relaxed"
    space = _space(form)
    form.type("b64")
    put, where = form.set(0, "pred"), addresses(form, 1, space)
    token = form.get(2, "u32" if parity else "b64")
    if suspends and len(form.ins.operands) > 3:
        form.get(3, "u32")  # a hint how long

    def waited(w: Fragment) -> np.ndarray:
        """The phase that each thread waits for: who was suspended, for the one it began with."""
        places, tokens = where(w), np.broadcast_to(token(w), w.n)
        phases: np.ndarray = w.cta.awaited[w.threads]
        begins = phases == None  # noqa: E711 (each of an array)
        pairs, whose = _distinct(places, tokens)
        for i, (place, what) in enumerate(pairs):
            barrier, users = find(w.cta, int(place)), whose == i
            visible(w, barrier, users)
            if barrier.cta is not w.cta:
                raise form.error("waits for an mbarrier of another CTA")
            users &= begins
            if users.any():
                phases[users] = _phase(form, barrier, int(what), parity)
        return phases

    def run(w: Fragment) -> Any:
        phases, threads = waited(w), w.threads
        each = list(dict.fromkeys(phases))
        ended = [(phase, phases == phase) for phase in each if phase.over]
        over = np.zeros(w.n, bool)
        for _, here in ended:
            over |= here
        if suspends and not w.gives_up and not over.all():
            w.cta.awaited[threads] = phases
            if ended:
                return Split(over)
            return Wait(
                lambda: any(phase.over for phase in each),
                lambda: _why(form, each, int(threads[0]), parity),
                may_fail=True,
            )
        w.gives_up = False
        w.cta.awaited[threads] = None
        order = w.cta.cluster.order
        for phase, here in ended:
            phase.barrier.seen[int(threads[0])] = phase.number
            if order is not None and phase.known is not None:
                (order.hear if relaxed else order.acquire)(w.agents()[here], phase.known)
        put(w, over)
        return None

    return run
