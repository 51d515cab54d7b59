"""The ladder's kernels, run in the emulator: each computes what the product's kernel does."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from kernel_code import built
from sm90_inputs import BF16, SQUARE, assert_close, emulated, frame_bytes, operands, product

from blockscale import emulator as em
from blockscale.emulator.isa import tensor_copy
from blockscale.emulator.memory.tensormap import TensorMap
from examples.ladder.config import LadderConfig
from examples.ladder.steps import STEPS, Step

pytestmark = pytest.mark.usefixtures("keep_code")

BY_NAME = {step.name: step for step in STEPS}
SHORT = [step.name for step in STEPS if isinstance(step.config, LadderConfig)]
TAILS = 72, 264, 272  # in M, N and K; several tiles


def run(step: Step, given: tuple[Tensor, ...], completion: str) -> Tensor:
    """What a step leaves in poisoned memory; nothing beside the output may change."""
    a, a_scale, b, b_scale = given
    m, n = a.shape[0], b.shape[0]
    whole = torch.empty(m + 2, n + 16, dtype=BF16)
    whole.view(torch.uint8).fill_(0xA5)
    before, out = whole.clone(), whole[1:-1, 8:-8]
    with em.cutedsl(em.Device("sm_90a", completion=completion, check="all")):
        scale = step.prepare(a_scale, m)
        step.launch(a.view(torch.uint8), scale, b.view(torch.uint8), b_scale, out, 2)
    result = out.clone()
    out.copy_(before[1:-1, 8:-8])
    assert torch.equal(whole.view(torch.uint8), before.view(torch.uint8)), "written beside it"
    return result


@cache
def wanted(shape: tuple[int, int, int]) -> Tensor:
    """Of the product's kernel, whose error is that of rounding, and of sums of FP8 products."""
    given = operands(*shape)
    got = emulated(SQUARE, given)
    assert_close(got, product(*given, (128, 128)), BF16)
    return got


@pytest.mark.parametrize("name", BY_NAME)
def test_steps(name):
    """All add K block after K block in the same way, so all give the same bits. No spills."""
    step = BY_NAME[name]
    assert torch.equal(run(step, operands(*TAILS), "late"), wanted(TAILS))
    assert frame_bytes(built(step.config).__cubin__) == [0]


@pytest.mark.parametrize("name", SHORT)
def test_completion(name):
    """More K blocks than slots, and a place of the scales of B that is no multiple of 16 bytes."""
    shape = (16, 136, 5 * 128)
    assert torch.equal(run(BY_NAME[name], operands(*shape), "random"), wanted(shape))


@pytest.mark.parametrize("name", SHORT)
def test_one_block(name):
    """Less than a K block: nothing is asked for ahead."""
    shape = (1, 8, 16)
    assert torch.equal(run(BY_NAME[name], operands(*shape), "eager"), wanted(shape))


def test_scales_of_rows_apart():
    """Scales of B in rows that do not follow each other: TMA finds them, too."""
    a, a_scale, b, b_scale = operands(*TAILS)
    wide = torch.full((b_scale.shape[0], b_scale.shape[1] + 3), float("nan"))
    apart = wide[:, : b_scale.shape[1]]
    apart.copy_(b_scale)
    for name in ("prefetch", "B scales by TMA"):
        assert torch.equal(run(BY_NAME[name], (a, a_scale, b, apart), "late"), wanted(TAILS))


@pytest.mark.parametrize(("name", "fetched"), [("N256", "128B"), ("L2 256 B", "256B")])
def test_promotion(name, fetched, monkeypatch):
    """What the tensor maps of A and B ask of the L2 cache."""
    maps: dict[int, TensorMap] = {}

    def decode(raw: bytes) -> TensorMap:
        found = TensorMap.decode(raw)
        maps[found.address] = found
        return found

    monkeypatch.setattr(tensor_copy, "_decode", decode)
    given = operands(*TAILS)
    run(BY_NAME[name], given, "eager")
    a, b = (maps[given[i].data_ptr()].l2_promotion for i in (0, 2))
    assert (a, b) == ("128B", fetched)


def test_steps_are_a_ladder():
    """Each is one idea past an earlier one."""
    assert len(BY_NAME) == len(STEPS)
    assert len({(step.config, step.persistent) for step in STEPS}) == len(STEPS)
    for i, step in enumerate(STEPS):
        assert step.after in ([before.name for before in STEPS[:i]] if i else [""])


def test_bad_input():
    a, a_scale, b, b_scale = operands(*TAILS)
    for message, given in {
        "a_scale: has shape": (a, a_scale[:1], b, b_scale),
        "b: has shape": (a, a_scale, b[:, :256].contiguous(), b_scale),
        "b_scale: has shape": (a, a_scale, b, b_scale[:1]),
        "b: has 260 rows": (a, a_scale, b[:260], b_scale),
    }.items():
        for name in ("baseline", "two warpgroups"):
            with pytest.raises(ValueError, match=message):
                run(BY_NAME[name], given, "eager")
    for wrong in (
        {"columns": 192},
        {"across": 2},
        {"ahead": 3},
        {"promotion": 64},
        {"staged": ("a", "b")},
        {"staged": ("a", "b"), "transposed": True, "prefetch": True},
    ):
        with pytest.raises(ValueError, match="no kernel is made so"):
            LadderConfig(**wrong)
