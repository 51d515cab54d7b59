"""Adapters on a quantized base train under DDP and FSDP2 as in one process, to the last digit."""

from __future__ import annotations

import pytest
import ranks
import ranks_adapters

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return ranks.spawn(ranks_adapters.gathered, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", ranks_adapters.KINDS)
@pytest.mark.parametrize("recipe", ranks_adapters.RECIPES)
def test_losses_are_those_of_one_process(found, kind, recipe):
    got = [results["losses"][f"{kind} {recipe}"] for results in found["ranks"]]
    want = found["alone"][recipe]
    assert len(want[0]) == ranks_adapters.STEPS
    assert want[0][-1] < 0.9 * want[0][0]  # it learns
    assert got == want


def test_a_model_that_names_no_quantized_weights_is_told_how(found):
    for results in found["ranks"]:
        ddp, fsdp2 = results["refused"]
        assert "_set_params_and_buffers_to_ignore_for_model(model, [name for name, p in" in ddp
        assert "fully_shard(model, ignored_params={p for p in model.parameters()" in fsdp2
