"""``blockscale bench moe``: the same layer by everybody, its steps, and the command."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from blockscale.bench import moe, moe_stages, timing
from blockscale.bench.contest import BASELINE, OURS
from blockscale.bench.moe_shapes import Shape
from blockscale.bench.moe_work import work
from blockscale.cli.bench import bench

SMALL = Shape(128, 64, 4, 2, tokens=40)


class Clock:
    device = "cpu"

    def microseconds(self, call, repeats=30):
        call()
        return 2.0

    def copy(self, nbytes):
        return nbytes * 1e-6


@pytest.mark.parametrize("name", moe.RECIPES)
def test_all_compute_the_same(name):
    layer = moe.make_layer(SMALL, "cpu")
    want, got = moe.bf16(layer), moe.ours(layer, moe.RECIPES[name])
    assert got.dtype == want.dtype
    assert (got - want).norm() <= {"nvfp4": 0.3}.get(name, 0.1) * want.norm()
    want.backward(layer.grad)
    theirs = [t.grad.clone() for t in layer.leaves]
    moe.train(lambda: moe.ours(layer, moe.RECIPES[name]), layer)()
    for t, want in zip(layer.leaves, theirs, strict=True):
        assert (t.grad - want).norm() <= {"nvfp4": 0.4}.get(name, 0.1) * want.norm()


def test_contests():
    """Forward, and both, and again with the weights as they were: not quantized again."""
    found = list(moe.contests(["mxfp8"], {"small": SMALL}, device="cpu"))
    cases = [(one.where.group, one.where.case, one.products) for one in found]
    assert cases == [
        ("small, forward", "mxfp8", 3),
        ("small, forward", f"mxfp8, {moe.REUSED}", 3),
        ("small, forward and backward", "mxfp8", 9),
        ("small, forward and backward", f"mxfp8, {moe.REUSED}", 9),
        ("small, forward and backward", f"mxfp8, {moe.ONCE}", 9),
    ]
    alone, beside = [OURS], [OURS, BASELINE]
    assert [list(one.contestants) for one in found] == [beside, alone, beside, alone, alone]
    for one in found:
        assert one.where.m * one.where.n * one.where.k == 80 * 64 * 128
        for prepare in one.contestants.values():
            prepare()


@pytest.mark.parametrize("name", moe.RECIPES)
def test_stages(name):
    """Each runs, and has its work; all of them multiply what a layer does."""
    known = work(SMALL, 1, 1)
    steps = dict(moe_stages.stages(moe.make_layer(SMALL, "cpu"), moe.RECIPES[name]))
    assert list(steps) == list(known)
    for call in steps.values():
        call()
    flops = sum(each.flops for each in known.values())
    assert flops == 3 * 3 * 2 * SMALL.pairs * SMALL.hidden * SMALL.intermediate


def test_command(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "Timer", Clock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    contests = moe.contests
    monkeypatch.setattr(moe, "contests", lambda *a, **k: contests(*a, **k, device="cpu"))
    monkeypatch.setattr(moe_stages, "_DENSE", 128)
    monkeypatch.setattr(moe_stages, "gemm", lambda a, b, backend: None)
    monkeypatch.setattr("blockscale.bench.host.measure_host", lambda *a, **k: [])
    out = tmp_path / "out.json"
    given = "--shapes", "128x64x4x2x40", "--recipe", "mxfp8", "--json", str(out)
    found = CliRunner().invoke(bench, ["moe", *given], catch_exceptions=False)
    assert found.exit_code == 0
    assert "SwiGLU backward + quantize, both" in found.output
    made = json.loads(out.read_text())
    assert [row["who"] for row in made["rows"]] == [*[OURS, BASELINE, OURS] * 2, OURS]
    stages = {each["what"]: each for each in made["stages"]}
    moved = SMALL.pairs * SMALL.hidden * 3
    assert stages["gather + quantize, rows"]["floor"] == pytest.approx(moved * 1e-6)
    bad = CliRunner().invoke(bench, ["moe", "--recipe", "fp4"])
    assert "recipe" in str(bad.exception)
