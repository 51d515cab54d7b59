"""fence and membar: PTX ISA 9.7.13.4.

Memory is sequentially consistent here; what a fence does is to order accesses for the checks: for
the asynchronous proxy, for relaxed arrivals after it (.mbarrier_init: of what mbarrier.init wrote),
and for relaxed waits before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..clocks.order import Order
from ..clocks.scopes import SYS, scope_of
from ..machine.state import Fragment, Step
from ..ptx.program import Immediate
from .registry import Form, instruction

_SCOPES = ("cta", "cluster", "gpu", "sys")
_SEMANTICS = ("sc", "acq_rel", "acquire", "release")
_KINDS = ("alias", "async")
_SPACES = ("global", "shared::cta", "shared::cluster")
_MAP = 128  # bytes of a tensor map: the only size there is

Effect = Callable[[Order, np.ndarray], None]


class _Kind(NamedTuple):
    """A line of the syntax.

    Attributes:
        modifiers: in their order; of each place one of several.
        effects: on the order of shared memory; None: those of its semantics, on all memory.
        of_range: whether it takes an address and a size.
        of_global: whether it is a proxy fence of global memory.
    """

    modifiers: tuple[tuple[str, ...], ...]
    effects: tuple[Effect, ...] | None = ()
    of_range: bool = False
    of_global: bool = False


def _kind(
    text: str, effects: tuple[Effect, ...] | None = (), of_range: bool = False,
    of_global: bool = False,
) -> _Kind:  # fmt: skip
    """Of modifiers as they are written; alternatives stand between bars."""
    modifiers = tuple(tuple(place.split("|")) for place in text.split())
    return _Kind(modifiers, effects, of_range, of_global)


_SCOPE, _SEMANTIC = "|".join(_SCOPES), "|".join(_SEMANTICS)
_FROM, _TO = "sync_restrict::shared::cta cluster", "sync_restrict::shared::cluster cluster"
_PROXIES = (
    _kind("proxy alias"),
    _kind("proxy async", (Order.fence_proxy,), of_global=True),
    _kind("proxy async shared::cta|shared::cluster", (Order.fence_proxy,)),
    _kind("proxy async global", of_global=True),
)
_KINDS_OF = {
    "fence": (
        _kind(_SCOPE, None),
        _kind(f"{_SEMANTIC} {_SCOPE}", None),
        _kind(f"acquire {_TO}", (Order.fence_acquire,)),
        _kind(f"release {_FROM}", (Order.fence_release,)),
        _kind("mbarrier_init release cluster", (Order.fence_inits,)),
        *_PROXIES,
        _kind(f"proxy tensormap::generic release {_SCOPE}"),
        _kind(f"proxy tensormap::generic acquire {_SCOPE}", (), True),
        _kind(f"proxy async::generic acquire {_TO}", (Order.fence_proxy,)),
        _kind(f"proxy async::generic release {_FROM}", (Order.fence_proxy,)),
    ),
    "membar": (_kind("cta|gl|sys", None), *_PROXIES),
}


def _matches(kind: _Kind, given: list[str]) -> bool:
    places = kind.modifiers
    return len(given) == len(places) and all(map(lambda p, g: g in p, places, given))


def _syntax(opcode: str) -> str:
    lines = []
    for kind in _KINDS_OF[opcode]:
        places = [f"{{.{', .'.join(p)}}}" if len(p) > 1 else f".{p[0]}" for p in kind.modifiers]
        lines.append(opcode + "".join(places))
    return "; ".join(lines)


@instruction("fence", "membar")
def fence(form: Form) -> Step:
    """One of the lines of the syntax, its modifiers in their order."""
    opcode, given = form.parts[0], list(form.left)
    kind = next((each for each in _KINDS_OF[opcode] if _matches(each, given)), None)
    if kind is None:
        raise form.error(f"there is no such fence; there are {_syntax(opcode)}")
    form.left.clear()
    if kind.of_range:
        form.address(0)
        size = form.operand(1)
        if not isinstance(size, Immediate) or size.value != _MAP:
            raise form.error(f"the size must be the constant {_MAP}")
    if kind.effects is None:
        return _of_memory(form.parts)
    effects, of_global = kind.effects, kind.of_global

    def run(w: Fragment) -> None:
        order, member = w.cta.cluster.order, w.cta.cluster.member
        if order is not None:
            for effect in effects:
                effect(order, w.agents())
        if of_global and member is not None:
            member.fence_proxy(w)

    return run


def _of_memory(parts: tuple[str, ...]) -> Step:
    """A thread fence: of all that its thread does."""
    wide, total = scope_of(parts, SYS), parts[0] == "membar" or "sc" in parts
    releases, acquires = "acquire" not in parts, "release" not in parts

    def run(w: Fragment) -> None:
        order, member, agents = w.cta.cluster.order, w.cta.cluster.member, w.agents()
        if order is None:
            return
        if acquires:
            order.fence_acquire(agents, wide, total)
            if member is not None:
                member.fence_acquire(agents, wide, total)
        if total:  # what it has acquired is among what it passes on
            event = order.event(w.site())
            order.flags.add_totals(agents, wide, event)
            if member is not None:
                member.add_totals(agents, wide, event)
        if releases:
            order.fence_release(agents, wide)

    return run
