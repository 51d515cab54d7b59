"""Ranks that share layers: the losses of one process, saves in its order, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch
import training_ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from training_ranks import Few, by, facts

from blockscale.cli import main
from blockscale.training import (
    Plan,
    Ranks,
    Settings,
    Stopped,
    Work,
    compare,
    saves,
    started_ranks,
    torchrun_place,
)
from blockscale.training.tensor_plan import by_kind, by_rank

pytestmark = pytest.mark.usefixtures("quick_ranks")

MESHES = ({"tp": 2}, {"fsdp": 2, "tp": 2})


@pytest.fixture
def settings(small) -> Settings:
    """Whose shards are whole blocks of 32 along either axis, also of four ranks."""
    return dataclasses.replace(small, width=128, layers=2, heads=4, context=64, batch=4, steps=4)


# --- losses ---------------------------------------------------------------------------------------

#: Of gradients: sums of fp32 have another order; of elements near the middle between two that the
#: format has, one in a million then goes to the other side, by a step of 1/16 (1/2 of 4 bits).
CLOSE = {"bf16": 2e-6, "mxfp8": 1e-3, "nvfp4": 2e-2}


@pytest.mark.parametrize("mesh", [*MESHES, {"tp": 2, "compile": True}], ids=str)
def test_gradients_in_fp32(mesh, settings, text, monkeypatch):
    """Where activations are not rounded to bf16 every gradient is that of one process, and so are
    norm, losses and statistics."""
    monkeypatch.setattr(started_ranks, "_be_rank", training_ranks.in_fp32)
    # of NVFP4 each part of a batch has a global scale of its own
    names = [name for name in CLOSE if name != "nvfp4" or mesh == {"tp": 2}]
    work = Work(names, text, dataclasses.replace(settings, **mesh))
    shared = started_ranks.train_by_started(work, lambda _: None, lambda: False)
    alone = training_ranks.learned(
        dataclasses.replace(work, settings=settings), Ranks(torch.device("cpu"))
    )
    for name in names:
        close, one, other = CLOSE[name], alone[name], shared[name]
        assert other["norm"] == pytest.approx(one["norm"], rel=close)
        assert other["losses"][0] == pytest.approx(one["losses"][0], rel=close)
        assert other["losses"] == pytest.approx(one["losses"], rel=max(close, 1e-5))
        for parameter, grad in one["gradients"].items():
            error = np.linalg.norm(grad - other["gradients"][parameter])
            assert error <= close * np.linalg.norm(grad), parameter
        for role, seen in one["statistics"].items():
            found = other["statistics"][role]
            assert found["elements"] == seen["elements"]
            # an element at the border of saturation goes either way by another order of sums
            saturated = pytest.approx(seen["saturated_per_million"], rel=1e-4)
            assert found["saturated_per_million"] == saturated
            # parts of a batch are tensors of their own
            near = 1e-4 if name == "mxfp8" and "fsdp" not in mesh else 0.1
            assert found["sqnr_db"] == pytest.approx(seen["sqnr_db"], abs=near)


@pytest.mark.parametrize("mesh", [{"tp": 1}, {"tp": 4}, *MESHES], ids=str)
def test_losses_of_one_process(mesh, settings, text):
    """One rank has all of its bits. More round the parts of a sum to bf16 before it is made, which
    the test above leaves out. Elements that are quantized go to the other side of a rounding by it:
    2 % of a gradient's norm."""
    runs = compare(("bf16", "mxfp8"), text, settings), by(mesh, settings, text)
    for one, shared in zip(*runs, strict=True):
        if mesh == {"tp": 1}:
            assert facts([one]) == facts([shared])
        near = {"bf16": 1e-4, "mxfp8": 4e-4}[one.recipe]
        assert shared.train_loss == pytest.approx(one.train_loss, rel=near)
        assert shared.final_validation_loss == pytest.approx(one.final_validation_loss, rel=near)
        assert shared.parameters == one.parameters


def test_weights_gathered_quantized_change_nothing(settings, text, monkeypatch):
    settings = dataclasses.replace(settings, steps=2, layers=1, validations=1)
    quantized = by(MESHES[1], settings, text, ("mxfp8", "nvfp4"))
    monkeypatch.setattr(started_ranks, "_be_rank", training_ranks.gather_as_they_are)
    assert facts(by(MESHES[1], settings, text, ("mxfp8", "nvfp4"))) == facts(quantized)


# --- saves ----------------------------------------------------------------------------------------


def some_steps(mesh, settings, text, folder, steps=3):
    few = Few(steps)
    with pytest.raises(Stopped):
        by(mesh, settings, text, ("mxfp8",), report=few.report, folder=folder, stop=few.stop)


