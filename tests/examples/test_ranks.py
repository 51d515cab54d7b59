"""A Llama over ranks has the losses of one process, but for the order of sums."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "distributed"))

import rank_tasks
from processes import gather


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    known = {}

    def found(fsdp: int, tp: int):
        if (fsdp, tp) not in known:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FSDP", str(fsdp))
                patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
                folder = tmp_path_factory.mktemp(f"{fsdp}-{tp}")
                known[fsdp, tp] = gather(rank_tasks.losses, fsdp * tp, folder)
        return known[fsdp, tp]

    return found


@pytest.mark.parametrize("fsdp", [1, 2])
def test_layers_and_sequences_are_shared(run, fsdp):
    """By two ranks, with FSDP2 beside it and without. A loss of bfloat16 layers changes in the
    third digit where sums have another order, and grows with steps."""
    alone, shared = run(fsdp, 1), run(fsdp, 2)
    for name, losses in alone[0].items():
        assert all(each[name] == shared[0][name] for each in shared)
        assert shared[0][name][0] == pytest.approx(losses[0], rel=1e-3)
        assert shared[0][name] == pytest.approx(losses, rel=2e-2)


def test_they_learn(run):
    for losses in run(2, 1)[0].values():
        assert losses[-1] < 0.8 * losses[0]
