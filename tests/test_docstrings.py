"""What docstrings of public names show runs, on a CPU, and gives what they say."""

from __future__ import annotations

import doctest
import inspect
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import blockscale as bs
from blockscale import checkpoint, measure

EXAMPLES = {
    id(value): pytest.param(value, id=f"{module.__name__}.{name}")
    for module in (bs, bs.nn, checkpoint, measure)
    for name in module.__all__
    if (inspect.isfunction(value := getattr(module, name)) or inspect.isclass(value))
    and ">>>" in (value.__doc__ or "")
}


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(512, 256, dtype=torch.bfloat16))


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What examples take for granted: a model, its input, and files of it."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model, other, batch = _model(), _model(), torch.randn(4, 512, dtype=torch.bfloat16)
    weights = {"layer.weight": model[0].weight.detach()}
    checkpoint.save_file(weights, "model.safetensors")
    checkpoint.quantize_file("model.safetensors", "model.mxfp8.safetensors", "mxfp8")
    weights = {"model.layers.0.mlp.gate_proj.weight": torch.randn(256, 512, dtype=torch.bfloat16)}
    Path("Llama-3").mkdir()
    checkpoint.save_file(weights, "Llama-3/model.safetensors")
    Path("Llama-3/config.json").write_text('{"model_type": "llama"}')
    checkpoint.quantize_folder("Llama-3", "DeepSeek-V3", "fp8_128x128", "deepseek")
    functions = SimpleNamespace(register=lambda name, function: None)
    theirs = SimpleNamespace(ALL_EXPERTS_FUNCTIONS=functions)  # of transformers
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", theirs)
    held = bs.quantize_(_model(), bs.Recipe("nvfp4", activations="bfloat16"))
    checkpoint.save_file(held.state_dict(), "model.nvfp4.safetensors")
    return {
        "bs": bs,
        "torch": torch,
        "math": math,
        "checkpoint": checkpoint,
        "error_sums": measure.error_sums,
        "model": model,
        "other": other,
        "batch": batch,
        "x": batch,
        "optimizer": SimpleNamespace(step=lambda: None),
        "steps": 1,
        "micro_batches": [(batch, None)],
        "loss": lambda y, _: y.sum(),
    }


@pytest.mark.parametrize("value", EXAMPLES.values())
def test_example(value, names):
    checker = doctest.OutputChecker()
    for example in doctest.DocTestParser().get_examples(value.__doc__):
        if example.want:
            got = f"{eval(example.source, names)!r}\n"
            assert checker.check_output(example.want, got, doctest.ELLIPSIS), (example.source, got)
        else:
            exec(example.source, names)
