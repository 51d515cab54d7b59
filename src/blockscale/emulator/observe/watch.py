"""What can be observed of a launch: the base of reports and traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..machine.engine import Work
    from ..machine.state import CTA, Fragment, Wait

__all__ = ["Watch"]


class Watch:
    """Is told what happens; does nothing with it. ``tick`` counts instructions of the cluster."""

    def access(
        self,
        w: Fragment,
        space: str,
        kind: str,
        where: np.ndarray,
        size: int,
        cta: CTA | None,
        threads: np.ndarray,
    ) -> None:
        """Threads of a fragment read or write ``size`` bytes each.

        Args:
            space: "global", "shared" or "local".
            kind: "read" or "write".
            where: (threads,) addresses; offsets in shared memory of ``cta`` for "shared".
            size: bytes of a thread.
            threads: who: their numbers in the CTA.
        """

    def transfer(
        self, work: Work, space: str, kind: str, where: np.ndarray, size: int, cta: CTA | None
    ) -> None:
        """Asynchronous work reads or writes pieces of ``size`` bytes; arguments as above."""

    def multiplied(self, opcode: str, count: int, flops: int) -> None:
        """So many tensor-core instructions were carried out, with so many flops in all."""

    def ran(self, w: Fragment, tick: int, instructions: int) -> None:
        """A fragment ran this many instructions, the last of them at ``tick``."""

    def waits(self, w: Fragment, tick: int, wait: Wait) -> None:
        """A fragment begins to wait."""

    def issued(self, work: Work, tick: int) -> None:
        """Asynchronous work began."""

    def completed(self, work: Work, tick: int) -> None:
        """It is done."""