def test_resumed(settings, text, folder, tmp_path):
    """By the same ranks to the same bits, by 4, 2 and 1 to their losses; what is saved has queries,
    keys and values as one process has them."""
    settings = dataclasses.replace(settings, steps=20, layers=1, validations=1)
    (whole,) = by(MESHES[1], settings, text, ("mxfp8",))
    some_steps(MESHES[1], settings, text, folder)
    other = tmp_path / "other"
    (other / "unfinished").mkdir(parents=True)
    (saved,) = saves.saved_runs(folder)
    shutil.copytree(saved, other / "unfinished" / saved.name)
    assert facts(by(MESHES[1], settings, text, ("mxfp8",), folder=other)) == facts([whole])

    some_steps({"tp": 2}, settings, text, folder)
    (run,) = by({"fsdp": 1}, settings, text, ("mxfp8",), folder=folder)
    assert run.train_loss[:3] == whole.train_loss[:3]
    assert run.train_loss == pytest.approx(whole.train_loss, rel=5e-4)


def test_saved_in_the_order_of_one_process(settings, text, folder, tmp_path):
    found = {}
    for mesh in ({"fsdp": 1}, {"fsdp": 2, "tp": 2}):
        where = tmp_path / str(len(mesh))
        (where / "unfinished").mkdir(parents=True)
        some_steps(mesh, dataclasses.replace(settings, steps=20), text, where, steps=1)
        (saved,) = saves.saved_runs(where)
        dcp_to_torch_save(saved, where / "whole.pt")
        found[len(mesh)] = torch.load(where / "whole.pt", weights_only=False)
    name = "blocks.0.qkv.weight"
    for read in (
        lambda each: each["model"][name],
        lambda each: each["optimizer"]["state"][name]["exp_avg"],
    ):
        one, other = read(found[1]), read(found[2])
        assert (one - other).norm() < 0.2 * one.norm()  # another order of rows has 1.4


def test_orders():
    """Shards of the one have rows of queries, keys and values of the same heads."""
    rows = torch.arange(3 * 8).view(24, 1)
    kinds = rows.view(3, 4, 2)  # of 4 heads of size 2
    for rank, shard in enumerate(by_rank(rows, 2).chunk(2)):
        assert torch.equal(shard.view(3, 2, 2), kinds[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(by_kind(by_rank(rows, 2), 2), rows)


# --- the command, and arguments -------------------------------------------------------------------


def test_command(monkeypatch, capsys, tmp_path):
    """On a CPU the model is one that two and four ranks share."""
    given = "--tp", "2", "--steps", "1", "--seeds", "1", "--recipe", "fp8_block", "--json"
    monkeypatch.setattr(sys, "argv", ["blockscale", "train", *given, "--out", str(tmp_path / "o")])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    found = json.loads(capsys.readouterr().out)
    assert [found["settings"][name] for name in ("fsdp", "tp", "width")] == [None, 2, 256]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp": 0}, "tp: got 0; give 1 or more"),
        ({"tp": 3}, "tp: got 3, but ranks share 4 heads evenly; choose one of 1, 2, 4"),
        (
            {"tp": 4, "context": 66},
            "tp: got 4, but ranks share sequences of 66 bytes evenly; choose one of 1, 2",
        ),
        (
            {"tp": 8, "heads": 8, "context": 64, "fsdp": 3},
            "fsdp: got 3, but ranks share a batch of 4 sequences evenly",
        ),
    ],
)
def test_settings_of_ranks(settings, given, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        dataclasses.replace(settings, **given)


def test_blocks_are_not_cut(settings, text):
    four = dataclasses.replace(settings, width=256, tp=4)
    Work(("bf16", "mxfp8", "nvfp4"), text, four)
    message = "tp: got 4 beside recipe fp8_block, whose blocks of 128 they cut in layers 256 wide; "
    with pytest.raises(ValueError, match=f"^{message}choose one of 1, 2, or other recipes"):
        Work(("bf16", "fp8_block"), text, four)
    Work(("fp8_block",), text, dataclasses.replace(settings, width=192, heads=3, tp=1))


def test_ranks_of_torchrun(settings, monkeypatch):
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 3}.items():
        monkeypatch.setenv(name, str(value))
    assert torchrun_place(dataclasses.replace(settings, fsdp=2, tp=2)).ranks == 4
    with pytest.raises(ValueError, match=r"^fsdp and tp: got 1 x 2, but torchrun has started 4 "):
        torchrun_place(dataclasses.replace(settings, fsdp=1, tp=2))


def test_plan_by_other_ranks(settings):
    """Those that are given, and no others."""
    plan = Plan(("mxfp8",), dataclasses.replace(settings, fsdp=2, tp=2), None, "")
    assert plan.by_ranks(fsdp=None, tp=None) is plan
    assert plan.by_ranks(fsdp=None, tp=2).settings.mesh == {"tp": 2}
    assert plan.by_ranks(fsdp=4, tp=1).settings.mesh == {"fsdp": 4, "tp": 1}
    with pytest.raises(ValueError, match=r"^tp: got 3, but ranks share 4 heads"):
        plan.by_ranks(fsdp=None, tp=3)
    one = dataclasses.replace(plan, settings=settings)
    with pytest.raises(ValueError, match=r"^resume: is given beside tp, .*leave out --tp, or "):
        one.by_ranks(fsdp=None, tp=2)
