"""Exported programs of quantized models: the same bits from a file, or a sentence."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd.subclass_parametrization import (
    unwrap_tensor_subclass_parameters,
)

import blockscale as bs

QUANTIZED = [bs.Recipe(), bs.Recipe("nvfp4")]
WEIGHT_ONLY = [bs.Recipe(name, activations="bfloat16") for name in ("mxfp8", "nvfp4")]
BATCH = ({0: torch.export.Dim("batch", min=2, max=64)},)


def model(recipe, dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(70, 96, dtype=dtype), nn.ReLU(), nn.Linear(96, 32, dtype=dtype)
    return bs.quantize_(nn.Sequential(*layers), recipe).requires_grad_(False)


def x(rows=4, dtype=torch.float32):
    return torch.randn(rows, 70, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", [*QUANTIZED, *WEIGHT_ONLY], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_a_file(recipe, dtype):
    m = model(recipe, dtype)
    apart = unwrap_tensor_subclass_parameters(copy.deepcopy(m))
    program = torch.export.export(apart, (x(dtype=dtype),), dynamic_shapes=BATCH)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for rows in (4, 7):
        assert torch.equal(loaded(x(rows, dtype)), m(x(rows, dtype)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recipe", WEIGHT_ONLY, ids=str)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_only_whole(recipe, strict, dtype):
    m = model(recipe, dtype)
    program = torch.export.export(m, (x(dtype=dtype),), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for exported in (program, torch.export.load(file)):
        assert torch.equal(exported.module()(x(dtype=dtype)), m(x(dtype=dtype)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", QUANTIZED, ids=str)
@pytest.mark.parametrize("strict", [False, True])
def test_quantized_activations_say_what_to_do(recipe, strict):
    whole = model(recipe)
    models = [whole, unwrap_tensor_subclass_parameters(copy.deepcopy(whole))] if strict else [whole]
    for m in models:
        with pytest.raises(Exception, match=r"unwrap_tensor_subclass_parameters\(copy.*strict=F"):
            torch.export.export(m, (x(),), strict=strict)


@pytest.mark.parametrize("recipe", [QUANTIZED[0], WEIGHT_ONLY[1]], ids=str)
def test_jit_trace(recipe):
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace cannot record"):
        torch.jit.trace(model(recipe), x())
