"""tcgen05: allocation of Tensor Memory, commit, fences, waits. PTX ISA 9.7.16.7, .8, .11, .12."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..clocks.knowledge import Actor
from ..machine.engine import Work
from ..machine.ports import write_shared
from ..machine.registers import loads_waited_for
from ..machine.state import CTA, Fragment, Split, Step, Wait
from ..machine.tensor_memory import COLUMNS, tensor_memory
from ..memory.buffers import RANK_SHIFT, MemoryFault
from ..ptx.program import PtxError
from .bulk import one_by_one
from .copies import groups, wait_for, warps
from .mbarrier import addresses, find, visible
from .meeting import gathered
from .registry import Form, instruction
from .warp import meet

__all__ = ["aligned", "cta_group", "enqueue", "for_warps", "pair", "split_address", "uniform"]


def cta_group(form: Form) -> int:
    """1 or 2, from the qualifier that every such instruction must have."""
    found = form.one("cta_group::1", "cta_group::2")
    if found is None:
        raise form.error("expected .cta_group::1 or .cta_group::2")
    return int(found[-1])


def pair(cta: CTA, group: int) -> tuple[CTA, ...]:
    """The CTAs that an instruction works on: this one, or both of its pair, the even one first."""
    if group == 1:
        return (cta,)
    ctas, first = cta.cluster.ctas, cta.rank & ~1
    if first + 1 >= len(ctas):
        raise PtxError(f".cta_group::2 in a cluster of {len(ctas)}: {cta} has no peer")
    return ctas[first], ctas[first + 1]


def aligned(form: Form) -> None:
    """Takes .sync and .aligned, which must be there."""
    if not (form.has("sync") and form.has("aligned")):
        raise form.error("expected .sync.aligned")


def uniform(form: Form, value: Any, what: str) -> int:
    """The value that all threads must agree on."""
    values = np.asarray(value)
    if values.ndim and (values != values.flat[0]).any():
        raise form.error(f"{what} differs between threads of a warp")
    return int(values.flat[0]) if values.ndim else int(values)


def split_address(address: int) -> tuple[int, int]:
    """Lane and column of an address of Tensor Memory."""
    return address >> 16, address & 0xFFFF


def for_warps(form: Form, run: Callable[[Fragment], Any]) -> Step:
    """``run`` for each whole warp in turn: .sync.aligned."""

    def step(w: Fragment) -> None:
        for warp in warps(w):
            run(warp)

    return gathered(form, None, step)


def enqueue(w: Fragment, run: Callable[[Work], None], needs: tuple[CTA, ...]) -> None:
    """Submit work to the pipe of the issuing thread's warp, which keeps its order."""
    cluster = w.cta.cluster
    pipe = ("tcgen05", w.cta.rank, int(w.threads[0]) // 32)
    actor = cluster.follow(w, pipe, tensor=True)
    cluster.engine.submit(Work(w, run, pipe=pipe, needs=needs, actor=actor))


@instruction("tcgen05.alloc", control=True)
def alloc(form: Form) -> Step:
    """Columns of Tensor Memory, their address into shared memory; waits until they are free."""
    form.needs("sm_100f")
    group = cta_group(form)
    aligned(form)
    space = form.one("shared::cta")
    form.type("b32")
    where, count = addresses(form, 0, space), form.get(1, "u32")

    def run(w: Fragment) -> Any:
        counts = np.broadcast_to(count(w), w.n)
        warps, least = w.threads // 32, int(counts.argmin())
        memory, one = tensor_memory(w.cta), warps == warps[least]
        if not one.all() and memory.place_for(int(counts[least])) is not None:
            return Split(one)  # warps take turns; where none has room, they wait together
        columns = uniform(form, counts[one], "the number of columns")
        if columns < 32 or columns > COLUMNS or columns & (columns - 1):
            raise form.error(f"{columns} columns; allowed are powers of two from 32 to {COLUMNS}")
        pair(w.cta, group)
        if memory.closed_by is not None:
            raise form.error(
                f"the CTA has given up the right to allocate in line {memory.closed_by}"
            )
        start = memory.place_for(columns)
        if start is None:
            used = int((memory.owner >= 0).sum())
            return Wait(
                lambda: memory.place_for(columns) is not None,
                lambda: f"{columns} columns of Tensor Memory: {used} of {COLUMNS} are allocated",
            )
        memory.allocate(columns, start)
        value = np.array([[start]], np.uint32).view(np.uint8)
        write_shared(w.alone(0), where(w)[:1], value)
        meet(w)  # each lane executes it, and so comes after what it writes
        return None

    return gathered(form, None, run)


@instruction("tcgen05.dealloc", control=True)
def dealloc(form: Form) -> Step:
    form.needs("sm_100f")
    cta_group(form)
    aligned(form)
    form.type("b32")
    address, count = form.get(0, "u32"), form.get(1, "u32")

    def run(w: Fragment) -> None:
        _, start = split_address(uniform(form, address(w), "the address"))
        columns = uniform(form, count(w), "the number of columns")
        tensor_memory(w.cta).free(start, columns, w)

    return for_warps(form, run)


@instruction("tcgen05.relinquish_alloc_permit", control=True)
def relinquish(form: Form) -> Step:
    form.needs("sm_100f")
    cta_group(form)
    aligned(form)

    def run(w: Fragment) -> None:
        tensor_memory(w.cta).closed_by = form.ins.line

    return gathered(form, None, run)


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(form: Form) -> Step:
    """9.7.16.6.4. Only the check tcgen05_order asks for
    them: compilers leave them out too, and hardware runs that."""
    form.needs("sm_100f")
    before = form.parts[1].endswith("before_thread_sync")

    def run(w: Fragment) -> None:
        if w.cta.cluster.order is not None:
            w.cta.cluster.order.fence_tensor(w.agents(), before)

    return run


@instruction("tcgen05.wait::ld", "tcgen05.wait::st", control=True)
def wait(form: Form) -> Step:
    """Until the warp's loads from, or stores to, Tensor Memory are done."""
    form.needs("sm_100f")
    aligned(form)
    kind = "tcgen05." + form.parts[1][-2:]

    def run(w: Fragment) -> Any:
        mine = groups(w.cta, kind)
        waiting = wait_for(w, mine.all(w.threads), False, form.ins.opcode)
        if waiting is None:
            mine.commit(w.threads)
            mine.drop(w.threads, 0)
            if kind == "tcgen05.ld":
                loads_waited_for(w)
        return waiting

    return gathered(form, None, run)


@instruction("tcgen05.commit")
def commit(form: Form) -> Step:
    """Arrive at an mbarrier once all earlier tcgen05 work of the thread is done."""
    form.needs("sm_100f")
    group = cta_group(form)
    if not form.has("mbarrier::arrive::one"):
        raise form.error("expected .mbarrier::arrive::one")
    space = form.one("shared::cluster")
    multicast = form.has("multicast::cluster")
    form.type("b64")
    where = addresses(form, 0, space, bare=True)
    mask = form.get(1, "u16") if multicast else None

    def run(w: Fragment) -> None:
        pair(w.cta, group)
        address = int(where(w)[0])
        told = [address]
        if mask is not None:
            chosen, ctas = int(np.max(mask(w))), w.cta.cluster.ctas
            if not chosen or chosen >> len(ctas):
                raise MemoryFault(f"multicast to CTAs {chosen:#x} of a cluster of {len(ctas)}")
            offset = address & (1 << RANK_SHIFT) - 1
            told = [r << RANK_SHIFT | offset for r in range(len(ctas)) if chosen >> r & 1]
        barriers = [find(w.cta, one) for one in told]
        for barrier in barriers:
            visible(w, barrier, by_proxy=True)
        order = w.cta.cluster.order

        def signal(work: Work) -> None:
            if isinstance(work.actor, Actor):
                assert (
                    order is not None
                )  # who waits for an earlier commit does not know of this one
                work.actor.did(order.event(work.site()))
            for barrier in barriers:
                barrier.learn(work.message())
                barrier.arrive()

        enqueue(w, signal, tuple(barrier.cta for barrier in barriers))

    return one_by_one(run)
