"""What a GPU is given, on a CPU: its settings with a tiny model, through the same functions."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from blockscale.training import (
    Comparison,
    Corpus,
    Settings,
    Text,
    default_recipes,
    steps_within,
    train,
    write_report,
)
from blockscale.training.meter import Meter
from blockscale.training.run import Run, _model
from blockscale.training.settings import _GPU

TINY = {
    "steps": 9,
    "width": 32,
    "layers": 2,
    "heads": 2,
    "context": 32,
    "batch": 2,
    "validations": 2,
    "validation_sequences": 4,
    "log_every": 4,
}


@pytest.fixture
def tiny():
    return dataclasses.replace(Settings(**_GPU), device="cpu", **TINY)


@pytest.fixture
def text():
    lines = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(300)).encode()
    return Text.of(lines, "sources")


def test_the_model_fills_a_gpu():
    settings = Settings(**_GPU)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in _model(None, 0, settings).parameters())
    assert 124e6 < parameters < 200e6
    assert settings.batch * settings.context >= 16 * 1024


def test_settings_of_a_device():
    assert Settings.on("cpu") == Settings()
    assert Settings.on("cpu", steps=3) == Settings(steps=3)
    with pytest.raises(ValueError, match="device: got 'tpu'"):
        Settings.on("tpu")


def test_recipes_of_a_device():
    assert default_recipes("cpu") == ("bf16", "mxfp8", "mxfp8_e5m2_grad", "mxfp8_floor")
    assert default_recipes("cuda:0") == ("bf16", "fp8_block", "mxfp8")


def test_fused_attention_is_the_same_function(tiny):
    fused, plain = (
        _model(None, 0, dataclasses.replace(tiny, fused_attention=f)) for f in (True, False)
    )
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fused(tokens), plain(tokens), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", ["bf16", "fp8_block", "mxfp8"])
def test_losses_are_looked_at_now_and_then(tiny, text, name):
    """The same losses as when each is looked at as it is made."""
    corpus, seen = Corpus(text, tiny.context), []
    run = train(name, 0, corpus, tiny, seen.append)
    assert [(p.step, p.validation_loss is not None) for p in seen] == [
        (4, False), (5, True), (8, False), (9, True)
    ]  # fmt: skip
    each = train(name, 0, corpus, dataclasses.replace(tiny, log_every=1))
    assert len(run.train_loss) == tiny.steps
    assert run.train_loss == each.train_loss
    assert run.validation == each.validation
    assert run.statistics == each.statistics
    assert run.peak_memory is None


def test_compiled_blocks(tiny, text, monkeypatch):
    """One graph; the layers are watched all the same."""
    torch.compiler.reset()
    compile = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda m, **given: compile(m, backend="aot_eager", **given)
    )
    corpus = Corpus(text, tiny.context)
    tiny = dataclasses.replace(tiny, steps=3, layers=1, validations=1)
    compiled, plain = (
        train("mxfp8", 0, corpus, dataclasses.replace(tiny, compile=c)) for c in (True, False)
    )
    assert compiled.train_loss == pytest.approx(plain.train_loss, rel=0.01)
    assert compiled.statistics.keys() == plain.statistics.keys() == {
        "activations", "weights", "gradients"
    }  # fmt: skip


# --- pace -----------------------------------------------------------------------------------------


def test_steps_within_a_time(tiny, text, monkeypatch):
    """The slowest recipe decides; speeds are tokens of ``batch * context`` a step."""
    speeds, probed = {"bf16": 640.0, "mxfp8": 320.0}, []

    def fake(name, seed, corpus, settings):
        probed.append((name, settings.validations, settings.samples))
        return Run(name, seed, tokens_per_second=speeds[name])

    monkeypatch.setattr("blockscale.training.pace.train", fake)
    assert steps_within(2, ("bf16", "mxfp8"), text, tiny) == 2 * 60 * 320 / 64
    assert probed == [(name, 0, 0) for name in speeds]
    assert steps_within(1e-9, ("bf16",), text, tiny) == 1


def test_a_short_run_is_enough(tiny, text):
    assert steps_within(0.01, ("bf16",), text, tiny) >= 1


def test_the_meter_counts_what_is_not_paused(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("blockscale.training.meter.time.perf_counter", lambda: now[0])
    meter = Meter(torch.device("cpu"))

    def spend(seconds):
        now[0] += seconds

    spend(100)
    meter.lap(100)  # the first lap is slow
    for _ in range(2):
        spend(1)
        with meter.paused():
            spend(50)
        spend(1)
        meter.lap(100)
        with meter.paused():
            spend(70)
    assert meter.tokens_per_second == 50
    assert meter.peak_memory is None


# --- what is said of it ---------------------------------------------------------------------------


def test_speed_and_memory_are_told(tiny, text, tmp_path, monkeypatch):
    runs = [train(name, 0, Corpus(text, tiny.context), tiny) for name in default_recipes("cuda")]
    for run, speed, memory in zip(runs, (100_000, 150_000, 90_000), (2, 1, 3), strict=True):
        run.tokens_per_second, run.peak_memory = float(speed), memory << 30
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    comparison = Comparison(runs, dataclasses.replace(tiny, device="cuda"), text, 1.0)
    verdict = comparison.verdict()
    assert [sentence.split(" ends ")[0] for sentence in verdict[:2]] == ["mxfp8", "fp8_block"]
    assert verdict[-1] == (
        "Speed and peak memory: bf16 100,000 tokens/s (1.00x), 2.0 GiB; "
        "fp8_block 150,000 tokens/s (1.50x), 1.0 GiB; mxfp8 90,000 tokens/s (0.90x), 3.0 GiB."
    )
    found = comparison.to_json()
    assert [row["peak_memory"] for row in found["table"]] == [2 << 30, 1 << 30, 3 << 30]
    assert found["versions"]["gpu"].startswith("NVIDIA H200, CUDA")
    assert found["text"]["held_out"] == "the last tenth"
    write_report(comparison, tmp_path)
    assert "Speed and peak memory" in (tmp_path / "report.html").read_text()
