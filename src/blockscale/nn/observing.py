"""Where layers tell what they have quantized, to whom it may concern: ``debug.watch``.

A module's attribute, not a context variable: autograd's threads have none of their caller's. Plans
of linear layers tell of the parts that they launch products with, and make no tensors of them;
those of groups are not gone by where somebody looks on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..tensor import ScaledTensor
from .method_launches import OperandLaunch
from .quantize_launches import Parts
from .recipe import PRODUCTS_OF

__all__ = ["Form", "Made", "Observer", "at", "enter", "made", "narrow", "observer", "saw", "site"]


class Made(NamedTuple):
    """What a plan's quantizer wrote along an axis."""

    launch: OperandLaunch
    parts: Parts
    axis: int

    @property
    def is_transformed(self) -> bool:
        """Whether a transform of what the quantizer was given was quantized."""
        return self.launch.is_transformed(self.axis)

    def tensor(self) -> ScaledTensor:
        """That has these parts."""
        return self.launch.form(self.parts, self.axis)


Form = ScaledTensor | Made


class Observer(Protocol):
    """Looks at what layers quantize, and changes nothing."""

    def saw(self, place: tuple[Any, str], role: str, x: Any, forms: dict[str, Form]) -> None:
        """``x``, which plays ``role``, was quantized to ``forms``, by the product that reads each.

        ``place``: what was entered, and the part of it. ``x`` is a tensor, a source of rows, two
        stacks that were joined, or None where nobody has the values.
        """


observer: Observer | None = None


class _Here(threading.local):
    site: Any = None  # of the layer at work: what its observer calls it
    part: str = ""


_here = _Here()
_NOBODY = nullcontext()  # looks on: no time is spent on telling where a layer is


def site() -> Any:
    """What a layer keeps from its forward, to enter in its backward."""
    return None if observer is None else _here.site


def enter(site: Any) -> None:
    """What is quantized from now on in this thread is of this layer."""
    if observer is not None:
        _here.site, _here.part = site, ""


def at(site: Any) -> AbstractContextManager[None]:
    """As :func:`enter`, for a ``with`` block: a backward may run inside of another forward."""
    return _NOBODY if observer is None else _inside(site)


@contextmanager
def _inside(site: Any) -> Iterator[None]:
    before = _here.site, _here.part
    enter(site)
    try:
        yield
    finally:
        _here.site, _here.part = before


def narrow(part: str) -> None:
    """And of this part of the layer."""
    if observer is not None:
        _here.part = part


def saw(role: str, x: Any, **forms: Form | None) -> None:
    """Tell the observer, if there is one, of the ``forms`` of ``x`` that were made."""
    if observer is not None:
        told = {product: form for product, form in forms.items() if form is not None}
        if told:
            observer.saw((_here.site, _here.part), role, x, told)


def made(
    role: str, x: Tensor, launch: OperandLaunch, rows: Parts | None, columns: Parts | None
) -> None:
    """Tell the observer, if there is one, of the parts of ``x`` that a plan's ``launch`` wrote."""
    if observer is None:
        return
    by_rows, by_columns = PRODUCTS_OF[role]
    forms: dict[str, Form] = {}
    if rows is not None:
        forms[by_rows] = Made(launch, rows, -1)
    if columns is not None:
        forms[by_columns] = Made(launch, columns, -2)
    if forms:
        observer.saw((_here.site, _here.part), role, x, forms)
