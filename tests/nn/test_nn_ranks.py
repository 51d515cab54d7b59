"""DDP and FSDP give the single process's losses to the last digit, whatever is reused.

Two processes on a CPU, by gloo. A weight that FSDP gathers anew is the same Parameter, its version
and often its address unchanged: what was quantized before must not be used again.
"""

from __future__ import annotations

from functools import partial

import pytest
import ranks
import torch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    gather = partial(ranks.gathered, torch.device("cpu"))
    return ranks.spawn(gather, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("kind", "recipe", "reuse"), ranks.RUNS)
def test_losses_are_those_of_one_process(found, kind, recipe, reuse):
    dtype = torch.bfloat16 if kind == "fsdp2_bf16" else torch.float32
    got = [results[f"{kind} {recipe} {reuse}"] for results in found["ranks"]]
    want = found["alone"][f"{recipe} {dtype}"]
    assert len(want) == ranks.STEPS
    assert want[-1][0] < 0.5 * want[0][0]  # it learns
    assert [list(step) for step in zip(*got, strict=True)] == want


@pytest.mark.parametrize(("how", "reuse"), ranks.RELOADS)
def test_loaded_weights_are_seen(found, how, reuse):
    for results in found["ranks"]:
        losses = results[f"{how} {reuse}"]
        assert losses["again"] == losses["before"]
        assert losses["after"] != losses["before"]
