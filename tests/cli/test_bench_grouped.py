"""``blockscale bench grouped``: the same product by everybody, and the command."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from blockscale.bench import grouped, timing
from blockscale.bench.contest import BASELINE, OURS
from blockscale.cli.bench import bench


class Clock:
    def microseconds(self, call, repeats=30):
        call()
        return 2.0


def test_sizes():
    assert grouped.equal(3, 10) == (4, 3, 3)
    for groups, rows in ((8, 32768), (32, 32768), (8, 100), (3, 1000)):
        sizes = grouped.skewed(groups, rows)
        assert (len(sizes), sum(sizes)) == (groups, rows)
        assert min(sizes) >= 0
        assert len(set(sizes)) > 1
    assert not any(size % 128 for size in grouped.skewed(32, 32768))


@pytest.mark.parametrize("name", grouped.FORMATS)
def test_all_multiply_the_same(name):
    """Ours, torch's and, of equal matrices, the product of all rows."""
    for one in grouped.contests([name], [(3, 200, 128, 256)], device="cpu"):
        made = {who: prepare()() for who, prepare in one.contestants.items()}
        ours, theirs = made[OURS].float(), made[BASELINE].float()
        assert (ours - theirs).norm() <= {"nvfp4": 0.2}.get(name, 0.06) * theirs.norm()
        assert made["blockscale, one product"].shape == ours.shape
        assert one.where.group.startswith("3 groups, ")


def test_peers_are_those_of_fp8():
    every = list(grouped.contests(shapes=[(2, 16, 16, 128)], peers=True, device="cpu"))
    having = {one.where.case for one in every if "DeepGEMM" in one.contestants}
    assert having == {"fp8_block"}
    assert len(every) == len(grouped.FORMATS) * len(grouped.SIZES)


def test_command(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "Timer", Clock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    original = grouped.contests
    monkeypatch.setattr(grouped, "contests", lambda *a, **k: original(*a, **k, device="cpu"))
    out = tmp_path / "out.json"
    given = "--shapes", "2x64x128x256", "--format", "mxfp8", "--peers", "all", "--json", str(out)
    found = CliRunner().invoke(bench, ["grouped", *given], catch_exceptions=False)
    assert found.exit_code == 0
    assert "2 groups, skewed" in found.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["who"] for row in rows[:3]] == [OURS, "blockscale, one product", BASELINE]
