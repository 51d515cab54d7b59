"""A mega MoE, on either architecture, with one thing left out: a wait, a release, a fence. The
emulator finds it."""

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from blockscale import emulator as em
from blockscale.cli.emulate_ranks import Case, Ranks, steps
from blockscale.kernels.common import compile_cache
from blockscale.kernels.mega import combine, dispatch, gather, order, rings
from blockscale.kernels.ranks import signals
from blockscale.kernels.sm90 import mega_epilogue as hopper_epilogue
from blockscale.kernels.sm90 import mega_mixed_epilogue as mixed
from blockscale.kernels.sm100 import mega_epilogue

SMALL = Case((20, 13), topk=3, hidden=128, experts=2)
RINGS = Case((300,), hidden=512, experts=2, ring=4)
FP8 = {"format": "fp8_128x128", "activations": "fp8_1x128"}
SMALL_FP8 = Case((20, 13), topk=3, hidden=128, experts=2, **FP8)
RINGS_FP8 = Case((300,), hidden=512, experts=2, ring=4, **FP8)
NVFP4 = Case((40,), topk=3, hidden=128, experts=2, format="nvfp4", activations="fp8_1x128")
CASES = {
    "SMALL": SMALL,
    "RINGS": RINGS,
    "SMALL_FP8": SMALL_FP8,
    "RINGS_FP8": RINGS_FP8,
    "NVFP4": NVFP4,
}


def nothing(*args: Any, **how: Any) -> None:
    """In place of a wait or a fence."""


def relaxed(address: Any, value: Any, scope: str) -> None:
    """In place of a release."""
    signals._asm(f"red.relaxed.{scope}.global.add.u32 [$0], $1;", None, address, value)


def not_awaited(self: Any, awaited: Any, expert: Any) -> Any:
    return awaited


def arrives_first(self: Any, row: Any, owner: Any) -> None:
    """Rows that are sent after their number was."""


def left_out(address: Any, value: Any) -> Any:
    """The first tile after those that CTAs begin with."""
    return signals.fetch_add(address, value) + 1


MUTANTS = {
    "rows are not awaited": (SMALL, gather.Gather, "await_rows", not_awaited),
    "rows are not sent": (SMALL, dispatch.Dispatch, "copy", arrives_first),
    "pairs are sent without a release": (SMALL, dispatch, "add_release", relaxed),
    "CTAs do not wait for each other's counts": (SMALL, dispatch, "wait_for", nothing),
    "peers are not awaited before products": (SMALL, gather, "wait_for_peer", nothing),
    "rows of experts have no release": (SMALL, gather, "add_release", relaxed),
    "the first ring is filled too soon": (RINGS, gather, "wait_for", nothing),
    "tiles are loaded too soon": (SMALL, rings.Rings, "await_rows", nothing),
    "TMA reads what no fence orders": (SMALL, rings, "fence_async", nothing),
    "the second ring is filled too soon": (RINGS, rings.Rings, "await_room", nothing),
    "tiles are stored without a release": (SMALL, mega_epilogue, "add_release", relaxed),
    "results have no release": (SMALL, combine, "add_release", relaxed),
    "results are not awaited": (SMALL, combine, "wait_for_peer", nothing),
    "Hopper: tiles are loaded too soon": (SMALL_FP8, rings.Rings, "await_rows", nothing),
    "Hopper: TMA reads what no fence orders": (SMALL_FP8, rings, "fence_async", nothing),
    "Hopper: the second ring is filled too soon": (RINGS_FP8, rings.Rings, "await_room", nothing),
    "Hopper: rows without a release": (
        SMALL_FP8,
        hopper_epilogue,
        "add_release",
        relaxed,
    ),
    "mixed: rows without a release": (NVFP4, mixed, "add_release", relaxed),
    "mixed: magnitudes are not awaited": (NVFP4, mixed.MegaMixedEpilogue, "sync", nothing),
    "mixed: results are sent too soon": (
        NVFP4,
        mixed.MegaMixedEpilogue,
        "sync_warpgroup",
        nothing,
    ),
    "Hopper: a tile is taken by nobody": (SMALL_FP8, order, "fetch_add", left_out),
    "bands too high for a ring": (RINGS, order, "bands", lambda ring: (ring, ring)),
}


@cache
def right(case: str) -> list[torch.Tensor]:
    return steps(CASES[case], arch_of(CASES[case]))


def arch_of(case: Case) -> str:
    return "sm_90a" if case.activations == "fp8_1x128" else "sm_100a"


def is_found(name: str, completion: str) -> bool:
    case, owner, what, instead = MUTANTS[name]
    # a band that is too high has units that wait for later ones: of the same CTA
    clusters = 1 if what == "bands" else 3
    with patch.object(owner, what, instead):
        build = compile_cache.build.__wrapped__  # not what was compiled before
        how = {"completion": completion, "build": build}
        ranks = Ranks(case, arch_of(case), clusters=clusters, **how)
        try:
            got = ranks.launch()
        except em.PtxError:
            return True
    want = right(next(name for name, each in CASES.items() if each is case))
    return any(not torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_found(name):
    assert any(is_found(name, completion) for completion in ("late", "eager"))
