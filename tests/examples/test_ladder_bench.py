"""``python -m examples.ladder``: what it measures, not how fast it is; and that its kernels are
found, and kept, from wherever it runs."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
import typer
from typer.testing import CliRunner

from blockscale.bench.contest import BASELINE, Row, contest
from blockscale.kernels.common import builders, compile_cache
from blockscale.kernels.common.compile_all import compile_all
from examples.ladder import bench
from examples.ladder.config import LadderConfig
from examples.ladder.steps import STEPS

FP8 = torch.float8_e4m3fn


class Clock:
    """A timer of calls on a CPU."""

    device = "cpu"

    def microseconds(self, call, repeats=30):
        call()
        return 2.0


def invoke(*arguments: str):
    app = typer.Typer()
    app.command()(bench.main)
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_contestants(monkeypatch):
    """All get the same operands, scales of A as the kernel reads them."""
    monkeypatch.setattr(bench, "compile_all", list)
    seen = []

    def launch(step, a, a_scale, b, b_scale, d, multiprocessors):
        rows = a_scale if step.by_rows else a_scale.T
        scale = b_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        wide = a.view(FP8).float() * rows.repeat_interleave(128, 1)
        seen.append((multiprocessors, wide @ (b.view(FP8).float() * scale).T))

    monkeypatch.setattr(type(STEPS[0]), "launch", launch)
    (one,) = bench.contests([256], multiprocessors=132, device="cpu")
    assert list(one.contestants) == [*(step.name for step in STEPS), *bench.PEERS]
    x, w = one.contestants[BASELINE].args
    want = x.float() @ w.float().T
    rows = [row for row in contest(one, Clock()) if isinstance(row, Row)]
    assert len(seen) >= len(STEPS)
    for multiprocessors, exact in seen:
        assert multiprocessors == 132
        assert float((exact - want).norm() / want.norm()) < 0.05
    figure = bench.draw(rows)
    assert len(figure.axes[0].lines[0].get_xdata()) == len(STEPS)
    plt.close("all")


def test_command(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "Timer", Clock)
    monkeypatch.setattr(bench, "compile_all", list)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    fields = {"multi_processor_count": 132}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: type("Found", (), fields))
    original = bench.contests
    monkeypatch.setattr(bench, "contests", lambda *a, **k: original(*a, **k, device="cpu"))
    monkeypatch.setattr(type(STEPS[0]), "launch", lambda *_: None)
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    shown = invoke("--sizes", "128,256", "--json", str(out), "--plot", str(plot)).output
    assert all(step.idea in shown for step in STEPS)
    found = json.loads(out.read_text())
    names = [row["who"] for row in found["rows"] if row["m"] == 256]
    names += [row["who"] for row in found["absent"] if row["m"] == 256]
    assert sorted(names) == sorted([*(step.name for step in STEPS), *bench.PEERS])
    assert all(f"{row['who']}, 256x256x256, cannot run" in shown for row in found["absent"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_labels_stay_beside_the_line():
    """On the side of a point where its flatter neighbour is not."""
    rows = [
        Row(bench.GROUP, "fp8_block", 1024, 1024, 1024, step.name, 1.0, tflops)
        for step, tflops in zip(STEPS, (400, 440, 600, 620, 300), strict=False)
    ]
    labels = bench.draw(rows).axes[0].texts
    assert [(label.get_text(), label.get_ha()) for label in labels] == [
        ("400", "right"), ("440", "right"), ("600", "left"), ("620", "left"), ("300", "right"),
    ]  # fmt: skip


def test_nothing_is_measured_for_files_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match=r"plot: .* does not end in \.png"):
        invoke("--plot", str(tmp_path / "out.foo"), "--json", str(tmp_path / "out.json"))
    with pytest.raises(FileNotFoundError, match=r"json: the directory .* does not exist"):
        invoke("--json", str(tmp_path / "no" / "out.json"))


def test_bad_input():
    with pytest.raises(ValueError, match="sizes: got '2048x2048'"):
        invoke("--sizes", "2048x2048")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu():
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        invoke()


# --- kernels of another package -------------------------------------------------------------------


def test_other_processes_find_the_configurations(monkeypatch, tmp_path: Path):
    """Wherever these start: their types are unpickled after the path is known."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    monkeypatch.setenv("BLOCKSCALE_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    configs = [LadderConfig(), LadderConfig(ahead=1)]
    assert compile_all(configs, processes=2) == 2
    assert all(map(compile_cache.is_cached, configs))


def test_a_kernel_is_kept_by_all_that_it_is_made_of(monkeypatch):
    """A change in the example or in kernels/sm90 is a new kernel."""
    code = dict.fromkeys(builders.made_of(LadderConfig), b"")
    assert set(code) == {"examples.ladder.config", "blockscale.kernels.sm90.config"}
    monkeypatch.setattr(compile_cache, "_sources", code.__getitem__)
    monkeypatch.setattr(compile_cache, "version", lambda _: "1")
    keys = {compile_cache._key(LadderConfig())}
    for module in code:
        code[module] = b"changed"
        keys.add(compile_cache._key(LadderConfig()))
    assert len(keys) == 3


def test_the_package_does_not_name_it():
    assert not any("ladder" in each.lower() for item in builders.BUILDERS.items() for each in item)
